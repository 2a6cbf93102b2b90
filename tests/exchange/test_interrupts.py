"""A signal handler's exception leaves every call that waits as itself, and the peers hear it."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import stagelink
from stagelink.exchange.traffic import Traffic
from stagelink.testing import LeakCheck
from tests.interop.c10d_programs import world
from tests.interop.pipedream_driver import Job, Runtime, with_handler
from tests.nccl.over_gloo import NcclOverGloo, let_issuers_end
from tests.support.interrupts import struck
from tests.support.pipelines import SHM, TCP, Document, Wire, document, tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Transport

AFTER_S = 0.1
RAISED = (TimeoutError, ConnectionResetError, stagelink.DeadlineError, stagelink.PeerClosedError)


@contextmanager
def alarm(raised: type[Exception]) -> Iterator[None]:
    """SIGALRM, sent in a moment and again until it is over, raises ``raised("alarm")``."""

    def handler(number: int, frame: object) -> NoReturn:
        del number, frame
        raise raised("alarm")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _recv(comm: stagelink.Handler) -> None:
    with comm.train(2) as session:
        session.recv_grad("h", _sent(session))


def _sent(session: stagelink.Session) -> int:
    session.send("h", torch.ones(3000, requires_grad=True), 0)
    return 0


def _window(comm: stagelink.Handler) -> None:
    with comm.train(8) as session:
        for microbatch in range(8):
            session.send("h", torch.ones(3000), microbatch)


def _has(comm: stagelink.Handler) -> None:
    with comm.train(stagelink.UNTIL_END) as session:
        session.has(0)


def _reduce(comm: stagelink.Handler) -> None:
    comm.reduce([0.0])


def _wait(comm: stagelink.Handler) -> None:
    comm.wait(Future(), "what never comes")


def _opening(comm: stagelink.Handler) -> None:
    comm.train()


CALLS = ((0, _recv), (0, _window), (1, _has), (0, _reduce), (1, _wait), (1, _opening))
"""Which rank calls what, and is interrupted in it."""


def _interrupted(
    comm: stagelink.Handler, call: Callable[[stagelink.Handler], None], raised: type[Exception]
) -> str:
    with pytest.raises(raised) as caught, alarm(raised):
        call(comm)
    assert type(caught.value) is raised, (call, caught.value)
    assert str(caught.value) == "alarm"
    with pytest.raises(stagelink.AbortedError) as again:
        comm.reduce([0.0])
    return str(again.value)


def _hears(comm: stagelink.Handler) -> str:
    try:
        _wait(comm)
    except stagelink.AbortedError as error:
        return str(error)
    return ""


def _each_call(
    rank: int, world_size: int, store: Store, plan: Document, own: tuple[type[Transport], ...]
) -> None:
    leaks = LeakCheck("threads", "descriptors")
    for number, (who, call) in enumerate(CALLS):
        raised = RAISED[number % len(RAISED)]
        told = f"rank {who} was stopped by {raised.__name__}: alarm"
        with stagelink.connect(
            stagelink.Plan.from_dict(plan),
            rank=rank,
            world_size=world_size,
            store=store,
            run_id=f"run {number}",
            transports=own,
        ) as comm:
            if rank == who:
                assert _interrupted(comm, call, raised) == told, call
            else:
                assert _hears(comm) == f"rank {who} reports: {told}", call
        let_issuers_end()
    if rank == 0:
        _connecting(plan, store)
    leaks.verify()


def _connecting(plan: Document, store: Store) -> None:
    for number, raised in enumerate(RAISED[:2]):
        with pytest.raises(raised) as caught, alarm(raised):
            stagelink.connect(
                stagelink.Plan.from_dict(plan),
                rank=0,
                world_size=2,
                store=dist.PrefixStore(f"alone {number}", store),
            )
        assert type(caught.value) is raised
        assert str(caught.value) == "alarm"


NCCL = Wire(NcclOverGloo.name, processes=True)


@pytest.mark.parametrize("wire", [SHM, TCP, NCCL], ids=str)
def test_in_every_call_that_waits(wire: Wire, rank_pool: RankPool) -> None:
    tensors = [tensor("h", 0, 1)]
    plan = document(wire, (1, 1), tensors, limits={"close_deadline_s": 20.0})
    own = (NcclOverGloo,) if wire is NCCL else ()
    rank_pool.run(_each_call, 2, plan, own)


# -- under other names


def _c10d(rank: int, size: int) -> None:
    del size
    got = torch.zeros(3000)
    if rank == 0:
        with pytest.raises(TimeoutError) as caught, alarm(TimeoutError):
            dist.recv(got, 1)
        assert str(caught.value) == "alarm"
    with pytest.raises(dist.DistBackendError, match="rank 0 was stopped by TimeoutError: alarm"):
        dist.recv(got, 1 - rank)


def test_in_torchs_receive(rank_pool: RankPool) -> None:
    rank_pool.run(_in_a_world, 2)


def _in_a_world(rank: int, size: int, store: Store) -> None:
    with world(rank, size, store):
        _c10d(rank, size)


def _pipedream(runtime: Runtime) -> str:
    runtime.start("train", 2)
    if runtime.rank == 1:
        with pytest.raises(stagelink.DeadlineError) as caught, alarm(stagelink.DeadlineError):
            runtime.receive("out0")
        assert str(caught.value) == "alarm"
        return ""
    assert runtime.handler._comm is not None
    return _hears(runtime.handler._comm)


def _pipedream_end(rank: int, size: int, store: Store, job: Job) -> tuple[str, str]:
    texts: list[str] = []
    try:
        with_handler(rank, size, store, job, lambda runtime: texts.append(_pipedream(runtime)))
    except stagelink.StagelinkError as error:
        return "".join(texts), str(error)
    return "".join(texts), ""


def test_in_pipedreams_receive(rank_pool: RankPool) -> None:
    first, other = rank_pool.run(_pipedream_end, 2, Job((1, 1)))
    assert "rank 1 was stopped by DeadlineError: alarm" in first[0], (first, other)


@pytest.mark.parametrize("raised", [KeyError, TypeError])
@pytest.mark.parametrize("look_up", [Traffic._out_routes, Traffic.in_route])
def test_looking_a_name_up(look_up: Callable[..., object], raised: type[Exception]) -> None:
    """It is not a name that is looked up for the first time."""
    table = Mock(out={}, into={}, period=1)
    name = type("Name", (str,), {"__hash__": struck(raised)})("h")
    with pytest.raises(raised, match="a handler's"):
        look_up(Mock(open=True, mine=range(1), _table=table), name, 0)
