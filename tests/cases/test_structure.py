"""What a stage sends: several tensors, with and without gradient, past stages, or none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.schedule import Kind
from tests.support.pipelines import check_same, line, tensor

if TYPE_CHECKING:
    from tests.support.pipelines import Ranks


def _beside_the_activation(comm: stagelink.Handler) -> None:
    mask = torch.tensor([1, 0], dtype=torch.int32)
    with comm.train(3) as session:
        for action in session.actions:
            mb = action.microbatch
            h = torch.full((2, 2), float(mb), requires_grad=True)
            rope = torch.full((2,), 0.5 + mb)
            if comm.rank == 0 and action.kind is Kind.FORWARD:
                session.send("h", h, mb)
                session.send("mask", mask, mb)
                session.send("rope", rope, mb)
            elif comm.rank == 0:
                check_same(session.recv_grad("h", mb), torch.full((2, 2), 0.5 + mb))
                assert session.recv_grad("mask", mb) is None
                assert session.recv_grad("rope", mb) is None
                assert rope.grad is None
            elif action.kind is Kind.FORWARD:
                got = {name: session.recv(name, mb) for name in ("h", "mask", "rope")}
                for name, sent in (("h", h), ("mask", mask), ("rope", rope)):
                    check_same(got[name], sent)
                assert [t is not None and t.requires_grad for t in got.values()] == [True, 0, 0]
                kept = got
            else:
                assert kept["h"] is not None
                assert kept["rope"] is not None
                (kept["h"] * kept["rope"]).sum().backward()
                session.send_grad("h", kept["h"].grad, mb)
                session.send_grad("rope", None, mb)
    messages = [c.messages for link, c in comm.counters.items() if link.source == comm.rank]
    # Exactly one gradient for each microbatch.
    assert messages == [9 if comm.rank == 0 else 3]


def test_c005_tensors_without_gradient(any_ranks: Ranks) -> None:
    tensors = [tensor("h", 0, 1), tensor("mask", 0, 1), tensor("rope", 0, 1)]
    any_ranks.run(any_ranks.plan((1, 1), tensors), _beside_the_activation)


def _skip(comm: stagelink.Handler) -> list[float]:
    """Stage 0's s goes to 1 and 3; y = sum over h3·s3 + …, all in float64."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    weight = torch.tensor([0.5, -1.5], dtype=torch.float64, requires_grad=True)
    kept: dict[int, dict[str, torch.Tensor]] = {}
    with comm.train(6) as session:
        for action in session.actions:
            mb, stage = action.microbatch, comm.stage.index
            if action.kind is Kind.FORWARD:
                kept[mb] = _skip_forward(session, stage, mb, x * (mb + 1), weight)
            else:
                _skip_backward(session, stage, mb, kept.pop(mb))
    grad = weight.grad
    return [] if grad is None else [float(value) for value in grad]


