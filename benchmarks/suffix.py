"""What suffix drafts are worth, and what they cost the host: no model, texts are replayed.

    python benchmarks/suffix.py [TEXTS.json]

TEXTS.json is a list of [prompt, output], token ids each: what requests said, in their order. Without it, the files of
this repository's operator are outputs, their words tokens. Every request drafts from its own text and from those before
it; a draft stands where the text says the same.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from outrider_runtime.speculation.suffix_index import Outputs, Text

LONGEST = 8
LEAST = (0.0, 0.1, 0.2, 0.3, 0.5)
STREAMS = (1, 16, 64, 256)
PROMPT, OUTPUT = 64, 448  # words of a file
CACHED = 262_144

Request = tuple[list[int], list[int]]


@dataclass
class Tally:
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    stood: int = 0
    expected: float = 0.0


def main(texts: Sequence[str]) -> None:
    requests = json.loads(Path(texts[0]).read_text()) if texts else list(files())
    requests = [(prompt, output) for prompt, output, *_ in requests]
    words = sum(len(output) for _, output in requests)
    print(f"{len(requests)} requests, {words} tokens; drafts of up to {LONGEST}\n")
    print("least chance   tokens a step   drafted   stood   as estimated")
    for least in LEAST:
        print(f"{least:>12}   {described(replay(requests, least, CACHED))}")
    print(f"{'own text 0.2':>12}   {described(replay(requests, 0.2, 0))}\n")
    print("us a step      " + "".join(f"{f'{streams} streams':>14}" for streams in STREAMS))
    draw = random.Random(0)
    noise = [
        ([draw.randrange(50_000) for _ in prompt], [draw.randrange(50_000) for _ in output])
        for prompt, output in requests
    ]
    for name, members in (("these texts", requests), ("no matches", noise)):
        print(f"{name:<15}" + "".join(f"{1e6 * step_seconds(members, streams):>14.0f}" for streams in STREAMS))
    print(f"\n{bytes_per_token(requests):.0f} bytes a token that is kept of an output")


def files() -> Iterator[Request]:
    """Words and signs of Python files, numbered as they come."""
    ids: dict[str, int] = {}
    root = Path(__file__).resolve().parent.parent
    for path in sorted((root / "operator").rglob("*.py")):
        tokens = [ids.setdefault(word, len(ids)) for word in re.findall(r"\n *|\w+|[^\w\s]| ", path.read_text())]
        if len(tokens) > 2 * PROMPT:
            yield tokens[:PROMPT], tokens[PROMPT : PROMPT + OUTPUT]


def advance(text: Text, output: Sequence[int], at: int, least: float, tally: Tally) -> int:
    """One step of a request that has got `at` tokens of its output: how many it has then."""
    drafts, chances = text.draft(LONGEST, least)
    stood = 0
    while stood < len(drafts) and at + stood < len(output) and drafts[stood] == output[at + stood]:
        stood += 1
    new = output[at : at + stood + 1]
    text.extend(new)
    tally.steps += 1
    tally.tokens += len(new)
    tally.drafted += len(drafts)
    tally.stood += stood
    tally.expected += sum(chances)
    return at + len(new)


def replay(requests: Sequence[Request], least: float, cached: int) -> Tally:
    outputs, tally = Outputs(cached) if cached else None, Tally()
    for prompt, output in requests:
        text, at = Text(prompt, outputs), 0
        while at < len(output):
            at = advance(text, output, at, least, tally)
        text.finish()
    return tally


def described(tally: Tally) -> str:
    drafted = max(1, tally.drafted)
    return (
        f"{tally.tokens / tally.steps:13.2f} {tally.drafted / tally.steps:9.2f} {tally.stood / drafted:7.0%} "
        f"{tally.expected / drafted:14.0%}"
    )


def step_seconds(requests: Sequence[Request], streams: int) -> float:
    """Median of the steps in which so many requests run, beside the outputs of those before."""
    outputs, tally, waiting = Outputs(CACHED), Tally(), list(requests)[::-1] * (1 + streams // len(requests))
    running: list[tuple[Text, list[int], int]] = []
    took = []
    while waiting:
        while len(running) < streams and waiting:
            prompt, output = waiting.pop()
            running.append((Text(prompt, outputs), output, 0))
        if len(running) < streams:
            break
        begin = perf_counter()
        running = [(text, output, advance(text, output, at, 0.2, tally)) for text, output, at in running]
        took.append(perf_counter() - begin)
        for text, output, at in running:
            if at >= len(output):
                text.finish()
        running = [each for each in running if each[2] < len(each[1])]
    return median(took)


def bytes_per_token(requests: Sequence[Request]) -> float:
    texts = []
    for prompt, output in requests:
        texts.append(Text(prompt))
        texts[-1].extend(output)
    tracemalloc.start()
    outputs = Outputs(CACHED)
    for text, (prompt, _) in zip(texts, requests, strict=True):
        outputs.add(text.tokens, len(prompt))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / outputs.size


if __name__ == "__main__":
    main(sys.argv[1:])
