"""Hold what is compiled ahead to what the programs then launch, for every way to speculate, on a machine without a GPU.

Models and state lie on the CPU and say that they do not; what would be compiled is only noted. Ends with a line for
each way in which anything is left to compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partialmethod
from types import SimpleNamespace

import torch
import triton.compiler
from tests.runtime.kernels.compile_all import Compiler
from tests.runtime.methods import METHODS, Method
from tests.runtime.tiny import tiny_pair
from torch.overrides import TorchFunctionMode
from triton import JITFunction
from triton.runtime import driver

from outrider_runtime.config import EngineConfig, SchedulerConfig, SourceConfig, SpeculationConfig
from outrider_runtime.engine import capture
from outrider_runtime.engine.runner import Runner
from outrider_runtime.kernels.compiling import compile_ahead
from outrider_runtime.layers.linear import MergedLinear
from outrider_runtime.layers.norm import RMSNorm
from outrider_runtime.layers.rope import Turn

CPU = torch.device("cpu")
TURNS = 3


class OnCuda(TorchFunctionMode):
    """Says so; and what no kernel fills is zero, which is a valid index of anything."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}.get(func, func)(*args, **(kwargs or {}))


def runner_of(method: Method) -> Runner:
    config = EngineConfig(
        SourceConfig("m"),
        SpeculationConfig(method.method, max_tokens=TURNS, **method.options),
        scheduler=SchedulerConfig(max_concurrency=8, max_batched_tokens=64),
    )
    target = tiny_pair()[1]
    return Runner(config, target, method.draft(target), num_blocks=64, max_model_len=64, eos_token_ids=())


def held(runner: Runner) -> list[Callable[[], None]]:
    with runner._graphs.holding() as programs:
        for program in capture.first(runner.widths, TURNS):
            runner._prepare(program)
    return programs


def faults(method: Method, compiled: list[str]) -> list[str]:
    runner = runner_of(method)
    return faults_of(held(runner), runner._hidden, compiled)


def faults_of_many_rows(compiled: list[str]) -> list[str]:
    """More than tiny models' steps have, of 16 bits: for kernels of prompts and large batches alone."""
    gated = MergedLinear(64, {"gate_proj": 1280, "up_proj": 1280}, False, torch.bfloat16, CPU)
    turned = MergedLinear(64, {"q_proj": 512, "k_proj": 256, "v_proj": 256}, False, torch.bfloat16, CPU)
    x, norm = torch.zeros(256, 64, dtype=torch.bfloat16), RMSNorm(64, 1e-5, torch.bfloat16, CPU)
    keys, values = torch.zeros(2, 16, 4, 64, dtype=torch.bfloat16)
    turn = Turn(*torch.zeros(2, 256, 1, 64), keys, values, torch.zeros(256, dtype=torch.int64))

    def program() -> None:
        gated.gated(x, norm)
        turned.turned(x, norm, turn, None)

    return faults_of([program], x, compiled)


def faults_of(programs: list[Callable[[], None]], kept: torch.Tensor, compiled: list[str]) -> list[str]:
    """`kept` is not to be written to."""
    kept.fill_(1)
    reports: list[str] = []
    found = []
    with OnCuda():
        compile_ahead(programs, CPU, reports.append)
        if len(reports) != 2:
            found.append("was not rehearsed to the end")
        if not bool((kept == 1).all()):
            found.append("wrote what it computed")
        ahead = len(compiled)
        for program in programs:
            program()
    return [*found, *(f"left {name} to be compiled" for name in compiled[ahead:])]


def launch_nothing(kernel: JITFunction, run: Callable[..., object], *args, warmup: bool, **options) -> None:
    run(kernel, *args, warmup=True, **options)


def main() -> str | None:
    compiled: list[str] = []

    def note(source: object, **_: object) -> SimpleNamespace:
        compiled.append(source.name)
        return SimpleNamespace(metadata=SimpleNamespace(shared=0))

    triton.compiler.compile = note
    driver.set_active(Compiler())
    JITFunction.run = partialmethod(launch_nothing, JITFunction.run)
    findings = [f"{name}: {fault}" for name, method in METHODS.items() for fault in faults(method, compiled)]
    if not compiled:
        findings.append("nothing was compiled")
    compiled.clear()
    findings += [f"many rows: {fault}" for fault in faults_of_many_rows(compiled)]
    if sorted(compiled) != ["_rms_norm", "_tall", "_tall"]:
        findings.append(f"many rows: compiled {compiled}")
    return "\n".join(findings) or None


if __name__ == "__main__":
    sys.exit(main())
