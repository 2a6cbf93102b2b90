"""Planes joined by sockets: what is said reaches its handler, and a failure reaches everybody."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from stagelink.control.connection import Connection, Frame
from stagelink.control.framing import PROOF_BYTES, decode, encode
from stagelink.control.plane import Plane
from stagelink.deadline import Deadline
from stagelink.errors import (
    AbortedError,
    ClosedError,
    ForkedError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    StagelinkError,
    TransportError,
    UsageError,
)
from stagelink.transport.header import Header, MessageKind
from tests.support.planes import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG = 20.0
HELLO = bytes(PROOF_BYTES) + b"{}"


class Line:
    """Planes 0, 1, … each joined with the next; every plane keeps the REDUCE messages it gets."""

    def __init__(self, count: int, *, hands_over: bool = False) -> None:
        self._hands_over = hands_over
        self.planes = [Plane(rank) for rank in range(count)]
        self.heard: list[list[tuple[int, bytes]]] = [[] for _ in range(count)]
        self.socks: dict[tuple[int, int], socket.socket] = {}
        for plane in self.planes:
            plane.handle(MessageKind.REDUCE, self._ear(plane.rank))
        for rank in range(count - 1):
            self.join(rank, rank + 1)

    def _ear(self, rank: int) -> Callable[[int, Frame], None]:
        return lambda peer, frame: self.heard[rank].append((peer, frame.note))

    def join(self, one: int, other: int) -> None:
        mine, theirs = join(self.planes[one], self.planes[other], hands_over=self._hands_over)
        self.socks |= {(one, other): mine, (other, one): theirs}

    def start(self, *, but: int | None = None) -> Line:
        for plane in self.planes:
            if plane.rank != but:
                plane.reader.start()
        return self

    def say(self, rank: int, peer: int, note: bytes) -> None:
        self.planes[rank].post(peer, Header(MessageKind.REDUCE), note)

    def wait_heard(self, rank: int, count: int) -> None:
        plane = self.planes[rank]
        assert plane.wait(lambda: len(self.heard[rank]) >= count, Deadline(LONG))

    def wait_failed(self, rank: int) -> StagelinkError:
        with pytest.raises(StagelinkError) as caught:
            self.planes[rank].wait(lambda: False, Deadline(LONG))
        return caught.value

    def die(self, rank: int) -> None:
        """End the connections of a rank that reads nothing as its death does: without a word."""
        for (mine, _), sock in self.socks.items():
            if mine == rank:
                sock.shutdown(socket.SHUT_RDWR)

    def close(self, deadline_s: float = 5.0) -> None:
        for plane in self.planes:
            plane.start_closing()
        threads = [
            threading.Thread(target=plane.close, args=(Deadline(deadline_s),))
            for plane in self.planes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture(params=[False, True], ids=["by socket", "handed over"])
def line(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Line]]:
    with ExitStack() as stack:

        def make(count: int) -> Line:
            line = Line(count, hands_over=request.param)
            stack.callback(line.close)
            return line

        yield make


def test_messages_reach_their_handler_in_order(line: Callable[[int], Line]) -> None:
    pair = line(2)
    for number in range(5):
        pair.say(0, 1, b"%d" % number)
    pair.wait_heard(1, 5)
    assert pair.heard[1] == [(0, b"%d" % number) for number in range(5)]


def test_a_handler_is_not_replaced_silently(line: Callable[[int], Line]) -> None:
    pair = line(2)
    with pytest.raises(UsageError, match="rank 1: REDUCE has a handler already"):
        pair.planes[1].handle(MessageKind.REDUCE, lambda peer, frame: None)
    heard: list[bytes] = []
    pair.planes[1].handle(
        MessageKind.REDUCE, lambda peer, frame: heard.append(frame.note), replace=True
    )
    pair.say(0, 1, b"x")
    assert pair.planes[1].wait(lambda: heard == [b"x"], Deadline(LONG))


def test_more_than_the_socket_takes_comes_through(line: Callable[[int], Line]) -> None:
    pair = line(2).start()
    for number in range(3000):
        pair.say(0, 1, b"%04d" % number + bytes(1000))
    pair.wait_heard(1, 3000)
    assert [int(note[:4]) for _, note in pair.heard[1]] == list(range(3000))


@pytest.mark.parametrize("line", [False], indirect=True, ids=["by socket"])
def test_what_is_queued_just_after_a_flush_is_written_too(line: Callable[[int], Line]) -> None:
    pair = line(2)
    writer = pair.planes[0].connections[1]
    flush, said = writer.flush, [0]

    def say_until_queued() -> None:
        while writer.flushed:
            pair.say(0, 1, bytes(10_000))
            said[0] += 1

    def flush_then_say() -> bool:
        done = flush()
        if done and not meanwhile:
            say_until_queued()
            meanwhile.append(1)
        return done

    meanwhile: list[int] = []
    writer.flush = flush_then_say  # type: ignore[method-assign]
    say_until_queued()
    pair.start()
    pair.planes[1].wait(lambda: bool(meanwhile), Deadline(LONG))
    pair.wait_heard(1, said[0])


def test_two_that_flood_each_other_do_not_hang(line: Callable[[int], Line]) -> None:
    pair = line(2).start()

    def flood(rank: int) -> None:
        for _ in range(2000):
            pair.say(rank, 1 - rank, bytes(1000))
        pair.wait_heard(rank, 2000)

    threads = [threading.Thread(target=flood, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def test_an_unexpected_message_fails_the_plane(line: Callable[[int], Line]) -> None:
    pair = line(2)
    pair.planes[0].post(1, Header(MessageKind.CHOSEN))
    error = pair.wait_failed(1)
    assert isinstance(error, ProtocolError)
    assert "rank 0 sent CHOSEN out of place" in str(error)


def test_a_handler_that_raises_fails_the_plane_with_its_cause(line: Callable[[int], Line]) -> None:
    def broken(peer: int, frame: Frame) -> None:
        raise ZeroDivisionError("of a handler")

    pair = line(2)
    pair.planes[1].handle(MessageKind.OPEN, broken)
    pair.planes[0].post(1, Header(MessageKind.OPEN))
    error = pair.wait_failed(1)
    assert isinstance(error, TransportError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "of a handler" in str(pair.wait_failed(0))  # told by ABORT


def test_a_death_is_an_end_without_a_goodbye(line: Callable[[int], Line]) -> None:
    pair = line(2)
    pair.die(0)
    error = pair.wait_failed(1)
    assert isinstance(error, PeerLostError)
    assert "rank 0 died: its connection to rank 1 ended without a goodbye" in str(error)


def test_a_death_explains_what_a_transport_says_while_reading(line: Callable[[int], Line]) -> None:
    """Its error comes out of the same reading that is about to find the end."""
    pair = line(2)

    def break_down(peer: int, frame: Frame) -> None:
        raise TransportError(f"connection with {peer} closed {frame.note!r}")

    pair.planes[1].handle(MessageKind.NOTE, break_down)
    pair.planes[0].post(1, Header(MessageKind.NOTE))
    pair.die(0)
    assert isinstance(pair.wait_failed(1), PeerLostError)


def test_a_death_explains_what_a_transport_reports_while_reading(
    line: Callable[[int], Line],
) -> None:
    """As by `Port.fail`, and where what it has watched or announced goes wrong."""
    pair = line(2)
    plane = pair.planes[1]

    def report() -> None:
        assert plane.reader.reads_here
        plane.failure.blame(TransportError("broken pipe"), 0)
        pair.die(0)

    plane.reader.call(report)
    error = pair.wait_failed(1)
    assert isinstance(error, PeerLostError)
    assert "rank 0 died" in str(error)


def test_what_comes_behind_a_transport_s_error_is_read_and_may_explain_it(
    line: Callable[[int], Line],
) -> None:
    pair = line(2)

    def break_down(peer: int, frame: Frame) -> None:
        raise TransportError(f"connection with {peer} closed {frame.note!r}")

    pair.planes[1].handle(MessageKind.NOTE, break_down)
    pair.planes[0].post(1, Header(MessageKind.NOTE))
    pair.say(0, 1, b"behind it")
    pair.planes[0].fail(AbortedError("it was I"))
    assert "rank 0 reports: it was I" in str(pair.wait_failed(1))
    assert pair.heard[1] == [(0, b"behind it")]


def test_what_a_transport_says_while_reading_is_told_where_nothing_explains_it(
    line: Callable[[int], Line],
) -> None:
    pair = line(2).start()

    def break_down(peer: int, frame: Frame) -> None:
        raise TransportError(f"connection with {peer} closed {frame.note!r}")

    pair.planes[1].handle(MessageKind.NOTE, break_down)
    pair.planes[0].post(1, Header(MessageKind.NOTE), b"by itself")
    assert "connection with 0 closed b'by itself'" in str(pair.wait_failed(1))


def test_a_death_reaches_every_rank_of_a_line_with_its_name(line: Callable[[int], Line]) -> None:
    four = line(4).start(but=1)
    four.die(1)
    for rank in (0, 2, 3):
        assert "rank 1 died" in str(four.wait_failed(rank))
    assert str(four.wait_failed(3)).startswith("rank 2 reports: rank 1 died")


def test_a_goodbye_is_no_death(line: Callable[[int], Line]) -> None:
    pair = line(2).start()
    pair.say(0, 1, b"last words")
    pair.planes[0].start_closing()
    pair.planes[0].close(Deadline(LONG))
    pair.wait_heard(1, 1)
    gone = pair.planes[1].gone
    assert pair.planes[1].wait(lambda: 0 in gone, Deadline(LONG))
    with pytest.raises(PeerClosedError, match="rank 1: peer rank 0 closed; an answer expected"):
        pair.planes[1].goodbyes.check_here(0, "an answer")
    pair.planes[1].check()
    pair.say(1, 0, b"into the void")


def test_a_goodbye_behind_a_reset_is_heard(line: Callable[[int], Line]) -> None:
    pair = line(2)
    for _ in range(10):
        pair.say(1, 0, b"never read")
    pair.planes[0].post(1, Header(MessageKind.BYE))
    # With unread data: the peer is reset first.
    pair.planes[0].door.drop(pair.planes[0].connections.pop(1))
    assert pair.planes[1].wait(lambda: 0 in pair.planes[1].gone, Deadline(LONG))
    pair.planes[1].wait(lambda: pair.planes[1].connections[0].ended, Deadline(LONG))
    pair.planes[1].check()


def test_closing_reads_a_busy_peer_to_its_end(line: Callable[[int], Line]) -> None:
    pair = line(2).start()
    for _ in range(1000):
        pair.say(1, 0, bytes(2000))
    pair.say(0, 1, b"x")
    began = time.monotonic()
    pair.close(LONG)
    assert time.monotonic() - began < LONG / 2
    assert pair.planes[0].failure.error is None
    assert pair.planes[1].failure.error is None


def test_the_first_failure_stays_and_the_cause_is_passed_on(line: Callable[[int], Line]) -> None:
    three = line(3).start()
    error = StagelinkError("the first")
    three.planes[0].fail(error)
    three.planes[0].fail(StagelinkError("the second"))
    told = three.wait_failed(2)
    assert isinstance(told, AbortedError)
    assert str(told) == "rank 0 reports: the first"
    assert three.planes[2].failure.cause == {"rank": 0, "text": "the first"}
    assert str(three.wait_failed(0)) == "the first"


def test_a_failure_is_raised_as_a_new_object_each_time(line: Callable[[int], Line]) -> None:
    pair = line(2)
    error = TransportError("wire cut")
    error.__cause__ = OSError("below")
    pair.planes[0].fail(error)
    one, other = pair.wait_failed(0), pair.wait_failed(0)
    assert one is not other
    assert type(one) is TransportError
    assert one.__cause__ is error.__cause__


def test_a_failure_ends_a_wait_in_another_thread(
    line: Callable[[int], Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.reader._LOOK_S", 100.0)  # nobody looks by himself
    pair = line(2).start()
    caught: list[StagelinkError] = []
    waiter = threading.Thread(target=lambda: caught.append(pair.wait_failed(0)))
    waiter.start()
    pair.planes[0].fail(StagelinkError("now"))
    waiter.join(LONG / 2)
    assert str(caught[0]) == "now"


def test_a_connection_that_comes_in_during_a_failure_is_told_too(
    line: Callable[[int], Line],
) -> None:
    pair = line(2)
    plane, send = pair.planes[0], Connection.send
    mine, theirs = socket.socketpair()
    connection = plane.door.adopt(mine)
    greeters: list[threading.Thread] = []

    def greet_then_send(self: Connection, header: Header, *rest: bytes) -> None:
        if not greeters:
            greeters.append(threading.Thread(target=plane.door.greet, args=(connection, HELLO)))
            greeters[0].start()
            greeters[0].join(0.2)
        send(self, header, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", greet_then_send)
        plane.fail(StagelinkError("in between"))
        greeters[0].join()
    with _acquainted(theirs) as late:
        for told in (pair.planes[1], late):
            with pytest.raises(AbortedError, match="rank 0 reports: in between"):
                told.wait(lambda: False, Deadline(LONG))


def test_who_was_greeted_and_has_not_answered_is_told_too() -> None:
    mine, theirs = socket.socketpair()
    plane = Plane(0)
    plane.door.greet(plane.door.adopt(mine), HELLO)
    plane.fail(StagelinkError("early"))
    plane.close(Deadline(5))
    with (
        _acquainted(theirs) as peer,
        pytest.raises(AbortedError, match="rank 0 reports: early"),
    ):
        peer.wait(lambda: False, Deadline(LONG))


@contextmanager
def _acquainted(sock: socket.socket) -> Iterator[Plane]:
    """A plane that takes whoever says HELLO for rank 0."""
    plane = Plane(7)
    plane.door.expect(
        lambda connection, frame: plane.door.introduce(connection, 0), lambda proof: None
    )
    plane.door.adopt(sock)
    yield plane
    plane.close(Deadline(5))


def test_a_failure_is_told_before_anybody_can_close(line: Callable[[int], Line]) -> None:
    pair = line(2)
    plane, send = pair.planes[0], Connection.send
    closers: list[threading.Thread] = []

    def close() -> None:
        with pytest.raises(StagelinkError):
            plane.wait(lambda: False, Deadline(LONG))
        plane.start_closing()
        plane.close(Deadline(5))

    def close_then_send(self: Connection, header: Header, *rest: bytes) -> None:
        if self is plane.connections[1] and not closers:
            closers.append(threading.Thread(target=close))
            closers[0].start()
            closers[0].join(0.2)
        send(self, header, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", close_then_send)
        plane.fail(StagelinkError("the cause"))
    closers[0].join()
    assert str(pair.wait_failed(1)) == "rank 0 reports: the cause"


def test_closed_and_waits_end(line: Callable[[int], Line]) -> None:
    pair = line(2).start()
    caught: list[StagelinkError] = []
    waiter = threading.Thread(target=lambda: caught.append(pair.wait_failed(0)))
    waiter.start()
    pair.planes[0].start_closing()
    waiter.join(LONG)
    assert isinstance(caught[0], ClosedError)
    assert str(caught[0]) == "rank 0 is closed"
    assert not pair.planes[0].start_closing()


def test_waits_that_end_while_the_plane_is_closed(line: Callable[[int], Line]) -> None:
    for _ in range(30):
        pair = Line(2).start()
        caught: list[BaseException] = []
        waiters = [
            threading.Thread(target=lambda: caught.append(pair.wait_failed(0)))  # noqa: B023
            for _ in range(3)
        ]
        for waiter in waiters:
            waiter.start()
        pair.close()
        for waiter in waiters:
            waiter.join(LONG)
        assert [str(error) for error in caught] == ["rank 0 is closed"] * 3


def test_closing_does_not_wait_for_a_handler_that_never_returns(
    line: Callable[[int], Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.plane._STOP_S", 0.2)
    inside, gate = threading.Event(), threading.Event()

    def stuck(peer: int, frame: Frame) -> None:
        inside.set()
        gate.wait(LONG)

    pair = line(2)
    pair.planes[1].handle(MessageKind.OPEN, stuck)
    pair.start()
    pair.planes[0].post(1, Header(MessageKind.OPEN))
    assert inside.wait(LONG)
    began = time.monotonic()
    pair.planes[1].start_closing()
    pair.planes[1].close(Deadline(0.2))
    assert time.monotonic() - began < 10
    gate.set()


def test_a_stranger_is_dropped_and_harms_nobody(
    line: Callable[[int], Line], caplog: pytest.LogCaptureFixture
) -> None:
    pair = line(2)
    for bytes_of_a_stranger in (
        b"GET / HTTP/1.1\r\n" + bytes(300),
        Header(MessageKind.ABORT).pack(2) + b"{}",
        Header(MessageKind.HELLO).pack(2) + b"{}",
    ):
        mine, theirs = socket.socketpair()
        pair.planes[0].door.adopt(mine)
        with theirs:
            theirs.sendall(bytes_of_a_stranger)
            theirs.settimeout(0.0)
            pair.planes[0].wait(lambda: mine.fileno() < 0, Deadline(LONG))  # noqa: B023
    assert caplog.text.count("a stranger was refused") == 3
    pair.say(0, 1, b"goes on")
    pair.wait_heard(1, 1)


def test_bad_bytes_of_a_peer_fail_the_plane(line: Callable[[int], Line]) -> None:
    pair = line(2)
    pair.socks[0, 1].sendall(bytes(300))
    error = pair.wait_failed(1)
    assert isinstance(error, ProtocolError)
    assert "rank 1: from rank 0: not a stagelink frame" in str(error)


def test_a_fork_is_told_and_harms_nobody(line: Callable[[int], Line]) -> None:
    pair = line(2)
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            for call in (pair.planes[0].check, lambda: pair.planes[0].wait(bool, Deadline(1))):
                try:
                    call()
                except ForkedError as error:
                    os.write(into, f"{error}\n".encode())
            pair.planes[0].close(Deadline(1))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(into)
    with open(out, encoding="utf-8") as texts:
        lines = texts.read().splitlines()
    wanted = rf"rank 0 was opened in process {os.getpid()}, this is its fork {child}; .* spawn"
    assert [bool(re.fullmatch(wanted, text)) for text in lines] == [True, True]
    for rank in (0, 1):
        pair.say(rank, 1 - rank, b"still here")
    pair.wait_heard(0, 1)
    pair.wait_heard(1, 1)


def test_a_fork_of_a_fork_names_the_process_that_opened(line: Callable[[int], Line]) -> None:
    pair = line(2)
    out, into = os.pipe()
    child = os.fork()
    if not child:
        grandchild = os.fork()
        if grandchild:
            os.waitpid(grandchild, 0)
            os._exit(0)
        try:
            pair.planes[0].check()
        except ForkedError as error:
            os.write(into, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(into)
    with open(out, encoding="utf-8") as text:
        assert f"opened in process {os.getpid()}, " in text.read()


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe", b"[1]", b"null", b"{", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_damaged_fields_are_a_protocol_error(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged message"):
        decode(text)


def test_fields_come_back() -> None:
    fields = {"rank": 1, "text": "ü\n", "more": [1, None]}
    assert decode(encode(fields)) == fields
