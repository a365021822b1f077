#!/usr/bin/env bash
# Decoding speeds on one GPU: `hack/gpu_bench.sh RESULTS.json [PART...]`, to which rows are appended; all parts take some
# minutes, each about one. Settings are those of the peers' tables it is compared with (README, "Figures"). Where the
# tree was copied without its history, COMMIT says which it is.
set -euo pipefail
cd "$(dirname "$0")/.."
source hack/gpu_env.sh
RESULTS=$1
shift
decode() { "$PYTHON" benchmarks/decode.py --json "$RESULTS" "$@"; }

plain() { decode --method none; }
draft() { decode --method draft-model --accepted-length 3.35; }
ngram() { decode --method ngram --accepted-length 3.35; }
eagle3() { decode --method eagle3 --accepted-length 3.35; }

# One EAGLE-3 head that drafts as many as pay: 0.8 a token is 2.44, 2.95, 3.36 and 3.95 a step of 2, 3, 4 and 6.
adaptive() { decode --method eagle3 --acceptance 0.8 --adaptive --num-speculative-tokens 6; }

# Chains and trees of the same depth, at the same accepted length: what a tree costs, which it has to accept more for.
# 26 tokens are about as many as Medusa's own tree has, 60 as EAGLE-2's.
heads() {
    local few=(--num-speculative-tokens 5 --accepted-length 3.35 --concurrency 1 4)
    decode --method eagle medusa "${few[@]}"
    decode --method eagle medusa "${few[@]}" --tree-top-k 3 --tree-max-tokens 26
    decode --method eagle "${few[@]}" --tree-top-k 8 --tree-max-tokens 60
}

# Prompts: time until all have their first token. Many at once by as many a step as peers read, too.
prefill() {
    decode --method none --concurrency 1 --input 512 1024 4096 8192 --output 16 --repeats 5
    decode --method none --concurrency 16 --input 4096 --output 16 --repeats 3 --max-batched-tokens 8192
}

# Decoding behind long prompts, which are read as peers read them. Then as SGLang is measured, where all requests begin
# to decode at once and a lot for all of them lets them end at once: decoding full batches and nothing else.
long() {
    local behind=(--accepted-length 3.35 --input 4096 --max-batched-tokens 8192 --concurrency 1 16 64)
    decode --method none eagle3 "${behind[@]}" --repeats 1
    decode --method none eagle3 "${behind[@]}" --shared-lots --cached-prompts
}

# Drafts from texts in which nothing occurs again: what looking for them costs.
nomatch() { decode --method none ngram suffix --temperature 1 --adaptive --concurrency 1 16 64 --repeats 2; }

PARTS=(plain draft ngram eagle3 adaptive heads prefill long nomatch)
[[ $# -gt 0 ]] || set -- "${PARTS[@]}"
for part in "$@"; do
    [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "no part $part; there are ${PARTS[*]}" >&2; exit 2; }
done
for part in "$@"; do
    begin=$SECONDS
    "$part"
    echo "$part: $((SECONDS - begin)) s" >&2
done
