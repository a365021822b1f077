"""Decode speed of the engine by itself, on synthetic weights of a named shape: `python benchmarks/decode.py --help`.

The rate is that of peers' tables: for each concurrency, all prompts are given at once, and the time to `--output`
tokens each less the time to a few is what `--output` less those few took. Medians of `--repeats`. Each method and
length of prompts has an engine of its own, whose graphs are captured before anything is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from outrider_runtime.config import (
    HEADS,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SourceConfig,
    SpeculationConfig,
    TreeConfig,
    tree_fault,
)
from outrider_runtime.engine.capture import FEW_QUERIES, Draft, DraftRead, Extend, Forward, Program, Sample, rest
from outrider_runtime.engine.engine import Engine
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.graphs import bucket
from outrider_runtime.models.causal import Weighted
from outrider_runtime.models.config import ModelConfig, model_config
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.models.eagle_config import EagleShape
from outrider_runtime.models.llama import LlamaForCausalLM
from outrider_runtime.models.medusa_config import MedusaShape
from outrider_runtime.models.registry import make_draft
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.policy import Policy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # whichever way this file is found
from benchmarks.step_parts import Parts, bytes_read, time_parts

PASSES = {"none": 0, "ngram": 0, "suffix": 0, "medusa": 1}  # of the draft, a step; of others, as many as it drafts
FEW = 16  # tokens of the shorter run
SHARPNESS = 6.0  # spread of a head's logits: as sure of its first token as a trained one, so that its trees grow deep
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
}
SHAPES = {
    "llama-8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny": LLAMA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"vocab_size": 512, "num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Row:
    """One line of the results. Times are medians; `step_ms` is of the decoding between the two lengths."""

    shape: str  # of SHAPES, the target's
    method: str
    draft: str | None  # shape of the draft model
    k: int  # tokens drafted one behind the other: of a tree, its depth; if adaptive, at most
    tree: tuple[int, int] | None  # candidates behind each token, and tokens of the whole; None: chains
    concurrency: int  # requests at once
    input: int  # tokens of each prompt
    output: int  # tokens of each request in the time that is measured
    max_batched_tokens: int  # of a step, prompts' and drafts' together
    temperature: float
    accepted_length: float | None  # tokens that a step was made to yield each request: of a tree, its walked path
    acceptance: float | None  # with which each draft was made to stand behind one that did
    shared_lots: bool  # of an accepted length: a step yielded as many to every request, so that all ended at once
    cached_prompts: bool  # read before anything was measured, so that all requests began to decode at once
    adaptive: bool  # each step drafted as many as paid
    tokens_per_second: float  # of all requests, while they decode
    step_ms: float
    draft_ms: float  # of it, in one more run: the drafts' loop, and what a head reads of the target's step
    verify_ms: float  # the target's part
    gap_ms: float  # the device did neither: it waited for the host, or copied
    read_gigabytes: float  # that a step has to read: weights, and the KV of all texts
    terabytes_per_second: float  # so many by the time that it took
    tokens_per_step: float  # each request's; less than the accepted length where what was drafted is shorter
    first_tokens_seconds: float  # until every request has its first token
    ready_seconds: float  # from the process's start, on synthetic weights, until all graphs are captured


def synthetic(shape: str, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Random weights, small enough that activations stay finite."""
    return at_random(LlamaForCausalLM(model_config(SHAPES[shape]), dtype, device))


