"""The base of every API model: camelCase on the wire, unknown fields refused, and rules that are written once
and checked twice, as CEL by the API server and as Python by pydantic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Rule:
    """A validation that spans fields.

    `cel` is the expression for x-kubernetes-validations, `holds` the same in Python over the parsed model (None for
    transition rules, which only the API server can check), `message` names the fields and the fix.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None


@dataclass(frozen=True, slots=True)
class ListMap:
    """Annotates a list whose items `key` tells apart: no duplicates, and server-side apply merges item by item."""

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._unique, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [self.key],
        }

    def _unique(self, items: list[Any]) -> list[Any]:
        seen: set[Any] = set()
        for item in items:
            value = getattr(item, self.key)
            if value in seen:
                raise ValueError(f"Duplicate value: {self.key} {value!r} is given twice")
            seen.add(value)
        return items


class ApiModel(BaseModel):
    """Strict as the API server is: a number in quotes is no number. Enums alone read the strings they stand for."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.RULES:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self
