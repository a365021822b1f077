"""The API reference: up to date, complete, and in words for every word of the API."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import pytest

import api_docs
from outrider_operator.api.reasons import ConditionType, EventReason, Reason

ROOT = Path(__file__).parents[3]


def test_the_committed_reference_is_what_the_models_say(tmp_path: Path) -> None:
    api_docs.main([str(tmp_path / "api.md")])
    assert (tmp_path / "api.md").read_text() == (ROOT / "docs/api.md").read_text(), "run `make docs`, commit docs/"


@pytest.mark.parametrize("words", [ConditionType, Reason, EventReason])
def test_every_word_has_a_meaning_of_its_own(words: type[StrEnum]) -> None:
    meanings = api_docs.meanings(words)
    assert list(meanings) == [str(word) for word in words]
    assert len(set(meanings.values())) == len(meanings)
    assert all(meaning.endswith(".") for meaning in meanings.values())


def test_a_word_without_meaning_is_found_out() -> None:
    class Words(StrEnum):
        SAID = "Said"
        """It means something."""
        UNSAID = "Unsaid"

    with pytest.raises(KeyError, match="UNSAID"):
        api_docs.meanings(Words)


def test_tables_show_type_bounds_default_and_need_of_a_field() -> None:
    text = api_docs.render()
    for row in (
        "| `model.uri`* | string |  | Where the weights are",
        "| `speculativeDecoding.numSpeculativeTokens` | integer, 1 to 16 | `4` |",
        "| `engine.env[].name`* | string |  |",
        "| `rollout.maxSurge` | integer or percentage |  |",
        "| `resources.limits` | map of string to quantity |  |",
        "| `suspend` | boolean | `false` |",
        "| `conditions[].lastTransitionTime` | time |",
        "- cache takes exactly one of claimName, size, emptyDir\n",
        "| `PodFailed` | Warning |",
        "| Accept% | always |",
    ):
        assert row in text


def test_no_cell_breaks_its_table() -> None:
    tables: list[int] = []
    for line in api_docs.render().splitlines():
        if not line.startswith("|"):
            tables.clear()
            continue
        columns = line.replace("\\|", "").count("|")
        assert columns == (tables or [columns])[0], line
        tables.append(columns)
