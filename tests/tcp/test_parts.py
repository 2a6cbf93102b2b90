"""A payload is divided over streams, and told of once."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagelink.transport.contract import Message
from stagelink.transport.header import Header, MessageKind
from stagelink_tcp.link import TcpReceiver, TcpSender
from stagelink_tcp.parts import LEAST_PART_BYTES, Whole, split
from tests.support.completion import Completion
from tests.tcp.driving import Streams, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stagelink.transport.contract import Announce

SIZES = st.integers(0, 8 * LEAST_PART_BYTES)
STREAMS = st.integers(1, 64)


@given(SIZES, STREAMS)
def test_parts_follow_each_other_and_are_all_of_it(payload_bytes: int, streams: int) -> None:
    parts = split(payload_bytes, streams)
    assert 1 <= len(parts) <= streams
    assert (parts[0][0], parts[-1][1]) == (0, payload_bytes)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))


@given(SIZES, STREAMS)
def test_a_part_is_worth_its_stream_and_parts_are_alike(payload_bytes: int, streams: int) -> None:
    sizes = [end - begin for begin, end in split(payload_bytes, streams)]
    assert len(sizes) == 1 or min(sizes) >= LEAST_PART_BYTES
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == streams or payload_bytes < streams * LEAST_PART_BYTES


@pytest.fixture
def done() -> Completion:
    return Completion()


def test_a_message_is_done_with_its_last_part(done: Completion) -> None:
    whole = Whole(done, 3)
    for left in (2, 1, 0):
        assert not done.over
        whole()
        assert done.over == (left == 0)


def test_a_message_fails_with_its_first_part_that_does(done: Completion) -> None:
    whole = Whole(done, 3)
    whole()
    first, second = ConnectionError("first"), ConnectionError("second")
    whole.failed(first)
    whole.failed(second)
    assert done.error is first


def test_parts_may_be_through_on_several_threads(done: Completion) -> None:
    whole = Whole(done, 800)

    def finish() -> None:
        for _ in range(100):
            whole()

    threads = [threading.Thread(target=finish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.over


# -- over sockets


@pytest.fixture(scope="module", params=[1, 3], ids=["one stream", "three streams"])
def streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    made = Streams(request.param)
    yield made
    made.close()


def _announce(announced: list[bytes]) -> Announce:
    def announce(note: bytes = b"", fds: Sequence[int] = ()) -> None:
        del fds
        announced.append(note)

    return announce


def _lend(buffer: torch.Tensor) -> torch.Tensor:
    return buffer


def _all_over(*messages: Completion) -> bool:
    return all(message.over for message in messages)


@settings(max_examples=25, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=5))
def test_payloads_arrive_whole_and_in_their_order(streams: Streams, sizes: list[int]) -> None:
    sender, receiver = TcpSender(streams.sending), TcpReceiver(streams.receiving)
    for number, size in enumerate(sizes):
        payload, buffer = pattern(size, number), torch.zeros(size, dtype=torch.uint8)
        header = Header(MessageKind.DATA, payload_bytes=size)
        sent, received = Completion(), Completion()
        announced: list[bytes] = []
        assert sender.begin(Message(header, payload), _announce(announced), sent)
        assert announced == [b""]
        receiver.begin(header, b"", (), partial(_lend, buffer), received)
        streams.settle(partial(_all_over, sent, received))
        assert sent.error is received.error is None
        assert torch.equal(buffer, payload)
