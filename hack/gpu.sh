#!/usr/bin/env bash
# Both in one go, in under ten minutes: the tests that need a GPU, and behind them the README's table (gpu_bench.sh has
# more). `hack/gpu.sh RESULTS.json`
set -euo pipefail
cd "$(dirname "$0")/.."
hack/gpu_check.sh
hack/gpu_bench.sh "${1:?the file that rows are appended to}" plain draft ngram eagle3 adaptive prefill
