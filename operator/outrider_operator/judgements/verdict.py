"""What a judgement says, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_operator.api.reasons import ConditionType, Reason, Status
from outrider_operator.facts import Facts


@dataclass(frozen=True, slots=True)
class Verdict:
    status: Status
    reason: Reason
    message: str


Judge = Callable[[Facts], Verdict | None]  # None: nothing to say, ask the next
Chain = tuple[Judge, ...]

PENDING = Verdict(Status.UNKNOWN, Reason.PENDING, "not observed yet")
SUSPENDED = "no replicas are asked for"


def find(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    """The condition of that type in a status; empty when there is none."""
    return next((c for c in status.get("conditions") or () if c.get("type") == kind), {})
