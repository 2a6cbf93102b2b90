"""A pipeline trains to the weights that one process has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink import PipelineRunner
from tests.runner.models import (
    SHARED,
    SKIP,
    Shape,
    build,
    largest_difference,
    line,
    make_batches,
    quick_sgd,
    sgd,
    tensors_of,
    train_alone,
    weights,
)
from tests.support.pipelines import GLOO, LOOPBACK, Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink import Handler
    from stagelink.runner import Summary
    from stagelink.testing import RankPool

# No number divides another, and the last batch has fewer items than microbatches.
SIZES = [13, 13, 13, 9, 3]
MICROBATCHES = 5
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}
LINES = [(1, 1), (1, 1, 1), (2, 1), (1, 2), (3, 2), (2, 3, 1), (4, 3, 1)]

Trained = tuple[int, "Summary", dict[str, torch.Tensor]]


def train(
    comm: Handler, shapes: Sequence[Shape], dtype: torch.dtype, make_optimizer: Any
) -> Trained:
    module = build(shapes, comm.stage.index, dtype)
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=make_optimizer(module),
    )
    summary = runner.train(make_batches(SIZES, dtype) if comm.stage.index == 0 else None)
    return comm.stage.index, summary, weights(module)


def train_both(
    comm: Handler, shapes: Sequence[Shape], make_optimizer: Any
) -> dict[torch.dtype, Trained]:
    return {dtype: train(comm, shapes, dtype, make_optimizer) for dtype in LIMITS}


def check(ranks: list[dict[torch.dtype, Trained]], shapes: Sequence[Shape]) -> None:
    for dtype, limit in LIMITS.items():
        alone = [build(shapes, stage, dtype) for stage in range(len(shapes))]
        loss = train_alone(alone, make_batches(SIZES, dtype), MICROBATCHES)
        for stage, summary, found in (trained[dtype] for trained in ranks):
            assert largest_difference(found, weights(alone[stage])) <= limit
            assert summary.loss == pytest.approx(loss, rel=1e-6)
        same = [trained[dtype][1] for trained in ranks]
        assert same == same[:1] * len(ranks)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("replicas", LINES, ids=str)
def test_lines(replicas: tuple[int, ...], schedule: str, rank_pool: RankPool) -> None:
    shapes = line(len(replicas))
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), schedule=schedule, microbatches=MICROBATCHES)
    check(ranks.run(plan, train_both, shapes, sgd), shapes)


@pytest.mark.parametrize("shapes", [SKIP, SHARED], ids=["skip", "shared"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_a_tensor_that_passes_a_stage(
    shapes: list[Shape], replicas: tuple[int, ...], rank_pool: RankPool
) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), microbatches=MICROBATCHES)
    check(ranks.run(plan, train_both, shapes, sgd), shapes)


@pytest.mark.parametrize(
    ("replicas", "shapes"), [((2, 1), line(2)), ((1, 1, 1), SKIP)], ids=["line", "skip"]
)
def test_processes(replicas: tuple[int, ...], shapes: list[Shape], rank_pool: RankPool) -> None:
    ranks = Ranks(GLOO, rank_pool)
    plan = ranks.plan(replicas, tensors_of(shapes), microbatches=MICROBATCHES)
    check(ranks.run(plan, train_both, shapes, quick_sgd), shapes)


def test_one_stage_of_replicas(rank_pool: RankPool) -> None:
    """Without any tensor between ranks it is data-parallel training."""
    shapes = line(1)
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((3,), microbatches=MICROBATCHES) | {"tensors": []}
    check(ranks.run(plan, train_both, shapes, sgd), shapes)


def test_two_runs_are_alike_bit_for_bit(rank_pool: RankPool) -> None:
    shapes = line(2)
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((3, 2), tensors_of(shapes), microbatches=MICROBATCHES)
    one, other = (ranks.run(plan, train, shapes, torch.float32, sgd) for _ in range(2))
    for (_, _, first), (_, _, second) in zip(one, other, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
