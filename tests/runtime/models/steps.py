"""A model's logits over texts that are cut into steps, share a prefix and lie in shuffled blocks; and transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import transformers
from tests.runtime.batches import Span, make_batch
from tests.runtime.tiny import VOCAB

from outrider_runtime.kv.cache import KVCache
from outrider_runtime.layers.batch import Batch, attention_plan
from outrider_runtime.models.causal import CausalLM

BLOCK = 4
SHARED = 2  # blocks at the front of TEXTS that are found cached by all but the first


def random_text(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# The second and third begin as the first does. Cuts lie on borders of blocks, beside them and far from them.
PREFIX = random_text(SHARED * BLOCK, 1)
TEXTS = [PREFIX + random_text(15, 2), PREFIX + random_text(9, 3), PREFIX + random_text(132, 4)]
CUTS = [[11, 1, 1, 10], [4, 1, 4], [92, 1, 39]]


def in_steps(
    model: CausalLM, texts: Sequence[list[int]], cuts: Sequence[list[int]], shared: int = 0
) -> list[torch.Tensor]:
    """Logits of each text: `cuts[i]` are the lengths of text i's chunks, which all run together.

    With `shared` blocks, all but the first text find so many of the first's, start a step after it, behind them, and
    give no logits for them.
    """
    width = max(-(-len(text) // BLOCK) for text in texts)
    order = torch.randperm(len(texts) * width, generator=torch.Generator().manual_seed(1)).tolist()
    blocks = [order[i * width : (i + 1) * width] for i in range(len(texts))]
    for own in blocks[1:]:
        own[:shared] = blocks[0][:shared]
    late = [int(shared > 0 and i > 0) for i in range(len(texts))]
    cache = KVCache(model.config, len(order), BLOCK, model.dtype, model.device)
    done = [shared * BLOCK * each for each in late]
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(len(cut) + wait for cut, wait in zip(cuts, late, strict=True))):
        members = [i for i in range(len(texts)) if 0 <= step - late[i] < len(cuts[i])]
        spans = [Span(texts[i][done[i] : done[i] + cuts[i][step - late[i]]], done[i], blocks[i]) for i in members]
        logits = model.logits(model(batch_of(model, spans), cache)).cpu().split([len(span.token_ids) for span in spans])
        for i, span, part in zip(members, spans, logits, strict=True):
            parts[i].append(part)
            done[i] = span.end
    return [torch.cat(part) for part in parts]


def batch_of(model: CausalLM, spans: Sequence[Span]) -> Batch:
    """On a CUDA device, as the engine has it made there: for the kernel."""
    batch = make_batch(spans, BLOCK, model.device, model.attention_shape)
    if model.device.type != "cuda":
        return batch
    tables = [[*span.blocks] for span in spans]
    starts = [0, *accumulate(len(span.token_ids) for span in spans)]
    ends, rows = [span.end for span in spans], list(range(len(spans)))
    plan = attention_plan(
        *(torch.tensor(each, dtype=torch.int32, device=model.device) for each in (starts, ends, rows, tables)),
        tokens=len(batch.token_ids),
        block_size=BLOCK,
        dim=model.config.head_dim,
        shape=model.attention_shape,
        small=False,
    )
    return replace(batch, attention=plan)


def assert_logits_are_those_of(reference: transformers.PreTrainedModel, model: CausalLM) -> None:
    """Alone and whole, and in chunks in a mixed batch with prefix hits: within 1e-4 of a row's largest logit."""
    chunked = in_steps(model, TEXTS, CUTS, SHARED)
    for text, part in zip(TEXTS, chunked, strict=True):
        (whole,) = in_steps(model, [text], [[len(text)]])
        with torch.no_grad():
            expected = reference(torch.tensor([text]), use_cache=False).logits[0]
        bound = 1e-4 * expected.abs().amax(1, keepdim=True)
        assert (whole - expected).abs().le(bound).all()
        assert (part - expected[-len(part) :]).abs().le(bound[-len(part) :]).all()
