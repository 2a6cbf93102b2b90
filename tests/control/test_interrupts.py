"""What a signal handler raises is the caller's, wherever it strikes; and the peers hear of it."""

from __future__ import annotations

import _thread
import functools
import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from stagelink.control.plane import Plane
from stagelink.control.reduce import Reducer, spanning_tree
from stagelink.deadline import Deadline
from stagelink.errors import (
    AbortedError,
    DeadlineError,
    ProtocolError,
    StagelinkError,
    TransportError,
)
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.interrupts import raised_by_signal_handler, stops_caller
from tests.support.interrupts import interrupted_everywhere, lock_is_free
from tests.support.planes import join

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from stagelink.control.connection import Frame

MODULES = tuple(
    f"stagelink.control.{name}" for name in ("plane", "reader", "watches", "connection", "failure")
)


def _function(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"signal {number}")


def _forgetful(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise OSError("it keeps nothing of what it was given")


def _resetting(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise TimeoutError("once")


def _with_more(more: str, number: int, frame: FrameType | None) -> NoReturn:
    _function(number, frame)


class _Handler:
    def method(self, number: int, frame: FrameType | None) -> NoReturn:
        del frame
        raise DeadlineError(f"signal {number}")

    def __call__(self, *given: object) -> NoReturn:
        raise ConnectionResetError(f"signal {given[0]}")


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _somewhere() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    "handler",
    [
        _function,
        _forgetful,
        _resetting,
        functools.partial(_with_more, "more"),
        _Handler().method,
        _Handler(),
    ],
)
def test_what_a_handler_raises_is_known(handler: Any) -> None:
    with handled_by(handler):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - time-outs, resets, deadlines
            _somewhere()
        assert raised_by_signal_handler(caught.value)
        assert stops_caller(caught.value)


def _own_error() -> None:
    _function(1, None)


def test_other_errors_are_not_a_handlers() -> None:
    with handled_by(_forgetful):
        with pytest.raises(TimeoutError) as caught:
            _own_error()
        assert not stops_caller(caught.value)
    assert not raised_by_signal_handler(ValueError("never raised"))


def test_on_another_thread_no_handler_runs() -> None:
    told: list[bool] = []

    def work() -> None:
        try:
            _function(1, None)
        except TimeoutError as error:
            told.append(raised_by_signal_handler(error))

    with handled_by(_function):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert told == [False]


# -- in a wait of the plane


class Pair:
    """Two planes; 0 is the one that waits and is interrupted, 1 hears of it."""

    def __init__(self, *, hands_over: bool) -> None:
        self.planes = [Plane(0), Plane(1)]
        self.heard: list[bytes] = []
        self.planes[0].handle(MessageKind.REDUCE, self._hear)
        join(*self.planes, hands_over=hands_over)

    def _hear(self, peer: int, frame: Frame) -> None:
        assert peer == 1
        self.heard.append(frame.note)

    def wait(self) -> None:
        for note in (b"one", b"two"):
            self.planes[1].post(0, Header(MessageKind.REDUCE), note)
        assert self.planes[0].wait(lambda: len(self.heard) >= 2, Deadline(20.0))

    def what_peer_hears(self) -> str:
        with pytest.raises(AbortedError) as caught:
            self.planes[1].wait(lambda: False, Deadline(20.0))
        return str(caught.value)

    def close(self) -> None:
        for plane in self.planes:
            plane.start_closing()
            plane.fail(AbortedError("the test is over"))  # so that none waits for the other
            plane.close(Deadline(5.0))


@pytest.mark.parametrize(
    ("raised", "hands_over"),
    [
        (TimeoutError, False),
        (BlockingIOError, False),
        (ConnectionResetError, False),
        (ProtocolError, False),
        (TransportError, False),
        (KeyboardInterrupt, False),
        (DeadlineError, True),
        (RuntimeError, True),
    ],
)
def test_the_wait_raises_what_the_handler_raised(
    raised: type[BaseException], hands_over: bool
) -> None:
    pairs = [Pair(hands_over=hands_over)]

    def call() -> None:
        pairs[-1].wait()

    def end() -> None:
        pairs[-1].close()

    places = failed = 0
    with ExitStack() as stack:
        stack.callback(end)
        for place, error in interrupted_everywhere(call, *MODULES, raised=raised):
            assert type(error) is raised, (place, error)
            waiting, _ = pairs[-1].planes
            assert lock_is_free(waiting.lock, within_s=20), place
            assert waiting.reader._reader is None, place
            if waiting.failure.error is not None and place.split(".")[0] == "Reader":
                text = pairs[-1].what_peer_hears()
                assert text == f"rank 0 reports: rank 0 was stopped by {raised.__name__}: {place}"
                failed += 1
            pairs[-1].close()
            pairs.append(Pair(hands_over=hands_over))
            places += 1
    assert places > 50
    assert failed > 20


def test_a_close_that_waits_raises_it_too_and_gives_everything_back() -> None:
    # The other rank reads nothing, and so never says goodbye.
    pairs = [Pair(hands_over=False)]

    def call() -> None:
        pairs[-1].planes[0].close(Deadline(0.002))

    def end() -> None:
        for plane in pairs[-1].planes:
            plane.close(Deadline(0.0))

    with ExitStack() as stack:
        stack.callback(end)
        for place, error in interrupted_everywhere(
            call, "stagelink.control.reader", raised=DeadlineError
        ):
            assert type(error) is DeadlineError, (place, error)
            closed, other = pairs[-1].planes
            sock = closed.connections[1].sock
            assert sock.fileno() < 0, place
            closed.close(Deadline(0.0))  # what an interrupt at the very end left
            other.close(Deadline(0.0))
            pairs.append(Pair(hands_over=False))


def test_a_reduction_raises_what_the_handler_raised() -> None:
    first, second = Plane(0), Plane(1)
    with ExitStack() as stack:
        for plane in (first, second):
            stack.callback(plane.close, Deadline(5.0))
        join(first, second)
        tree = spanning_tree({0: [1], 1: [0]}, 0)
        stack.enter_context(handled_by(_function))
        timer = threading.Timer(0.1, signal.pthread_kill, _main(signal.SIGUSR1))
        timer.start()
        stack.callback(timer.join)
        with pytest.raises(TimeoutError, match="signal") as caught:
            Reducer(first, tree).reduce([1.0], "sum", Deadline(20.0))
        assert type(caught.value) is TimeoutError
        with pytest.raises(StagelinkError, match="stopped by TimeoutError: signal"):
            second.wait(lambda: False, Deadline(20.0))


def _main(number: int) -> tuple[int, int]:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident, number


def test_a_library_s_thread_that_asks_leaves_no_entry() -> None:
    """Python would keep one for each thread that it has not started, to the process's end."""
    asked = threading.Event()
    before = threading.active_count()

    def ask() -> None:
        assert not stops_caller(ValueError("a library's"))
        asked.set()

    _thread.start_new_thread(ask, ())
    assert asked.wait(20)
    assert threading.active_count() == before
