"""Descriptors of transports: who reads calls their actions, once an event, until they are over."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.control.reader import Reader
from stagelink.deadline import Deadline
from tests.support.interrupts import Interrupted, interrupted_everywhere, lock_is_free

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 20.0


class Wire:
    """A library with a descriptor: `progress` takes what has come, one byte a call."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.mine.setblocking(False)
        self.fd = self.mine.fileno()
        self.calls: list[str] = []
        self.got = b""
        self.again = False
        self.errors: list[BaseException] = []

    def progress(self) -> bool:
        self.calls.append(threading.current_thread().name)
        try:
            self.got += self.mine.recv(1)
        except BlockingIOError:
            return False
        return self.again

    def close(self) -> None:
        self.mine.close()
        self.theirs.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader("stand-by")
    yield reader
    reader.stop(Deadline(LONG))
    reader.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def _turn(reader: Reader) -> None:
    """One turn that finds what is there, and waits for nothing."""
    looks = iter((False, True))
    reader.wait(lambda: next(looks), Deadline(0.005))


def test_the_action_is_called_at_once_and_then_for_every_event(reader: Reader, wire: Wire) -> None:
    wire.theirs.send(b"a")
    reader.watch(wire.fd, wire.progress, wire.errors.append)
    assert reader.wait(lambda: wire.got == b"a", Deadline(LONG))
    wire.calls.clear()
    wire.theirs.send(b"bc")  # level-triggered: what was left is told of again
    assert reader.wait(lambda: wire.got == b"abc", Deadline(LONG))
    assert wire.calls == ["MainThread"] * 2


def test_it_is_called_in_the_next_turn_where_it_wants_to_be(reader: Reader, wire: Wire) -> None:
    left = [2, 1, 0]
    heard: list[int] = []
    mine, theirs = socket.socketpair()
    with mine, theirs:
        reader.add(mine, lambda mask: heard.append(len(mine.recv(10))))
        reader.watch(wire.fd, lambda: bool(left.pop(0)), wire.errors.append)
        _turn(reader)
        assert left == [1, 0]
        theirs.send(b"x")
        _turn(reader)
        assert left == [0]
        assert heard == [1]  # sockets are read meanwhile
        _turn(reader)
        _turn(reader)
        assert left == []
        reader.remove(mine)


def test_one_action_of_several_watches_is_called_once(reader: Reader, wire: Wire) -> None:
    watches = [reader.watch(wire.fd, wire.progress, wire.errors.append) for _ in range(3)]
    _turn(reader)
    assert len(wire.calls) == 1
    reader.unwatch(watches[0])
    reader.unwatch(watches[0])
    wire.theirs.send(b"a")
    _turn(reader)
    assert len(wire.calls) == 2
    for watch in watches:
        reader.unwatch(watch)
    wire.theirs.send(b"b")
    _turn(reader)
    assert len(wire.calls) == 2


def test_several_actions_of_one_descriptor_are_all_called(reader: Reader, wire: Wire) -> None:
    other: list[int] = []
    reader.watch(wire.fd, wire.progress, wire.errors.append)

    def act() -> bool:
        other.append(1)
        return False

    reader.watch(wire.fd, act, wire.errors.append)
    _turn(reader)
    wire.theirs.send(b"a")
    _turn(reader)
    assert len(wire.calls) == len(other) == 2


def test_room_to_write_is_told_of_where_it_is_wanted(reader: Reader, wire: Wire) -> None:
    reader.watch(wire.fd, wire.progress, wire.errors.append)
    for _ in range(3):
        _turn(reader)
    assert len(wire.calls) == 1
    watch = reader.watch(wire.fd, wire.progress, wire.errors.append, writable=True)
    for _ in range(3):
        _turn(reader)
    assert len(wire.calls) == 4
    reader.unwatch(watch)
    for _ in range(3):
        _turn(reader)
    assert len(wire.calls) == 4


def test_what_it_raises_ends_its_watches_and_goes_where_they_say(
    reader: Reader, wire: Wire
) -> None:
    def broken() -> bool:
        wire.calls.append("broken")
        raise ZeroDivisionError

    wire.theirs.send(b"a")
    watches = [reader.watch(wire.fd, broken, wire.errors.append) for _ in range(2)]
    for _ in range(3):
        _turn(reader)
    assert [type(error) for error in wire.errors] == [ZeroDivisionError] * 2
    assert wire.calls == ["broken"]
    for watch in watches:
        reader.unwatch(watch)


