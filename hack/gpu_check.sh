#!/usr/bin/env bash
# The tests that need a GPU, in one go: `hack/gpu_check.sh [pytest arguments]` on a machine with torch, transformers,
# pytest and pytest-xdist. Fails where there is no GPU, so that a run that skipped everything is not taken for one that
# passed. Most of the time kernels are compiled, each for many shapes: so processes share the GPU, but for the tests of
# times, which run alone behind the others.
set -euo pipefail
cd "$(dirname "$0")/.."
source hack/gpu_env.sh
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
WORKERS=${WORKERS:-8}
TIMED=tests/gpu/test_adaptive.py
NONE_CHOSEN=5  # pytest's
LINES=$(mktemp)
code=0 chosen=0

# check NAME ARGUMENT...: pytest; its closing line is kept for the end.
check() {
    local name=$1 begin=$SECONDS own=0
    shift
    # not pyproject.toml: it names plugins that such a machine may lack
    "$PYTHON" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --import-mode importlib --durations 12 \
        -W ignore::pytest.PytestUnknownMarkWarning "$@" | tee "$LINES.$name" || own=$?
    echo "$name, $((SECONDS - begin)) s: $(tail -n 1 "$LINES.$name")" >>"$LINES"
    rm "$LINES.$name"
    [[ $own == "$NONE_CHOSEN" ]] || chosen=1
    [[ $own == 0 || $own == "$NONE_CHOSEN" ]] || code=1
}

# Few threads each: what is computed on the CPU to compare with is small.
OMP_NUM_THREADS=2 check together tests/gpu --ignore "$TIMED" -n "$WORKERS" --dist worksteal "$@"
check alone "$TIMED" "$@"
cat "$LINES"
rm "$LINES"
[[ $chosen == 1 ]] || code=$NONE_CHOSEN
exit "$code"
