"""Whether a draft can draft for a target: the same token behind every id both can emit."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_runtime.errors import Refusal
from outrider_runtime.models.checkpoint import Checkpoint


def check_pair(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises Refusal(TokenizerMismatch)."""
    if difference := mismatch(
        target.vocabulary(), draft.vocabulary(), target.config.vocab_size, draft.config.vocab_size
    ):
        raise Refusal(
            "TokenizerMismatch",
            f"target {target.name} and draft {draft.name} disagree on {difference}; give a draft of the same tokenizer",
        )


def mismatch(target: Mapping[str, int], draft: Mapping[str, int], target_rows: int, draft_rows: int) -> str:
    """In words, where two tokenizers differ; empty when they do not. Token -> id, and rows of the embedding tables.

    Rows past a tokenizer's last id are padding: they may differ in number, and so may ids that only one model has.
    """
    target_tokens = {id_: token for token, id_ in target.items() if id_ < target_rows}
    draft_tokens = {id_: token for token, id_ in draft.items() if id_ < draft_rows}
    shared = target_tokens.keys() & draft_tokens.keys()
    different = sorted(id_ for id_ in shared if target_tokens[id_] != draft_tokens[id_])
    if different:
        first = different[0]
        also = f", and on {len(different) - 1} more of {len(shared)}" if len(different) > 1 else ""
        return f"token {first} ({target_tokens[first]!r} and {draft_tokens[first]!r}){also}"
    if not shared:
        return "every token: no id is in both"
    if unreadable := [id_ for id_ in target_tokens if id_ >= draft_rows]:
        return f"token {min(unreadable)}, which the draft's table of {draft_rows} rows lacks"
    return ""
