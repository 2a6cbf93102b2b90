"""Reading is a role: one thread at a time has it, and everybody gets what is read."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from stagelink.control.turns import Turns, _Bell
from stagelink.deadline import Deadline
from tests.support.interrupts import Interrupted, interrupted_everywhere, lock_is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Source:
    """Something to read: numbers in a pipe, added to `got` by whoever reads."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self.got: list[int] = []
        self.readers: list[str] = []
        self.dispatching = False
        self.reading = threading.Event()
        self._has_read = threading.Condition()
        self._at_once = threading.Lock()
        self.watched = threading.Event()
        self.turns = Turns(
            self.read, self.watch_pipe, self.poke, lambda: self.dispatching, "stand-by"
        )

    def put(self, number: int) -> None:
        os.write(self._in, bytes([number]))

    def poke(self) -> None:
        os.write(self._in, b"\0")

    def watch_pipe(self) -> None:
        self.watched.set()
        select.select([self._out], [], [])

    def read(self, timeout: float) -> None:
        assert self._at_once.acquire(blocking=False), "two read at once"
        try:
            self.readers.append(threading.current_thread().name)
            self.reading.set()
            if select.select([self._out], [], [], timeout)[0]:
                self.got += [number for number in os.read(self._out, 100) if number]
        finally:
            self._at_once.release()
            with self._has_read:
                self._has_read.notify_all()

    def watch(self, condition: Callable[[], bool]) -> None:
        """Block until it holds after some turn; takes no part in reading."""
        with self._has_read:
            assert self._has_read.wait_for(condition, 20)

    def wait_for(self, number: int, deadline_s: float = 20.0) -> bool:
        return self.turns.wait(lambda: number in self.got, Deadline(deadline_s))

    def close(self) -> None:
        self.turns.stop(Deadline(20))
        os.close(self._out)
        os.close(self._in)


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


def _started(source: Source) -> Source:
    source.turns.start()
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
    assert source.turns.wait(lambda: True, Deadline(0))
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
    monkeypatch.setattr("stagelink.control.turns._LOOK_S", 100.0)  # nobody looks by himself
    happened: list[int] = []
    threads = [
        threading.Thread(target=source.turns.wait, args=(lambda: bool(happened), Deadline(100)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert source.reading.wait(20)
    happened.append(1)
    source.turns.changed()
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
        source.turns.wait(broken, Deadline(20))
    source.put(1)
    assert source.wait_for(1)


def test_a_long_wait_is_told_of(source: Source) -> None:
    looked: list[tuple[float, bool]] = []
    lock = source.turns.lock
    # Again and again: the stand-by may have it for a moment.
    source.turns.on_long_wait = lambda: looked.append(
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
    source.turns.stop(Deadline(20))
    assert "stand-by" not in [thread.name for thread in threading.enumerate()]


def test_stopping_ends_a_stand_by_whose_poke_another_reader_swallowed(source: Source) -> None:
    pokes: list[int] = []
    poke = source.poke

    def swallow_first() -> None:
        pokes.append(1)
        if len(pokes) > 1:
            poke()

    source.turns._poke = swallow_first
    _started(source)
    assert source.watched.wait(20)
    source.turns.stop(Deadline(20))
    assert "stand-by" not in [thread.name for thread in threading.enumerate()]


def test_the_stand_by_reads_for_one_that_calls_all_the_time_and_never_waits(
    source: Source,
) -> None:
    _started(source)
    until = time.monotonic() + 20
    for number in range(1, 4):
        source.put(number)
        while number not in source.got and time.monotonic() < until:
            source.turns.touch()
            source.turns.wait(lambda: True, Deadline(0))
            time.sleep(0.0005)
    assert source.got == [1, 2, 3]


def test_a_change_out_of_a_signal_handler_is_seen_at_once(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.turns._LOOK_S", 100.0)  # nobody looks by himself
    happened: list[int] = []
    seen = threading.Event()

    def handler(number: int, frame: object) -> None:
        happened.append(number)
        source.turns.changed()

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
        assert source.turns.wait(lambda: bool(happened), Deadline(30))
        assert time.monotonic() - began < 20
    finally:
        seen.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def _roles_are_free(turns: Turns, place: str) -> None:
    assert lock_is_free(turns.lock), place
    assert turns._reader is None, place
    assert not turns._waiting, place


def test_a_caller_that_reads_may_be_interrupted_anywhere(source: Source) -> None:
    def call() -> None:
        source.got.clear()
        source.put(1)
        assert source.wait_for(1)

    places = 0
    for place, error in interrupted_everywhere(call, "stagelink.control.turns"):
        assert isinstance(error, Interrupted), (place, error)
        _roles_are_free(source.turns, place)
        places += 1
    assert places > 20
    call()


def test_a_caller_that_sleeps_may_be_interrupted_anywhere(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.turns._LOOK_S", 0.001)  # so that it goes round
    another = _Bell()
    turns = source.turns

    def call() -> None:
        turns._reader = another
        try:
            assert not source.wait_for(1, deadline_s=0.01)
        finally:
            assert turns._reader is another
            turns._reader = None

    for place, error in interrupted_everywhere(call, "stagelink.control.turns"):
        assert isinstance(error, Interrupted), (place, error)
        _roles_are_free(turns, place)
    call()


def test_a_change_may_be_interrupted_anywhere(source: Source) -> None:
    thread = _in_thread(source, 1)
    assert source.reading.wait(20)
    for place, error in interrupted_everywhere(source.turns.changed, "stagelink.control.turns"):
        assert isinstance(error, Interrupted), (place, error)
        assert lock_is_free(source.turns.lock, within_s=20), place
    source.put(1)
    thread.join(20)
    assert not thread.is_alive()


def test_the_stand_by_comes_in_after_an_interrupt_anywhere(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagelink.control.turns._LOOK_S", 0.05)
    _started(source)

    def call() -> None:
        assert not source.wait_for(1, deadline_s=0.003)

    for number, (place, error) in enumerate(
        interrupted_everywhere(call, "stagelink.control.turns")
    ):
        assert isinstance(error, Interrupted), (place, error)
        if number % 8 == 0:
            source.put(2)
            source.watch(lambda: 2 in source.got)
            source.got.clear()
