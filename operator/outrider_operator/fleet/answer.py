"""From the body of GET /v1/speculation to a checked value: what a pod says is not believed before it is looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from sys import intern
from typing import Any

from outrider_operator.fleet.samples import Answer, Counters


def parse_answer(body: object) -> Answer:
    """Check a body against tests/contract/speculation.

    Fields that nobody here reads are ignored, so that a newer runtime can say more.
    Raises ValueError naming the field when one is missing, of another type, negative or not finite.
    """
    root = _Part(body, "")
    effective, counters = root.part("effective"), root.part("counters")
    model, draft = root.part("model"), root.part("draft")
    return Answer(
        revision=root.part("policy").text("revision"),
        state=effective.text("state"),
        reason=effective.text("reason"),
        message=effective.text("message"),
        tokens=effective.number("tokens"),
        max_tokens=effective.count("maxTokens"),
        counters=Counters(**{field.name: counters.number(field.name) for field in fields(Counters)}),
        running=root.number("running"),
        waiting=root.number("waiting"),
        break_even_concurrency=root.count_or_none("breakEvenConcurrency"),
        speedup=root.number_or_none("speedup"),
        model_revision=model.text("resolvedRevision"),
        model_parameters=model.count("parameters"),
        model_dtype=model.text("dtype"),
        draft_ok=draft.flag("ok"),
        draft_reason=draft.text("reason"),
        draft_message=draft.text("message"),
        draft_revision=draft.text("resolvedRevision"),
        draft_parameters=draft.count("parameters"),
    )


class _Part:
    """An object within the body, and where it is."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path or 'the body'} must be an object, not {_shown(value)}")
        self._value: Mapping[str, Any] = value
        self._path = path

    def part(self, name: str) -> _Part:
        return _Part(self._get(name), self._name(name))

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise ValueError(f"{self._name(name)} must be a string, not {_shown(value)}")
        return intern(value)  # thousands of samples repeat the same few words

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self._name(name)} must be true or false, not {_shown(value)}")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # the bound also keeps out integers that no float can hold
        if not number or not 0 <= value <= 1e18 or math.isnan(value):
            raise ValueError(f"{self._name(name)} must be a number, finite and not negative, not {_shown(value)}")
        return float(value)

    def count(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise ValueError(f"{self._name(name)} must be a whole number, not {_shown(self._get(name))}")
        return int(self._get(name))

    def number_or_none(self, name: str) -> float | None:
        return None if self._get(name) is None else self.number(name)

    def count_or_none(self, name: str) -> int | None:
        return None if self._get(name) is None else self.count(name)

    def _get(self, name: str) -> Any:
        if name not in self._value:
            raise ValueError(f"{self._name(name)} is missing")
        return self._value[name]

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge integer"
    return text if len(text) <= 60 else f"{text[:57]}..."
