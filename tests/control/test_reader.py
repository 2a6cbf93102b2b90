"""Reading is a role: one thread at a time has it, and everybody gets what is read."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stagelink.control.reader import _BLOCKED, Reader
from stagelink.control.watches import Bell
from stagelink.deadline import Deadline
from tests.support.interrupts import Interrupted, interrupted_everywhere, lock_is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


MODULES = ("stagelink.control.reader", "stagelink.control.watches")


class Source:
    """Something to read: numbers in a socket, added to `got` by whoever reads."""

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair()
        self.got: list[int] = []
        self.readers: list[str] = []
        self.reading = threading.Event()
        self.watched = threading.Event()
        self._has_read = threading.Condition()
        self._at_once = threading.Lock()
        self.reader = Reader("stand-by")
        self.reader.add(self._out, self._read)
        self._poll, self._dispatch = self.reader._poll, self.reader._dispatch
        self._wait_for_input = self.reader._wait_for_input
        for name in ("poll", "dispatch", "wait_for_input"):
            setattr(self.reader, f"_{name}", getattr(self, f"_watched_{name}"))

    def put(self, number: int) -> None:
        self._in.send(bytes([number]))

    def _watched_wait_for_input(self) -> None:
        self.watched.set()
        self._wait_for_input()

    def _watched_poll(self, timeout_s: float) -> list[tuple[int, int]]:
        assert self._at_once.acquire(blocking=False), "two read at once"
        try:
            self.readers.append(threading.current_thread().name)
            self.reading.set()
            return self._poll(timeout_s)
        finally:
            self._at_once.release()

    def _watched_dispatch(self, events: list[tuple[int, int]]) -> None:
        assert self._at_once.acquire(blocking=False), "two read at once"
        try:
            self._dispatch(events)
        finally:
            self._at_once.release()
            with self._has_read:
                self._has_read.notify_all()

    def _read(self, mask: int) -> None:
        assert mask & ~select.EPOLLOUT
        self.got += self._out.recv(100)

    def watch(self, condition: Callable[[], bool]) -> None:
        """Block until it holds after some turn; takes no part in reading."""
        with self._has_read:
            assert self._has_read.wait_for(condition, 20)

    def wait_for(self, number: int, deadline_s: float = 20.0) -> bool:
        return self.reader.wait(lambda: number in self.got, Deadline(deadline_s))

    def close(self) -> None:
        self.reader.stop(Deadline(20))
        self.reader.close()
        self._out.close()
        self._in.close()


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


def _started(source: Source) -> Source:
    source.reader.start()
    return source


def _in_thread(source: Source, number: int) -> threading.Thread:
    thread = threading.Thread(target=source.wait_for, args=(number,), name=f"waits {number}")
    thread.start()
    return thread


def test_a_caller_reads_for_itself(source: Source) -> None:
    source.put(1)
    assert source.wait_for(1)
    assert source.readers == ["MainThread"]


def test_what_is_true_already_is_not_read_for(source: Source) -> None:
    assert source.reader.wait(lambda: True, Deadline(0))
    assert source.readers == []


def test_time_runs_out(source: Source) -> None:
    began = time.monotonic()
    assert not source.wait_for(1, deadline_s=0.05)
    assert time.monotonic() - began >= 0.05


def test_without_a_caller_the_stand_by_reads(source: Source) -> None:
    _started(source)
    source.put(1)
    assert source.reading.wait(20)
    source.watch(lambda: 1 in source.got)
    assert source.readers[0] == "stand-by"


def test_a_caller_takes_the_role_from_the_stand_by(source: Source) -> None:
    _started(source)
    assert source.watched.wait(20)
    thread = _in_thread(source, 1)
    source.put(2)
    source.watch(lambda: "waits 1" in source.readers)
    source.put(1)
    thread.join(20)
    assert not thread.is_alive()


def test_one_caller_reads_for_all_and_hands_the_role_over(source: Source) -> None:
    threads = [_in_thread(source, number) for number in range(1, 9)]
    for number in range(1, 9):
        source.put(number)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(source.got) == list(range(1, 9))


def test_callers_and_stand_by_in_any_order_lose_nothing(source: Source) -> None:
    _started(source)
    for round_number in range(1, 200):
        threads = [_in_thread(source, round_number) for _ in range(3)]
        source.put(round_number)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), f"round {round_number}"
        source.got.clear()


def test_a_change_that_is_not_read_wakes_the_reader_and_the_others(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.reader._LOOK_S", 100.0)  # nobody looks by himself
    happened: list[int] = []
    threads = [
        threading.Thread(target=source.reader.wait, args=(lambda: bool(happened), Deadline(100)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert source.reading.wait(20)
    happened.append(1)
    source.reader.changed()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_signal_interrupts_whoever_reads(source: Source) -> None:
    _started(source)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            source.wait_for(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    source.put(2)
    assert source.wait_for(2)  # the role is free again


def test_a_signal_interrupts_one_that_another_reads_for(source: Source) -> None:
    thread = _in_thread(source, 1)
    assert source.reading.wait(20)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            source.wait_for(2)
    finally:
        signal.signal(signal.SIGALRM, before)
    source.put(1)
    thread.join(20)
    assert not thread.is_alive()


def test_an_exception_of_the_condition_ends_only_that_wait(source: Source) -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        source.reader.wait(broken, Deadline(20))
    source.put(1)
    assert source.wait_for(1)


def test_a_long_wait_is_told_of(source: Source) -> None:
    looked: list[tuple[float, bool]] = []
    lock = source.reader.lock
    # Again and again: the stand-by may have it for a moment.
    source.reader.on_long_wait = lambda: looked.append(
        (time.monotonic(), any(lock_is_free(lock) for _ in range(100)))
    )
    began = time.monotonic()
    assert not source.wait_for(1, deadline_s=3.2)
    assert looked
    assert looked[0][0] - began >= 2
    assert all(free for _, free in looked)  # it may fail the handler, and abort transports


def test_stopping_ends_the_stand_by(source: Source) -> None:
    _started(source)
    assert source.watched.wait(20)
    source.reader.stop(Deadline(20))
    assert "stand-by" not in [thread.name for thread in threading.enumerate()]


def test_stopping_ends_a_stand_by_whose_wake_up_another_reader_swallowed(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[int] = []
    wake = source.reader._waker.wake

    def swallow_first() -> None:
        wakes.append(1)
        if len(wakes) > 1:
            wake()

    monkeypatch.setattr(source.reader._waker, "wake", swallow_first)
    _started(source)
    assert source.watched.wait(20)
    source.reader.stop(Deadline(20))
    assert "stand-by" not in [thread.name for thread in threading.enumerate()]


def test_the_stand_by_reads_for_one_that_calls_all_the_time_and_never_waits(
    source: Source,
) -> None:
    _started(source)
    until = time.monotonic() + 20
    for number in range(1, 4):
        source.put(number)
        while number not in source.got and time.monotonic() < until:
            source.reader.last_call_s = time.monotonic()
            source.reader.wait(lambda: True, Deadline(0))
            time.sleep(0.0005)
    assert source.got == [1, 2, 3]


def test_a_change_out_of_a_signal_handler_is_seen_at_once(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.reader._LOOK_S", 100.0)  # nobody looks by himself
    happened: list[int] = []
    seen = threading.Event()

    def handler(number: int, frame: object) -> None:
        happened.append(number)
        source.reader.changed()

    def send() -> None:
        assert source.reading.wait(20)
        # Again, since one that comes right before a system call is handled only after it.
        while not seen.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            seen.wait(0.1)

    before = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        began = time.monotonic()
        assert source.reader.wait(lambda: bool(happened), Deadline(30))
        assert time.monotonic() - began < 20
    finally:
        seen.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def _roles_are_free(reader: Reader, place: str) -> None:
    assert lock_is_free(reader.lock), place
    assert reader._reader is None, place
    assert not reader._waiting, place


def test_a_caller_that_reads_may_be_interrupted_anywhere(source: Source) -> None:
    def call() -> None:
        source.got.clear()
        source.put(1)
        assert source.wait_for(1)

    places = 0
    for place, error in interrupted_everywhere(call, *MODULES):
        assert isinstance(error, Interrupted), (place, error)
        _roles_are_free(source.reader, place)
        places += 1
    assert places > 20
    call()


def test_a_caller_that_sleeps_may_be_interrupted_anywhere(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.reader._LOOK_S", 0.001)  # so that it goes round
    another = Bell()
    reader = source.reader

    def call() -> None:
        reader._reader = another
        try:
            assert not source.wait_for(1, deadline_s=0.01)
        finally:
            assert reader._reader is another
            reader._reader = None

    for place, error in interrupted_everywhere(call, *MODULES):
        assert isinstance(error, Interrupted), (place, error)
        _roles_are_free(reader, place)
    call()


def test_a_change_may_be_interrupted_anywhere(source: Source) -> None:
    thread = _in_thread(source, 1)
    assert source.reading.wait(20)
    for place, error in interrupted_everywhere(source.reader.changed, *MODULES):
        assert isinstance(error, Interrupted), (place, error)
        assert lock_is_free(source.reader.lock, within_s=20), place
    source.put(1)
    thread.join(20)
    assert not thread.is_alive()


def test_the_stand_by_comes_in_after_an_interrupt_anywhere(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.reader._LOOK_S", 0.05)
    _started(source)

    def call() -> None:
        assert not source.wait_for(1, deadline_s=0.003)

    for number, (place, error) in enumerate(interrupted_everywhere(call, *MODULES)):
        assert isinstance(error, Interrupted), (place, error)
        if number % 8 == 0:
            source.put(2)
            source.watch(lambda: 2 in source.got)
            source.got.clear()


# -- turns


@pytest.fixture
def reader() -> Iterator[Reader]:
    with closing(Reader("stand-by")) as reader:
        yield reader


def _run(reader: Reader, timeout_s: float) -> None:
    reader._turn(Bell(), timeout_s)


def _nothing() -> None:
    pass


@pytest.mark.parametrize("method", ["turn", "watch"])
def test_a_call_wakes_who_waits(reader: Reader, method: str) -> None:
    blocks: dict[str, Callable[[], None]] = {
        "turn": lambda: _run(reader, 20.0),
        "watch": reader._wait_for_input,
    }
    waiting = threading.Thread(target=blocks[method])
    waiting.start()
    while _BLOCKED not in {reader._phase, reader._standby_phase}:
        pass
    called: list[int] = []
    reader.call(lambda: called.append(1))
    waiting.join(10)
    assert not waiting.is_alive()
    _run(reader, 0.0)
    assert called == [1]


def test_calls_come_in_order_and_those_they_lead_to_in_the_next_run(reader: Reader) -> None:
    called: list[str] = []

    def first() -> None:
        called.append("first")
        reader.call(lambda: called.append("third"))

    reader.call(first)
    reader.call(lambda: called.append("second"))
    _run(reader, 20.0)
    assert called == ["first", "second"]
    _run(reader, 20.0)
    assert called == ["first", "second", "third"]


def test_sockets_have_their_turn_after_calls(reader: Reader) -> None:
    mine, theirs = socket.socketpair()
    ready: list[int] = []
    with closing(mine), closing(theirs):
        reader.add(mine, ready.append)
        theirs.send(b"x")
        reader.call(lambda: None)
        _run(reader, 20.0)
        _run(reader, 20.0)
    assert len(ready) == 1


def test_sockets_have_their_turn_beside_calls_that_lead_to_others(reader: Reader) -> None:
    """As a transport's may that has more to do each time."""
    mine, theirs = socket.socketpair()
    ready: list[int] = []

    def again() -> None:
        reader.call(again)

    with closing(mine), closing(theirs):
        reader.add(mine, ready.append)
        theirs.send(b"x")
        again()
        for _ in range(16):
            _run(reader, 20.0)
    assert len(ready) == 1


