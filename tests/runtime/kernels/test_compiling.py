from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from triton import JITFunction

from outrider_runtime.kernels.compiling import Rehearsal, compile_ahead, kept_zeros

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def test_what_fails_is_left_to_the_programs_themselves(caplog):
    ran, run = [], JITFunction.run

    def fail() -> None:
        ran.append(JITFunction.run)
        raise RuntimeError("no such shape")

    compile_ahead([fail], CPU, lambda line: None)
    assert ran != [run]
    assert JITFunction.run is run
    assert "one by one" in caplog.text
    assert "no such shape" in caplog.text


def test_a_rehearsal_finds_shapes_and_says_that_they_are_on_its_device():
    weight = torch.nn.Parameter(torch.ones(6, 4), requires_grad=False)
    with Rehearsal(OTHER), torch.inference_mode():
        out = torch.nn.functional.linear(torch.empty(3, 4), weight)
        picked = out.flatten()[5:].argmax()
        moved = out.to(CPU, torch.float64)
    assert (out.shape, out.device, picked.dtype) == ((3, 6), OTHER, torch.int64)
    assert (moved.shape, moved.device, moved.dtype) == ((3, 6), OTHER, torch.float64)


def test_a_rehearsal_writes_nothing():
    kept = torch.zeros(4, 2)
    with Rehearsal(OTHER):
        kept[:2] = torch.ones(2, 2)
        kept.add_(1).index_copy_(0, torch.tensor([3]), torch.ones(1, 2))
        with torch.inference_mode():
            kept[1:] += 1
    assert kept.sum() == 0


def test_what_was_rehearsed_cannot_be_used_afterwards():
    with Rehearsal(OTHER):
        out = torch.ones(2)
    with pytest.raises(RuntimeError, match="only rehearsed"):
        out + 1
    with pytest.raises(RuntimeError, match="only rehearsed"):
        out.data_ptr()


def test_zeros_that_are_kept_have_memory_in_a_rehearsal_too():
    with Rehearsal(OTHER):
        zeros = kept_zeros(3, CPU)
    assert zeros.tolist() == [0, 0, 0]


def test_a_rehearsal_imports_nothing_that_takes_long():
    program = """
import sys, torch
from outrider_runtime.kernels.compiling import Rehearsal
with Rehearsal(torch.device("meta")), torch.inference_mode():
    x, weight = torch.zeros(3, 4), torch.empty(6, 4)
    y = torch.nn.functional.linear(x, weight)
    assert torch.zeros_like(y, dtype=torch.int32).shape == torch.empty_like(y).shape == (3, 6)
    y[1:].add_(1).copy_(torch.ones(2, 6)).t().unbind(0)[0].view(torch.int32)
print(*sys.modules)
"""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | paths, check=True, capture_output=True, text=True
    )
    imported = run.stdout
    assert "sympy" not in imported.split()
