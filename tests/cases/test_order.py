"""Order, replicas, topology: whatever the order, everything arrives once and where it belongs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink.schedule import Kind
from stagelink.testing import run_threads
from stagelink.testing.faults import Gate, Hold, Point, faulty
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import (
    LOOPBACK,
    Document,
    Ranks,
    check_same,
    document,
    joined,
    line,
    tensor,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool


def _value(rank: int, mb: int, name: str = "h") -> torch.Tensor:
    return torch.tensor([float(rank), float(mb), float(ord(name[0]))])


def _replicated(comm: stagelink.Handler, names: tuple[str, ...]) -> tuple[int, list[int]]:
    """Each message says who sent it; each gradient who answered. What this rank handled."""
    sources, targets = (stage.ranks for stage in comm.plan.stages)
    with comm.train(7) as session:
        for action in session.actions:
            mb = action.microbatch
            source, target = sources[mb % len(sources)], targets[mb % len(targets)]
            for name in names:
                sent = _value(source, mb, name).requires_grad_()
                if comm.stage.index == 0 and action.kind is Kind.FORWARD:
                    session.send(name, sent, mb)
                elif comm.stage.index == 0:
                    check_same(session.recv_grad(name, mb), _value(target, -mb, name))
                elif action.kind is Kind.FORWARD:
                    check_same(session.recv(name, mb), sent)
                else:
                    session.send_grad(name, _value(comm.rank, -mb, name), mb)
        return comm.stage.index, list(session.mine)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (1, 3), (3, 1)], ids=str)
def test_c009_replicas_that_do_not_divide(any_ranks: Ranks, shape: tuple[int, int]) -> None:
    handled = any_ranks.run(any_ranks.plan(shape), _replicated, ("h",))
    for stage in (0, 1):
        assert sorted(mb for s, mine in handled if s == stage for mb in mine) == list(range(7))


def _two_by_two(comm: stagelink.Handler) -> tuple[int, int]:
    _replicated(comm, ("a", "b"))
    return len(comm.counters), sum(c.messages > 0 for c in comm.counters.values())


def test_c030_two_by_two_opens_what_it_uses(any_ranks: Ranks) -> None:
    plan = any_ranks.plan((2, 2), [tensor("a", 0, 1), tensor("b", 0, 1)])
    assert any_ranks.run(plan, _two_by_two) == [(2, 2)] * 4


def _runs_out(comm: stagelink.Handler) -> None:
    with comm.evaluate(4) as session:
        for mb in range(3 if comm.rank == 0 else 4):
            if comm.rank == 0:
                session.send("h", torch.ones(2), mb)
            else:
                session.recv("h", mb)


def test_c031_the_peer_ran_out_of_data(any_ranks: Ranks) -> None:
    _, end = any_ranks.run_to_ends(any_ranks.plan(window=4), _runs_out)
    assert end.kind == "PeerClosedError"
    assert end.seconds < 2
    assert end.text.startswith("rank 1: peer rank 0 ")
    assert "it finished after microbatch 2; microbatch 3 (forward, session 0) exp" in end.text
    assert "on edge 'h'" in end.text


def _other_order(comm: stagelink.Handler) -> None:
    sent = [("a", 0), ("b", 0), ("a", 1)]
    taken = [("b", 0), ("a", 0), ("a", 1)]
    with comm.evaluate(2) as session:
        for name, mb in sent if comm.rank == 0 else taken:
            if comm.rank == 0:
                session.send(name, _value(0, mb, name), mb)
            else:
                check_same(session.recv(name, mb), _value(0, mb, name))


def test_c034_receives_in_another_order(any_ranks: Ranks) -> None:
    plan = any_ranks.plan((1, 1), [tensor("a", 0, 1), tensor("b", 0, 1)])
    any_ranks.run(plan, _other_order)


def _backwards(comm: stagelink.Handler) -> None:
    with comm.evaluate(20) as session:
        for mb in range(20):
            if comm.rank == 0:
                session.send("h", _value(0, mb), mb)
            else:
                check_same(session.recv("h", 19 - mb), _value(0, 19 - mb))


def test_c034_receives_in_the_opposite_order(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(window=20), _backwards)


def _line_of_four(comm: stagelink.Handler) -> int:
    last = len(comm.plan.stages) - 1
    inputs = [edge.tensor.name for edge in comm.plan.inputs(comm.stage.index)]
    outputs = [edge.tensor.name for edge in comm.plan.outputs(comm.stage.index)]
    with comm.train(8) as session:
        for action in session.actions:
            mb, stage = action.microbatch, comm.stage.index
            if action.kind is Kind.FORWARD:
                for name in inputs:
                    check_same(session.recv(name, mb), _value(stage - 1, mb, name))
                for name in outputs:
                    session.send(name, _value(stage, mb, name).requires_grad_(), mb)
            else:
                for name in outputs if stage < last else []:
                    check_same(session.recv_grad(name, mb), _value(stage + 1, -mb, name))
                for name in inputs:
                    session.send_grad(name, _value(stage, -mb, name), mb)
    return sum(counters.messages for counters in comm.counters.values())


FOUR = [tensor(f"{kind}{stage}", stage, stage + 1) for stage in range(3) for kind in "hs"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_c036_a_line_of_four_with_two_tensors(ranks: Ranks, schedule: str) -> None:
    plan = ranks.plan((1,) * 4, FOUR, schedule=schedule)
    assert ranks.run(plan, _line_of_four) == [32, 64, 64, 32]


def test_c036_every_pending_is_waited_for(rank_pool: RankPool) -> None:
    gate = Gate()
    cls = faulty(Loopback, Hold(message=1, at=Point.SEND_FINISH, until=gate))
    plan = document(LOOPBACK)
    plan["links"] = [{"transport": "faulty"}]

    def send_three(comm: stagelink.Handler) -> list[bool]:
        with comm.evaluate(3) as session:
            if comm.rank == 1:
                for mb in range(3):
                    session.recv("h", mb)
                comm.reduce([0.0])
                return []
            handles = [session.isend("h", torch.ones(2), mb, copy=False) for mb in range(2)]
            handles[0].wait()
            before = handles[1].done()
            gate.open()
            handles[1].wait()
            session.send("h", torch.ones(2), 2)
            comm.reduce([0.0])
            return [before, handles[1].done()]

    got = Ranks(LOOPBACK, rank_pool).run(plan, send_three, transports=[cls])
    assert got == [[False, True], []]


# -- ranks that hold different ideas of the edges ------------------------------------------------


def _open_only(rank: int, world_size: int, store: Store, plans: list[Document]) -> str:
    try:
        with joined(rank, world_size, store, plans[rank]) as comm:
            comm.reduce([0.0])
    except stagelink.DisagreementError as error:
        return f"same: {error}"
    except stagelink.StagelinkError as error:
        return f"told: {error}"
    return "fine"


def test_c037_edges_in_another_order_are_the_same(ranks: Ranks) -> None:
    a, b = tensor("a", 0, 1), tensor("b", 0, 1)
    plans = [ranks.plan((1, 1), [a, b]), ranks.plan((1, 1), [b, a])]
    assert ranks.run_bare(_open_only, 2, plans) == ["fine", "fine"]


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ([tensor("a", 0, 1, shape=[2])], ["tensor 'b'", "absent"]),
        ([tensor("a", 0, 1, shape=[3]), tensor("b", 0, 1)], ["'a' shape", "[2]", "[3]"]),
        ([tensor("a", 0, 1, shape=[2], dtype="int8"), tensor("b", 0, 1)], ["'a' dtype", "int8"]),
    ],
)
def test_c037_other_edges_are_told_on_both(
    ranks: Ranks, other: list[Document], names: list[str]
) -> None:
    mine = [tensor("a", 0, 1, shape=[2]), tensor("b", 0, 1)]
    plans = [ranks.plan((1, 1), mine), ranks.plan((1, 1), other)]
    for text in ranks.run_bare(_open_only, 2, plans):
        assert "hold different plans" in text
        assert all(name in text for name in names), text


# -- several pipelines in one world --------------------------------------------------------------


def _two_pipelines(
    rank: int, world_size: int, store: Store, plans: list[Document], members: list[list[int]]
) -> str:
    which = next(number for number, ranks in enumerate(members) if rank in ranks)
    place = members[which].index(rank)
    with joined(place, 2, store, plans[which]) as comm, comm.evaluate(8) as session:
        for mb in range(8):
            if comm.stage.index == 0:
                session.send("h", _value(which, mb), mb)
            else:
                check_same(session.recv("h", mb), _value(which, mb))
    return comm.stage.name


@pytest.mark.parametrize("members", [[[0, 2], [1, 3]], [[3, 1], [2, 0]]], ids=str)
def test_c078_two_pipelines_do_not_meet(ranks: Ranks, members: list[list[int]]) -> None:
    plans = [ranks.plan(name="first"), ranks.plan(name="second")]
    stages = ranks.run_bare(_two_pipelines, 4, plans, members)
    assert [stages[rank] for group in members for rank in group] == ["s0", "s1"] * 2


def _stage_of_any(comm: stagelink.Handler) -> str:
    with comm.evaluate(2) as session:
        for mb in range(2):
            stage = comm.stage.index
            if stage:
                check_same(session.recv(f"h{stage - 1}", mb), _value(stage - 1, mb))
            if stage < 3:
                session.send(f"h{stage}", _value(stage, mb), mb)
    return comm.stage.name


def test_c078_ranks_that_are_not_sorted(ranks: Ranks) -> None:
    plan = ranks.plan((1,) * 4, line(4))
    for stage, rank in zip(plan["stages"], (2, 0, 3, 1), strict=True):
        stage["ranks"] = [rank]
    assert ranks.run(plan, _stage_of_any) == ["s1", "s3", "s0", "s2"]


def test_c079_a_rank_in_no_stage() -> None:
    plan = stagelink.Plan.from_dict(document(LOOPBACK, (1, 1, 1), line(3)))
    nowhere: Any = None
    with pytest.raises(ValueError, match=r"rank 3.*|world size.* 4") as caught:
        stagelink.connect(plan, rank=3, world_size=4, store=nowhere or "file:///nowhere/at/all")
    assert isinstance(caught.value, stagelink.PlanError)
    assert "3" in str(caught.value)


def test_c115_two_stages_on_one_rank_are_refused() -> None:
    plan = document(LOOPBACK, (1, 1, 1), line(3))
    plan["stages"][2]["ranks"] = [0]
    with pytest.raises(ValueError, match=r"rank 0"):
        stagelink.Plan.from_dict(plan)


# -- one edge does not hold up another -----------------------------------------------------------


def _sleepy(comm: stagelink.Handler, size: int) -> None:
    with comm.evaluate(20) as session:
        if comm.rank == 0:
            for mb in range(20):
                session.send("a", torch.full((size,), float(mb)), mb)
            for mb in range(20):
                session.send("b", _value(0, mb), mb)
        else:
            for mb in range(20):
                check_same(session.recv("b", mb), _value(0, mb))
            for mb in range(20):
                check_same(session.recv("a", mb), torch.full((size,), float(mb)))


@pytest.mark.parametrize("size", [3, 20_000])
def test_c117_an_edge_that_nobody_reads_holds_up_no_other(any_ranks: Ranks, size: int) -> None:
    plan = any_ranks.plan((1, 1), [tensor("a", 0, 1), tensor("b", 0, 1)], window=20)
    any_ranks.run(plan, _sleepy, size)


def test_c117_a_slow_receive_holds_up_no_other(rank_pool: RankPool) -> None:
    """Two threads of one rank: one waits for a message that does not come yet."""
    there = threading.Event()

    def two_receivers(rank: int, world_size: int, store: Store) -> None:
        plan = document(LOOPBACK, (1, 1), [tensor("a", 0, 1), tensor("b", 0, 1)], window=10)
        with joined(rank, world_size, store, plan) as comm, comm.evaluate(10) as session:
            if rank == 0:
                for mb in range(10):
                    session.send("b", _value(0, mb), mb)
                assert there.wait(20)
                session.send("a", _value(0, 0), 0)
                return
            waiter = threading.Thread(target=session.recv, args=("a", 0))
            waiter.start()
            for mb in range(10):
                check_same(session.recv("b", mb), _value(0, mb))
            assert waiter.is_alive()
            there.set()
            waiter.join(20)
            assert not waiter.is_alive()

    run_threads(two_receivers, 2)
