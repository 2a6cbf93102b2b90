"""Numerics: a pipeline computes what one process computes, and disturbs nothing else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagelink.schedule import Kind
from tests.support.pipelines import (
    GLOO,
    INLINE,
    SHM,
    Ranks,
    check_same,
    document,
    joined,
    line,
    tensor,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    import stagelink
    from stagelink.testing import RankPool
    from tests.support.pipelines import Document, Wire

MICROBATCHES = 4


def _layer(stage: int) -> nn.Linear:
    # Not from the seed of the process, which all threads share.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, 6, 6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    return layer


def _data(mb: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + mb)
    return torch.randn(5, 6, dtype=torch.float64, generator=generator)


def _pass(comm: stagelink.Handler, module: nn.Module, no_sync: Any = None) -> None:
    """One training session of a chain: forward and backward, gradients left in the module."""
    last, stage = len(comm.plan.stages) - 1, comm.stage.index
    kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    with comm.train(MICROBATCHES) as session:
        for action in session.actions:
            mb = action.microbatch
            if action.kind is Kind.FORWARD:
                x = session.recv(f"h{stage - 1}", mb) if stage else None
                y = module(_data(mb) if x is None else x).tanh()
                if stage < last:
                    session.send(f"h{stage}", y, mb)
                kept[mb] = (y, x)
            else:
                y, x = kept.pop(mb)
                y.backward(session.recv_grad(f"h{stage}", mb) if stage < last else y.detach())
                if x is not None:
                    session.send_grad(f"h{stage - 1}", x.grad, mb)


def _alone(stages: int) -> list[torch.Tensor]:
    layers = [_layer(stage) for stage in range(stages)]
    for mb in range(MICROBATCHES):
        y = _data(mb)
        for layer in layers:
            y = layer(y).tanh()
        y.backward(y.detach())
    return [layer.weight.grad for layer in layers if layer.weight.grad is not None]


def _three_steps(comm: stagelink.Handler) -> torch.Tensor:
    layer = _layer(comm.stage.index)
    before = torch.get_rng_state()
    _pass(comm, layer)
    assert torch.equal(torch.get_rng_state(), before)
    gradient = layer.weight.grad
    assert gradient is not None
    return gradient


def test_c105_two_runs_are_equal_and_draw_nothing(any_ranks: Ranks) -> None:
    plan = any_ranks.plan((1, 1, 1), line(3))
    wanted = _alone(3)
    for _ in range(2):
        for got, want in zip(any_ranks.run(plan, _three_steps), wanted, strict=True):
            check_same(got, want)


def _generator_around(rank: int, world_size: int, store: Store, plan: Document) -> bool:
    before = torch.get_rng_state()
    with joined(rank, world_size, store, plan) as comm:
        comm.reduce([1.0])
    return torch.equal(torch.get_rng_state(), before)


def test_c105_open_and_close_draw_nothing(ranks: Ranks) -> None:
    assert ranks.run_bare(_generator_around, 2, ranks.plan()) == [True, True]


# -- a replicated stage under DistributedDataParallel --------------------------------------------


def _with_ddp(rank: int, world_size: int, store: Store, plan: Document) -> list[torch.Tensor]:
    """Ranks 0 and 1 are replicas under DDP, which averages; rank 2 is the next stage."""
    if rank < 2:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("ddp", store), rank=rank, world_size=2
        )
    try:
        with joined(rank, world_size, store, plan) as comm:
            return _ddp_pass(comm)
    finally:
        if rank < 2:
            dist.destroy_process_group()


def _ddp_pass(comm: stagelink.Handler) -> list[torch.Tensor]:
    layer: Any = _layer(comm.stage.index)
    module = nn.parallel.DistributedDataParallel(layer) if comm.stage.index == 0 else layer
    with comm.train(MICROBATCHES) as session:
        ys: dict[int, torch.Tensor] = {}
        for action in session.actions:
            mb = action.microbatch
            if comm.stage.index == 1 and action.kind is Kind.FORWARD:
                x = session.recv("h0", mb)
                assert x is not None
                y = module(x).tanh()
                y.backward(y.detach())
                ys[mb] = x
            elif comm.stage.index == 1:
                session.send_grad("h0", ys.pop(mb).grad, mb)
            elif action.kind is Kind.FORWARD:
                with module.no_sync():
                    ys[mb] = module(_data(mb)).tanh()
                session.send("h0", ys[mb], mb)
            else:
                _backward(module, ys.pop(mb), session.recv_grad("h0", mb), mb == session.mine[-1])
    return [layer.weight.grad]


def _backward(module: Any, y: torch.Tensor, gradient: torch.Tensor | None, last: bool) -> None:
    """As torch's own pipelines do with DDP: only the last backward is told to synchronise."""
    if last:
        module.reducer.prepare_for_backward([y])
        y.backward(gradient)
    else:
        with module.no_sync():
            y.backward(gradient)


