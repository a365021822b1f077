#!/bin/sh
# Refresh requirements/*.txt from pyproject.toml: exact versions and markers for every supported
# Python, without the index addresses that uv.lock and pylock.toml would record.
# Usage: hack/image/lock.sh [--upgrade]      (without --upgrade, pins that still fit stay)
set -eu
cd "$(dirname "$0")/../.."
PATH=$PATH:${OUTRIDER_HOME:-$HOME/.cache/outrider}/tools/bin  # where hack/venv puts uv if the machine has none
compile() { uv pip compile -q --universal --no-header --no-annotate "$@" pyproject.toml; }
part() { compile -c requirements/all.txt "$@"; }

mkdir -p requirements
compile "$@" --extra operator --extra runtime --group dev -o requirements/all.txt
parts=$(mktemp -d); trap 'rm -rf "$parts"' EXIT
part --extra operator -o "$parts/operator"
part --extra runtime  -o "$parts/runtime"
part --group dev      -o "$parts/dev"

# The torch stack is 5 GB and changes rarely: an image layer, and so a file, of its own. The development
# environment takes the same file or the one for CPUs, though tools of `dev` want torch as well.
stack='^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)=='
cp "$parts/operator" requirements/operator.txt
grep -E  "$stack" "$parts/runtime" > requirements/torch.txt
grep -vE "$stack" "$parts/runtime" > requirements/runtime.txt
grep -vE "$stack" "$parts/dev"     > requirements/dev.txt
# Without a GPU: torch links the rest at load time, these only when a GPU first asks for them.
# Triton stays: its interpreter runs the kernels' tests on a CPU.
grep -vE '^(cuda-[a-z]+|nvidia-(cusolver|nvtx|cuda-cccl))==' requirements/torch.txt > requirements/torch-cpu.txt
! grep -n '://' requirements/*.txt
