"""Every way to speculate that tests hold to be lossless, a line each: whatever loops over METHODS tests a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import transformers
from tests.runtime.heads import eagle_draft, medusa_draft
from tests.runtime.tiny import blurred_model, ours, reference_model

from outrider_runtime.config import TreeConfig
from outrider_runtime.models.causal import CausalLM, Weighted

DraftOf = Callable[[CausalLM], Weighted | None]


@dataclass(frozen=True)
class Method:
    """`method` and `options` are SpeculationConfig's; `draft` makes, for a target, what Engine takes beside it."""

    method: str
    draft: DraftOf = lambda target: None
    options: Mapping[str, Any] = field(default_factory=dict)


def model(reference: Callable[[], transformers.PreTrainedModel]) -> DraftOf:
    """A draft model with the weights of transformers' one, in the target's type and on its device."""

    @cache
    def draft(target: CausalLM) -> CausalLM:
        return ours(reference(), target.dtype, target.device)

    return draft


METHODS = {
    "no speculation": Method("draft-model"),
    "n-gram": Method("ngram", options={"ngram_min": 1, "ngram_max": 3}),
    "suffix": Method("suffix", options={"suffix_min_probability": 0.0}),
    "equal draft": Method("draft-model", model(reference_model)),
    "worse draft": Method("draft-model", model(blurred_model)),
    "random draft": Method("draft-model", model(lambda: reference_model(seed=1))),
    "EAGLE-3": Method("eagle3", lambda target: eagle_draft(3, target)),
    "EAGLE-1": Method("eagle", lambda target: eagle_draft(1, target)),
    "Medusa": Method("medusa", medusa_draft),
    "EAGLE-1 tree": Method("eagle", lambda target: eagle_draft(1, target), {"tree": TreeConfig(2, 20)}),
    "Medusa tree": Method("medusa", medusa_draft, {"tree": TreeConfig(3, 12)}),
}
