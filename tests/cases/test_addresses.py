"""Addresses, ranks, devices: what is wrong is said at once, and nothing is changed or guessed."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

import stagelink
from stagelink.testing import run_threads
from tests.support.pipelines import LOOPBACK, Document, Ranks, check_same, document, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store


def _plan(**limits: float) -> stagelink.Plan:
    return stagelink.Plan.from_dict(document(LOOPBACK, limits=limits))


@pytest.fixture(scope="module")
def _served_before() -> None:
    """The first store that a process serves opens a pipe that stays, for good."""
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.mark.usefixtures("_served_before")
def test_c015_the_port_is_in_use() -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as holder:
        where = f"127.0.0.1:{holder.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(stagelink.ConnectError, match=f"{where}.*another job may hold the po"):
            stagelink.connect(_plan(), rank=0, world_size=2, store=f"tcp://{where}", run_id="run")
        assert time.monotonic() - began < 15


def test_c015_nobody_is_there() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    plan = _plan(connect_deadline_s=0.5)
    with pytest.raises(stagelink.ConnectError, match=f"no answer from the store at {where} with"):
        stagelink.connect(plan, rank=1, world_size=2, store=f"tcp://{where}", run_id="run")


def test_c015_a_rank_does_not_come() -> None:
    plan = _plan(connect_deadline_s=0.3)
    with pytest.raises(
        stagelink.ConnectError, match=r"rank 0: missing: 1, not here within 0\.3 s"
    ):
        stagelink.connect(plan, rank=0, world_size=2, store=HashStore(), run_id="run")


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (5, 2, "5"),
        (-1, 2, "-1"),
        ("0", 2, "'0'"),
        (True, 2, "True"),
        (0.0, 2, "0.0"),
        (0, 0, "0"),
        (0, 3, "3"),
        (0, "2", "'2'"),
    ],
)
def test_c049_a_wrong_rank_or_world_size(rank: int, world_size: int, text: str) -> None:
    store = HashStore()
    began = time.monotonic()
    with pytest.raises(ValueError, match=text) as caught:
        stagelink.connect(_plan(), rank=rank, world_size=world_size, store=store, run_id="run")
    assert isinstance(caught.value, stagelink.PlanError)
    assert time.monotonic() - began < 15
    assert store.num_keys() == 0  # nothing was started


def _start_together(run: Callable[[int], str], count: int) -> list[str]:
    return run_threads(lambda rank, world_size, store: run(rank), count)


def test_c050_a_rank_is_started_twice() -> None:
    store, plan, taken = HashStore(), document(LOOPBACK), threading.Event()

    def run(number: int) -> str:
        """Ranks 0, 1 and 1; the first two work on."""
        try:
            with joined(min(number, 1), 2, store, plan) as comm:
                assert taken.wait(20)
                return str(comm.reduce([1.0]))
        except stagelink.RankTakenError as error:
            taken.set()
            return str(error)

    texts = _start_together(run, 3)
    refused = [text for text in texts if "rank 1 of run 'run/test' is taken by" in text]
    assert len(refused) == 1
    assert texts.count("[2.0]") == 2


def _device(comm: stagelink.Handler) -> str:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2), 0)
            return "cpu"
        got = session.recv("h", 0)
        assert got is not None
        return got.device.type


def test_c053_cpu_tensors(any_ranks: Ranks) -> None:
    assert any_ranks.run(any_ranks.plan(), _device) == ["cpu", "cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_c053_cuda_where_there_is_none() -> None:
    plan = document(LOOPBACK)
    plan["stages"][0]["device"] = "cuda"
    store = HashStore()
    with pytest.raises(stagelink.PlanError, match="rank 0: stage 's0' is on device 'cuda', and C"):
        stagelink.connect(
            stagelink.Plan.from_dict(plan), rank=0, world_size=2, store=store, run_id="run"
        )
    assert store.num_keys() == 0


def _wrong_device(comm: stagelink.Handler) -> None:
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            with pytest.raises(stagelink.MessageError, match="device 'meta' has no data to send"):
                session.send("h", torch.ones(2, device="meta"), 0)
            session.send("h", torch.ones(2), 1)
        else:
            with pytest.raises(stagelink.RefusedError, match="device 'meta' has no data to send"):
                session.recv("h", 0)
            check_same(session.recv("h", 1), torch.ones(2))


def test_c053_a_tensor_on_another_device(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _wrong_device)


def _twenty_pairs(rank: int, world_size: int, store: Store, plan: Document) -> int:
    """Each pair a pipeline of its own, all of them opened at once."""
    root: Any = PrefixStore("", store)
    clients = [root.clone() for _ in range(20)]

    def one(pair: int, count: int, unused: Store) -> bool:
        own = PrefixStore(f"pair {pair}", clients[pair])
        with joined(rank, world_size, own, plan) as comm:
            return _device(comm) == "cpu"

    return sum(run_threads(one, 20, timeout_s=60.0))


def test_c090_twenty_pairs_at_once(ranks: Ranks) -> None:
    assert ranks.run_bare(_twenty_pairs, 2, ranks.plan()) == [20, 20]


def _environment(rank: int, world_size: int, store: Store, plan: Document) -> bool:
    before = dict(os.environ)
    with joined(rank, world_size, store, plan) as comm:
        _device(comm)
        during = dict(os.environ)
    return before == during == dict(os.environ)


def test_c091_the_environment_is_left_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes have theirs from before; for threads these would lead nowhere, but arguments win.
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert ranks.run_bare(_environment, 2, ranks.plan()) == [True, True]


def test_c092_a_transport_that_is_not_installed(ranks: Ranks) -> None:
    plan = ranks.plan()
    plan["links"] = [{"transport": "ncll"}]
    plan["transports"] = {}
    for end in ranks.run_to_ends(plan, _device):
        assert "unknown transport 'ncll'" in end.text
        assert "this process has " in end.text
        assert "'gloo', 'loopback'" in end.text
        assert end.left == ()


def test_a_wrong_interface_is_said_also_where_another_transport_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = document(LOOPBACK)
    plan["links"] = [{"transport": ["gloo", "loopback"]}]
    plan["transports"] = {"gloo": {"interface": "eht0"}}
    store = HashStore()

    def run(rank: int, world_size: int, unused: Store) -> list[str]:
        with joined(rank, world_size, store, plan) as comm:
            _device(comm)
            return list(comm.transports.values())

    assert run_threads(run, 2) == [["loopback", "loopback"]] * 2
    for rank in (0, 1):
        start = (
            f"rank {rank}: no 'gloo' here: [transports.gloo] interface = 'eht0': there is no su"
        )
        assert any(message.startswith(start) for message in caplog.messages), caplog.messages
