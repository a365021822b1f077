"""Requests come and go and policies change, in any order, in engines of any shape: no text does, no block is lost."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runtime.engine.driver import MAX_MODEL_LEN, ON, SUSPENDED, Collector, assert_all_free, make_engine, run
from tests.runtime.losslessness.plain import everything, plain, target
from tests.runtime.methods import METHODS

from outrider_runtime.engine.messages import AddRequest

COUNT = 32  # of everything(): the shorter texts


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(sorted(METHODS)),
    block_size=st.sampled_from([1, 4, 16]),
    tokens=st.integers(MAX_MODEL_LEN, 240),
    budget=st.integers(4, 40),
    concurrency=st.integers(1, 4),
    k=st.integers(1, 6),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, COUNT - 1)),
            st.tuples(st.just("step"), st.integers(1, 5)),
            st.tuples(st.just("abort"), st.integers(0, 20)),
            st.tuples(st.just("policy"), st.integers(0, 6)),
        ),
        max_size=30,
    ),
)
def test_no_order_of_events_changes_a_text_or_loses_a_block(
    method, block_size, tokens, budget, concurrency, k, prefix_caching, overlap, actions
):
    engine = make_engine(
        method,
        block_size=block_size,
        blocks=-(-tokens // block_size),
        budget=budget,
        concurrency=concurrency,
        k=k,
        prefix_caching=prefix_caching,
        overlap=overlap,
        target=target(torch.float64),
    )
    collector, added, aborted = Collector(), [], set()
    for action, value in actions:
        if action == "add":
            request = AddRequest(str(len(added)), everything()[value].prompt, everything()[value].params)
            added.append((request, plain()[value]))
            engine.add(request)
        elif action == "step":
            for _ in range(value):
                collector.take(engine.step().deltas)
        elif action == "abort" and added:
            request, _ = added[value % len(added)]
            if collector.finish_reason(request.request_id) is None:
                aborted.add(request.request_id)
            engine.abort(request.request_id)
        elif action == "policy":
            engine.set_policy(replace(ON, num_speculative_tokens=value) if value else SUSPENDED)
    run(engine, [], collector)
    for request, expected in added:
        tokens, reason = collector.text(request.request_id)
        if request.request_id in aborted:
            assert list(tokens) == expected.token_ids[: len(tokens)], request
        else:
            assert (list(tokens), reason) == (expected.token_ids, expected.finish_reason), request
    assert_all_free(engine)
