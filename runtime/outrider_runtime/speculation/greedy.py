"""Greedy tokens of large batches, without their logits and of no more rows than can count.

What is sampled behind a draft counts where that draft stands, and all before it (verify.py). So the first half of each
request's rows comes first, and then the rest of those requests whose drafts stand up to there. Of four drafts, each of
which stands with a probability of 0.8 behind one that does, that is four fifths of the rows, with 0.5 two thirds.
Logits are a fourteenth of what a step of Llama-3.1-8B multiplies, a fifth of Llama-3.2-1B's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider_runtime.engine.feed import Feed
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.layers.rows import take_rows
from outrider_runtime.models.causal import CausalLM

HALVED_ROWS = 1024  # from so many on; the matrix is read twice then, which takes as long as a product of 150 rows


def greedy_tokens(
    target: CausalLM, hidden: Tensor, state: DeviceState, feed: Feed, stands: Tensor | None, *, chains: bool
) -> Tensor | None:
    """The feed's [R] rows' tokens, int32, where they can count; None where they are found sooner by way of logits.

    `hidden` [tokens, hidden] are the step's. Drafts are `chains`, else trees. `stands`: verify.commit()'s.
    """
    rows, weight = feed.rows, target.output
    if weight is None or not weight.is_cuda:
        return None
    from outrider_runtime.kernels.tall import largest_of_product, largest_pays

    if not largest_pays(len(rows), weight):
        return None
    if chains and len(rows) >= max(HALVED_ROWS, 2 * len(feed.slots)):
        return by_halves(weight, hidden, state, feed, stands)
    return largest_of_product(take_rows(hidden, rows), weight)


def by_halves(weight: Tensor, hidden: Tensor, state: DeviceState, feed: Feed, stands: Tensor | None) -> Tensor:
    """greedy_tokens() of chains, by the [vocab, hidden] matrix of the logits; 0 where they cannot count."""
    from outrider_runtime.kernels.step import rows_that_count
    from outrider_runtime.kernels.tall import largest_of_product

    sampled = torch.zeros_like(feed.rows)
    about = feed.slots, feed.drafts, feed.first_rows, feed.rows
    for rest in (False, True):
        places, tokens, count = rows_that_count(state.tokens, state.lengths, *about, sampled, stands, rest=rest)
        largest_of_product(take_rows(hidden, tokens), weight, count=count, places=places, out=sampled)
    return sampled
