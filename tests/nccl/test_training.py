"""Replicas train over nccl to the weights that one process has, in an order that NCCL allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nccl.journal import Journal, faults, journal
from tests.nccl.over_gloo import NcclOverGloo
from tests.nccl.programs import NCCL
from tests.runner.models import Shape, line, quick_sgd, tensors_of
from tests.runner.test_equality import MICROBATCHES, Trained, check, train_both
from tests.support.pipelines import Document, document, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed import Store

    from stagelink.testing import RankPool


def train(
    rank: int, world_size: int, store: Store, plan: Document, shapes: Sequence[Shape]
) -> tuple[Journal, dict[torch.dtype, Trained]]:
    with journal() as entries, joined(rank, world_size, store, plan, [NcclOverGloo]) as comm:
        trained = train_both(comm, shapes, quick_sgd)
    return entries, trained


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (2, 2, 1)], ids=str)
def test_training(replicas: tuple[int, ...], schedule: str, rank_pool: RankPool) -> None:
    shapes = line(len(replicas))
    plan = document(
        NCCL, replicas, tensors_of(shapes), schedule=schedule, microbatches=MICROBATCHES
    )
    ranks = rank_pool.run(train, sum(replicas), plan, shapes)
    check([trained for _, trained in ranks], shapes)
    assert faults([entries for entries, _ in ranks]) == []
