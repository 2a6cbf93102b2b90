"""A pipeline of two processes on one GPU trains to the weights that one process has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stagelink import PipelineRunner
from stagelink.testing import run_fresh
from tests.gpu.answers import Answer, Findings
from tests.gpu.plans import pair, ways
from tests.runner.models import (
    build,
    largest_difference,
    line,
    make_batches,
    quick_sgd,
    tensors_of,
    train_alone,
    weights,
)
from tests.support.pipelines import joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler
    from tests.gpu.machines import Machine
    from tests.support.pipelines import Document

__all__ = ["pipeline"]

_SHAPES = line(2)
_SIZES = [13, 13, 9, 3]
_MICROBATCHES = 5
_LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}


def pipeline(machine: Machine) -> Answer:
    """1F1B over cupy."""
    findings = Findings()
    for how, options in ways(machine).items():
        plan = pair(
            machine,
            [machine.cupy],
            options,
            tensors=tensors_of(_SHAPES),
            schedule="1f1b",
            microbatches=_MICROBATCHES,
        )
        with run_fresh(_train, 2, machine, plan) as ranks:
            differences = ranks.results(machine.patience_s)
        for (dtype, limit), *both in zip(
            _LIMITS.items(), *(found.values() for found in differences), strict=True
        ):
            what = f"{how}, {dtype}: weights differ by at most"
            seen = max(both)
            findings.need(what, seen, seen if seen <= limit else f"{limit} or less")
    return findings.answer()


def _train(
    rank: int, world_size: int, store: Store, machine: Machine, plan: Document
) -> dict[str, float]:
    with (
        machine.process(rank),
        joined(rank, world_size, store, plan, machine.transports) as comm,
    ):
        return {str(dtype): _difference(comm, machine.device, dtype) for dtype in _LIMITS}


def _difference(comm: Handler, device: str, dtype: torch.dtype) -> float:
    """Between this stage's weights and those that one process trains."""
    batches = [
        {name: value.to(device) for name, value in batch.items()}
        for batch in make_batches(_SIZES, dtype)
    ]
    stage = comm.stage.index
    module = build(_SHAPES, stage, dtype).to(device)
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=quick_sgd(module),
    )
    runner.train(batches if stage == 0 else None)
    alone = [build(_SHAPES, index, dtype).to(device) for index in range(len(_SHAPES))]
    before = weights(alone[stage])
    train_alone(alone, batches, _MICROBATCHES)
    if largest_difference(before, weights(alone[stage])) == 0:
        raise AssertionError("nothing was trained")
    return largest_difference(weights(module), weights(alone[stage]))
