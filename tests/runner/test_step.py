"""Clipping counts every stage's gradients, and schedulers move with the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from stagelink import Handler, PipelineRunner
from stagelink.errors import UsageError
from stagelink.testing import run_threads
from tests.runner.models import build, line, make_batches, tensors_of
from tests.support.pipelines import LOOPBACK, document, joined

if TYPE_CHECKING:
    from torch.distributed import Store

Weights = dict[str, torch.Tensor]

SHAPES = line(3)
SIZES = [12, 12, 7]
CLIP_NORM = 0.05


def train(comm: Handler, clip_norm: float | None) -> tuple[int, Weights, float]:
    """This stage's index, its weights, and the learning rate at the end."""
    module = build(SHAPES, comm.stage.index)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=optimizer,
        clip_norm=clip_norm,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
    )
    runner.train(make_batches(SIZES) if comm.stage.index == 0 else None)
    state = runner.state_dict()
    runner.load_state_dict(state)
    assert state["scheduler"]["last_epoch"] == len(SIZES)
    return comm.stage.index, module.state_dict(), optimizer.param_groups[0]["lr"]


def train_alone(clip_norm: float | None) -> list[Weights]:
    """Each stage's weights after the same in one process, by torch's own clipping."""
    modules = torch.nn.ModuleList(build(SHAPES, stage) for stage in range(3))
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for batch in make_batches(SIZES):
        optimizer.zero_grad()
        out = modules[2](h1=modules[1](h0=modules[0](x=batch["x"])))
        torch.nn.functional.cross_entropy(out, batch["target"]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(modules.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
    return [module.state_dict() for module in modules]


@pytest.mark.parametrize("clip_norm", [CLIP_NORM, 1e6, None])
def test_weights_are_those_of_one_process(clip_norm: float | None) -> None:
    plan = document(LOOPBACK, [2, 1, 2], tensors_of(SHAPES))

    def rank(rank: int, world_size: int, store: Store) -> tuple[int, Weights, float]:
        with joined(rank, world_size, store, plan) as comm:
            return train(comm, clip_norm)

    alone = train_alone(clip_norm)
    for stage, weights, lr in run_threads(rank, 5):
        assert lr == pytest.approx(0.05)
        for name, value in weights.items():
            assert torch.allclose(value, alone[stage][name], rtol=0, atol=1e-12)


def test_clipping_changes_something() -> None:
    clipped, free = train_alone(CLIP_NORM), train_alone(None)
    assert not torch.allclose(clipped[0]["maps.x-h0.weight"], free[0]["maps.x-h0.weight"])


def test_a_norm_that_bounds_nothing_is_refused() -> None:
    plan = document(LOOPBACK, [1, 1], tensors_of(line(2)))

    def rank(rank: int, world_size: int, store: Store) -> str:
        with joined(rank, world_size, store, plan) as comm:
            with pytest.raises(UsageError, match="clip_norm 0: must be above 0"):
                PipelineRunner(comm, build(line(2), comm.stage.index), clip_norm=0)
            return "refused"

    assert run_threads(rank, 2) == ["refused"] * 2