def head_config(method: str, target: ModelConfig) -> ModelConfig:
    """Of the target's shape, as heads are published: EAGLE-3 drafts 32,000 tokens from three layers, EAGLE-1 with the
    target's own output layer; Medusa has five heads of one block."""
    hidden, layers = target.hidden_size, target.num_layers
    shape: EagleShape | MedusaShape
    if method == "medusa":
        shape = MedusaShape(heads=5, blocks=1)
    elif method == "eagle":
        shape = EagleShape(1, 2 * hidden, hidden, "layers.0")
    else:
        tapped = (min(2, layers), layers // 2, max(0, layers - 3))
        rows = min(32_000, target.vocab_size)
        shape = EagleShape(3, 3 * hidden, hidden, "midlayer", tapped, head_rows=rows, mapped=True)
    return replace(target, num_layers=0 if method == "medusa" else 1, head=shape)


@torch.no_grad()
def synthetic_head(method: str, target: LlamaForCausalLM) -> Weighted:
    """Random, but for that an EAGLE head is about as sure of what it drafts as a trained one."""
    head = at_random(make_draft(head_config(method, target.config), target.dtype, target.device))
    if isinstance(head, EagleHead):
        output = target.head if head.head is None else head.head
        output.weight.mul_(SHARPNESS)
        if rows := head.shape.head_rows:  # every fourth token, or so
            ids = torch.arange(rows, device=target.device)
            head.offsets.copy_(ids * (target.config.vocab_size // rows) - ids)
    return head


M = TypeVar("M", bound=Weighted)


def at_random(model: M) -> M:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model.eval()


def tree_of(options: argparse.Namespace) -> TreeConfig | None:
    if options.method not in HEADS or options.tree_top_k is None:
        return None
    return TreeConfig(options.tree_top_k, options.tree_max_tokens)


def make_engine(options: argparse.Namespace, target: LlamaForCausalLM, draft: Weighted | None) -> Engine:
    longest = options.input + options.output + 64
    block_size = 16
    most = max(options.concurrency)
    blocks = most * (-(-longest // block_size) + 2)
    config = EngineConfig(
        model=SourceConfig("synthetic"),
        speculation=SpeculationConfig(
            method="draft-model" if options.method == "none" else options.method,
            max_tokens=options.num_speculative_tokens,
            tree=tree_of(options),
        ),
        cache=CacheConfig(block_size=block_size, num_blocks=blocks, prefix_caching=options.cached_prompts),
        scheduler=SchedulerConfig(max_concurrency=most, max_batched_tokens=options.max_batched_tokens),
        device="cuda" if target.device.type == "cuda" else "cpu",
        policy=Policy(
            mode="Enabled" if options.method != "none" else "Disabled",
            num_speculative_tokens=options.num_speculative_tokens,
        ),
    )
    engine = Engine(config, target, draft, max_model_len=longest)
    if options.accepted_length is not None:
        engine.force_accepted_length(options.accepted_length, shared=options.shared_lots)
    elif options.acceptance is not None:
        engine.force_acceptance(options.acceptance)
    return engine


def _texts(options: argparse.Namespace, concurrency: int) -> int:
    """Tokens of all texts, in the middle of what is measured."""
    return concurrency * (options.input + FEW + options.output // 2)


def capture(engine: Engine, met: Callable[[Program], bool]) -> None:
    """The graphs of these programs, of all that a server captures sooner or later. Whatever else is met is captured
    when it is, which takes a tenth of a second of what is measured then."""
    begin, runner = time.perf_counter(), engine._runner  # benchmarks may
    runner._uncaptured = [program for program in reversed(rest(runner.widths, [])) if met(program)]
    if not runner.on_host:
        runner._compile(runner._uncaptured, partial(print, file=sys.stderr, flush=True))
    while engine.idle():
        pass
    print(f"{len(graphs(engine))} graphs in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def freeze() -> None:
    """What is there stays, as in the engine's process: to look through it for garbage in the middle of what is measured
    takes a tenth of a second."""
    gc.collect()
    gc.freeze()


def free() -> None:
    """What was frozen, and is not used any more."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is none


def graphs(engine: Engine) -> set[Program]:
    """That have been captured."""
    return set(engine._runner._graphs._graphs)


@contextmanager
def measuring(engine: Engine, what: str) -> Iterator[None]:
    """Says so if a graph is captured in spite of all."""
    known = graphs(engine)
    yield
    if late := graphs(engine) - known:
        print(f"captured while {what} was measured: {late}", file=sys.stderr, flush=True)


def met_by(options: argparse.Namespace, engine: Engine) -> Callable[[Program], bool]:
    """Whether requests as these can meet a program: they end at different steps, so any number of them may be left."""
    runner, most = engine._runner, max(options.concurrency)
    widths, mode = runner.widths, Mode.NOISE if options.temperature else Mode.GREEDY
    decoding = most * (1 + (runner.draft_sizes[-1] if runner.proposer else 0))
    everything = most * options.input + decoding

    def up_to(widths: Sequence[int], width: int) -> int:
        return bucket(widths, min(width, widths[-1]))

    def met(program: Program) -> bool:
        match program:
            case Forward(tokens, small, narrow):
                return tokens <= up_to(
                    widths.tokens, most if narrow else decoding + FEW_QUERIES if small else everything
                )
            case Extend(tokens, small):
                return tokens <= up_to(widths.tokens, decoding + FEW_QUERIES if small else everything)
            case DraftRead(tokens):
                return tokens <= up_to(widths.tokens, everything)
            case Sample(rows, of):
                return of is mode and rows <= up_to(widths.rows, decoding)
            case Draft(_, length, of):
                fixed = bucket(widths.lengths, options.num_speculative_tokens)
                return of is mode and (options.adaptive or length == fixed)

    return met


@dataclass
class Run:
    seconds: float
    first_tokens: float
    steps: int  # that yielded something
    tokens: int


def asked(concurrency: int, prompt_length: int, output: int, vocab_size: int, temperature: float) -> list[AddRequest]:
    """Always the same, of random prompts."""
    lots = random.Random(0)
    params = SamplingParams(max_tokens=output, temperature=temperature, ignore_eos=True)
    return [
        AddRequest(str(index), tuple(lots.randrange(vocab_size) for _ in range(prompt_length)), params)
        for index in range(concurrency)
    ]


def run(
    engine: Engine, concurrency: int, prompt_length: int, output: int, vocab_size: int, temperature: float = 0.0
) -> Run:
    """All at once, to the end."""
    requests = asked(concurrency, prompt_length, output, vocab_size, temperature)
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    waiting, first, steps, tokens = {str(index) for index in range(concurrency)}, 0.0, 0, 0
    while engine.has_work:
        deltas = engine.step().deltas
        steps += bool(deltas)
        tokens += sum(len(delta.token_ids) for delta in deltas)
        if waiting:
            waiting.difference_update(delta.request_id for delta in deltas)
            first = time.perf_counter() - begin
    return Run(time.perf_counter() - begin, first, steps, tokens)


def measure(
    options: argparse.Namespace, engine: Engine, target: LlamaForCausalLM, draft: Weighted | None, ready: float
) -> Iterator[Row]:
    tree, vocab_size = tree_of(options), target.config.vocab_size
    for concurrency in options.concurrency:
        first = options.input if options.cached_prompts else min(options.input, 128)
        run(engine, concurrency, first, FEW, vocab_size, options.temperature)
        rates, steps, firsts, yields = [], [], [], []
        with measuring(engine, f"{options.method} at {concurrency}"):
            for _ in range(options.repeats):
                short = run(engine, concurrency, options.input, FEW, vocab_size, options.temperature)
                long = run(engine, concurrency, options.input, options.output + FEW, vocab_size, options.temperature)
                seconds = long.seconds - short.seconds
                rates.append(concurrency * options.output / seconds)
                steps.append(1000 * seconds / max(1, long.steps - short.steps))
                yields.append((long.tokens - short.tokens) / max(1, long.steps - short.steps) / concurrency)
                firsts.append(long.first_tokens)
        parts = parts_of(options, engine, concurrency, vocab_size)
        read = bytes_read(
            target, draft, PASSES.get(options.method, options.num_speculative_tokens), _texts(options, concurrency)
        )
        step = statistics.median(steps)
        yield Row(
            shape=options.shape,
            method=options.method,
            draft=options.draft_shape if options.method == "draft-model" else None,
            k=0 if options.method == "none" else options.num_speculative_tokens,
            tree=None if tree is None else (tree.top_k, tree.max_tokens),
            concurrency=concurrency,
            input=options.input,
            output=options.output,
            max_batched_tokens=options.max_batched_tokens,
            temperature=options.temperature,
            accepted_length=options.accepted_length,
            acceptance=options.acceptance,
            shared_lots=options.shared_lots,
            cached_prompts=options.cached_prompts,
            adaptive=options.adaptive,
            tokens_per_second=round(statistics.median(rates), 1),
            step_ms=round(step, 3),
            draft_ms=round(parts.draft, 3),
            verify_ms=round(parts.verify, 3),
            gap_ms=round(parts.gap, 3),
            read_gigabytes=round(read / 1e9, 2),
            terabytes_per_second=round(read / step / 1e9, 2),
            tokens_per_step=round(statistics.median(yields), 3),
            first_tokens_seconds=round(statistics.median(firsts), 4),
            ready_seconds=round(ready, 1),
        )


def begin(engine: Engine, options: argparse.Namespace, concurrency: int, output: int, vocab_size: int) -> None:
    """Requests as run()'s, each of which has its first token."""
    waiting = set()
    for request in asked(concurrency, options.input, output, vocab_size, options.temperature):
        engine.add(request)
        waiting.add(request.request_id)
    while waiting:
        waiting.difference_update(delta.request_id for delta in engine.step().deltas)


def end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def parts_of(options: argparse.Namespace, engine: Engine, concurrency: int, vocab_size: int) -> Parts:
    """While all decode: the steps are fewer than the fewest that a request can take."""
    steps = max(1, options.output // (2 * (1 + engine._runner.draft_sizes[-1])))
    begin(engine, options, concurrency, FEW + options.output, vocab_size)
    parts = time_parts(engine, steps)
    end(engine)
    return parts


def profile(options: argparse.Namespace, engine: Engine, vocab_size: int, steps: int = 20) -> None:
    """Where the device's time goes while all decode: the costliest kernels, in microseconds a step."""
    for concurrency in options.concurrency:
        run(engine, concurrency, options.input, options.output, vocab_size)
        begin(engine, options, concurrency, options.output, vocab_size)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            started = time.perf_counter()
            for _ in range(steps):
                engine.step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        end(engine)
        kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
        busy = sum(kernel.self_device_time_total for kernel in kernels) / steps
        print(f"{concurrency} streams: {1e6 * seconds / steps:.0f} us a step, kernels {busy:.0f}")
        for kernel in kernels[:18]:
            total = kernel.self_device_time_total / steps
            print(
                f"{total:9.1f} us {kernel.count / steps:7.1f} x {total * steps / kernel.count:7.2f}  {kernel.key[:90]}"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument(
        "--method", nargs="+", choices=["none", "ngram", "suffix", "draft-model", *HEADS], default=["none"]
    )
    parser.add_argument("--draft-shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--tree-top-k", type=int, metavar="K", help="heads draft trees: candidates behind each token")
    parser.add_argument("--tree-max-tokens", type=int, metavar="N", help="tokens of a tree")
    parser.add_argument("--adaptive", action="store_true", help="draft up to that many tokens, as it pays")
    forced = parser.add_mutually_exclusive_group()
    forced.add_argument("--accepted-length", type=float, help="tokens a step yields on average, whatever is drafted")
    forced.add_argument("--acceptance", type=float, help="chance of each draft behind one that stands, whatever it is")
    parser.add_argument("--shared-lots", action="store_true", help="as many for all requests, as SGLang simulates it")
    parser.add_argument(
        "--cached-prompts", action="store_true", help="read prompts before anything is measured: decoding alone"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="1.0: texts in which nothing occurs again")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--input", type=int, nargs="+", default=[128])
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append the rows to this file's list")
    parser.add_argument("--profile", action="store_true", help="print the costliest kernels instead")
    options = parser.parse_args(arguments)
    if (options.tree_top_k is None) != (options.tree_max_tokens is None):
        parser.error("--tree-top-k and --tree-max-tokens are given together or not at all")
    if options.profile and options.device != "cuda":
        parser.error(f"--profile times the kernels of a CUDA device, not of {options.device}")
    if options.shared_lots and options.accepted_length is None:
        parser.error("--shared-lots is of the tokens of --accepted-length")
    if options.tree_top_k is not None and (
        fault := tree_fault(options.tree_top_k, options.num_speculative_tokens, options.tree_max_tokens)
    ):
        parser.error(f"--tree-max-tokens {options.tree_max_tokens} makes {fault}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    imports = seconds_since_start()
    for method in options.method:
        since = time.perf_counter() - imports
        target = synthetic(options.shape, dtype, options.device)
        draft: Weighted | None = None
        if method in HEADS:
            draft = synthetic_head(method, target)
        elif method == "draft-model":
            draft = synthetic(options.draft_shape, dtype, options.device)
        # none drafts nothing
        forced = {"accepted_length": None, "acceptance": None, "shared_lots": False} if method == "none" else {}
        for length in options.input:
            of = {"method": method, "input": length, **forced}
            bench(argparse.Namespace(**vars(options) | of), target, draft, since)
            since = time.perf_counter() - imports
            free()


def bench(options: argparse.Namespace, target: LlamaForCausalLM, draft: Weighted | None, since: float) -> None:
    """One method and length of prompts, made ready `since` then."""
    engine = make_engine(options, target, draft)
    if options.adaptive and engine._calibration is not None:
        engine.set_policy(Policy(num_speculative_tokens=options.num_speculative_tokens))
        engine._calibration.begin()
    capture(engine, met_by(options, engine))
    freeze()
    if options.profile:
        profile(options, engine, target.config.vocab_size)
        return
    rows = []
    for row in measure(options, engine, target, draft, time.perf_counter() - since):
        print(json.dumps(asdict(row)), flush=True)
        rows.append(asdict(row) | settings(options.device))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*known, *rows], indent=1) + "\n")


def seconds_since_start() -> float:
    """Of this process: what came before its first line, too."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def settings(device: str) -> dict[str, object]:
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = os.environ.get("COMMIT") or subprocess.run(command, capture_output=True, text=True, check=False).stdout
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "device": name,
        "versions": {"torch": torch.__version__, "triton": version("triton")},
        "commit": commit.strip() or "unknown",
    }


if __name__ == "__main__":
    main()
