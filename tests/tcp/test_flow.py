"""One socket, one direction: what is moved at once, what later, and what a broken one tells."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.completion import Completion
from tests.tcp.driving import Streams, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = 4 << 20


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    made.close()


def test_what_fits_is_through_at_once_and_watches_nothing(streams: Streams) -> None:
    sent, received, buffer = Completion(), Completion(), bytearray(100)
    streams.sending[0].start(pattern(100).numpy().data, sent)
    streams.receiving[0].start(memoryview(buffer), received)
    assert sent.over
    assert received.over
    assert bytes(buffer) == pattern(100).numpy().tobytes()
    assert not streams.reader.watched


def test_what_does_not_fit_goes_on_when_the_socket_is_ready(streams: Streams) -> None:
    sent, received, buffer = Completion(), Completion(), bytearray(LARGE)
    streams.receiving[0].start(memoryview(buffer), received)
    streams.sending[0].start(pattern(LARGE).numpy().data, sent)
    assert len(streams.reader.watched) == 2
    assert not sent.over
    streams.settle(lambda: received.over and sent.over)
    assert bytes(buffer) == pattern(LARGE).numpy().tobytes()


def test_a_socket_without_a_message_is_watched_once_more_only(streams: Streams) -> None:
    """A payload that is here before its header must not turn the reader round and round."""
    received = Completion()
    streams.receiving[0].start(memoryview(bytearray(LARGE)), received)
    streams.sending[0].start(pattern(LARGE).numpy().data, Completion())
    streams.settle(lambda: received.over)
    streams.sending[0].start(pattern(9).numpy().data, Completion())
    while streams.reader.turn():
        pass
    assert not streams.reader.watched
    late = Completion()
    streams.receiving[0].start(memoryview(bytearray(9)), late)
    assert late.over


def test_the_next_message_may_start_in_the_word_that_one_is_through(streams: Streams) -> None:
    buffers = [bytearray(LARGE), bytearray(9)]
    last = Completion()

    class First(Completion):
        def __call__(self, payload: torch.Tensor | None = None) -> None:
            super().__call__(payload)
            streams.receiving[0].start(memoryview(buffers[1]), last)

    streams.receiving[0].start(memoryview(buffers[0]), First())
    streams.sending[0].start(pattern(LARGE + 9).numpy().data, Completion())
    streams.settle(lambda: last.over)
    assert bytes(buffers[0] + buffers[1]) == pattern(LARGE + 9).numpy().tobytes()


def test_the_end_of_the_stream_is_no_end_of_a_message(streams: Streams) -> None:
    received = Completion()
    streams.sending[0].start(pattern(5).numpy().data, Completion())
    streams.sending[0].close()
    streams.receiving[0].start(memoryview(bytearray(9)), received)
    streams.settle(lambda: received.over)
    with pytest.raises(ConnectionError, match="the other end has closed the connection"):
        received.wait()


def test_a_broken_connection_is_told_to_who_sends(streams: Streams) -> None:
    sent = Completion()
    streams.sending[0].start(pattern(LARGE).numpy().data, sent)
    streams.receiving[0].close()  # with much unread: a reset
    streams.settle(lambda: sent.over)
    assert isinstance(sent.error, ConnectionError)
    with pytest.raises(ConnectionError):
        streams.sending[0].put(pattern(9).numpy().data)


def test_sockets_do_not_wait() -> None:
    made = Streams()
    try:
        socks: list[socket.socket] = [flow._sock for flow in (*made.sending, *made.receiving)]
        assert [sock.getblocking() for sock in socks] == [False, False]
    finally:
        made.close()
