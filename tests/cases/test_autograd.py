"""Gradients cross the border; graphs do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stagelink.schedule import Kind
from tests.support.pipelines import check_same

if TYPE_CHECKING:
    import stagelink
    from tests.support.pipelines import Ranks


def _kinds() -> list[torch.Tensor]:
    leaf = torch.ones(3, requires_grad=True)
    return [leaf, leaf * 2, torch.ones(3), torch.ones(3, dtype=torch.int64)]


def _flags(comm: stagelink.Handler) -> None:
    with comm.train(4) as session:
        for action in session.actions:
            mb, sent = action.microbatch, _kinds()[action.microbatch]
            if comm.rank == 0 and action.kind is Kind.FORWARD:
                session.send("h", sent, mb)
            elif comm.rank == 0:
                gradient = session.recv_grad("h", mb)
                assert (gradient is not None) == sent.requires_grad
            elif action.kind is Kind.FORWARD:
                got = session.recv("h", mb)
                check_same(got, sent)
                assert got is not None
                assert got.requires_grad == sent.requires_grad
                assert got.is_leaf
                assert got.grad_fn is None
            else:
                session.send_grad("h", torch.ones(3) if sent.requires_grad else None, mb)
    with comm.evaluate(4) as session:
        for mb, sent in enumerate(_kinds()):
            if comm.rank == 0:
                session.send("h", sent, mb)
            else:
                got = session.recv("h", mb)
                assert got is not None
                assert not got.requires_grad


def test_c006_requires_grad_is_the_senders(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _flags)


def _train(comm: stagelink.Handler, count: int, size: tuple[int, ...]) -> None:
    with comm.train(count) as session:
        for action in session.actions:
            mb = action.microbatch
            value = torch.full(size, float(mb), requires_grad=True)
            if comm.rank == 0 and action.kind is Kind.FORWARD:
                session.send("h", value, mb)
            elif comm.rank == 0:
                check_same(session.recv_grad("h", mb), value)
            elif action.kind is Kind.FORWARD:
                check_same(session.recv("h", mb), value)
            else:
                session.send_grad("h", value.detach(), mb)


def _evaluate(comm: stagelink.Handler, count: int, size: tuple[int, ...]) -> None:
    with comm.evaluate(count) as session:
        for mb in session.mine:
            value = torch.full(size, float(mb), requires_grad=True)
            if comm.rank == 0:
                session.send("h", value, mb)
            else:
                check_same(session.recv("h", mb), value)


def _alternate(comm: stagelink.Handler) -> None:
    for _ in range(3):
        _train(comm, 4, (2, 16))
        _evaluate(comm, 1, (8, 16))
        _train(comm, 1, (3, 16))
        _evaluate(comm, 7, (1, 16))


def test_c027_evaluation_of_another_size(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _alternate)


def _no_gradient_once(comm: stagelink.Handler) -> None:
    gradients = [torch.ones(2), None, torch.full((2,), 2.0)]
    with comm.train(3) as session:
        for action in session.actions:
            mb = action.microbatch
            if comm.rank == 0 and action.kind is Kind.FORWARD:
                session.send("h", torch.zeros(2, requires_grad=True), mb)
            elif comm.rank == 0:
                got, wanted = session.recv_grad("h", mb), gradients[mb]
                assert (got is None) == (wanted is None)
                if wanted is not None:
                    check_same(got, wanted)
            elif action.kind is Kind.FORWARD:
                session.recv("h", mb)
            else:
                session.send_grad("h", gradients[mb], mb)


def test_c028_no_gradient_arrives_as_none(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _no_gradient_once)


def _in_the_graph(comm: stagelink.Handler) -> None:
    x, weight = torch.arange(3.0), torch.ones(3, requires_grad=True)
    with comm.train(1) as session:
        if comm.rank == 0:
            h = x * weight
            session.send("h", h, 0)
            assert h.grad_fn is not None
            h.backward(session.recv_grad("h", 0))
            assert weight.grad is not None
            check_same(weight.grad, 3 * x)
        else:
            got = session.recv("h", 0)
            assert got is not None
            assert got.grad_fn is None
            (got * 3).sum().backward()
            session.send_grad("h", got.grad, 0)


def test_c029_a_tensor_that_hangs_in_the_graph(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(), _in_the_graph)
