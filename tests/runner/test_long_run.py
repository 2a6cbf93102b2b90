"""Many epochs of training and evaluation, every one of another kind: right, and nothing grows."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink import PipelineRunner
from tests.runner.models import (
    CLASSES,
    WIDTH,
    build,
    largest_difference,
    line,
    quick_sgd,
    tensors_of,
    train_alone,
    weights,
)
from tests.support.pipelines import GLOO, Ranks

if TYPE_CHECKING:
    from stagelink import Handler
    from stagelink.testing import RankPool

EPOCHS = 20
STAGES = 3
Batches = list[dict[str, torch.Tensor]]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def batches_of(epoch: int) -> Batches:
    """One to three batches of as many items and dimensions as the epoch's number says."""
    generator = torch.Generator().manual_seed(epoch)
    found = []
    for number in range(1 + epoch % 3):
        items = 1 + (5 * epoch + 3 * number) % 13
        shape = (items, *([1 + epoch % 4] * (epoch % 3)))
        x = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
        target = torch.randn(*shape, CLASSES, generator=generator, dtype=torch.float64)
        found.append({"x": x, "target": target})
    return found


def resources() -> tuple[int, int, int]:
    """Resident memory in bytes, threads, descriptors."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    )


def _many_epochs(
    comm: Handler,
) -> tuple[int, dict[str, torch.Tensor], list[float], list[tuple[int, int, int]]]:
    module = build(line(STAGES), comm.stage.index)
    runner = PipelineRunner(comm, module, loss=loss_of, optimizer=quick_sgd(module))
    losses, held = [], []
    for epoch in range(EPOCHS):
        batches = batches_of(epoch) if comm.stage.index == 0 else None
        if epoch % 3 == 2:
            losses.append(runner.evaluate(batches)["loss"])
        else:
            runner.train(batches)
        held.append(resources())
        comm.reduce([0.0])  # nobody closes before all have looked
    return comm.stage.index, weights(module), losses, held


def _alone(microbatches: int) -> tuple[list[torch.nn.Module], list[float]]:
    modules: list[torch.nn.Module] = [build(line(STAGES), stage) for stage in range(STAGES)]
    optimizers = [quick_sgd(module) for module in modules]
    losses = []
    for epoch in range(EPOCHS):
        trains = epoch % 3 != 2
        loss = train_alone(
            modules, batches_of(epoch), microbatches, optimizers, loss=loss_of, steps=trains
        )
        if not trains:
            losses.append(loss)
    return modules, losses


@pytest.mark.timeout(150)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_twenty_epochs_of_all_kinds(schedule: str, rank_pool: RankPool) -> None:
    ranks = Ranks(GLOO, rank_pool)
    plan = ranks.plan((2, 3, 1), tensors_of(line(STAGES)), schedule=schedule, microbatches=5)
    alone, losses = _alone(5)
    for stage, found, seen, held in ranks.run(plan, _many_epochs, timeout_s=120.0):
        assert largest_difference(found, weights(alone[stage])) <= 1e-12
        assert seen == pytest.approx(losses, rel=1e-9)
        memory, threads, descriptors = zip(*held[5:], strict=True)
        assert memory[-1] - memory[0] < 4 << 20
        assert len(set(threads)) == 1
        assert len(set(descriptors)) == 1
