"""What sampling, log probabilities and n-gram matching cost on a CUDA device, in microseconds inside CUDA graphs.

    python benchmarks/kernels_sampling.py

The logits are bfloat16 and stay where the head has just left them: in L2 as far as they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from outrider_runtime.kernels.ngram import continuations
from outrider_runtime.sampling.logprobs import logprobs
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import SamplingTable, mode_of

VOCAB = 128_256
ROWS = (1, 5, 16, 80, 320, 1280)
TEXT = 1_024  # tokens of each text
SLOTS = 256
PLAIN = SamplingParams(max_tokens=1)
KINDS = {
    "GREEDY": replace(PLAIN, temperature=0.0),
    "NOISE": PLAIN,
    "top-p 0.9": replace(PLAIN, top_p=0.9),
    "top-k 50": replace(PLAIN, top_k=50),
    "k 20, p 0.8": replace(PLAIN, top_k=20, top_p=0.8),
    "penalties": replace(PLAIN, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1),
}


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name())
    sampling()
    matching()


@torch.inference_mode()
def sampling() -> None:
    others = ["torch argmax", "5 logprobs"]
    print(f"\nsampling, us; {VOCAB} tokens\n" + " rows", *(name.rjust(18) for name in (*KINDS, *others)))
    tables = {name: _table(params) for name, params in KINDS.items()}
    for rows in ROWS:
        logits = torch.randn(rows, VOCAB, device="cuda").mul_(2)
        logits[:, ::331] += 7  # a few hundred candidates above a broad mass
        logits = logits.to(torch.bfloat16)
        slots = torch.arange(rows, device="cuda", dtype=torch.int32) % SLOTS
        positions = torch.full_like(slots, TEXT)

        def draw(
            name: str, logits: torch.Tensor = logits, slots: torch.Tensor = slots, positions: torch.Tensor = positions
        ) -> Callable[[], object]:
            return lambda: sample(logits, slots, positions, tables[name], mode_of(KINDS[name]))

        times = [_microseconds(draw(name)) for name in KINDS]
        times.append(_microseconds(lambda logits=logits: logits.argmax(-1)))
        times.append(_microseconds(lambda logits=logits, slots=slots: logprobs(logits, slots, 5)))
        print(f"{rows:5}", *(_with_rate(time, logits.nbytes).rjust(18) for time in times))


@torch.inference_mode()
def matching() -> None:
    lengths = (512, 8_192, 131_072)
    print(
        "\nn-grams of 2 to 4 tokens, us; texts in which nothing matches\nrows",
        *(f"{n} tokens".rjust(16) for n in lengths),
    )
    for rows in (1, 16, 256):
        times = []
        for length in lengths:
            texts = torch.arange(length, device="cuda", dtype=torch.int32).repeat(rows, 1)
            slots = torch.arange(rows, device="cuda", dtype=torch.int32)
            ends = torch.full_like(slots, length)
            time = _microseconds(lambda texts=texts, slots=slots, ends=ends: continuations(texts, slots, ends, 4, 2, 4))
            times.append(time)
        print(f"{rows:4}", *(f"{time:16.1f}" for time in times))


def _table(params: SamplingParams) -> SamplingTable:
    texts = torch.randint(VOCAB, (SLOTS, TEXT + 1), device="cuda", dtype=torch.int32)
    table = SamplingTable(texts)
    for slot in range(SLOTS):
        table.write(slot, params, slot, TEXT // 2)
    return table


def _with_rate(time: float, size: int) -> str:
    return f"{time:.1f} ({size / time / 1e6:.2f} TB/s)"


def _microseconds(call: Callable[[], object], calls: int = 10) -> float:
    """Of one call, among others of its kind in a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return median(times)


if __name__ == "__main__":
    main()
