"""Ranks of two hosts when a cable is cut or a process is stopped: errors in time, and a way out.

Every rank says when it heard and when it was through, by the clock that all processes share.
"""

from __future__ import annotations

import itertools
import re
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.schedule import Kind
from stagelink.testing import report
from tests.runner.models import quick_sgd
from tests.support.pipelines import Wire, document, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink.testing import RankProcesses
    from tests.support.hosts import Hosts
    from tests.support.pipelines import Document

GLOO, TCP = Wire("gloo"), Wire("tcp")
DEADLINE_S, CLOSE_S = 2.0, 2.0
LIMITS = {"deadline_s": DEADLINE_S, "first_deadline_s": DEADLINE_S, "close_deadline_s": CLOSE_S}
PATIENT = {**LIMITS, "deadline_s": 60.0, "first_deadline_s": 60.0}
GRACE_S = 2.0
PLAN = document(GLOO, limits=LIMITS)


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        error: type and text of what its call raised.
        raised_s: when.
        left_s: when it had left its ``with`` block.
    """

    error: str
    raised_s: float
    left_s: float


def _until_it_fails(
    rank: int,
    world_size: int,
    store: str,
    plan: Document,
    work: Callable[[stagelink.Handler], None],
) -> Ending:
    error, raised_s = "", 0.0
    try:
        with joined(rank, world_size, store, plan) as comm:
            try:
                work(comm)
            except stagelink.StagelinkError as failure:
                error, raised_s = f"{type(failure).__name__}: {failure}", time.monotonic()
                raise
    except stagelink.StagelinkError:
        report("left")
        return Ending(error, raised_s, time.monotonic())
    raise AssertionError("it ended")


def _start(
    two: Hosts, work: Callable[[stagelink.Handler], None], plan: Document = PLAN
) -> RankProcesses[Ending]:
    """Ranks of two hosts that are in the middle of it."""
    ranks = two.start(_until_it_fails, [0, 1], plan, work)
    for rank in (0, 1):
        ranks.wait_for(rank, "going")
    return ranks


def _cut(two: Hosts, ranks: RankProcesses[Ending], host: int) -> tuple[float, list[Ending]]:
    """Cut a cable, and see how the ranks end; when it was cut."""
    two.cut(host)
    struck_s = time.monotonic()
    try:
        return struck_s, ranks.results()
    finally:
        two.restore(host)


def _check(ending: Ending, wanted: str, struck_s: float, within_s: float = DEADLINE_S) -> None:
    assert re.match(wanted, ending.error), ending.error
    assert ending.raised_s - struck_s < within_s + GRACE_S
    assert ending.left_s - ending.raised_s < CLOSE_S + GRACE_S


def _train_for_ever(comm: stagelink.Handler) -> None:
    for number in itertools.count():
        _both_ways(comm)
        if number == 1:
            report("going")


def _both_ways(comm: stagelink.Handler) -> None:
    """Activations of 16 MB and their gradients, so that there are always some on their way."""
    value = torch.ones(4_000_000)
    with comm.train(4) as session:
        for action in session.actions:
            forward, mb = action.kind is Kind.FORWARD, action.microbatch
            if comm.rank == 0 and forward:
                session.send("h", value.clone().requires_grad_(), mb)
            elif comm.rank == 0:
                session.recv_grad("h", mb)
            elif forward:
                session.recv("h", mb)
            else:
                session.send_grad("h", value, mb)


@pytest.mark.parametrize("wire", [GLOO, TCP], ids=str)
@pytest.mark.parametrize("host", [0, 1], ids=["of the store's host", "of the other"])
def test_a_cable_is_cut(two_hosts: Hosts, host: int, wire: Wire) -> None:
    with _start(two_hosts, _train_for_ever, document(wire, limits=LIMITS)) as ranks:
        struck_s, endings = _cut(two_hosts, ranks, host)
    for rank, ending in enumerate(endings):
        _check(ending, rf"DeadlineError: rank {rank}: .*from rank {1 - rank} on", struck_s)


def _wait_for_nothing(comm: stagelink.Handler) -> None:
    for connection in comm._plane.connections.values():  # ten times as fast as it is
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000)
    report("going")
    if comm.rank == 0:
        comm.reduce([0.0])
    else:
        comm.evaluate(1).recv("h", 0)


def test_a_cable_is_cut_while_nothing_is_sent(two_hosts: Hosts) -> None:
    """No deadline is near: the kernel's probes, which begin after three seconds, tell it."""
    plan = document(GLOO, limits=PATIENT)
    with _start(two_hosts, _wait_for_nothing, plan) as ranks:
        struck_s, endings = _cut(two_hosts, ranks, 1)
    for rank, ending in enumerate(endings):
        _check(ending, rf"PeerLostError: .*rank {1 - rank}\b", struck_s, within_s=10.0)


