"""Messages arrive whole and in order however the socket cuts them, and a step's deltas survive their columns."""

from __future__ import annotations

import pickle
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_runtime.engine.channel import Channel
from outrider_runtime.engine.messages import EngineStats, StepOutput, TokenDelta, TokenLogprobs

DELTAS = st.builds(
    TokenDelta,
    request_id=st.text(max_size=4),
    token_ids=st.lists(st.integers(0, 200_000), max_size=5).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    drafted=st.integers(0, 16),
    accepted=st.integers(0, 16),
    cached_tokens=st.none() | st.integers(0, 100),
    error=st.text(max_size=4),
    logprobs=st.none() | st.just((TokenLogprobs(-0.5, ((7, -0.5), (8, -1.0))),)),
)


@pytest.fixture
def ends():
    """A channel, and the raw socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def _framed(message) -> bytes:
    body = pickle.dumps(message)
    return struct.pack("!Q", len(body)) + body


@given(st.lists(DELTAS, max_size=5).map(tuple), st.integers(0, 9), st.none() | st.floats(0, 4))
def test_a_step_is_the_same_behind_the_channel(deltas, running, speedup):
    output = StepOutput(deltas, EngineStats(running=running, accepted_per_position=(3, 1), speedup=speedup))
    got = pickle.loads(pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL))
    assert got == output
    assert all(type(delta) is TokenDelta for delta in got.deltas)
    assert type(got.stats) is EngineStats


def test_what_has_arrived_comes_at_once_and_in_order(ends):
    channel, theirs = ends
    theirs.sendall(b"".join(map(_framed, range(5))))
    assert channel.receive() == [0, 1, 2, 3, 4]
    assert channel.receive(wait=False) == []


def test_a_message_in_pieces_comes_when_it_is_whole(ends):
    channel, theirs = ends
    data = _framed("first") + _framed("second")
    for count in range(len(data) - 1):
        theirs.sendall(data[count : count + 1])
        got = channel.receive(wait=False)
        assert got == (["first"] if count == len(_framed("first")) - 1 else [])
    theirs.sendall(data[-1:])
    assert channel.receive() == ["second"]


def test_a_message_larger_than_every_buffer_passes(ends):
    channel, theirs = ends
    large = bytes(20_000_000)
    other = Channel(theirs.dup())
    sender = threading.Thread(target=other.send, args=(large,))
    sender.start()
    assert channel.receive() == [large]
    sender.join(10)
    other.close()


def test_the_end_of_the_other_side_is_said_after_what_it_sent(ends):
    channel, theirs = ends
    theirs.sendall(_framed("last") + _framed("cut short")[:-1])
    theirs.shutdown(socket.SHUT_RDWR)
    assert channel.receive() == ["last"]
    with pytest.raises(EOFError):
        channel.receive()
