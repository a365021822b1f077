"""The decoding benchmark captures what it can meet before it measures, and its rows say what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable

import pytest
import torch
from benchmarks import decode
from benchmarks.decode import main, synthetic
from benchmarks.step_parts import bytes_read

from outrider_runtime.config import HEADS
from outrider_runtime.engine import runner

SMALL = [
    *("--shape", "tiny", "--draft-shape", "tiny", "--device", "cpu", "--concurrency", "1", "6"),
    *("--input", "21", "--output", "24", "--repeats", "1", "--max-batched-tokens", "64"),
]
TREE = ["--tree-top-k", "3", "--tree-max-tokens", "12"]


class Recorded:
    """Runs programs as they are, padded as graphs are."""

    def __init__(self, device: torch.device) -> None:
        self.active = True
        self._graphs: dict[Hashable, None] = {}

    def run(self, key: Hashable, program: Callable[[], None]) -> None:
        self._graphs[key] = None
        program()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict], str]:
    main([*SMALL, *arguments])
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *((method, []) for method in ("none", "draft-model", *HEADS)),
        *((head, TREE) for head in HEADS),
        *((method, ["--temperature", "1"]) for method in ("ngram", "suffix")),
    ],
)
def test_nothing_is_captured_while_it_is_measured(monkeypatch, capsys, method, more):
    monkeypatch.setattr(runner, "Graphs", Recorded)
    found, said = rows(capsys, "--method", method, "--accepted-length", "2.5", *more)
    assert [row["concurrency"] for row in found] == [1, 6]
    assert "graphs in" in said
    assert "captured while" not in said, said


def test_a_tree_yields_the_length_that_was_asked_for_and_its_row_names_it(capsys):
    found, _ = rows(capsys, "--method", "none", *HEADS, *TREE, "--accepted-length", "3.0")
    assert [row["tree"] for row in found] == [None, None, *[[3, 12]] * 6]
    assert [row["accepted_length"] for row in found] == [None, None, *[3.0] * 6]
    assert [row["tokens_per_step"] for row in found if row["concurrency"] == 1] == [1.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(("k", "length"), [(2, 2.44), (4, 3.36), (8, 4.33)])
def test_drafts_stand_with_the_chance_that_was_asked_for_however_many_there_are(capsys, k, length):
    options = ["--acceptance", "0.8", "--num-speculative-tokens", str(k), "--concurrency", "8", "--output", "120"]
    (row,), _ = rows(capsys, "--method", "eagle3", *options)
    assert (row["acceptance"], row["accepted_length"]) == (0.8, None)
    assert row["tokens_per_second"] * row["step_ms"] / 8000 == pytest.approx(length, rel=0.06)


def test_requests_that_share_their_lots_end_together(capsys):
    options = ["--method", "eagle3", "--accepted-length", "2.5", "--max-batched-tokens", "256", "--output", "120"]
    (alone, together), _ = rows(capsys, *options, "--shared-lots")
    (_, apart), _ = rows(capsys, *options)
    assert alone["tokens_per_step"] == together["tokens_per_step"] > apart["tokens_per_step"]
    assert (together["shared_lots"], apart["shared_lots"]) == (True, False)


def test_requests_whose_prompts_are_cached_begin_to_decode_together(capsys, monkeypatch):
    options = ["--method", "none", "--input", "600", "--max-batched-tokens", "700"]
    steps, run = [], decode.run

    def noted(*args):
        steps.append(run(*args))
        return steps[-1]

    monkeypatch.setattr(decode, "run", noted)
    for cached in (True, False):
        steps.clear()
        found, _ = rows(capsys, *options, *["--cached-prompts"] * cached)
        assert [row["cached_prompts"] for row in found] == [cached] * 2
        _, short_alone, _, _, short, _ = (each.steps for each in steps)
        assert (short > short_alone) == (not cached)


def test_lots_that_are_not_drawn_are_not_shared(capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--method", "eagle3", "--shared-lots"])
    assert "--accepted-length" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [["--tree-top-k", "3"], ["--tree-top-k", "8", "--tree-max-tokens", "9"]])
def test_a_tree_that_cannot_grow_is_refused(capsys, shape):
    with pytest.raises(SystemExit):
        main([*SMALL, "--method", "eagle", *shape])
    assert "--tree-max-tokens" in capsys.readouterr().err


def test_a_row_tells_where_a_step_s_time_goes(capsys):
    found, _ = rows(capsys, "--method", "none", "draft-model")
    plain, drafted = found[0], found[2]
    assert plain["draft_ms"] == 0.0 < plain["verify_ms"]
    assert min(drafted["draft_ms"], drafted["verify_ms"], drafted["gap_ms"]) > 0.0
    assert 0.0 < plain["ready_seconds"] < 600.0


def test_a_step_reads_the_target_once_and_the_draft_as_often_as_it_drafts():
    model = synthetic("tiny", torch.float32, "cpu")
    numbers = sum(weight.numel() for weight in model.parameters()) - 512 * 64  # the embedding is not the output layer
    kv = 2 * 2 * 2 * 16  # keys and values of two layers of two heads
    assert bytes_read(model, None, 0, tokens=10) == 4 * (numbers + 10 * kv)
    assert bytes_read(model, model, 3, tokens=10) == 4 * 4 * (numbers + 10 * kv)
