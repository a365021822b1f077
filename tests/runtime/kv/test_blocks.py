"""The block pool hands out each block once, and keeps published contents until it must give them away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.kv.blocks import BlockPool


def test_allocation_takes_nothing_when_there_are_too_few():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.available == 3


def test_a_published_block_keeps_its_contents_until_it_is_needed():
    evicted: list[int] = []
    pool = BlockPool(2, evicted.append)
    kept, plain = pool.allocate(2)
    pool.publish(kept)
    pool.release([kept, plain])
    assert pool.allocate(1) == [plain]
    assert evicted == []
    assert pool.allocate(1) == [kept]
    assert evicted == [kept]


def test_a_kept_block_can_be_taken_up_again():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block)
    pool.release([block])
    pool.acquire(block)
    assert pool.refs(block) == 1
    assert pool.allocate(1) is None


def test_releasing_too_often_is_an_error():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])


@given(st.lists(st.tuples(st.sampled_from("arp"), st.integers(0, 5)), max_size=80))
def test_no_block_is_ever_lost_or_handed_out_twice(actions):
    pool = BlockPool(6)
    held: list[int] = []
    for action, n in actions:
        if action == "a":
            held += pool.allocate(n) or []
        elif action == "r" and held:
            pool.release([held.pop(n % len(held))])
        elif action == "p" and held:
            pool.publish(held[n % len(held)])
        assert len(set(held)) == len(held)
        assert pool.used == len(held)
