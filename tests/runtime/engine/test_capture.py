"""What is captured before a server is ready, and that running a program for nobody leaves everybody's state alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runtime.engine.driver import assert_all_free, make_engine, naive, run
from tests.runtime.tiny import tiny_pair

from outrider_runtime.engine import runner
from outrider_runtime.engine.capture import Draft, DraftRead, Forward, Program, Sample, Widths, first, rest, wanted
from outrider_runtime.engine.device_step import place, update_tables
from outrider_runtime.engine.feed import FeedBuffer, FeedShape
from outrider_runtime.engine.messages import AddRequest
from outrider_runtime.engine.state import DeviceState
from outrider_runtime.graphs import Graphs, bucket, buckets
from outrider_runtime.sampling.params import SamplingParams
from outrider_runtime.sampling.table import Mode
from outrider_runtime.speculation.verify import commit

WIDTHS = Widths(buckets(2048), buckets(1280), buckets(256), (1, 2, 3, 4), reads=True)


def of(kind: type, programs: list[Program]) -> list:
    return [program for program in programs if isinstance(program, kind)]


def test_a_server_is_ready_with_a_long_prompt_and_a_few_requests_that_decode_or_draft_as_the_policy_says():
    programs = first(WIDTHS, 4)
    assert Forward(2048, small=False) in programs
    assert [program.tokens for program in of(DraftRead, programs)] == [2048]
    assert {1, 2, 4, 8, 16} | {8, 12, 24, 48, 96} == {each.tokens for each in of(Forward, programs) if each.small}
    assert {(each.requests, each.length) for each in of(Draft, programs)} == {(n, 4) for n in (1, 2, 4, 8, 16)}
    assert {each.mode for each in of(Draft, programs)} == {Mode.GREEDY, Mode.NOISE}
    assert len(programs) <= 52


def test_without_speculation_in_force_only_plain_decoding_is():
    programs = first(WIDTHS, 0)
    assert not of(Draft, programs)
    assert {each.rows for each in of(Sample, programs)} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize(
    "widths",
    [
        WIDTHS,
        Widths(buckets(8), buckets(8), buckets(3), (1, 2, 3), reads=False),
        Widths((1,), (1,), (1,), (), reads=False),
    ],
    ids=["a GPU's", "small", "one"],
)
def test_everything_comes_once_and_is_of_a_width_that_steps_are_padded_to(widths, draft_tokens):
    now = first(widths, draft_tokens)
    programs = now + rest(widths, now)
    assert len(set(programs)) == len(programs)
    assert {each.tokens for each in of(Forward, programs) if each.small} == set(widths.tokens)
    assert {each.rows for each in of(Sample, programs)} == set(widths.rows)
    assert {(each.rows, each.mode) for each in of(Sample, programs)} == {(n, m) for n in widths.rows for m in Mode}
    assert {(each.requests, each.length) for each in of(Draft, programs)} == {
        (requests, length) for requests in widths.requests for length in widths.lengths
    }
    assert {each.tokens for each in of(DraftRead, programs)} == (set(widths.tokens) if widths.reads else set())


TREES = replace(WIDTHS, draft_sizes=(0, 8, 20, 26, 26))


def test_requests_that_draft_trees_need_as_wide_a_forward_as_their_trees_are():
    programs = list(wanted(TREES, 3, 2, Mode.GREEDY))
    assert Forward(bucket(WIDTHS.tokens, 63), small=True) in programs
    assert Draft(bucket(WIDTHS.requests, 3), 2, Mode.GREEDY) in programs


@pytest.mark.parametrize(("widths", "few"), [(WIDTHS, 17), (TREES, 27)])
def test_a_step_of_no_more_tokens_than_a_tree_has_is_small_and_captured_as_such_alone(widths, few):
    assert widths.few == few
    assert min(each.tokens for each in of(Forward, rest(widths, [])) if not each.small) > few


@pytest.mark.parametrize("kind", [Forward, Sample, Draft, DraftRead])
def test_the_widest_of_a_kind_comes_first(kind):
    programs = of(kind, first(WIDTHS, 4))
    sizes = [
        getattr(each, "tokens", 0) or getattr(each, "rows", 0) or getattr(each, "requests", 0) for each in programs
    ]
    assert sizes[0] == max(sizes)


def test_a_feed_of_nobody_changes_nobodys_text_nor_table():
    state = DeviceState(slots=3, width=20, blocks=5, device="cpu")
    for slot in range(3):
        state.admit(slot, [slot + 5] * (slot + 2))
    state.block_tables[:3] = torch.arange(15).view(3, 5)
    before = [tensor[:3].clone() for tensor in (state.tokens, state.lengths, state.block_tables)]
    shape = FeedShape(requests=3, tokens=8, rows=6, updates=4)
    feed = FeedBuffer(shape, state.nobody, torch.device("cpu")).pack([], [], shape)
    results, meant = torch.full((3, 5), 9, dtype=torch.int32), torch.full((3,), 2, dtype=torch.int32)
    update_tables(state, feed)
    place(state, feed.slots[:3], state.lengths[feed.slots[:3]], torch.full((3, 2), 7))
    commit(state, feed, torch.full((6,), 8, dtype=torch.int32), meant, results)
    after = (state.tokens[:3], state.lengths[:3], state.block_tables[:3])
    assert all(map(torch.equal, before, after))
    assert results[:, 0].tolist() == [0, 0, 0]
    assert state.lengths[state.nobody] == 1


class EagerGraphs(Graphs):
    """Pads and knows what it has run, as on a GPU, but runs it each time."""

    def __init__(self, device: torch.device) -> None:
        self.active = True
        self.keys: list[Program] = []

    def run(self, key, program) -> None:
        self.keys.append(key)
        program()

    def __contains__(self, key) -> bool:
        return key in self.keys

    def __len__(self) -> int:
        return len(self.keys)


@pytest.mark.parametrize("method", ["no speculation", "n-gram", "worse draft"])
def test_padded_programs_and_captures_between_requests_change_no_text(method, monkeypatch):
    monkeypatch.setattr(runner, "Graphs", EagerGraphs)
    engine, lines = make_engine(method, k=3, concurrency=5, budget=24), []
    engine.capture(lines.append)
    graphs = engine._runner._graphs
    programs = first(engine._runner.widths, 0 if method == "no speculation" else 3)
    assert graphs.keys[: len(programs)] == programs
    assert lines[0] == f"capturing {len(programs)} graphs"
    requests = [
        AddRequest(f"{name}-{index}", prompt, params)
        for name, params in enumerate([SamplingParams(14, temperature=0.0), SamplingParams(14, seed=3, top_k=9)])
        for index, prompt in enumerate([(5,), (6, 7, 8) * 5, tuple(range(4, 54))])
    ]
    for _ in range(2):
        collector = run(engine, requests)
        for request in requests:
            assert collector.text(request.request_id) == naive(request.prompt, request.params)
        for _ in range(7):
            engine.idle()
    while engine.idle():
        pass
    assert set(rest(engine._runner.widths, [])) <= set(graphs.keys)
    collector = run(engine, requests)
    for request in requests:
        assert collector.text(request.request_id) == naive(request.prompt, request.params)
    assert_all_free(engine)


def test_where_there_are_no_graphs_nothing_is_captured_and_nothing_left_to_do():
    engine, lines = make_engine("equal draft", target=tiny_pair()[1]), []
    engine.capture(lines.append)
    assert lines == []
    assert not engine.idle()
    params = SamplingParams(max_tokens=5, temperature=0.0)
    assert run(engine, [AddRequest("it", (5, 6), params)]).text("it") == naive((5, 6), params)