@pytest.mark.parametrize("wire", [GLOO, SHM, INLINE[1]], ids=str)
def test_c063_a_replicated_stage_under_ddp(rank_pool: RankPool, wire: Wire) -> None:
    plan = document(wire, (2, 1), line(2))
    zero, one, two = Ranks(wire, rank_pool).run_bare(_with_ddp, 3, plan)
    wanted = _alone(2)
    check_same(zero[0], one[0])
    torch.testing.assert_close(zero[0], wanted[0] / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(two[0], wanted[1], rtol=1e-12, atol=1e-12)


# -- process groups and compilation --------------------------------------------------------------


def _counted_groups(rank: int, world_size: int, store: Store, plan: Document) -> tuple[int, bool]:
    made: list[int] = []
    real = dist.ProcessGroupGloo

    class Counted(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            made.append(1)
            super().__init__(*args)

    dist.ProcessGroupGloo = Counted  # type: ignore[misc, assignment]
    try:
        began = time.monotonic()
        with joined(rank, world_size, store, plan) as comm:
            quick = time.monotonic() - began < 5
            comm.reduce([0.0])
    finally:
        dist.ProcessGroupGloo = real  # type: ignore[misc]
    return len(made), quick


@pytest.mark.parametrize("edges", [10, 40])
def test_c103_one_group_for_all_edges_of_a_pair(rank_pool: RankPool, edges: int) -> None:
    plan = document(GLOO, (1, 1), [tensor(f"t{n}", 0, 1) for n in range(edges)])
    got = Ranks(GLOO, rank_pool).run_bare(_counted_groups, 2, plan)
    assert got == [(1, True), (1, True)]


def _compiled(rank: int, world_size: int, store: Store, plan: Document) -> None:
    with joined(rank, world_size, store, plan) as comm:
        layer = _layer(comm.stage.index)
        module: Any = torch.compile(layer, backend="aot_eager")
        _pass(comm, module)
        check_same(layer.weight.grad, _alone(2)[comm.stage.index])
        _sends_inside(comm)


def _sends_inside(comm: stagelink.Handler) -> None:
    def send_inside(session: stagelink.Session, x: torch.Tensor, mb: int) -> torch.Tensor:
        y = x * 2
        if comm.rank == 0:
            session.send("h0", y, mb)
        else:
            got = session.recv("h0", mb)
            assert got is not None
            y = y + got
        return y + 1

    inside = torch.compile(send_inside, backend="aot_eager")
    with comm.evaluate(3) as session:
        for mb in range(3):
            x = torch.full((2 + mb, 3), float(mb))
            check_same(inside(session, x, mb), x * (2 if comm.rank == 0 else 4) + 1)


def test_c107_compiled_stages(rank_pool: RankPool) -> None:
    plan = document(GLOO, (1, 1), line(2))
    Ranks(GLOO, rank_pool).run_bare(_compiled, 2, plan)
