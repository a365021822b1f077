"""The one verification rule: a draft stands while it equals the target's own token.

Both are determined by the request's noise, so what is emitted is what plain decoding would have emitted
(../sampling/pipeline.py); the draft decides only how many tokens a step yields.
"""

from __future__ import annotations

from collections.abc import Sequence


def walk(drafted: Sequence[int], target: Sequence[int]) -> int:
    """How many drafted tokens stand. `target` holds the target's token behind each prefix of the draft, one more than
    `drafted`; the step emits `target[: accepted + 1]`."""
    for accepted, (draft, token) in enumerate(zip(drafted, target, strict=False)):
        if draft != token:
            return accepted
    return len(drafted)
