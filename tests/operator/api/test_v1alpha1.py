"""What pydantic says of the table that the API server is held to as well, and what follows from a spec."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError
from tests.operator.api.objects import DRAFT, INVALID, MODEL, UNKNOWN, VALID, Case, model

from outrider_operator.api.v1alpha1 import (
    CAPTURE_TIERS,
    Device,
    Method,
    Mode,
    SpeculativeDecoding,
    SpeculativeModel,
    SpeculativeModelSpec,
    Tree,
)
from outrider_runtime.config import tree_fault


def _path(location: tuple[int | str, ...]) -> str:
    """pydantic's location as the API server writes it: spec.engine.env[0].name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


@pytest.mark.parametrize("case", VALID, ids=str)
def test_a_valid_object_is_read_and_written_back_as_it_was(case: Case) -> None:
    read = SpeculativeModel.model_validate(case.body)
    assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == case.body


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_an_invalid_object_is_refused_where_it_is_wrong(case: Case) -> None:
    with pytest.raises(ValidationError) as refused:
        SpeculativeModel.model_validate(case.body)
    errors = [(_path(error["loc"]), error["msg"]) for error in refused.value.errors()]
    assert any(path.startswith(case.path) and case.message in message for path, message in errors), errors


@pytest.mark.parametrize("case", UNKNOWN, ids=str)
def test_an_unknown_field_is_refused_by_name(case: Case) -> None:
    with pytest.raises(ValidationError) as refused:
        SpeculativeModel.model_validate(case.body)
    assert [(_path(error["loc"]), error["type"]) for error in refused.value.errors()] == [
        (case.path, "extra_forbidden")
    ]


def test_names_in_the_tables_are_unique() -> None:
    for table in (VALID, INVALID, UNKNOWN):
        names = [case.name for case in table]
        assert len(set(names)) == len(names)


def test_the_smallest_spec_means_one_replica_on_one_gpu_with_adaptive_ngrams() -> None:
    spec = SpeculativeModelSpec.model_validate({"model": MODEL})
    assert spec.replicas == 1
    assert not spec.suspend
    assert spec.autoscaling is None
    assert spec.cache is None
    assert (spec.engine.device, spec.engine.tensor_parallel_size, spec.engine.max_concurrency) == (Device.CUDA, 1, 256)
    assert spec.speculative_decoding.mode is Mode.AUTO
    assert spec.speculative_decoding.effective_method is Method.NGRAM
    assert spec.speculative_decoding.num_speculative_tokens == 4


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({}, Method.NGRAM),
        ({"draft": DRAFT}, Method.DRAFT_MODEL),
        ({"method": "NGram"}, Method.NGRAM),
        ({"method": "Suffix"}, Method.SUFFIX),
        ({"method": "DraftModel", "draft": DRAFT}, Method.DRAFT_MODEL),
        ({"method": "Eagle3", "draft": DRAFT}, Method.EAGLE3),
    ],
)
def test_the_method_follows_from_the_draft_unless_it_is_said(fields: dict[str, object], method: Method) -> None:
    assert SpeculativeDecoding.model_validate(fields).effective_method is method


@pytest.mark.parametrize(("tokens", "tier"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_the_capture_tier_is_the_smallest_that_holds_the_tokens(tokens: int, tier: int) -> None:
    assert SpeculativeDecoding(num_speculative_tokens=tokens).capture_tier == tier


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_tree_of_which_nothing_is_said_fits_any_draft_length(tokens: int) -> None:
    fields = {"method": "Eagle3", "draft": DRAFT, "numSpeculativeTokens": tokens, "tree": {}}
    assert SpeculativeDecoding.model_validate(fields).tree == Tree(top_k=4, max_tokens=60)


@pytest.mark.parametrize("depth", CAPTURE_TIERS)
def test_a_tree_fits_where_the_runtime_can_grow_it(depth: int) -> None:
    for top_k, max_tokens in itertools.product(range(1, 17), range(1, 64)):
        grows = tree_fault(top_k, depth, max_tokens) is None
        assert Tree(top_k=top_k, max_tokens=max_tokens).fits(depth) == grows


def test_a_spec_is_a_value_that_cannot_be_changed() -> None:
    spec = SpeculativeModelSpec.model_validate(model()["spec"])
    with pytest.raises(ValidationError, match="frozen"):
        spec.replicas = 2  # type: ignore[misc]  # that is the point
