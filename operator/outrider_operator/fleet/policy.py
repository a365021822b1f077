"""The speculation policy as pods receive it, and the operator's own memory beside it in ConfigMap NAME-policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider_operator.api.reasons import SpeculationState
from outrider_operator.digest import digest

_END_OF_TIME = 1e11  # seconds since the epoch, beyond which dates cannot be written


@dataclass(frozen=True, slots=True)
class Policy:
    """Body of PUT /v1/speculation (tests/contract). Equal content has equal `revision`."""

    mode: str
    state: SpeculationState  # Active, Suspended or Disabled
    reason: str  # a Reason, empty while Active
    num_speculative_tokens: int
    min_acceptance_percent: int | None
    revision: str = ""

    def sealed(self) -> Policy:
        """The same with `revision` set to the hash of the content."""
        return replace(self, revision=digest({**asdict(self), "revision": ""}, 8))

    def to_json(self) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "mode": self.mode,
            "state": str(self.state),
            "reason": self.reason,
            "numSpeculativeTokens": self.num_speculative_tokens,
            "minAcceptancePercent": self.min_acceptance_percent,
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """What must survive a restart of the operator. Times are seconds since the epoch, 0 for never."""

    state: SpeculationState = SpeculationState.ACTIVE
    reason: str = ""
    since: float = 0.0
    attempts: int = 0  # pauses for low acceptance since it last passed
    retry_at: float = 0.0  # end of the current pause; 0 while there is none
    trial: str = ""  # the pod on which speculation is tried again after a pause
    paused_for: str = ""  # hash of all that acceptance depends on: a change ends the pause
    disable_at: float = 0.0  # threshold at which load suspended it, kept until it resumes; 0 when it did not
    remeasured: int = 0  # trials of a measured threshold in a row
    remeasure_at: float = 0.0  # when the next is due; 0 when none is
    spec_hash: str = ""  # of mode, method, draft and tree: a change starts over

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Memory:
        """Unknown keys are ignored and missing ones take their defaults, so that versions can read each other's.

        Raises ValueError or TypeError for a value of another kind, or for a time that no clock shows.
        """
        fresh = cls()
        known = {}
        for name in cls.__dataclass_fields__:
            if name in data:
                known[name] = type(getattr(fresh, name))(data[name])
        memory = cls(**known)
        numbers = (memory.since, memory.retry_at, memory.disable_at, memory.remeasure_at)
        if not all(0 <= value < _END_OF_TIME for value in numbers):
            raise ValueError("a time or threshold in the memory is out of range")
        return memory
