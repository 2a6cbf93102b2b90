"""Shapes and sizes: they may change from message to message, to nothing and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from tests.support.pipelines import carry, check_same, tensor

if TYPE_CHECKING:
    from tests.support.pipelines import Ranks


def _numbered(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count).to(dtype).view(shape).requires_grad_(grad)


def _epochs(comm: stagelink.Handler) -> None:
    sizes = [(4, 16), (4, 16), (2, 16), (4, 16)]
    carry(comm, [_numbered(*size, grad=True) for size in sizes], (3, 1, 4, 20))


def test_c003_last_smaller_batch(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _epochs)


def _dims(comm: stagelink.Handler) -> None:
    sizes = [(2, 3), (6,), (1, 2, 3), (), (1,) * 8, (2, 3)]
    carry(comm, [_numbered(*size, grad=True) for size in sizes], (1, 20))


def test_c023_number_of_dimensions_changes(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _dims)


def _wrong_shape(comm: stagelink.Handler) -> str:
    wanted = r"edge 'h': the plan declares shape \[-1, 3\], got "
    with comm.evaluate(4) as session:
        for mb, size in enumerate([(6,), (1, 2, 3), ()]):
            if comm.rank == 0:
                with pytest.raises(stagelink.MessageError, match=wanted) as caught:
                    session.send("h", _numbered(*size), mb)
            else:
                with pytest.raises(stagelink.RefusedError, match=wanted) as caught:
                    session.recv("h", mb)
        if comm.rank == 0:
            session.send("h", _numbered(2, 3), 3)
        else:
            check_same(session.recv("h", 3), _numbered(2, 3))
    return str(caught.value)


def test_c023_declared_shape(any_ranks: Ranks) -> None:
    plan = any_ranks.plan((1, 1), [tensor("h", 0, 1, shape=[-1, 3])])
    sent, received = any_ranks.run(plan, _wrong_shape)
    assert received.endswith(sent)


def _scalars(comm: stagelink.Handler) -> None:
    values = [
        torch.tensor(3.5, requires_grad=True),
        torch.tensor(7),
        torch.tensor([1.0]),
        torch.tensor(True),
        torch.tensor(-0.0, dtype=torch.float64),
    ]
    carry(comm, values, (1, 20))


def test_c069_zero_dimensions(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _scalars)


def _empties(comm: stagelink.Handler) -> None:
    values = []
    for size in ((0,), (0, 3), (3, 0, 2)):
        for dtype in (torch.float32, torch.int64):
            grad = dtype == torch.float32
            values += [_numbered(*size, dtype=dtype, grad=grad), _numbered(2, dtype=dtype)]
    carry(comm, values, (1, 20))


def test_c070_zero_elements(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _empties)


def _dimension_past_int32(comm: stagelink.Handler) -> None:
    carry(comm, [torch.empty(2**31, 0), torch.empty(0, 2**40), torch.ones(2)], (3,))


def test_c112_a_dimension_that_does_not_fit_32_bits(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _dimension_past_int32)


def _send_unasked(comm: stagelink.Handler, count: int) -> None:
    """Three of four messages of 4,000 bytes are there before the fourth is asked for."""
    with comm.train(count) as session:
        for microbatch in session.mine:
            if comm.stage.index == 0:
                session.send("h", torch.full((1000,), float(microbatch)), microbatch)
            else:
                last = count - 1 - microbatch
                check_same(session.recv("h", last), torch.full((1000,), float(last)))


def test_memory_that_the_plan_could_not_know_is_held_against_its_bound(ranks: Ranks) -> None:
    plan = ranks.plan((1, 1), schedule="gpipe", limits={"receive_bytes": 4 * 4000})
    ranks.run(plan, _send_unasked, 4)
    plan["limits"]["receive_bytes"] = 4 * 4000 - 1
    sender, receiver = ranks.run_to_ends(plan, _send_unasked, 4)
    said = (
        "rank 1: microbatch 3 (forward, session 0) from rank 0 on edge 'h' has 4000 bytes, and "
        "12000 bytes of messages have come that nobody has taken yet; limits.receive_bytes "
        "allows 15999 together"
    )
    assert (receiver.kind, receiver.text) == ("MessageError", said)
    assert sender.kind == "AbortedError"
    assert said in sender.text
    assert [*sender.left, *receiver.left] == []
