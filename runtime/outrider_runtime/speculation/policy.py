"""The speculation policy an operator sets (tests/contract): parsed, and reduced to the draft length it allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Mode = Literal["Auto", "Enabled", "Disabled"]
State = Literal["Active", "Suspended", "Disabled"]

MAX_SPECULATIVE_TOKENS = 16
_MODES = ("Auto", "Enabled", "Disabled")
_STATES = ("Active", "Suspended", "Disabled")
_FIELDS = ("revision", "mode", "state", "reason", "numSpeculativeTokens", "minAcceptancePercent")


class PolicyError(ValueError):
    """`field` is the policy's field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Policy:
    """The default is what a runtime without an operator does: draft whenever it pays."""

    revision: str = ""
    mode: Mode = "Auto"
    state: State = "Active"
    reason: str = ""
    num_speculative_tokens: int = 4
    min_acceptance_percent: int | None = None

    def allowed_tokens(self, max_tokens: int) -> int:
        """The most that may be drafted per step by a runtime started for `max_tokens`."""
        if self.mode == "Disabled" or self.state != "Active":
            return 0
        return min(self.num_speculative_tokens, max_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "mode": self.mode,
            "state": self.state,
            "reason": self.reason,
            "numSpeculativeTokens": self.num_speculative_tokens,
            "minAcceptancePercent": self.min_acceptance_percent,
        }


def parse_policy(body: object) -> Policy:
    """The policy in a PUT body or in OUTRIDER_POLICY. Raises PolicyError naming the field."""
    if not isinstance(body, Mapping):
        raise PolicyError("", f"the policy must be a JSON object; got {type(body).__name__}")
    for name in body:
        if name not in _FIELDS:
            raise PolicyError(str(name), f"{name} is not a field of the policy; the fields are {', '.join(_FIELDS)}")
    for name in _FIELDS:
        if name not in body:
            raise PolicyError(name, f"{name} is missing; PUT takes the whole policy")
    acceptance = body["minAcceptancePercent"]
    return Policy(
        revision=_string(body, "revision"),
        mode=cast("Mode", _choice(body, "mode", _MODES)),
        state=cast("State", _choice(body, "state", _STATES)),
        reason=_string(body, "reason"),
        num_speculative_tokens=_integer(body, "numSpeculativeTokens", 1, MAX_SPECULATIVE_TOKENS),
        min_acceptance_percent=None if acceptance is None else _integer(body, "minAcceptancePercent", 0, 100),
    )


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body[name]
    if not isinstance(value, str) or len(value) > 1024:
        raise PolicyError(name, f"{name} must be a string of at most 1024 characters; got {_shown(value)}")
    return value


def _choice(body: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = body[name]
    if value not in choices:
        raise PolicyError(name, f"{name} must be one of {', '.join(choices)}; got {_shown(value)}")
    return cast("str", value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PolicyError(name, f"{name} must be an integer from {low} to {high}; got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
