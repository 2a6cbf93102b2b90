"""A synchronous send is done when its message has been received, not before."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.errors import DeadlineError
from stagelink.plugins.problems import transport_problems
from stagelink.testing import RankFailedError, drivers, run_threads
from stagelink.testing.faults import Gate, Hold, Point, faulty
from stagelink.testing.subject import Subject
from stagelink.testing.synchronous import synchronous
from stagelink.transport.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool

Unbuffered = synchronous(Loopback)


def send_one(rank: int, world_size: int, store: Store, subject: Subject, let_it: Gate) -> bool:
    """Whether the send was done before the receiver's end had the message."""
    before = False
    with (
        subject.connect(subject.plan(), rank, world_size, store) as comm,
        comm.evaluate(1) as session,
    ):
        if rank == 0:
            handle = session.send("e0", torch.ones(3), 0, copy=False)
            try:
                handle.wait(deadline_s=0.2)
                before = True
            except DeadlineError:
                pass
            let_it.open()
            handle.wait()
        else:
            session.recv("e0", 0)
        comm.reduce([0.0])
    return before


def test_core_accepts_the_class() -> None:
    assert transport_problems(Unbuffered) == []
    assert Unbuffered.name == "synchronous-loopback"
    assert synchronous(Loopback, name="mine").name == "mine"


@pytest.mark.parametrize("waits", [False, True])
def test_a_send_waits_for_the_receiver(waits: bool) -> None:
    gate = Gate()
    held = faulty(Loopback, Hold(message=0, at=Point.RECEIVE_FINISH, until=gate))
    transport = synchronous(held) if waits else held
    subject = Subject(transport.name, (transport,))
    assert run_threads(send_one, 2, subject, gate)[0] is not waits


def test_values_arrive_as_ever() -> None:
    run_threads(drivers.keeps_sizes, 2, Subject("loopback", synchronous=True), (0, 1, 300_000, 7))


@pytest.mark.parametrize("name", ["gloo", "shm"])  # one that tells what is sent, one that copies
def test_between_processes(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(drivers.sends_both_ways_at_once, 2, Subject(name, synchronous=True), 400_000)


def send_first(
    rank: int, world_size: int, store: Store, subject: Subject, receives: Sequence[Gate]
) -> None:
    """Both ranks wait until their own message is through, and then receive: a wrong order."""
    plan_of = partial(Subject.plan, window=4, deadline_s=1.0)
    with (
        subject.join(rank, world_size, store, plan_of) as comm,
        comm.train(2) as session,
    ):
        tensor = torch.ones(3, requires_grad=True)
        if rank == 0:
            session.send("e0", tensor, 0)
            session.send("e0", tensor, 1, copy=False).wait()
            receives[0].open()
            session.recv_grad("e0", 0)
        else:
            got = session.recv("e0", 0)
            session.send_grad("e0", got, 0, copy=False).wait()
            receives[1].open()
            session.recv("e0", 1)
        comm.reduce([0.0])


@pytest.mark.parametrize("waits", [False, True])
def test_it_brings_a_wrong_order_out(waits: bool) -> None:
    gates = [Gate(), Gate()]
    holds = [
        Hold(message=0, link=(1, 0), at=Point.RECEIVE_FINISH, until=gates[0]),
        Hold(message=1, link=(0, 1), at=Point.RECEIVE_FINISH, until=gates[1]),
    ]
    transport = faulty(Loopback, *holds)
    subject = Subject(transport.name, (transport,), synchronous=waits)
    with pytest.raises(RankFailedError, match="DeadlineError") if waits else nullcontext():
        run_threads(send_first, 2, subject, gates)