class Epoll:
    """Counts looks; something is ready at the look of that number."""

    def __init__(self, at_look: int) -> None:
        self.at_look = at_look
        self.looks = 0
        self.blocked = 0

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        self.looks += 1
        self.blocked += timeout_s > 0
        return [(-1, 0)] if self.looks >= self.at_look or timeout_s else []


def _wait(reader: Reader, at_look: int, monkeypatch: pytest.MonkeyPatch) -> Epoll:
    epoll = Epoll(at_look)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_epoll", epoll)
        _run(reader, 20.0)
    return epoll


def _wait_shortly_thrice(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        _wait(reader, 1, monkeypatch)


def test_a_wait_spins_after_three_short_ones(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.spin_s = 10.0
    blocked = [_wait(reader, 5, monkeypatch).blocked for _ in range(5)]
    assert blocked == [1, 1, 1, 0, 0]


def test_a_spin_that_met_nothing_is_not_tried_again_at_once(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.spin_s = 10.0
    _wait_shortly_thrice(reader, monkeypatch)
    reader.spin_s = 1e-9
    assert _wait(reader, 10**9, monkeypatch).blocked == 1  # spun in vain
    reader.spin_s = 10.0
    assert [_wait(reader, 5, monkeypatch).blocked for _ in range(4)] == [1, 1, 1, 0]


def test_without_a_spin_every_wait_blocks(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_wait(reader, 5, monkeypatch).blocked for _ in range(5)] == [1] * 5


def test_a_look_without_a_wait_is_no_short_wait(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.spin_s = 10.0
    for _ in range(5):
        _run(reader, 0.0)
    assert _wait(reader, 5, monkeypatch).blocked == 1


def test_a_spin_takes_no_longer_than_the_wait(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.spin_s = 30.0
    _wait_shortly_thrice(reader, monkeypatch)
    began = time.monotonic()
    _run(reader, 0.01)
    assert time.monotonic() - began < 10


def test_an_alarm_is_not_missed_that_is_set_as_a_wait_begins(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the wait has looked for how long it may block, and before it has said that it does."""

    def set_meanwhile(reader: Reader) -> float:
        reader.call_at(time.monotonic() + 10, _nothing)
        return 0.0

    monkeypatch.setattr(Reader, "spin_s", property(set_meanwhile), raising=False)
    assert _wait(reader, 5, monkeypatch).blocked == 0


def test_each_alarm_comes_at_the_last_moment_that_it_was_given(reader: Reader) -> None:
    called: list[str] = []
    actions = {name: partial(called.append, name) for name in ("soon", "later", "put off")}
    now_s = time.monotonic()
    reader.call_at(now_s - 2, actions["put off"])
    reader.call_at(now_s + 0.05, actions["later"])
    reader.call_at(now_s - 1, actions["soon"])
    reader.call_at(now_s + 10_000, actions["put off"])
    _run(reader, 0.0)
    assert called == ["soon"]
    while len(called) < 2:
        _run(reader, 20.0)  # which it ends, too
    assert called == ["soon", "later"]
    assert time.monotonic() < now_s + 20
    _run(reader, 0.0)
    assert len(called) == 2


def test_an_alarm_ends_a_spin_that_it_was_set_in(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.spin_s = 30.0
    _wait_shortly_thrice(reader, monkeypatch)
    alarm_s = time.monotonic() + 10
    monkeypatch.setattr(os, "sched_yield", lambda: reader.call_at(alarm_s, _nothing))
    assert _wait(reader, 10**9, monkeypatch).looks == 2


def test_a_call_ends_a_spin(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.spin_s = 10.0
    _wait_shortly_thrice(reader, monkeypatch)
    called: list[int] = []
    spinning = threading.Thread(target=_run, args=(reader, 20.0))
    spinning.start()
    reader.call(lambda: called.append(1))
    spinning.join(5)
    assert not spinning.is_alive()
    assert called == [1]
