"""Tokens per step by method, on 20 real prompts of three kinds, with a real target; and that no method changes a text.

    python benchmarks/acceptance.py [--models FOLDER] [--output TOKENS] [--tokens K] [--temperature T]

The target is the demo's SmolLM2-135M (hack/demo_models.py) in float32 on the CPU, its draft the same with weights of 4
bits. All prompts are answered together. Nothing that is printed depends on the machine's speed. Exits with 1 if a text
differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from outrider_runtime.config import WITH_WEIGHTS, Method
from outrider_runtime.engine.messages import StepOutput
from outrider_runtime.offline import Completion, Engine
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.server.chat import load_chat_template
from outrider_runtime.speculation.policy import Policy

PROMPTS = Path(__file__).with_name("prompts.jsonl")
HOME = Path(os.environ.get("OUTRIDER_HOME", "~/.cache/outrider")).expanduser()
TARGET, DRAFT = "smollm2-135m-instruct", "smollm2-135m-instruct-int4"
METHODS = ("draft-model", *(method for method in get_args(Method) if method not in WITH_WEIGHTS))


@dataclass
class Tally:
    """Of the steps that drafted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted)

    def __str__(self) -> str:
        if not self.steps:
            return "-"
        return f"{1 + self.accepted / self.steps:.2f} ({self.accepted / self.drafted:.0%} of {self.drafted})"


class Counting(Engine):
    """Keeps what was drafted for each prompt, by its number."""

    tallies: defaultdict[int, Tally]

    def step(self) -> StepOutput:
        output = super().step()
        for delta in output.deltas:
            if delta.drafted:
                number = int(delta.request_id.rpartition(" ")[2])
                self.tallies[number] += Tally(1, delta.drafted, delta.accepted)
        return output


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, default=HOME / "models")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--tokens", type=int, default=4, help="drafted in a step")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    kinds = list(dict.fromkeys(prompt["kind"] for prompt in prompts))
    params = [
        SamplingParams(arguments.output, temperature=arguments.temperature, seed=number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    print(f"K = {arguments.tokens}, temperature {arguments.temperature:g}, {arguments.output} tokens to each prompt;")
    print("tokens per drafting step (share of the drafted tokens that stood)\n")
    print(f"| method | {' | '.join(kinds)} | all | other texts |\n|{'---|' * (len(kinds) + 3)}")
    plain: list[Completion] | None = None
    differ = 0
    for method in ("none", *METHODS):
        engine = _engine(arguments.models, method, arguments.tokens)
        completions = engine.generate(_chats(engine, arguments.models, prompts), params)
        plain = plain or completions
        others = [number for number, pair in enumerate(zip(completions, plain, strict=True)) if pair[0] != pair[1]]
        differ += len(others)
        by_kind = [
            sum((engine.tallies[n] for n, prompt in enumerate(prompts) if prompt["kind"] == kind), Tally())
            for kind in kinds
        ]
        cells = " | ".join(str(tally) for tally in (*by_kind, sum(by_kind, Tally())))
        print(f"| {method} | {cells} | {', '.join(map(str, others)) or 'none'} |", flush=True)
    return 1 if differ else 0


def _engine(models: Path, method: str, tokens: int) -> Counting:
    options: dict[str, object] = {"dtype": "float32", "kv_blocks": 1024, "max_model_len": 1024, "max_concurrency": 32}
    options |= {"speculative_method": "ngram" if method == "none" else method, "max_speculative_tokens": tokens}
    if method == "draft-model":
        options["draft_model"] = str(models / DRAFT)
    engine = Counting.load(str(models / TARGET), **options)
    engine.tallies = defaultdict(Tally)
    engine.set_policy(Policy(mode="Disabled" if method == "none" else "Enabled", num_speculative_tokens=tokens))
    return engine


def _chats(engine: Engine, models: Path, prompts: Sequence[dict[str, str]]) -> list[tuple[int, ...]]:
    template = load_chat_template(models / TARGET, engine.tokenizer)
    assert template is not None
    return [template.encode([{"role": "user", "content": prompt["prompt"]}]) for prompt in prompts]


if __name__ == "__main__":
    sys.exit(main())
