"""Where what a method wrote is not what plain decoding wrote, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.runtime.losslessness.asked import Asked
from tests.runtime.losslessness.plain import NEAR, behind_the_best

from outrider_runtime.engine.messages import TokenLogprobs
from outrider_runtime.offline import Completion


@dataclass
class Verdict:
    """`faults` has a line for each request that went wrong; `near` counts the tokens whose place another took because
    rounding may decide between the two, `tokens` all."""

    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    near: int = 0


def compared(
    requests: Sequence[Asked], found: Sequence[Completion], plain: Sequence[Completion], *, rounded: bool = False
) -> Verdict:
    """To the letter; where it is `rounded`, another token passes whose score is within NEAR of the best, and the text
    behind it is held to the same."""
    verdict = Verdict()
    for request, one, other in zip(requests, found, plain, strict=True):
        verdict.tokens += len(one.token_ids)
        if one.token_ids != other.token_ids and rounded:
            short = behind_the_best(request, one.token_ids)
            verdict.near += sum(0 < by < NEAR for by in short)
            wrong = [at for at, by in enumerate(short) if by >= NEAR]
            if wrong:
                verdict.faults.append(f"{request.name}: token {wrong[0]} falls short by {short[wrong[0]]:.2g}")
        elif fault := _difference(one, other, 1e-4 if rounded else 1e-6):
            verdict.faults.append(f"{request.name}: {fault}")
    return verdict


def _difference(one: Completion, other: Completion, tolerance: float) -> str | None:
    if one.token_ids != other.token_ids:
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids)))
        return f"from token {at} on {one.token_ids[at : at + 4]}, plain decoding {other.token_ids[at : at + 4]}"
    if (one.text, one.finish_reason) != (other.text, other.finish_reason):
        return f"{one.text!r} ({one.finish_reason}), plain decoding {other.text!r} ({other.finish_reason})"
    if (one.logprobs is None) != (other.logprobs is None):
        return f"log-probabilities {one.logprobs}, plain decoding {other.logprobs}"
    told = zip(one.logprobs or (), other.logprobs or (), strict=True)
    at = next((at for at, (a, b) in enumerate(told) if not _alike(a, b, tolerance)), None)
    return None if at is None else f"other log-probabilities than plain decoding's, from token {at} on"


def _alike(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    values = [(one.logprob, other.logprob), *((a, b) for (_, a), (_, b) in zip(one.top, other.top, strict=True))]
    ids = [id for id, _ in one.top] == [id for id, _ in other.top]
    return ids and all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in values)
