"""Exceptions of foreign code in the middle of a call: no peer waits for what they would leave."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

import stagelink
from stagelink.errors import AbortedError, PluginError, StagelinkError
from stagelink.links.in_link import InLink
from stagelink.testing import run_threads
from stagelink.transport.header import NO_TRACE, Direction
from stagelink.transport.hooks import hookimpl
from stagelink.transport.streams import HostStream
from tests.observers.watching import connect
from tests.support.pipelines import INLINE, LOOPBACK, SYNCHRONOUS, Document, Wire, document

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event

T = TypeVar("T")
WIRES = pytest.mark.parametrize("wire", [LOOPBACK, INLINE[0]], ids=str)


def narrow(wire: Wire, **tables: Any) -> Document:
    """One message may be unanswered, and nobody waits for long."""
    limits = {"deadline_s": 5.0, "first_deadline_s": 5.0}
    return document(wire, window=1, limits=limits, **tables)


def run(
    plan: Document, case: Callable[..., T], *args: Any, observers: tuple[object, ...] = ()
) -> list[T]:
    """Call ``case(comm, *args)`` on two ranks, whose handlers have failed by the end, or not."""

    def enter(rank: int, world_size: int, store: Store) -> T:
        comm = stagelink.connect(
            stagelink.Plan.from_dict(plan),
            rank=rank,
            world_size=world_size,
            store=store,
            run_id="run",
            transports=SYNCHRONOUS.register,
            observers=observers,
        )
        try:
            return case(comm, *args)
        finally:
            with suppress(StagelinkError):  # a failure that no call has told of
                comm.close()

    return run_threads(enter, 2)


class Once:
    """A tracer that raises for the first gradient."""

    def __init__(self) -> None:
        self._raised = False

    @hookimpl
    def stagelink_trace(self, direction: Direction) -> bytes:
        if direction is Direction.BACKWARD and not self._raised:
            self._raised = True
            raise ZeroDivisionError("what a pity")
        return NO_TRACE


def refuse_once(comm: stagelink.Handler, *, again: bool) -> object:
    """Two sessions of a message and its gradient, whose first try in the first one is refused."""
    gradient: object = None
    for first in (True, False):
        with comm.train(1) as session:
            if comm.rank == 0:
                session.send("h", torch.ones(3, requires_grad=True), 0)
                if again or not first:
                    gradient = session.recv_grad("h", 0)
                continue
            session.recv("h", 0)
            if first:
                with pytest.raises(PluginError, match="what a pity"):
                    session.send_grad("h", torch.ones(3), 0)
            if again or not first:
                session.send_grad("h", torch.ones(3), 0)
    return gradient


@WIRES
@pytest.mark.parametrize("again", [True, False], ids=["sent again", "left"])
def test_a_gradient_that_a_tracer_refuses_is_still_owed(wire: Wire, *, again: bool) -> None:
    plan = narrow(wire, microbatches=1)
    gradient, _ = run(plan, lambda comm: refuse_once(comm, again=again), observers=(Once(),))
    assert isinstance(gradient, torch.Tensor)


class Failing:
    """An observer that raises at one event of a rank's."""

    def __init__(self, name: str, rank: int) -> None:
        self._at = name, rank

    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        if (event.name, event.rank) == self._at:
            raise ZeroDivisionError("what a pity")


def send_two(comm: stagelink.Handler) -> None:
    session = comm.evaluate(2)
    for microbatch in range(2):  # of which the window has room for one
        if comm.rank == 0:
            session.send("h", torch.ones(4), microbatch)
        else:
            session.recv("h", microbatch)


def fail_one(
    comm: stagelink.Handler,
    case: Callable[[stagelink.Handler], None],
    failing: int,
    error: type[Exception],
    both: threading.Barrier,
) -> None:
    """A case in which one rank's call raises; it goes on as if nothing had been.

    The other hears of it all the same.
    """
    both.wait(20)  # are connected
    with pytest.raises(error if comm.rank == failing else AbortedError, match="what a pity"):
        case(comm)
    both.wait(20)
    assert comm.failure is not None


