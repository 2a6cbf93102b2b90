"""Pipelines under observation: a plan's ranks, each with the observers that a test gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import stagelink
from stagelink.testing import run_threads
from stagelink.transport.hooks import hookimpl
from tests.support.pipelines import LOOPBACK, Document, document, world_size

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

    from stagelink.transport.events import Event

__all__ = ["NARROW", "Keeper", "connect", "exchange", "overfill", "park", "run"]

T = TypeVar("T")

NARROW = document(LOOPBACK, schedule="forward", window=1)
"""One message may be under way."""


@dataclass(eq=False)
class Keeper:
    """Keeps the events of all ranks that it is given to."""

    events: list[Event] = field(default_factory=list)

    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


def connect(
    plan: Document,
    rank: int,
    store: Store,
    observers: Sequence[object] = (),
    run_id: str = "run",
) -> stagelink.Handler:
    return stagelink.connect(
        stagelink.Plan.from_dict(plan),
        rank=rank,
        world_size=world_size(plan),
        store=store,
        run_id=run_id,
        observers=observers,
    )


def run(
    plan: Document, case: Callable[..., T], *args: Any, observers: Sequence[object] = ()
) -> list[T]:
    """Call ``case(comm, *args)`` on a thread per rank; all ranks have the same observers."""

    def enter(rank: int, world_size: int, store: Store) -> T:
        with connect(plan, rank, store, observers) as comm:
            return case(comm, *args)

    return run_threads(enter, world_size(plan))


def exchange(comm: stagelink.Handler, microbatches: int, size: int = 3) -> None:
    """One training session over the tensor ``h`` from stage 0 to 1, in the schedule's order."""
    with comm.train(microbatches) as session:
        for action in session.actions:
            forward = action.kind is stagelink.Kind.FORWARD
            first = comm.stage.index == 0
            if forward and first:
                value = torch.full((size,), 1.0, requires_grad=True)
                session.send("h", value, action.microbatch)
            elif forward:
                session.recv("h", action.microbatch)
            elif first:
                session.recv_grad("h", action.microbatch)
            else:
                session.send_grad("h", torch.ones(size), action.microbatch)


def overfill(comm: stagelink.Handler, full: threading.Event) -> None:
    """By the plan `NARROW`: send two messages, of which the second waits for a place.

    Args:
        comm: the handler.
        full: set when it waits.
    """
    with comm.evaluate(2) as session:
        for microbatch in range(2):
            if comm.rank == 0:
                session.send("h", torch.ones(4), microbatch)
            else:
                assert full.wait(20)
                session.recv("h", microbatch)


def park(comm: stagelink.Handler, parked: threading.Event, takes: int) -> None:
    """By the plan `NARROW`: two sends, of which the second is parked until the first is answered.

    Args:
        comm: the handler.
        parked: set when it is.
        takes: how many messages the receiver takes; with 0 the second is never sent, since the
            receiver fails first.

    Raises:
        RuntimeError: on rank 1, with 0.
    """
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            session.isend("h", torch.ones(4), 0)
            last = session.isend("h", torch.ones(4), 1)
            parked.set()
            last.wait()
        else:
            assert parked.wait(20)
            if not takes:
                error = RuntimeError("nothing is taken")
                comm.abort(error)  # before the session is left, which would answer the first
                raise error
            for microbatch in range(takes):
                session.recv("h", microbatch)
            comm.reduce([0.0])  # in the session, where nothing more is answered
    if comm.rank == 0:
        comm.reduce([0.0])
