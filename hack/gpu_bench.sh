#!/usr/bin/env bash
# The decoding table on one GPU, in a few minutes: `hack/gpu_bench.sh RESULTS.json`, to which rows are appended.
# Settings are those of the peers' tables it is compared with (README, "Figures"). Where the tree was copied without its
# history, COMMIT says which it is.
set -euo pipefail
cd "$(dirname "$0")/.."
source hack/gpu_env.sh
RESULTS=$1
decode() { "$PYTHON" benchmarks/decode.py --json "$RESULTS" "$@"; }
decode --method none --repeats 3
decode --method draft-model --accepted-length 3.35 --repeats 3
decode --method ngram --accepted-length 3.35 --repeats 3
# Prompts: time until all have their first token.
for input in 512 1024 4096 8192; do
    decode --method none --concurrency 1 --input "$input" --output 16 --repeats 5
done
decode --method none --concurrency 16 --input 4096 --output 16 --repeats 3
# Decoding behind long prompts.
decode --method none --concurrency 1 16 64 --input 4096 --output 256 --repeats 1