@WIRES
@pytest.mark.parametrize(
    ("name", "failing"),
    [("send", 0), ("wait_window", 0), ("recv", 1), ("wait_peer", 1), ("wait_wire", 1)],
)
def test_an_observer_s_error_that_is_caught_leaves_no_peer_waiting(
    wire: Wire, name: str, failing: int
) -> None:
    plan = narrow(wire, schedule="forward")
    observer, both = Failing(name, failing), threading.Barrier(2)
    run(plan, fail_one, send_two, failing, PluginError, both, observers=(observer,))


def _without_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("what a pity")


@pytest.mark.parametrize("step", ["copy", "hand over", "copy of a gradient"])
def test_a_caller_s_error_of_torch_s_in_a_message_tells_the_peer(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, both = int(step != "copy"), threading.Barrier(2)

    def case(comm: stagelink.Handler) -> None:
        session = comm.train(1)
        if comm.rank == 0:
            session.send("h", torch.ones(4, requires_grad=True), 0)
            session.recv_grad("h", 0)
        else:
            session.recv("h", 0)
            monkeypatch.setattr(HostStream, "cloned", _without_memory)
            session.send_grad("h", torch.ones(4), 0)

    if step == "hand over":
        monkeypatch.setattr(HostStream, "record", lambda _: object())
        monkeypatch.setattr(InLink, "hand_to_caller", _without_memory)
    elif step == "copy":
        monkeypatch.setattr(HostStream, "cloned", _without_memory)
    plan = narrow(SYNCHRONOUS, microbatches=1)
    run(plan, fail_one, case, failing, torch.OutOfMemoryError, both)


class Closings:
    """An observer that cannot stand the end of any link."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    @hookimpl
    def stagelink_link_closed(self, link: Link) -> None:
        self.closed.append(str(link))
        raise ZeroDivisionError("what a pity")


def test_an_observer_that_raises_at_a_link_s_end_is_told_of_the_others() -> None:
    observers = [Closings(), Closings()]

    def enter(rank: int, world_size: int, store: Store) -> None:
        del world_size
        comm = connect(document(LOOPBACK), rank, store, [observers[rank]])
        with pytest.raises(PluginError, match="what a pity"):
            comm.close()

    run_threads(enter, 2)
    for observer in observers:
        assert sorted(observer.closed) == ["0→1 by loopback", "1→0 by loopback"]


def _break() -> None:
    raise ZeroDivisionError("what a pity")


def test_a_callback_that_raises_at_a_failure_keeps_nobody_from_hearing_of_it() -> None:
    def case(comm: stagelink.Handler, heard: list[str], waits: threading.Barrier) -> None:
        if comm.rank == 1:
            waits.wait(20)
            comm.abort(RuntimeError("enough"))
            return
        comm.on_failure(lambda _: _break())
        comm.on_failure(lambda error: heard.append(str(error)))
        waits.wait(20)
        with pytest.raises((AbortedError, ZeroDivisionError)):
            comm.reduce([0.0])

    heard: list[str] = []
    run(document(LOOPBACK), case, heard, threading.Barrier(2))
    assert len(heard) == 1
    assert "enough" in heard[0]


def test_what_is_to_be_given_up_and_raises_keeps_nothing_else_from_being_closed() -> None:
    def enter(rank: int, world_size: int, store: Store) -> list[str]:
        del world_size
        dropped: list[str] = []
        comm = connect(document(LOOPBACK), rank, store)
        comm.replica_store(_break)
        comm.replica_store(lambda: dropped.append("second"))
        with comm.evaluate(1) as session:
            if rank == 0:
                session.send("h", torch.ones(3), 0)
            else:
                session.recv("h", 0)
        with pytest.raises(ZeroDivisionError):
            comm.close()
        return dropped

    assert run_threads(enter, 2) == [["second"], ["second"]]  # no thread is left: see conftest