def _replicas_for_ever(comm: stagelink.Handler) -> None:
    module = torch.nn.Linear(1000, 1000)
    loss, optimizer = torch.nn.functional.mse_loss, quick_sgd(module)
    runner = stagelink.PipelineRunner(comm, module, loss=loss, optimizer=optimizer)
    batch = {"x": torch.ones(2, 1000), "target": torch.ones(2, 1000)}
    for number in itertools.count():
        runner.train([batch])
        if number == 1:
            report("going")


def test_a_cable_is_cut_between_replicas(two_hosts: Hosts) -> None:
    plan = document(GLOO, (2,), microbatches=2, limits=LIMITS) | {"tensors": [], "links": []}
    with _start(two_hosts, _replicas_for_ever, plan) as ranks:
        struck_s, endings = _cut(two_hosts, ranks, 1)
    for rank, ending in enumerate(endings):
        wanted = rf"DeadlineError: rank {rank}: .* with rank {1 - rank}, of the same stage 's0'"
        _check(ending, wanted, struck_s)


def _fail_to_connect_and_connect(rank: int, world_size: int, store: str, plan: Document) -> Ending:
    """How the first try failed, and when it began."""
    began_s = time.monotonic()
    with pytest.raises(stagelink.ConnectError) as caught, joined(rank, world_size, store, plan):
        pass
    found = Ending(str(caught.value), began_s, time.monotonic())
    report("left")
    plan["limits"]["connect_deadline_s"] = 30.0
    with joined(rank, world_size, store, plan) as comm:
        _both_ways(comm)
    return found


def test_a_cable_is_cut_before_they_connect(two_hosts: Hosts) -> None:
    """And once it is mended, the same processes meet."""
    plan = document(GLOO, limits={**LIMITS, "connect_deadline_s": DEADLINE_S})
    two_hosts.cut(1)
    try:
        with two_hosts.start(_fail_to_connect_and_connect, [0, 1], plan) as ranks:
            for rank in (0, 1):
                ranks.wait_for(rank, "left")
            two_hosts.restore(1)
            endings = ranks.results()
    finally:
        two_hosts.restore(1)
    for ending, wanted in zip(
        endings, (r"missing: 1\b", "missing: 0, which hosts the store"), strict=True
    ):
        assert re.search(wanted, ending.error), ending.error
        assert ending.left_s - ending.raised_s < DEADLINE_S + CLOSE_S + GRACE_S


@pytest.mark.parametrize("stopped", [0, 1], ids=["that hosts the store", "of the other host"])
def test_a_process_is_stopped_and_goes_on(two_hosts: Hosts, stopped: int) -> None:
    other = 1 - stopped
    with _start(two_hosts, _train_for_ever) as ranks:
        ranks.kill(stopped, signal.SIGSTOP)
        struck_s = time.monotonic()
        ranks.wait_for(other, "left")
        ranks.kill(stopped, signal.SIGCONT)
        continued_s = time.monotonic()
        endings = ranks.results()
    _check(endings[other], rf"DeadlineError: rank {other}: .*from rank {stopped} on", struck_s)
    _check(endings[stopped], rf".*rank {other}\b", continued_s)
