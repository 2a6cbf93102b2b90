"""Who is missing while ranks connect is named by all who wait, whatever the step."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import HashStore

import stagelink
from stagelink.control.meeting import Meeting
from stagelink.interop.pipedream import CommunicationHandler
from stagelink.links.agreement import Agreement
from stagelink.links.wiring import Wiring
from stagelink.testing import run_fresh, run_threads
from tests.support.pipelines import LOOPBACK, SHM, Wire, document, tensor

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store

DEADLINE_S = 1.0


def _plan(seconds: float = DEADLINE_S, wire: Wire = LOOPBACK) -> stagelink.Plan:
    """A line of three ranks, whose ends do not know each other."""
    tensors = [tensor("h", 0, 1), tensor("k", 1, 2)]
    limits = {"connect_deadline_s": seconds, "close_deadline_s": 5.0}
    return stagelink.Plan.from_dict(document(wire, (1, 1, 1), tensors, limits=limits))


def _end(rank: int, store: Store, plan: stagelink.Plan) -> str:
    """How a rank's `connect` ended."""
    began = time.monotonic()
    try:
        with stagelink.connect(plan, rank=rank, world_size=3, store=store, run_id="run") as comm:
            comm.reduce([0.0])
    except (stagelink.ConnectError, stagelink.AbortedError) as error:
        assert time.monotonic() - began < plan.limits.connect_deadline_s + 10
        return str(error)
    return "connected"


@pytest.mark.parametrize(
    ("started", "missing"),
    [([0, 1], "2"), ([0, 2], "1"), ([1, 2], "0"), ([0], "1, 2"), ([2], "0, 1")],
)
def test_ranks_that_were_not_started(started: list[int], missing: str) -> None:
    store = HashStore()
    texts = run_threads(
        lambda place, count, unused: _end(started[place], store, _plan(0.5)), len(started)
    )
    for text in texts:
        assert f"missing: {missing}, not here within 0.5 s. Was each of them started" in text
        assert "{" not in text


def test_a_rank_that_comes_late_but_in_time() -> None:
    zero_waits = threading.Event()

    def run(rank: int, world_size: int, store: Store) -> str:
        if rank == 2:
            assert zero_waits.wait(20)
        elif rank == 0:
            threading.Timer(0.2, zero_waits.set).start()
        return _end(rank, store, _plan(20.0))

    assert run_threads(run, 3) == ["connected"] * 3


@pytest.mark.parametrize("stopped", [0, 2])
@pytest.mark.parametrize(
    ("where", "step"),
    [
        ((Meeting, "meet"), r"no address \(unix\) from it"),
        ((Meeting, "_wait_greeted"), None),
        ((Agreement, "reach"), "no choice of transports from it"),
        ((Wiring, "open"), None),
    ],
    ids=["addresses", "handshake", "choice", "opening"],
)
def test_a_rank_that_does_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
    stopped: int,
    where: tuple[type[Any], str],
    step: str | None,
) -> None:
    """As one that was stopped; the others wait for it, or for each other."""
    over = threading.Event()
    still_here = [rank for rank in range(3) if rank != stopped]
    cls, name = where
    method = getattr(cls, name)

    def stop_there(self: Any, *args: Any) -> Any:
        plane = self._plane if cls is Meeting else self.plane
        if plane.rank == stopped:
            over.wait(20)
        return method(self, *args)

    monkeypatch.setattr(cls, name, stop_there)
    ended = {rank: threading.Event() for rank in still_here}

    def run(rank: int, world_size: int, store: Store) -> str:
        if rank == stopped:
            threading.Thread(target=_set_after, args=(ended.values(), over)).start()
        try:
            return _end(rank, store, _plan(20.0 if rank == stopped else DEADLINE_S))
        finally:
            if rank in ended:
                ended[rank].set()

    texts = run_threads(run, 3)
    for rank in still_here:
        assert f"missing: {stopped} within 1 s: rank {stopped} came (" in texts[rank]
        if step is not None:
            assert step.replace("\\", "") in texts[rank]


