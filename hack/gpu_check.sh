#!/usr/bin/env bash
# The tests that need a GPU, in one go: `hack/gpu_check.sh [pytest arguments]` on a machine with torch, transformers
# and pytest. Fails where there is no GPU, so that a run that skipped everything is not taken for one that passed.
set -euo pipefail
cd "$(dirname "$0")/.."
source hack/gpu_env.sh
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
# not pyproject.toml: it names plugins that such a machine may lack
"$PYTHON" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --import-mode importlib -W ignore::pytest.PytestUnknownMarkWarning tests/gpu "$@"
