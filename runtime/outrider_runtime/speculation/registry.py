"""The methods by the name users give them: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider_runtime.config import EngineConfig
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.kv.cache import KVCache
from outrider_runtime.models.causal import CausalLM, Weighted
from outrider_runtime.models.eagle import EagleHead
from outrider_runtime.models.medusa import MedusaHeads
from outrider_runtime.sampling.table import SamplingTable
from outrider_runtime.speculation.draft_model import DraftModel
from outrider_runtime.speculation.eagle import Eagle
from outrider_runtime.speculation.expansion import DynamicTree
from outrider_runtime.speculation.medusa import Medusa
from outrider_runtime.speculation.ngram import NGram
from outrider_runtime.speculation.proposer import Proposer
from outrider_runtime.speculation.suffix import Suffix
from outrider_runtime.speculation.suffix_index import Outputs
from outrider_runtime.speculation.tree import StaticTree, likely_choices


@dataclass(frozen=True, slots=True)
class Setting:
    """What a method may build on. `draft` and its KV arrays are there when one was given."""

    config: EngineConfig
    target: CausalLM
    draft: Weighted | None
    draft_cache: KVCache | None
    state: DeviceState
    table: SamplingTable


def make_proposer(setting: Setting) -> Proposer | None:
    """None when the method's draft could not be had: then nothing is drafted."""
    return METHODS[setting.config.speculation.method](setting)


def _ngram(setting: Setting) -> Proposer:
    speculation = setting.config.speculation
    return NGram(setting.state, speculation.ngram_min, speculation.ngram_max)


def _draft_model(setting: Setting) -> Proposer | None:
    if not isinstance(setting.draft, CausalLM) or setting.draft_cache is None:
        return None
    return DraftModel(
        setting.draft,
        setting.draft_cache,
        setting.state,
        setting.table,
        setting.target.config.vocab_size,
    )


def _eagle(setting: Setting) -> Proposer | None:
    if not isinstance(setting.draft, EagleHead) or setting.draft_cache is None:
        return None
    tree, depth = setting.config.speculation.tree, setting.config.speculation.max_tokens
    return Eagle(
        setting.draft,
        setting.target,
        setting.draft_cache,
        setting.state,
        setting.table,
        setting.config.scheduler.max_batched_tokens,
        None if tree is None else DynamicTree(tree.top_k, min(depth, tree.max_tokens), tree.max_tokens),
    )


def _medusa(setting: Setting) -> Proposer | None:
    if not isinstance(setting.draft, MedusaHeads):
        return None
    tree, depth = setting.config.speculation.tree, setting.config.speculation.max_tokens
    shape = None
    if tree is not None:
        shape = StaticTree.of(likely_choices(min(depth, setting.draft.shape.heads), tree.top_k, tree.max_tokens))
    return Medusa(setting.draft, setting.target, setting.state, setting.table, shape)


def _suffix(setting: Setting) -> Proposer:
    speculation = setting.config.speculation
    outputs = Outputs(speculation.suffix_cache_tokens) if speculation.suffix_cache_tokens else None
    return Suffix(setting.state, speculation.max_tokens, outputs, speculation.suffix_min_probability)


METHODS: dict[str, Callable[[Setting], Proposer | None]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft-model": _draft_model,
    "eagle3": _eagle,
    "eagle": _eagle,
    "medusa": _medusa,
}