def _set_after(events: Any, event: threading.Event) -> None:
    for one in events:
        one.wait(20)
    event.set()


def _dies(rank: int, world_size: int, store: Store) -> str:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        Meeting.meet = die  # type: ignore[assignment, method-assign]
    return _end(rank, store, _plan(wire=SHM))


def test_a_rank_that_comes_and_dies() -> None:
    with run_fresh(_dies, 3) as ranks:
        zero, one, _ = ranks.outcomes()
    for outcome in (zero, one):
        assert "missing: 2 within 1 s: rank 2 came (" in outcome.value
        assert "and has died; no address (unix) from it" in outcome.value


# -- PipeDream's constructor


class _Impatient(CommunicationHandler):
    tables = {"limits": {"connect_deadline_s": 0.5}}  # noqa: RUF012 - as its callers set it
    device = "cpu"


def _construct(
    handler: type[CommunicationHandler], rank: int, world_size: int, address: Any, port: Any
) -> None:
    handler(
        master_addr=address,
        master_port=port,
        rank=rank,
        local_rank=rank,
        num_ranks_in_server=1,
        world_size=world_size,
        fp16=False,
        backend="gloo",
    )


@pytest.mark.parametrize(("started", "missing"), [([0, 1], "2"), ([1], "0, 2")])
def test_pipedream_s_constructor_names_who_is_missing(
    tmp_path: Path, started: list[int], missing: str
) -> None:
    def run(place: int, count: int, unused: Store) -> str:
        with pytest.raises(stagelink.ConnectError) as caught:
            _construct(_Impatient, started[place], 3, f"file://{tmp_path}/store", 0)
        return str(caught.value)

    for text in run_threads(run, len(started)):
        assert f"missing: {missing}, not here within 0.5 s" in text


@pytest.mark.parametrize(
    ("address", "port", "text"),
    [
        ("", 29500, "master_addr='': that is no host name and no IP address"),
        (None, 29500, "master_addr=None: that is no host name"),
        ("host:1", 29500, "master_addr='host:1': a host's name or IP address, without a port"),
        ("localhost", 99999, "master_port=99999: a port is from 1 to 65535"),
        ("localhost", 0, "master_port=0: a port is from 1 to 65535"),
        ("localhost", -1, "master_port=-1: a port is from 1 to 65535"),
        ("localhost", "abc", "master_port='abc': the port is not a whole number"),
        ("localhost", None, "master_port=None: the port is not a whole number"),
        ("localhost", 29500.0, "master_port=29500.0: the port is not a whole number"),
        ("file://relative", 1, "master_addr='file://relative' has no absolute path"),
        ("tcp://h", 1, "master_addr='tcp://h' has no port"),
    ],
)
def test_pipedream_s_address_is_checked(address: Any, port: Any, text: str) -> None:
    with pytest.raises(stagelink.PlanError) as caught:
        _construct(_Impatient, 0, 1, address, port)
    assert text in str(caught.value)


def test_pipedream_s_host_name_that_nobody_knows() -> None:
    wanted = r"cannot resolve host 'no-such.invalid' within 0.5 s: .*master_addr='no-such.invalid'"
    with pytest.raises(stagelink.ConnectError, match=wanted):
        _construct(_Impatient, 1, 2, "no-such.invalid", 29500)


@pytest.mark.parametrize(
    "limits", [{"connect_deadline_s": "soon"}, {"connect_deadline_s": -1}, {"conect": 1}, "soon"]
)
def test_pipedream_s_limits_are_checked_before_anything_starts(limits: Any) -> None:
    class Wrong(_Impatient):
        tables = {"limits": limits}  # noqa: RUF012 - as its callers set it

    with pytest.raises(stagelink.PlanError, match=r"CommunicationHandler\.tables: limits"):
        _construct(Wrong, 0, 1, "localhost", 29500)
