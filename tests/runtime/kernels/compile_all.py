"""Compile every kernel for a GPU, on a machine without one: the interpreter checks no types and no limits.

    python -m tests.runtime.kernels.compile_all [90|80|89]

The wrappers are called as the runtime calls them, on CPU tensors of real models' shapes; what they would launch is
compiled instead, down to the machine's code: for an H100 or H200, or, of those whose tiles shared memory bounds, for
an A100 or for GPUs like L4 and L40S. Ends with a line for each kernel that fails, or that nothing here calls.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from outrider_runtime import kernels
from outrider_runtime.kernels import (
    activation,
    attention,
    follow,
    ngram,
    norm,
    pair,
    rope,
    rows,
    sampling,
    skinny,
    step,
    tall,
    tree,
)
from outrider_runtime.layers.attention import AttentionShape
from outrider_runtime.layers.rope import Turn, split_qkv
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode, SamplingTable

SHARED_MEMORY = {90: 227 << 10, 80: 163 << 10, 89: 99 << 10}  # bytes, the most that a program may have
TYPE = torch.bfloat16
SLOTS, WIDTH, TOKENS = 8, 1024, 48


class Compiler:
    """Takes the place of launching."""

    def __init__(self, target: int = 90) -> None:
        self._target = target
        self.done: set[str] = set()
        self.failures: list[str] = []
        self._run = JITFunction.run

    def install(self) -> None:
        driver.set_active(self)

        def run(kernel: JITFunction, *args, grid, warmup, **options) -> None:
            self.done.add(label(kernel))
            try:
                compiled = self._run(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:  # the compiler's are of many kinds; each is a finding
                self.failures.append(f"{kernel.__name__}: {type(error).__name__}: {error}")
                return
            if compiled.metadata.shared > SHARED_MEMORY[self._target]:
                self.failures.append(f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory")

        JITFunction.run = run

    # What is asked of Triton's driver before a launch
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._target, 32)


def empty(*shape: int, dtype: torch.dtype = TYPE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def attend(
    dim: int,
    small: bool = True,
    narrow: bool = False,
    dtype: torch.dtype = TYPE,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: torch.Tensor | None = None,
) -> None:
    plan = attention.plan_paged(
        ints(SLOTS + 1),
        ints(SLOTS),
        ints(SLOTS),
        ints(SLOTS, WIDTH // 16),
        tokens=TOKENS,
        block_size=16,
        shape=AttentionShape(8, 4, window, dtype, softcap=softcap),
        dim=dim,
        small=small,
        narrow=narrow,
        ancestors=ancestors,
    )
    keys, values = empty(2, 64, 8, dim, dtype=dtype)
    attention.paged_attention(empty(TOKENS, 32, dim, dtype=dtype), keys, values, plan, dim**-0.5)


def attend_all() -> None:
    attend(64, small=True)
    attend(64, narrow=True)
    attend(128, narrow=True)
    attend(128, small=False)
    attend(256, small=False, window=512, softcap=50.0)
    attend(64, small=False, ancestors=empty(TOKENS, dtype=torch.int64))
    attend(128, small=True, window=512, ancestors=empty(TOKENS, dtype=torch.int64))
    attend(64, small=True, dtype=torch.float32)


def multiply_all() -> None:
    """Matrices of Llama-3.2-1B, one of Llama-3.1-8B, and one that no tile divides."""
    x, wide, norm_weight = empty(5, 2048), empty(5, 8192), empty(2048)
    skinny.product(x, empty(3072, 2048), norm=norm_weight, eps=1e-5, bias=empty(3072))
    skinny.product(x, empty(16384, 2048), norm=norm_weight, eps=1e-5, gated=True)
    turn = Turn(*empty(2, 5, 1, 64, dtype=torch.float32), *empty(2, 64, 8, 64), ints(5))
    skinny.product(x, empty(3072, 2048), norm=norm_weight, eps=1e-5, turn=turn)
    skinny.product(wide, empty(2048, 8192), residual=empty(5, 2048))  # split
    skinny.product(empty(20, 4096), empty(28672, 4096), norm=empty(4096), gated=True)  # the most shared memory
    skinny.product(empty(33, 2048), empty(128256, 2048))
    skinny.product(empty(5, 100), empty(61, 100), bias=empty(61), residual=empty(5, 61))
    skinny.product(empty(5, 64, dtype=torch.float32), empty(96, 64, dtype=torch.float32))


def surround_all() -> None:
    norm.rms_norm(empty(TOKENS, 2048), empty(2048), 1e-5)
    rows.take_rows(empty(128256, 2048), ints(TOKENS))
    for norms in (None, (empty(2048), empty(2048))):
        pair.pair(empty(128256, 2048), ints(TOKENS), empty(TOKENS, 2048), norms=norms, eps=1e-5)
    activation.silu_gate(empty(TOKENS, 2 * 8192))
    tall.gated_product(empty(256, 4096), empty(2 * 14336, 4096))
    counted = {"count": ints(1), "places": ints(256), "out": ints(256)}
    for outputs, given in ((128256, {}), (151936, counted)):
        tall.largest_of_product(empty(256, 4096), empty(outputs, 4096), **given)
    for dim, normed, slots in ((64, False, ints(TOKENS)), (128, True, ints(TOKENS).long())):
        turns = rope.rotation(ints(TOKENS), empty(dim // 2, dtype=torch.float32), 1.0)
        keys, values = empty(2, 64, 8, dim)
        norms = (empty(dim), empty(dim)) if normed else None
        turn = Turn(*turns, keys, values, slots)
        tall.turned_product(empty(TOKENS, 4096), empty(48 * dim, 4096), empty(48 * dim) if normed else None, turn)
        rope.turn_and_store(*split_qkv(empty(TOKENS, 48 * dim), turn), turn, norms=norms, eps=1e-6)
        rope.turn_and_store(empty(5, 32 * dim), empty(TOKENS, 16 * dim), turn, ints(5), norms=norms, eps=1e-6)


def sample_all() -> None:
    table = SamplingTable(ints(SLOTS, WIDTH))
    table.write(0, SamplingParams(max_tokens=1), 0, 1)
    for mode in Mode:
        for place in (False, True):
            sampling.draw(empty(SLOTS, 128_256), ints(SLOTS), ints(SLOTS), table, mode, place=place)
    ids = torch.zeros(32_000, dtype=torch.int64)
    for mode in (Mode.GREEDY, Mode.NOISE):
        sampling.draw(empty(SLOTS, 32_000), ints(SLOTS), ints(SLOTS), table, mode, place=True, token_ids=ids)


def step_all() -> None:
    texts, tables = ints(SLOTS + 1, WIDTH), ints(SLOTS + 1, WIDTH // 16)
    per_slot, per_request = ints(SLOTS + 1), ints(SLOTS + 1)
    at = {"block_size": 16, "nowhere": 1024}
    step.update_tables(tables, ints(20), ints(20), ints(20))
    step.gather(texts, per_slot, tables, *[per_request] * 5, ints(TOKENS), **at)
    step.drawing(per_request, ints(TOKENS), ints(20), ints(TOKENS))
    step.tails(texts, ints(4), tables, ints(4), ints(4), ints(4), 2, **at)
    step.drafts_ahead(per_slot, tables, ints(4), ints(4), ints(4), 3, **at)
    step.place(texts, ints(4), ints(4), ints(4, 5))
    step.stands_by_lot(per_slot, per_request, ints(SLOTS + 1, 4096))
    for stands in (None, per_request):
        step.commit(texts, per_slot, *[per_request] * 4, ints(TOKENS), ints(SLOTS), ints(SLOTS, 8), stands)
    for stands, rest in ((None, True), (per_request, True), (None, False)):
        step.rows_that_count(texts, per_slot, *[per_request] * 3, ints(TOKENS), ints(TOKENS), stands, rest=rest)
    follow.entries(texts, per_slot, tables, *[per_request] * 3, ints(TOKENS), ints(TOKENS), nobody=SLOTS, **at)
    ngram.continuations(texts, ints(4), ints(4), 5, 2, 4)


def tree_all() -> None:
    depth, most, at = 5, 63, {"block_size": 16, "nowhere": 1024}
    texts, tables, parents = ints(SLOTS + 1, WIDTH), ints(SLOTS + 1, WIDTH // 16), ints(SLOTS + 1, most)
    per_slot, per_request = ints(SLOTS + 1), ints(SLOTS + 1)
    tree.branches(parents, *[per_request] * 3, ints(TOKENS), ints(TOKENS), depth)
    tree.frontier(ints(4), tables, ints(4), ints(4), ints(4), 10, 3, **at)
    ends, nodes = ints(SLOTS), ints(SLOTS, depth)
    for stands in (None, per_request):
        results = ints(SLOTS, 3 + most)
        tree.commit(
            texts, per_slot, parents, *[per_request] * 4, ints(TOKENS), ints(SLOTS), results, ends, nodes, stands
        )
    tree.compact_kv(empty(2, 2, 64, 8, 128), tables, per_request, ends, nodes, 16)
    tree.compact_rows(empty(TOKENS, 4096), ends, nodes)
    table = SamplingTable(ints(SLOTS, WIDTH))
    tree.with_noise(empty(SLOTS, 128_256), ints(SLOTS), ints(SLOTS), table)


def forgotten(done: set[str]) -> list[str]:
    """Kernels that were not compiled and that no other one calls."""
    names = [each.name for each in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    known = {label(each): each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
    called = {name for name, each in known.items() if any(calls(other, each) for other in known.values())}
    return sorted(known.keys() - done - called)


def label(kernel: JITFunction) -> str:
    """Files may have kernels of the same name."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"


def calls(one: JITFunction, other: JITFunction) -> bool:
    name = other.__name__
    return one is not other and f"{name}(" in one.src and one.fn.__globals__.get(name) is other


def main(target: int = 90) -> str | None:
    compiler = Compiler(target)
    compiler.install()
    for module in (attention, skinny):
        module.shared_memory = lambda device: SHARED_MEMORY[target]
    for part in (attend_all, multiply_all):
        part()
    findings = compiler.failures
    if target == 90:
        for part in (surround_all, sample_all, step_all, tree_all):
            part()
        findings += [f"{name}: nothing calls it here" for name in forgotten(compiler.done)]
    return "\n".join(findings) or None


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
