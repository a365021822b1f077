"""The adaptive draft length against every fixed one and against plain decoding: `python benchmarks/adaptive.py --help`.

Pairs agree truly, as often as --acceptance says (agreement.py). Three things are measured, in one engine for each pair,
whose graphs are captured before; what took how long is told on stderr:
- levels: at each concurrency the same texts with each length, adaptive first and last (the mean of both counts).
  `ratio` is adaptive over the best of all others.
- ramp: concurrency rises through all levels and falls again, once plainly and once adaptive. `min_ratio` is of
  the worst second. Who writes faster also ends sooner, and another's prompt is read: so what was written and read in a
  second counts by the time that plain decoding takes for it, as fitted to the plain run.
- steps: the acceptance changes in mid-stream. `seconds` are until the mean length, whenever all decode, is one of those
  that, fixed, are within 2 % of the best, and stays there (for fewer, while prompts of others are read, another one
  is right); `ratio` is of the second half of the time, `progress` of every half second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from benchmarks.agreement import Circle, agree, build, build_head, prompt, prompt_to_copy  # noqa: E402
from benchmarks.decode import LLAMA, SHAPES, capture, free, freeze, make_engine, measuring, met_by, settings  # noqa: E402
from benchmarks.decode import parse as decode_options  # noqa: E402

from outrider_runtime.config import HEADS  # noqa: E402
from outrider_runtime.engine.engine import Engine  # noqa: E402
from outrider_runtime.engine.messages import AddRequest  # noqa: E402
from outrider_runtime.models.causal import Weighted  # noqa: E402
from outrider_runtime.models.llama import LlamaForCausalLM  # noqa: E402
from outrider_runtime.models.medusa import MedusaHeads  # noqa: E402
from outrider_runtime.sampling.params import SamplingParams  # noqa: E402
from outrider_runtime.speculation.policy import Policy  # noqa: E402

NGRAM = "ngram"
DRAFTS = {
    "llama-1b": SHAPES["llama-1b"],
    "llama-0.25b": LLAMA
    | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16},
    "tiny": SHAPES["tiny"] | {"num_hidden_layers": 1},
}
WINDOWS = {1: 512, 4: 512, 16: 256, 64: 192, 128: 128, 256: 128}  # tokens of each request that a level is measured over
AHEAD = 224  # tokens that a request may write before, while prompts of others are read
ENOUGH = 0.98  # of the best is as good as it
BUCKET = 0.1  # seconds over which the length is averaged
CIRCLE = 32_000  # tokens that are said: as many as an EAGLE-3 head knows
# Levels only, half as long and fewer of them: a minute a pair
QUICK = {
    "parts": ["levels"],
    "levels": [1, 16, 64, 128, 256],
    "fixed": [1, 2, 3, 4, 6],
    "num_speculative_tokens": 6,
    "window": 0.5,
    "settle": 16,
}
Row = dict[str, Any]
Text = Callable[[int], AddRequest]  # the index-th


@dataclass
class Site:
    """An engine for one pair, and the texts that it writes."""

    options: Namespace
    pair: str
    engine: Engine
    target: LlamaForCausalLM
    draft: Weighted | None  # None: n-gram
    circle: Circle

    @property
    def fixed(self) -> list[int]:
        """Lengths that adaptive is compared with."""
        return [length for length in self.options.fixed if length <= self.engine.config.speculation.max_tokens]

    def policy(self, length: int | None) -> None:
        """None is adaptive, 0 plain, else fixed."""
        if length is None:
            policy = Policy(mode="Auto", num_speculative_tokens=self.engine.config.speculation.max_tokens)
        elif length == 0:
            policy = Policy(mode="Disabled")
        else:
            policy = Policy(mode="Enabled", num_speculative_tokens=length)
        self.engine.set_policy(policy)

    def texts(self, acceptance: float, copied: int) -> Text:
        """Requests of this acceptance, from now on; where a draft has weights also those that run. For n-gram they end
        when so many tokens are copied."""
        output = self.options.output if self.draft is not None else copied
        if self.draft is not None:
            agree(self.draft, self.target, self.circle, acceptance)
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)

        def text(index: int) -> AddRequest:
            if self.draft is None:
                tokens = prompt_to_copy(self.circle, index, output, acceptance)
            else:
                tokens = prompt(self.circle, index, self.options.input)
            return AddRequest(str(index), tokens, params)

        return text


@dataclass(frozen=True)
class Step:
    at: float  # its end, in seconds of the process's clock, or since its run began
    written: int  # tokens
    turns: float  # plain steps that write as much
    read: int  # tokens of the prompts that were read to their ends
    length: float  # of drafts, in force

    @property
    def writers(self) -> int:
        return round(self.written / self.turns) if self.turns else 0


class Traffic:
    """Keeps as many requests running as it is told to; who ends is followed by another."""

    def __init__(self, engine: Engine, text: Text) -> None:
        self._engine, self.text = engine, text
        self._indices = itertools.count()
        self._running: list[str] = []
        self._silent: set[str] = set()  # have not said anything yet
        self._read = engine.stats().prompt_tokens

    @property
    def all_begun(self) -> bool:
        return not self._silent

    def step(self, concurrency: int) -> Step:
        """One of the engine."""
        while len(self._running) > concurrency:
            self._leave(self._running.pop())
        while len(self._running) < concurrency:
            request = self.text(next(self._indices))
            self._running.append(request.request_id)
            self._silent.add(request.request_id)
            self._engine.add(request)
        output = self._engine.step()
        written = [len(delta.token_ids) for delta in output.deltas]
        step = Step(
            time.perf_counter(),
            sum(written),
            sum(written) / sum(map(bool, written)) if any(written) else 0.0,
            output.stats.prompt_tokens - self._read,
            output.stats.effective_tokens,
        )
        self._read = output.stats.prompt_tokens
        for delta in output.deltas:
            self._silent.discard(delta.request_id)
            if delta.finish_reason is not None:
                self._running.remove(delta.request_id)
        return step

    def end(self) -> None:
        while self._running:
            self._leave(self._running.pop())
        self._engine.step()  # what was launched for them

    def restart(self, text: Text) -> None:
        """All leave, others with these texts come."""
        self.end()
        self.text = text

    def _leave(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._silent.discard(request_id)


@dataclass
class Measured:
    rate: float  # tokens a second
    length: float  # mean drafts of a request and step
    agreement: float | None  # share of first drafts that stood


def measure(site: Site, text: Text, concurrency: int, length: int | None, window: int) -> Measured:
    """The rate over so many tokens of each request, a few after all have begun. Until they have, nearly nothing is
    drafted, so that none runs ahead; but a draft model reads what they begin with."""
    traffic = Traffic(site.engine, text)
    site.policy(1)
    traffic.step(concurrency)
    while not traffic.all_begun:
        traffic.step(concurrency)
    site.policy(length)
    tokens = 0
    while tokens < site.options.settle * concurrency:
        tokens += traffic.step(concurrency).written
    before, begin = site.engine.stats(), time.perf_counter()
    tokens = 0
    lengths = []
    with measuring(site.engine, f"{site.pair} at {concurrency}"):
        while tokens < window * concurrency:
            step = traffic.step(concurrency)
            tokens += step.written
            lengths.append(step.length)
    seconds = time.perf_counter() - begin
    after = site.engine.stats()
    traffic.end()
    drafts = after.drafts - before.drafts
    stood = after.accepted_per_position[0] - before.accepted_per_position[0]
    return Measured(tokens / seconds, statistics.fmean(lengths), stood / drafts if drafts else None)


def levels(site: Site) -> Iterator[Row]:
    options = site.options
    for concurrency in options.levels:
        window = _window(options, concurrency)
        text = site.texts(options.acceptance, window + AHEAD)
        measure(site, text, concurrency, None, window // 2)  # what was not captured yet, and what it has to learn
        adaptive = [measure(site, text, concurrency, None, window)]
        plain = measure(site, text, concurrency, 0, window)
        fixed = {length: measure(site, text, concurrency, length, window) for length in site.fixed}
        adaptive.append(measure(site, text, concurrency, None, window))
        rates = {length: each.rate for length, each in fixed.items()}
        agreements = [each.agreement for each in fixed.values() if each.agreement is not None]
        mean = statistics.fmean(each.rate for each in adaptive)
        yield {
            "kind": "level",
            "pair": site.pair,
            "acceptance": options.acceptance,
            "agreement": round(statistics.fmean(agreements), 3) if agreements else None,
            "concurrency": concurrency,
            "adaptive": round(mean, 1),
            "adaptive_runs": [round(each.rate, 1) for each in adaptive],
            "fixed": _rounded(rates),
            "plain": round(plain.rate, 1),
            "ratio": round(mean / max(plain.rate, *rates.values()), 3),
            "length": round(statistics.fmean(each.length for each in adaptive), 2),
        }


def ramp(site: Site) -> Iterator[Row]:
    """Up through all levels and down again, `hold` seconds from each to the next."""
    options = site.options
    stations = [*options.levels, *options.levels[-2::-1]]
    text = site.texts(options.acceptance, options.copied)
    long = (len(stations) - 1) * options.hold
    plain, adaptive = (_ramp_run(site, text, stations, length) for length in (0, None))
    plainly = plain_seconds(plain)
    windows = []
    for start in (0.25 * quarter for quarter in range(int(4 * (long - 1.0)) + 1)):
        second = {"plain": _within(plain, start), "adaptive": _within(adaptive, start)}
        window = {
            "second": start,
            "concurrency": concurrency_at(start + 0.5, stations, options.hold),
            "ratio": round(plainly(second["adaptive"]) / max(plainly(second["plain"]), 1e-9), 3),
            "length": round(statistics.fmean([step.length for step in second["adaptive"]] or [0.0]), 2),
        }
        window |= {way: sum(step.written for step in steps) for way, steps in second.items()}
        windows.append(window | {f"{way}_read": sum(step.read for step in steps) for way, steps in second.items()})
    worst = min(windows, key=lambda window: window["ratio"])
    yield {
        "kind": "ramp",
        "pair": site.pair,
        "acceptance": options.acceptance,
        "levels": stations,
        "hold": options.hold,
        "min_ratio": worst["ratio"],
        "worst": worst,
        "seconds": windows[::4],
    }


def _within(steps: Sequence[Step], start: float) -> list[Step]:
    return [step for step in steps if start <= step.at < start + 1.0]


def plain_seconds(steps: Sequence[Step]) -> Callable[[Sequence[Step]], float]:
    """What plain decoding takes for what steps do: so much a turn, a token written and a token read. Fitted to a plain
    run of them, by tenths of a second, since a prompt counts when it has been read to its end."""

    def work(steps: Sequence[Step]) -> list[float]:
        return [
            sum(step.turns for step in steps),
            sum(step.written for step in steps),
            sum(step.read for step in steps),
        ]

    tenths: dict[int, list[Step]] = {}
    for step in steps:
        tenths.setdefault(int(step.at / 0.1), []).append(step)
    ends = [0.0, *(each[-1].at for each in tenths.values())]
    done = np.array([work(each) for each in tenths.values()], dtype=float)
    costs = least_squares(done, np.diff(ends))
    return lambda steps: float(np.dot(work(steps), costs))


def least_squares(columns: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """[columns] factors, none of them negative, of [rows, columns] that come nearest to [rows]."""
    count = columns.shape[1]
    found = []
    for used in itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(count + 1)):
        factors = np.zeros(count)
        factors[list(used)] = np.linalg.lstsq(columns[:, used], totals, rcond=None)[0]
        if (factors >= 0).all():
            found.append((float(np.square(columns @ factors - totals).sum()), factors))
    return min(found, key=lambda each: each[0])[1]


def _ramp_run(site: Site, text: Text, stations: Sequence[int], length: int | None) -> list[Step]:
    """Begins when the first requests have."""
    traffic, steps = Traffic(site.engine, text), []
    site.policy(length)
    traffic.step(stations[0])
    while not traffic.all_begun:
        traffic.step(stations[0])
    begin, now = time.perf_counter(), 0.0
    while now < (len(stations) - 1) * site.options.hold:
        step = traffic.step(concurrency_at(now, stations, site.options.hold))
        now = step.at - begin
        steps.append(replace(step, at=now))
    traffic.end()
    return steps


def concurrency_at(second: float, stations: Sequence[int], hold: float) -> int:
    """Straight from each station to the next."""
    legs = list(itertools.pairwise(stations)) or [(stations[0], stations[0])]
    leg = min(int(second / hold), len(legs) - 1)
    start, end = legs[leg]
    return round(start + (end - start) * min(1.0, second / hold - leg))


def steps(site: Site) -> Iterator[Row]:
    """Acceptance goes through --acceptances and back to the first."""
    options = site.options
    concurrency = options.step_concurrency
    fixed = {}
    for acceptance in options.acceptances:
        window = _window(options, concurrency) // 2
        text = site.texts(acceptance, window + AHEAD)
        fixed[acceptance] = {
            length: measure(site, text, concurrency, length, window).rate for length in (0, *site.fixed)
        }
    order = [*options.acceptances, options.acceptances[0]]
    traffic = Traffic(site.engine, site.texts(order[0], options.copied))
    site.policy(None)
    _phase(traffic, concurrency, options.step_seconds)
    for before, now in itertools.pairwise(order):
        text = site.texts(now, options.copied)
        if site.draft is None:
            traffic.restart(text)  # n-gram's agreement is the prompts'
        phase = _phase(traffic, concurrency, options.step_seconds)
        right = right_lengths(fixed[now])
        best, half = max(fixed[now].values()), options.step_seconds / 2
        rate = sum(step.written for step in phase if step.at >= half) / half
        yield {
            "kind": "step",
            "pair": site.pair,
            "concurrency": concurrency,
            "from": before,
            "to": now,
            "seconds": seconds_until_right(
                [(step.at, step.length) for step in phase if step.writers == concurrency], right
            ),
            "right": right,
            "length": round(statistics.fmean(step.length for step in phase[len(phase) // 2 :]), 2),
            "fixed": _rounded(fixed[now]),
            "adaptive": round(rate, 1),
            "ratio": round(rate / best, 3),
            "progress": [round(each / best, 2) for each in rates_by_half_second(phase)],
        }
    traffic.end()


def _phase(traffic: Traffic, concurrency: int, seconds: float) -> list[Step]:
    steps: list[Step] = []
    begin = time.perf_counter()
    while not steps or steps[-1].at < seconds:
        step = traffic.step(concurrency)
        steps.append(replace(step, at=step.at - begin))
    return steps


def rates_by_half_second(steps: Sequence[Step]) -> list[float]:
    whole = int(2 * steps[-1].at)
    return [2.0 * sum(step.written for step in steps if int(2 * step.at) == half) for half in range(whole)]


def right_lengths(rates: dict[int, float]) -> list[int]:
    """Those as good as the best."""
    return [length for length, rate in rates.items() if rate >= ENOUGH * max(rates.values())]


def seconds_until_right(lengths: Sequence[tuple[float, float]], right: Sequence[int]) -> float | None:
    """From when on the mean of each bucket is within half a token of a right length; None if never. Of (second,
    length of that step)."""
    buckets: dict[int, list[float]] = {}
    for second, length in lengths:
        buckets.setdefault(int(second / BUCKET), []).append(length)
    wrong = [
        bucket
        for bucket, values in buckets.items()
        if min(abs(statistics.fmean(values) - length) for length in right) > 0.5
        and not right[0] <= statistics.fmean(values) <= right[-1]
    ]
    if not buckets or (wrong and max(wrong) == max(buckets)):
        return None
    return round((max(wrong) + 1) * BUCKET, 1) if wrong else 0.0


def make_site(options: Namespace, pair: str, target: LlamaForCausalLM, circle: Circle) -> Site:
    """Its engine has captured what its requests need, and knows what steps take."""
    draft: Weighted | None = None
    if pair in HEADS:
        draft = build_head(pair, target, circle)
    elif pair != NGRAM:
        draft = build(DRAFTS[pair], circle, target.dtype, options.device, seed=1)
    longest = max(options.copied, AHEAD + max(_window(options, concurrency) for concurrency in options.levels))
    most = options.num_speculative_tokens
    stepped = [options.step_concurrency] if "steps" in options.parts else []
    of = {
        "method": "draft-model" if pair in DRAFTS else pair,
        "input": longest if draft is None else options.input,
        "output": longest if draft is None else options.output,
        "concurrency": sorted({*options.levels, *stepped}),
        "num_speculative_tokens": min(most, draft.shape.heads) if isinstance(draft, MedusaHeads) else most,
        "max_batched_tokens": options.max_batched_tokens,
        "adaptive": True,
    }
    setting = Namespace(**vars(decode_options([])) | of)
    engine = make_engine(setting, target, draft)
    assert engine._calibration is not None
    engine._calibration.begin()
    capture(engine, met_by(setting, engine))
    return Site(options, pair, engine, target, draft, circle)


def rows(options: Namespace) -> Iterator[Row]:
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    size = int(str(SHAPES[options.shape]["vocab_size"]))
    circle = Circle(min(CIRCLE, size))
    for pair in options.pair:
        begin = time.perf_counter()
        target = build(SHAPES[options.shape], circle, dtype, options.device, seed=0)  # anew: heads tap it
        site = make_site(options, pair, target, circle)
        freeze()
        _tell(f"{pair}: ready", begin)
        if "levels" in options.parts:
            yield from _timed(levels(site))
        if "ramp" in options.parts:
            yield from _timed(ramp(site))
        if "steps" in options.parts:
            yield from _timed(steps(site))
        del site, target
        free()


def _timed(rows: Iterable[Row]) -> Iterator[Row]:
    begin = time.perf_counter()
    for row in rows:
        _tell(f"{row['pair']}: {row['kind']}", begin)
        yield row
        begin = time.perf_counter()


def _tell(what: str, begin: float) -> None:
    print(f"{what} in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def _window(options: Namespace, concurrency: int) -> int:
    known = [level for level in WINDOWS if level <= concurrency]
    return int(options.window * WINDOWS[max(known)])


def _rounded(rates: dict[int, float]) -> dict[int, float]:
    return {length: round(rate, 1) for length, rate in rates.items()}


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="of the target")
    parser.add_argument(
        "--pair",
        nargs="+",
        choices=[*DRAFTS, *HEADS, NGRAM],
        default=["llama-1b", "llama-0.25b", NGRAM, *HEADS],
        help="the drafts",
    )
    parser.add_argument("--quick", action="store_true", help="levels only, and short ones: unless others are given")
    parser.add_argument("--parts", nargs="+", choices=["levels", "ramp", "steps"], default=["levels", "ramp", "steps"])
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="lengths to compare with")
    parser.add_argument("--num-speculative-tokens", type=int, default=8, help="the most that are drafted")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of levels and the ramp")
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.7, 0.2, 0.9, 0.4])
    parser.add_argument("--step-concurrency", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=3.0, help="from one change to the next")
    parser.add_argument("--hold", type=float, default=1.0, help="seconds from one level of the ramp to the next")
    parser.add_argument("--window", type=float, default=1.0, help="times the usual length of what is measured")
    parser.add_argument("--settle", type=int, default=32, help="tokens of each request before a level is measured")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt, but for n-gram")
    parser.add_argument("--output", type=int, default=1024, help="tokens of a request, but with n-gram")
    parser.add_argument("--copied", type=int, default=384, help="tokens of one with n-gram, in the ramp and the steps")
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append the rows to this file's list")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    begin = time.perf_counter()
    for row in rows(options):
        print(json.dumps(row), flush=True)
        if options.json:  # at once, in case the time does not suffice for all
            known = json.loads(options.json.read_text()) if options.json.exists() else []
            options.json.write_text(json.dumps([*known, row | settings(options.device)], indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
