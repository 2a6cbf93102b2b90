"""Under a rendezvous a send is done when its message has been received, not before."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.errors import DeadlineError
from stagelink.plugins.problems import transport_problems
from stagelink.testing import RankFailedError, drivers, run_threads
from stagelink.testing.rendezvous import rendezvous
from stagelink.testing.subject import Subject
from stagelink.transport.loopback import Loopback

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool

Unbuffered = rendezvous(Loopback)


def send_one(
    rank: int, world_size: int, store: Store, transport: type[Loopback], let_it: threading.Event
) -> bool:
    """Whether the send was done before the receiver began to receive."""
    subject = Subject(transport.name, () if transport is Loopback else (transport,))
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
            let_it.set()
            handle.wait()
        else:
            let_it.wait()
            session.recv("e0", 0)
        comm.reduce([0.0])
    return before


def test_core_accepts_the_class() -> None:
    assert transport_problems(Unbuffered) == []
    assert Unbuffered.name == "rendezvous-loopback"
    assert rendezvous(Loopback, name="mine").name == "mine"


@pytest.mark.parametrize(("transport", "before"), [(Loopback, True), (Unbuffered, False)])
def test_a_send_waits_for_the_receiver(transport: type[Loopback], before: bool) -> None:
    assert run_threads(send_one, 2, transport, threading.Event())[0] is before


def test_values_arrive_as_ever() -> None:
    run_threads(drivers.keeps_sizes, 2, Subject("loopback", rendezvous=True), (0, 1, 300_000, 7))


@pytest.mark.parametrize("name", ["gloo", "shm"])  # one that tells what is sent, one that copies
def test_between_processes(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(drivers.sends_both_ways_at_once, 2, Subject(name, rendezvous=True), 400_000)


def send_first(rank: int, world_size: int, store: Store, subject: Subject) -> None:
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
            session.recv_grad("e0", 0)
        else:
            got = session.recv("e0", 0)
            session.send_grad("e0", got, 0, copy=False).wait()
            session.recv("e0", 1)
        comm.reduce([0.0])


def test_it_brings_a_wrong_order_out() -> None:
    run_threads(send_first, 2, Subject("loopback"))
    with pytest.raises(RankFailedError, match="DeadlineError"):
        run_threads(send_first, 2, Subject("loopback", rendezvous=True))
