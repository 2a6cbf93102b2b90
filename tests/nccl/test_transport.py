"""What the transport says of itself, whom it refuses, and what it asks of torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

import stagelink
from stagelink.deadline import Deadline
from stagelink.errors import TransportError
from stagelink.transport.contract import Endpoint, Link
from stagelink_nccl import Nccl, NcclOptions
from stagelink_nccl.groups import NcclGroups, PairGroup
from tests.nccl.over_gloo import GlooGroup, NcclOverGloo, let_issuers_end
from tests.nccl.programs import NCCL
from tests.support.pipelines import document, joined

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Port

LINK = Link(0, 1, "nccl", "cuda")


def _place(rank: int, **says: Any) -> Endpoint:
    description = {"version": [2, 28, 9], "uuid": f"GPU-{rank}", "options": {}, **says}
    return Endpoint(rank, "server", f"process {rank}", description)


def _verdict(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    nccl = Nccl(NcclOptions())
    here, there = _place(0, **mine), _place(1, **theirs)
    verdict = nccl.can_connect(LINK, here, there)
    assert verdict.ok == nccl.can_connect(LINK, there, here).ok
    assert verdict.ok == (not verdict.reason)
    return verdict.reason


def test_two_gpus_and_one_nccl() -> None:
    assert _verdict({}, {}) == ""
    assert "both ranks are on one GPU (GPU-7)" in _verdict({"uuid": "GPU-7"}, {"uuid": "GPU-7"})
    assert "differ in version" in _verdict({"version": [2, 28, 9]}, {"version": [2, 30, 3]})
    assert "differ in options" in _verdict({"options": {"eager": True}}, {})


def test_an_nccl_that_shares_a_device() -> None:
    shares = {"uuid": "GPU-7", "shares_device": True}
    assert _verdict(shares, shares) == ""
    assert "one GPU" in _verdict(shares, {"uuid": "GPU-7"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    verdict = Nccl.probe(NcclOptions())
    assert not verdict
    assert "NCCL" in verdict.reason or "CUDA" in verdict.reason


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_ctas": -1}, "numbers of blocks"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas = 8 is above max_ctas = 4"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NcclOptions(**options)


class FakeBackend:
    """Writes down what is asked of one of torch's process groups."""

    class Options:
        def __init__(self) -> None:
            self.config = type("Config", (), {})()

    def __init__(self, store: Any = None, rank: int = 0, size: int = 2, options: Any = None):
        self.made = (store, rank, size, options)
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


class FakePort:
    link = LINK

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def store(self) -> Store:
        return dist.HashStore()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_asked_of_nccl(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeBackend, raising=False)
    before = dict(os.environ)
    options = NcclOptions(max_ctas=4)
    group = NcclGroups().connect(cast("Port", FakePort(rank)), options, Deadline(1.0))
    backend = cast("Any", group)._backend
    _, number, size, given = backend.made
    assert (number, size) == (rank, 2)
    assert vars(given.config) == {"max_ctas": 4}
    assert given._timeout.days >= 1  # its watchdog would end the process
    assert dict(os.environ) == before


@pytest.mark.parametrize("sends", [True, False])
def test_broadcast(sends: bool) -> None:
    backend, buffer = FakeBackend(), torch.zeros(3, dtype=torch.uint8)
    PairGroup(backend, NcclOptions(), sends=sends).start(buffer)
    ((name, tensors, options),) = backend.calls
    assert (name, tensors) == ("broadcast", [buffer])
    assert (options.rootRank, options.asyncOp) == (0, True)


@pytest.mark.parametrize(("sends", "call"), [(True, ("send", 1)), (False, ("recv", 0))])
def test_send_and_receive(sends: bool, call: tuple[str, int]) -> None:
    backend, buffer = FakeBackend(), torch.zeros(3, dtype=torch.uint8)
    PairGroup(backend, NcclOptions(operation="send_recv"), sends=sends).start(buffer)
    assert backend.calls == [(call[0], [buffer], call[1], 0)]


@pytest.mark.parametrize(("broken", "call"), [(True, "abort"), (False, "shutdown")])
def test_only_a_group_that_may_be_stuck_is_aborted(broken: bool, call: str) -> None:
    backend = FakeBackend()
    PairGroup(backend, NcclOptions(), sends=True).close(broken=broken)
    assert backend.calls[-1] == (call,)
    assert [name for name, *_ in backend.calls[:-1]] == ["_set_default_timeout"] * broken


def _connect_twice(rank: int, world_size: int, store: Store) -> str:
    plan = document(NCCL)
    with joined(rank, world_size, store, plan, [NcclOverGloo]):
        try:
            with joined(rank, world_size, dist.PrefixStore("2", store), plan, [NcclOverGloo]):
                return "both were opened"
        except stagelink.StagelinkError as error:
            text = str(error)
    with joined(rank, world_size, dist.PrefixStore("3", store), plan, [NcclOverGloo]):
        return text


def test_a_second_handler_is_refused_as_long_as_there_is_one(rank_pool: RankPool) -> None:
    for text in rank_pool.run(_connect_twice, 2):
        assert "another handler of this process uses nccl" in text


def _fails_in_the_middle(rank: int, world_size: int, store: Store) -> str:
    count = 0
    start = GlooGroup.start

    def start_twice(group: GlooGroup, buffer: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        if rank == 0 and count == 3:
            raise RuntimeError("NCCL WARN unhandled system error")
        return start(group, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooGroup, "start", start_twice)
        try:
            with joined(rank, world_size, store, document(NCCL), [NcclOverGloo]) as comm:
                _exchange(comm)
        except (TransportError, stagelink.AbortedError) as error:
            let_issuers_end()
            return str(error)
    return "nothing happened"


def _exchange(comm: stagelink.Handler) -> None:
    with comm.evaluate(20) as session:
        for microbatch in session.mine:
            if comm.rank == 0:
                session.send("h", torch.zeros(1000), microbatch)
            else:
                session.recv("h", microbatch)
        comm.reduce([0.0])


def test_what_nccl_says_fails_the_handler_on_both_ranks(rank_pool: RankPool) -> None:
    for text in rank_pool.run(_fails_in_the_middle, 2):
        assert "NCCL WARN unhandled system error" in text
