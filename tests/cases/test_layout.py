"""Memory layout: what a view shows arrives, whatever its strides and its storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.pipelines import carry

if TYPE_CHECKING:
    import stagelink
    from tests.support.pipelines import Ranks


def _views(*, grad: bool) -> list[torch.Tensor]:
    x = torch.arange(12.0, requires_grad=grad).view(3, 4)
    expanded = torch.arange(3.0, requires_grad=grad).view(3, 1).expand(3, 4)
    return [x.t(), x[:, 1], torch.chunk(x, 2, dim=1)[1], x.flip(0), x[::2, ::2], expanded]


def test_c001_memory_layout(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), carry, _views(grad=False), (1, 20))


def _training_views(comm: stagelink.Handler) -> None:
    carry(comm, _views(grad=True), (20,))


def test_c001_views_with_gradients(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _training_views)


def _slice_of_64_mib(comm: stagelink.Handler) -> int:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            base = torch.arange(16 * 2**20, dtype=torch.float32)
            session.send("h", base[1000:1256], 0)
        else:
            got = session.recv("h", 0)
            assert got is not None
            assert torch.equal(got, torch.arange(1000.0, 1256.0))
            assert got.untyped_storage().nbytes() == 1024
    return sum(counters.payload_bytes for counters in comm.counters.values())


def test_c066_view_of_a_large_storage(any_ranks: Ranks) -> None:
    assert any_ranks.run(any_ranks.plan(), _slice_of_64_mib) == [1024, 1024]


def _channels_last(comm: stagelink.Handler) -> None:
    x = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    x.requires_grad_()
    factor = torch.arange(24.0).view(1, 2, 3, 4)
    with comm.train(1) as session:
        if comm.rank == 0:
            session.send("h", x, 0)
            assert x.is_contiguous(memory_format=torch.channels_last)
            gradient = session.recv_grad("h", 0)
            assert gradient is not None
            assert torch.equal(gradient, factor)
        else:
            got = session.recv("h", 0)
            assert got is not None
            assert torch.equal(got, x)
            assert got.is_contiguous()
            (got * factor).sum().backward()
            assert got.grad is not None
            back = got.grad.to(memory_format=torch.channels_last)
            session.send_grad("h", back, 0)


def test_c109_channels_last(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _channels_last)
