"""Rules and keyed lists, written once on a model, are checked by pydantic and end up in the schema."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest
from pydantic import Field, ValidationError

from outrider_operator.api import crd
from outrider_operator.api.schema import ApiModel, ListMap, Rule


class Item(ApiModel):
    name: str


class Range(ApiModel):
    """From low to high."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule("self.low <= self.high", "low must not be above high", lambda r: r.low <= r.high),
        Rule("self.low == oldSelf.low", "low is immutable", None),
    )

    low: int = 0
    high: int = Field(9, ge=1)
    some_items: Annotated[list[Item], ListMap("name")] = Field(default_factory=list, max_length=2)


def test_a_rule_is_checked_when_the_object_is_read() -> None:
    assert Range(low=9).high == 9
    with pytest.raises(ValidationError, match="low must not be above high"):
        Range(low=10)


def test_rules_stand_in_the_schema_in_their_order() -> None:
    assert crd.structural(Range)["x-kubernetes-validations"] == [
        {"rule": "self.low <= self.high", "message": "low must not be above high"},
        {"rule": "self.low == oldSelf.low", "message": "low is immutable"},
    ]


def test_a_keyed_list_refuses_a_key_given_twice_and_says_which() -> None:
    assert len(Range.model_validate({"someItems": [{"name": "a"}, {"name": "b"}]}).some_items) == 2
    with pytest.raises(ValidationError, match="Duplicate value: name 'a' is given twice"):
        Range.model_validate({"someItems": [{"name": "a"}, {"name": "a"}]})


def test_a_keyed_list_keeps_its_bound_in_both() -> None:
    field = crd.structural(Range)["properties"]["someItems"]
    assert (field["maxItems"], field["x-kubernetes-list-map-keys"]) == (2, ["name"])
    with pytest.raises(ValidationError, match="at most 2"):
        Range.model_validate({"someItems": [{"name": "a"}, {"name": "b"}, {"name": "c"}]})


@pytest.mark.parametrize("value", ["1", 1.0, True, None])
def test_a_number_is_a_number_only(value: object) -> None:
    with pytest.raises(ValidationError):
        Range.model_validate({"low": value})
