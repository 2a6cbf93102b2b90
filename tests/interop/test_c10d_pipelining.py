"""Unmodified torch pipelining trains over the backend to the weights that it has on gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.interop.c10d_programs import STAGELINK, in_world, pipelining, tensor_parallel

if TYPE_CHECKING:
    from stagelink.testing import RankPool

SCHEDULES = [
    ("GPipe", 2, 1),
    ("1F1B", 3, 1),
    ("Interleaved1F1B", 2, 2),
    ("InterleavedZeroBubble", 2, 2),
    ("ZBVZeroBubble", 2, 2),
]


@pytest.mark.parametrize(("schedule", "ranks", "stages_each"), SCHEDULES)
def test_the_weights_are_those_on_gloo(
    schedule: str, ranks: int, stages_each: int, rank_pool: RankPool
) -> None:
    ours, theirs = (
        rank_pool.run(in_world, ranks, pipelining, backend, schedule, stages_each)
        for backend in (STAGELINK, "cpu:gloo")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == 4 * stages_each
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize(
    ("schedule", "stages_each", "whole", "kind"),
    [
        ("1F1B", 1, False, "AsyncCollectiveTensor"),
        ("Interleaved1F1B", 2, True, "DTensor"),
    ],
)
def test_tensor_parallel_stages(
    schedule: str, stages_each: int, whole: bool, kind: str, rank_pool: RankPool
) -> None:
    """They end in a collective, and hand on its result while it may still be at work."""
    arguments = (schedule, stages_each, whole)
    ours, theirs = (
        rank_pool.run(in_world, 4, tensor_parallel, backend, *arguments)
        for backend in (STAGELINK, "cpu:gloo")
    )
    for (mine, sent), (other, _) in zip(ours, theirs, strict=True):
        assert sent == {kind}
        assert len(mine) == 4 * stages_each
        assert all(map(torch.equal, mine, other))
