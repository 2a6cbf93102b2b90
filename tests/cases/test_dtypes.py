"""Data types: every one arrives bit for bit, and takes a gradient exactly when it can."""

from __future__ import annotations

import pytest
import torch

import stagelink
from stagelink.schedule import Kind
from stagelink.transport.contract import Capabilities
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import LOOPBACK, Ranks, carry, check_same, document, tensor

HALVES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def _train_float(comm: stagelink.Handler, dtype: torch.dtype) -> None:
    """A layer on each side in one type, against the two in one process."""
    generator = torch.Generator().manual_seed(3)
    x, w0, w1 = (torch.rand(4, 4, generator=generator).to(dtype) for _ in range(3))
    w0.requires_grad_()
    w1.requires_grad_()
    with comm.train(3) as session:
        for action in session.actions:
            mb = action.microbatch
            if comm.rank == 0 and action.kind is Kind.FORWARD:
                session.send("h", (x + mb) @ w0, mb)
            elif comm.rank == 0:
                gradient = session.recv_grad("h", mb)
                assert gradient is not None
                assert gradient.dtype == dtype
                ((x + mb) @ w0).backward(gradient)
            elif action.kind is Kind.FORWARD:
                h = session.recv("h", mb)
                assert h is not None
                assert h.requires_grad
                (h @ w1).sum().backward()
                session.send_grad("h", h.grad, mb)
    alone = [w.detach().clone().requires_grad_() for w in (w0, w1)]
    for mb in range(3):
        ((x + mb) @ alone[0] @ alone[1]).sum().backward()
    wanted = alone[comm.rank].grad
    assert wanted is not None
    check_same((w0, w1)[comm.rank].grad, wanted)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_c002_floating_types_train(any_ranks: Ranks, dtype: torch.dtype) -> None:
    any_ranks.run(any_ranks.plan(), _train_float, dtype)


def _integers(comm: stagelink.Handler) -> None:
    values = [torch.tensor([0, 1, torch.iinfo(t).max], dtype=t) for t in INTEGERS]
    carry(comm, [*values, torch.tensor([True, False])], (1, 20))


def test_c022_integer_types(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _integers)


def _complex(comm: stagelink.Handler) -> None:
    values = [
        torch.complex(torch.arange(6.0), -torch.arange(6.0)).view(3, 2).requires_grad_(),
        torch.complex(torch.arange(6.0).double(), torch.arange(6.0).double()).view(3, 2),
        torch.complex(torch.arange(6.0), -torch.arange(6.0)).conj(),
        torch.complex(torch.arange(6.0), -torch.arange(6.0)).conj().imag,
    ]
    carry(comm, values, (1, 20))


def test_c067_complex(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _complex)


def _all_patterns(comm: stagelink.Handler) -> None:
    patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    carry(comm, [patterns.view(dtype) for dtype in FLOAT8], (1, 20))


def test_c068_all_patterns_of_float8(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _all_patterns)


class OnlyFloat32(Loopback):
    """A transport that carries nothing else."""

    name = "only-float32"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        auto_rank=0,
        same_process=True,
        in_flight=4,
        copies_on_begin=True,
        dtypes=frozenset({"float32"}),
    )


def _refused_type(comm: stagelink.Handler) -> str:
    wanted = "transport 'only-float32' does not carry float16, only float32"
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            with pytest.raises(stagelink.MessageError, match=wanted) as caught:
                session.send("h", torch.ones(3, dtype=torch.float16), 0)
            session.send("h", torch.ones(3), 1)
        else:
            with pytest.raises(stagelink.RefusedError, match=wanted) as caught:
                session.recv("h", 0)
            assert session.recv("h", 1) is not None
        return str(caught.value)


@pytest.mark.parametrize("inline_bytes", [0, 8192])
def test_c068_a_type_that_the_transport_does_not_carry(
    rank_pool: stagelink.testing.RankPool, inline_bytes: int
) -> None:
    plan = document(LOOPBACK, control={"inline_bytes": inline_bytes})
    plan["links"] = [{"transport": "only-float32"}]
    ranks = Ranks(LOOPBACK, rank_pool)
    texts = ranks.run(plan, _refused_type, transports=[OnlyFloat32])
    said = "rank 0: microbatch 0 (forward, session 0) of edge 'h'"
    assert all(said in text for text in texts)
    assert [text.count("microbatch 0 (forward") for text in texts] == [1, 1]  # on either rank


def _wrong_type(comm: stagelink.Handler, dtype: torch.dtype) -> str:
    wanted = f"edge 'h': the plan declares dtype float32, got {str(dtype).removeprefix('torch.')}"
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            with pytest.raises(stagelink.MessageError) as sent:
                session.send("h", torch.ones(3, 4).to(dtype), 0)
            session.send("h", torch.ones(3, 4), 1)
            text = str(sent.value)
        else:
            with pytest.raises(stagelink.RefusedError) as received:
                session.recv("h", 0)
            assert session.recv("h", 1) is not None
            text = str(received.value)
    assert wanted in text
    return text


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.int64], ids=str)
def test_c020_declared_type(any_ranks: Ranks, dtype: torch.dtype) -> None:
    plan = any_ranks.plan((1, 1), [tensor("h", 0, 1, dtype="float32", shape=[-1, 4])])
    sent, received = any_ranks.run(plan, _wrong_type, dtype)
    assert received.endswith(sent)


def test_c020_dynamic_type(any_ranks: Ranks) -> None:
    values = [
        torch.ones(3, 4).to(t) for t in (torch.float32, torch.float16, torch.int32, torch.int64)
    ]
    any_ranks.run(any_ranks.plan(), carry, values, (4,))
