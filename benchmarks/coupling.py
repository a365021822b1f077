"""How often a draft stands that is drawn with the target's own noise, against the best that any draft can do.

    python benchmarks/coupling.py [--models FOLDER]

For pairs of distributions p (target) and q (draft): `shared noise` is measured with the runtime's own draws, 8 seeds a
pair; the others are computed. The best coupling reaches sum min(p, q), as rejection sampling with residuals does. A
greedy draft, the likeliest token of q, stands with its probability under p; one drawn with a noise of its own with sum
pq. With --models, also the pairs that the demo's two models meet on the prompts of benchmarks/prompts.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.sampler import sample
from outrider_runtime.sampling.table import Layout, Mode, SamplingTable

SEEDS = 8
PAIRS = 250  # of each kind
VOCAB = 8_000
PROMPTS = Path(__file__).with_name("prompts.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, help="where hack/demo_models.py put the demo's models")
    arguments = parser.parse_args()
    print("| logits of the two | temperature | shared noise | best coupling | greedy draft | noise of its own |")
    print("|---|---|---|---|---|---|")
    with torch.inference_mode():
        for name, target, draft in _pairs(arguments.models):
            for temperature in (1.0, 0.5):
                rates = acceptance(target / temperature, draft / temperature)
                print(f"| {name} | {temperature} |", " | ".join(f"{rate:.3f}" for rate in rates), "|", flush=True)


def acceptance(target: Tensor, draft: Tensor) -> tuple[float, float, float, float]:
    """Of [pairs, vocab] logits: by shared noise, the best coupling, a greedy draft, and a noise of its own."""
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    tokens = [_drawn(logits) for logits in (target, draft)]
    greedy = p.gather(1, q.argmax(1, keepdim=True))
    rates = (tokens[0] == tokens[1]).double(), torch.minimum(p, q).sum(1), greedy, (p * q).sum(1)
    shared, best, likeliest, own = (float(rate.mean()) for rate in rates)
    return shared, best, likeliest, own


def _drawn(logits: Tensor) -> Tensor:
    """[pairs, SEEDS] tokens; pair and seed determine the noise."""
    pairs = len(logits)
    text = torch.zeros(1, 1, dtype=torch.int32)
    table = SamplingTable(text, (), Layout(bias=1, ends=1, words=1, word_length=1))
    table.write(0, SamplingParams(max_tokens=1), 0, 1)
    table.tokens, table.rows = text.expand(pairs, -1), table.rows.repeat(pairs, 1)
    slots, positions = torch.arange(pairs, dtype=torch.int32), torch.ones(pairs, dtype=torch.int32)
    drawn = []
    for seed in range(SEEDS):
        table.rows.view(torch.int64)[:, 0] = torch.arange(pairs) * SEEDS + seed
        drawn.append(sample(logits, slots, positions, table, Mode.NOISE))
    return torch.stack(drawn, dim=1)


def _pairs(models: Path | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names and [pairs, vocab] logits. `apart` is the standard deviation of what the draft's differ by."""
    generator = torch.Generator().manual_seed(0)
    for width in (2.0, 4.0):
        for apart in (0.5, 1.0):
            target = width * torch.randn(PAIRS, VOCAB, generator=generator)
            draft = target + apart * torch.randn(PAIRS, VOCAB, generator=generator)
            yield f"normal, {width:g} wide, {apart:g} apart", target, draft
    if models is not None:
        yield "SmolLM2-135M and its weights in 4 bits", *_of_the_demo(models)


def _of_the_demo(models: Path) -> list[Tensor]:
    """Behind every eighth token of the prompts' chats."""
    import transformers

    folders = [models / name for name in ("smollm2-135m-instruct", "smollm2-135m-instruct-int4")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in PROMPTS.read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
    logits = []
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits.append(torch.cat([model(torch.tensor([text])).logits[0, ::8] for text in texts])[:PAIRS])
    return logits


if __name__ == "__main__":
    main()