def _skip_forward(
    session: stagelink.Session, stage: int, mb: int, x: torch.Tensor, weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    took = {}
    for name in ([], ["h0", "s"], ["h1"], ["h2", "s"])[stage]:
        value = session.recv(name, mb)
        assert value is not None
        took[name] = value
    if stage == 0:
        h, s = x * weight, x * weight * weight
        session.send("s", s, mb)
        took["out s"] = s
    else:
        h = torch.stack(list(took.values())).prod(0) * weight
    if stage < 3:
        session.send(f"h{stage}", h, mb)
    took["out"] = h
    return took


def _skip_backward(
    session: stagelink.Session, stage: int, mb: int, took: dict[str, torch.Tensor]
) -> None:
    out = took.pop("out")
    grad = torch.ones_like(out) if stage == 3 else session.recv_grad(f"h{stage}", mb)
    assert grad is not None
    if stage == 0:
        skip = session.recv_grad("s", mb)
        torch.autograd.backward([out, took.pop("out s")], [grad, skip])
    else:
        out.backward(grad)
    for name, value in took.items():
        session.send_grad(name, value.grad, mb)


def _skip_alone() -> list[list[float]]:
    weights = [
        torch.tensor([0.5, -1.5], dtype=torch.float64, requires_grad=True) for _ in range(4)
    ]
    for mb in range(6):
        x = torch.tensor([1.0, 2.0], dtype=torch.float64) * (mb + 1)
        s = x * weights[0] * weights[0]
        h = x * weights[0]
        h = h * s * weights[1]
        h = h * weights[2]
        (h * s * weights[3]).sum().backward()
    return [[float(v) for v in w.grad] for w in weights if w.grad is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_c071_a_skip_connection_with_two_users(ranks: Ranks, schedule: str) -> None:
    plan = ranks.plan((1,) * 4, [*line(4), tensor("s", 0, 1, 3)], schedule=schedule)
    for got, wanted in zip(ranks.run(plan, _skip), _skip_alone(), strict=True):
        assert got == pytest.approx(wanted, rel=1e-12)


def _ids(comm: stagelink.Handler) -> int:
    with comm.train(4) as session:
        for action in session.actions:
            if action.kind is Kind.FORWARD:
                _ids_forward(session, comm.stage.index, action.microbatch)
            else:
                _ids_backward(session, comm.stage.index, action.microbatch)
    own = [c.messages for link, c in comm.counters.items() if link == _link(comm, 2, 0)]
    return sum(own)


def _ids_forward(session: stagelink.Session, stage: int, mb: int) -> None:
    ids = torch.tensor([3, 1, 2]) + mb
    if stage == 0:
        session.send("ids", ids, mb)
    if stage == 2:
        check_same(session.recv("ids", mb), ids)
    h = session.recv(f"h{stage - 1}", mb) if stage else torch.ones(2).requires_grad_()
    assert h is not None
    if stage < 2:
        session.send(f"h{stage}", h * 2, mb)


def _ids_backward(session: stagelink.Session, stage: int, mb: int) -> None:
    gradient = session.recv_grad(f"h{stage}", mb) if stage < 2 else torch.ones(2)
    if stage:
        session.send_grad(f"h{stage - 1}", gradient, mb)
    if stage == 0:
        assert session.recv_grad("ids", mb) is None
    if stage == 2:
        session.send_grad("ids", None, mb)


def _link(comm: stagelink.Handler, source: int, target: int) -> object:
    found = [link for link in comm.counters if (link.source, link.target) == (source, target)]
    return found[0] if found else None


def test_c072_a_skip_tensor_without_gradient(any_ranks: Ranks) -> None:
    plan = any_ranks.plan((1,) * 3, [*line(3), tensor("ids", 0, 2)])
    assert any_ranks.run(plan, _ids) == [0, 0, 0]  # no gradient message from 2 to 0


def _none_and_objects(comm: stagelink.Handler) -> None:
    h, aux = torch.ones(2, requires_grad=True), torch.ones(3)
    wrong: object = object()
    with comm.train(4) as session:
        if comm.rank == 0:
            for mb in range(4):
                session.isend("h", h, mb)
            session.isend("aux", aux, 0)
            session.isend("aux", None, 1)
            with pytest.raises(TypeError, match="only tensors and None can be sent, not 'object'"):
                session.isend("aux", wrong, 2)  # type: ignore[arg-type]
            session.isend("aux", aux, 3)
            for mb in range(4):
                assert session.recv_grad("h", mb) is None
        else:
            for mb in range(4):
                check_same(session.recv("h", mb), h)
                session.send_grad("h", None, mb)
            check_same(session.recv("aux", 0), aux)
            assert session.recv("aux", 1) is None
            with pytest.raises(stagelink.RefusedError, match="only tensors and None can be sent"):
                session.recv("aux", 2)
            check_same(session.recv("aux", 3), aux)


def test_c073_none_and_objects(any_ranks: Ranks) -> None:
    plan = any_ranks.plan((1, 1), [tensor("h", 0, 1), tensor("aux", 0, 1)], window=4)
    any_ranks.run(plan, _none_and_objects)


def _two_of_three(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("a", torch.ones(2), 0)
            session.send("b", torch.ones(2), 0)
            comm.reduce([0.0], deadline_s=20)  # the next call
        else:
            for name in ("a", "b", "c"):
                session.recv(name, 0)


def test_c074_fewer_tensors_than_expected(any_ranks: Ranks) -> None:
    limits = {"deadline_s": 0.5, "first_deadline_s": 0.5}
    tensors = [tensor(name, 0, 1) for name in "abc"]
    plan = any_ranks.plan((1, 1), tensors, limits=limits)
    sender, receiver = any_ranks.run_to_ends(plan, _two_of_three)
    assert receiver.kind == "DeadlineError"
    assert receiver.text == (
        "rank 1: nothing came from rank 0 on edge 'c' within 0.5 s; expected microbatch 0 "
        "(forward, session 0), got nothing yet in this session; rank 0 waits for rank 1 "
        "(reduction 0), so the ranks wait for each other in a cycle"
    )
    assert sender.text == f"rank 1 reports: {receiver.text}"
    assert max(sender.seconds, receiver.seconds) < 5