def test_the_stand_by_calls_it_while_nobody_waits(reader: Reader, wire: Wire) -> None:
    reader.start()
    came = threading.Event()

    def progress() -> bool:
        wire.progress()
        came.set()
        return False

    reader.watch(wire.fd, progress, wire.errors.append)
    assert came.wait(LONG)
    came.clear()
    wire.theirs.send(b"a")
    assert came.wait(LONG)
    assert set(wire.calls) == {"stand-by"}


def test_a_watch_wakes_the_one_who_reads(reader: Reader, wire: Wire) -> None:
    waits = threading.Thread(target=reader.wait, args=(lambda: bool(wire.calls), Deadline(LONG)))
    waits.start()
    reader.watch(wire.fd, wire.progress, wire.errors.append)
    waits.join(LONG / 4)
    assert not waits.is_alive()


def test_after_its_end_it_is_not_at_work(reader: Reader, wire: Wire) -> None:
    reader.start()
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        assert may_end.wait(LONG)
        ended.set()
        return True

    watch = reader.watch(wire.fd, slow, wire.errors.append)
    assert begun.wait(LONG)
    threading.Timer(0.05, may_end.set).start()
    reader.unwatch(watch)
    assert ended.is_set()
    ended.clear()
    _turn(reader)
    assert not ended.is_set()


def test_it_may_end_its_own_watch(reader: Reader, wire: Wire) -> None:
    def once() -> bool:
        wire.calls.append("once")
        reader.unwatch(watch)
        return True

    wire.theirs.send(b"a")
    watch = reader.watch(wire.fd, once, wire.errors.append)
    for _ in range(3):
        _turn(reader)
    assert wire.calls == ["once"]


def test_a_descriptor_that_was_closed_is_forgotten(reader: Reader, wire: Wire) -> None:
    closed = reader.watch(wire.fd, wire.progress, wire.errors.append)
    fd = wire.fd
    wire.close()
    out, into = os.pipe()
    try:
        assert fd in {out, into}  # the system gives the number again
        again = reader.watch(out, lambda: False, wire.errors.append)
        reader.unwatch(closed)
        reader.unwatch(again)
    finally:
        os.close(out)
        os.close(into)


def test_what_cannot_be_watched_is_refused(reader: Reader, wire: Wire) -> None:
    with open(__file__, "rb") as file:
        for fd in (file.fileno(), 10**6, -1):
            with pytest.raises((OSError, ValueError)):
                reader.watch(fd, wire.progress, wire.errors.append)
    _turn(reader)
    assert wire.calls == []


def test_watches_that_begin_or_end_may_be_interrupted_anywhere(reader: Reader, wire: Wire) -> None:
    def call() -> None:
        reader.unwatch(reader.watch(wire.fd, wire.progress, wire.errors.append))

    for place, error in interrupted_everywhere(call, "stagelink.control.watches"):
        assert isinstance(error, Interrupted), (place, error)
        assert lock_is_free(reader._watches._lock), place
        for watch in reader._watches._watches.get(wire.fd, ()):
            reader.unwatch(watch)
    call()


def test_a_wait_that_progresses_may_be_interrupted_anywhere(reader: Reader, wire: Wire) -> None:
    reader.watch(wire.fd, wire.progress, wire.errors.append)

    def call() -> None:
        wire.theirs.send(b"a")
        before = len(wire.got)
        assert reader.wait(lambda: len(wire.got) > before, Deadline(LONG))

    modules = ("stagelink.control.reader", "stagelink.control.watches")
    for place, error in interrupted_everywhere(call, *modules):
        assert isinstance(error, Interrupted), (place, error)
        assert reader._reader is None, place
        assert reader._watches._acting is None, place
    assert wire.errors == []
    call()


def test_actions_and_calls_are_in_no_mode_of_the_thread_that_reads(
    reader: Reader, wire: Wire
) -> None:
    """A program may wait under a fake tensor mode; what a transport allocates must have memory."""
    made: list[torch.Tensor] = []

    def act() -> bool:
        made.append(torch.empty(1))
        return False

    with torch.device("meta"):
        reader.watch(wire.fd, act, wire.errors.append)
        assert reader.wait(lambda: len(made) == 1, Deadline(LONG))
        reader.call(lambda: made.append(torch.empty(1)))
        assert reader.wait(lambda: len(made) == 2, Deadline(LONG))
    assert [tensor.device.type for tensor in made] == ["cpu", "cpu"]
