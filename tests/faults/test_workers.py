"""What goes wrong on a link's worker, or in a transport's call, reaches the caller."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.errors import AbortedError, StagelinkError, TransportError
from stagelink.testing import run_threads
from stagelink.testing.faults import Fail, Point, faulty
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import Wire, document, joined

if TYPE_CHECKING:
    from torch.distributed import Store

REACHES_S = 1.0


def at_fault(point: Point) -> int:
    """The rank whose transport fails."""
    return 0 if point in {Point.SEND_BEGIN, Point.SEND_FINISH} else 1


def stream_two(rank: int, world_size: int, store: Store, point: Point) -> tuple[str, str, float]:
    """What the first call after the fault raises, its cause, and the seconds until then."""
    fail = Fail(message=1, at=point, error=OSError("the cable is cut"))
    broken = faulty(Loopback, fail)
    plan = document(Wire("faulty", options={}), window=8)
    comm_error: StagelinkError | None = None
    began = time.monotonic()
    try:
        with joined(rank, world_size, store, plan, [broken]) as comm, comm.evaluate(4) as session:
            comm.reduce([0.0])
            began = time.monotonic()
            for microbatch in range(4):
                if rank == 0:
                    session.send("h", torch.ones(5000), microbatch)
                else:
                    session.recv("h", microbatch)
            if rank != at_fault(point):
                comm.reduce([0.0])  # in which the other takes no part: it goes on to close
    except StagelinkError as error:
        comm_error = error
    assert comm_error is not None, f"rank {rank}: nothing was raised"
    cause = f"{type(comm_error.__cause__).__name__}: {comm_error.__cause__}"
    return f"{type(comm_error).__name__}: {comm_error}", cause, time.monotonic() - began


@pytest.mark.parametrize("point", list(Point), ids=lambda point: point.name.lower())
def test_c012_a_fault_of_the_transport_reaches_both_callers(point: Point) -> None:
    results = run_threads(stream_two, 2, point)
    own = at_fault(point)
    told, cause, took_s = results[own]
    assert told.startswith(TransportError.__name__)
    assert "the cable is cut" in told
    assert cause == "OSError: the cable is cut"
    assert took_s < REACHES_S
    other, _, took_s = results[1 - own]
    assert other.startswith(AbortedError.__name__)
    assert "the cable is cut" in other
    assert took_s < REACHES_S + 1.0


def close_after_fault(rank: int, world_size: int, store: Store) -> str:
    """A fault that no call has told of yet is told by close."""
    broken = faulty(
        Loopback, Fail(message=0, at=Point.SEND_FINISH, error=OSError("the cable is cut"))
    )
    plan = document(Wire("faulty", options={"rendezvous": True}), window=8)
    with joined(rank, world_size, store, plan, [broken]) as comm:
        session = comm.evaluate(1)
        if rank == 1:
            with pytest.raises(AbortedError, match="the cable is cut"):
                comm.reduce([0.0])
            comm.close()  # told before: nothing to raise
            return "closed"
        session.send("h", torch.ones(5000), 0)
        with pytest.raises(TransportError, match="the cable is cut"):
            comm.close(5.0)
        comm.close()  # the second call is silent
    return "closed"


def test_c012_a_fault_that_nobody_was_told_of_is_told_by_close() -> None:
    assert run_threads(close_after_fault, 2) == ["closed", "closed"]
