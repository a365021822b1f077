"""The base of every API model: camelCase on the wire, unknown fields refused, and rules that are written once
and checked twice, as CEL by the API server and as Python by pydantic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel


@dataclass(frozen=True, slots=True)
class Rule:
    """A validation that spans fields.

    `cel` is the expression for x-kubernetes-validations, `holds` the same in Python over the parsed model (None for
    transition rules, which only the API server can check), `message` names the fields and the fix.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None


class ApiModel(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="forbid", frozen=True
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.RULES:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self
