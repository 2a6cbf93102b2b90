"""Tensors of a GPU by way of host memory; a double plays the GPU, and takes its time."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from stagelink.testing.conformance import TransportConformance
from stagelink.testing.subject import Subject
from stagelink_gloo import Gloo, staged
from tests.cupy.double import CudaDouble
from tests.cupy.machine import DoubleConfig
from tests.cupy.on_double import DoubleStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Link
    from stagelink.transport.streams import Stream

LO: dict[str, Any] = {"interface": "lo"}


class GlooOnDouble(Gloo):
    """Gloo, where all tensors are a GPU's."""

    name = "gloo-on-double"
    rt: ClassVar[CudaDouble] = CudaDouble(DoubleConfig())

    def stream(self, link: Link) -> Stream:
        del link
        return DoubleStream(self.rt)


class SlowGloo(GlooOnDouble):
    """On a GPU that is seldom done when it has been told what to do."""

    name = "gloo-on-slow-double"
    rt: ClassVar[CudaDouble] = CudaDouble(DoubleConfig(delay_s=0.05))


class TestStaged(TransportConformance):
    transport = GlooOnDouble
    options: ClassVar[dict[str, Any]] = LO


@contextmanager
def _without_waits() -> Iterator[None]:
    """Nobody waits for a copy; so that nobody writes to what is freed, nothing is."""
    kept: list[torch.Tensor] = []
    copy = DoubleStream.copy

    def keeping(self: DoubleStream, target: torch.Tensor, source: torch.Tensor) -> None:
        kept.extend((target, source))
        copy(self, target, source)

    with (
        patch.object(staged, "synchronize", lambda *_: None),
        patch.object(DoubleStream, "copy", keeping),
    ):
        yield
    SlowGloo.rt.deviceSynchronize()


def _pass_slowly(rank: int, world_size: int, store: Store, patched: str) -> int:
    """How many messages came out wrong, where one end does not wait for its copies."""
    with _without_waits() if patched == f"rank {rank}" else nullcontext():
        subject = Subject(SlowGloo.name, (SlowGloo,), LO)
        wrong = 0
        with (
            subject.connect(subject.plan(window=4), rank, world_size, store) as comm,
            comm.evaluate(16) as session,
        ):
            for number in session.mine:
                want = torch.full((50_000,), number, dtype=torch.uint8)
                if rank == 0:
                    session.send("e0", want, number)
                else:
                    got = session.recv("e0", number)
                    assert got is not None
                    wrong += not torch.equal(got, want)
        return wrong


@pytest.mark.parametrize("patched", ["nobody", "rank 0"])
def test_what_is_not_there_yet_is_not_sent(patched: str, rank_pool: RankPool) -> None:
    wrong = rank_pool.run(_pass_slowly, 2, patched)[1]
    assert (wrong > 0) == (patched == "rank 0")
