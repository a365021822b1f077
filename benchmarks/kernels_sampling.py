"""What sampling, log probabilities and n-gram matching cost on a CUDA device, in microseconds inside CUDA graphs.

    python benchmarks/kernels_sampling.py [sampling] [search] [matching]

The logits are bfloat16 and stay where the head has just left them: in L2 as far as they fit. `search` compares tilings
of the search for the winner, best first: SEARCHED of kernels/sampling.py is chosen by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from outrider_runtime.kernels import sampling as kernel
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


TILES = ((2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 8), (16384, 16))  # part, warps


def main() -> None:
    parts = {"sampling": sampling, "search": search, "matching": matching}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; all if none is named")
    chosen = parser.parse_args().parts
    if unknown := set(chosen) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    print(torch.__version__, torch.cuda.get_device_name())
    for name in chosen or parts:
        parts[name]()


@torch.inference_mode()
def search() -> None:
    print(f"\nsearch, us by part x warps; {VOCAB} tokens")
    tables = {name: _table(KINDS[name]) for name in ("GREEDY", "NOISE")}
    chosen = kernel.SEARCHED
    for rows in (1, 64, 256, 1280):
        logits, slots, positions = _rows(rows)
        for name, table in tables.items():
            times: dict[tuple[int, int], float] = {}
            for tile in TILES:
                kernel.SEARCHED = ((rows, *tile),)
                times[tile] = _microseconds(
                    lambda name=name, table=table, logits=logits, slots=slots, positions=positions: sample(
                        logits, slots, positions, table, mode_of(KINDS[name])
                    )
                )
            best = sorted(times, key=times.__getitem__)
            print(f"{rows:5} {name:6}", *(f"{part}x{warps} {times[part, warps]:.1f} " for part, warps in best))
    kernel.SEARCHED = chosen


@torch.inference_mode()
def sampling() -> None:
    others = ["torch argmax", "5 logprobs"]
    print(f"\nsampling, us; {VOCAB} tokens\n" + " rows", *(name.rjust(18) for name in (*KINDS, *others)))
    tables = {name: _table(params) for name, params in KINDS.items()}
    for rows in ROWS:
        logits, slots, positions = _rows(rows)

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


def _rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, slots and positions."""
    logits = torch.randn(count, VOCAB, device="cuda").mul_(2)
    logits[:, ::331] += 7  # a few hundred candidates above a broad mass
    slots = torch.arange(count, device="cuda", dtype=torch.int32) % SLOTS
    return logits.to(torch.bfloat16), slots, torch.full_like(slots, TEXT)


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
