"""What crosses for a session itself, beside its messages: a batch is not a handshake."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink.transport.header import MessageKind
from tests.support.pipelines import Ranks, line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.transport.header import Header


@contextmanager
def posts(comm: stagelink.Handler) -> Iterator[Counter[MessageKind]]:
    """Counts what a rank posts to its peers, by kind."""
    plane, found = comm._engine.plane, Counter[MessageKind]()
    post = plane.post

    def counted(peer: int, header: Header, *rest: Any, **more: Any) -> None:
        found[header.kind] += 1
        post(peer, header, *rest, **more)

    plane.post = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del plane.post


def _whole(comm: stagelink.Handler, session: stagelink.Session) -> None:
    """Carry out the session's actions; every stage has a line's tensors."""
    here, last = comm.stage.index, len(comm.plan.stages) - 1
    for action in session.actions:
        mb = action.microbatch
        if action.kind is stagelink.Kind.BACKWARD:
            gradient = torch.ones(3) if here == last else session.recv_grad(f"h{here}", mb)
            if here > 0:
                session.send_grad(f"h{here - 1}", gradient, mb)
            continue
        if here > 0:
            session.recv(f"h{here - 1}", mb)
        if here < last:
            trains = session.mode == "train"
            session.send(f"h{here}", torch.ones(3, requires_grad=trains), mb)


# -- who leaves


def _through(comm: stagelink.Handler, microbatches: int) -> int:
    with posts(comm) as found:
        for opened in (comm.train, comm.evaluate):
            with opened(microbatches) as session:
                _whole(comm, session)
    return found[MessageKind.END]


@pytest.mark.parametrize("microbatches", [0, 1, 2, 7])
def test_who_is_through_does_not_tell_that_it_left(any_ranks: Ranks, microbatches: int) -> None:
    """Nobody can wait for anything of it, so an END would say nothing."""
    plan = any_ranks.plan((2, 3, 1), line(3))
    assert any_ranks.run(plan, _through, microbatches) == [0] * 6


def _owing(comm: stagelink.Handler) -> int:
    """Rank 1 has taken all, and leaves without a gradient that rank 0 may wait for."""
    with posts(comm) as found, comm.train(2) as session:
        for mb in session.mine:
            if comm.rank == 0:
                session.send("h0", torch.ones(3, requires_grad=True), mb)
            else:
                session.recv("h0", mb)
                if mb == 0:
                    session.send_grad("h0", torch.ones(3), mb)
    return found[MessageKind.END]


def _unsent(comm: stagelink.Handler) -> int:
    """Rank 0 sends one of two, and rank 1 takes what there is."""
    with posts(comm) as found, comm.evaluate(2) as session:
        if comm.rank == 0:
            session.send("h0", torch.ones(3), 0)
        else:
            session.recv("h0", 0)
    return found[MessageKind.END]


def _unended(comm: stagelink.Handler) -> int:
    """All that is known of has come through, and the number is not said."""
    with (
        posts(comm) as found,
        comm.evaluate(stagelink.UNTIL_END if comm.rank == 0 else None) as session,
    ):
        if comm.rank == 0:
            session.send("h0", torch.ones(3), 0)
        else:
            session.recv("h0", 0)
    return found[MessageKind.END]


def _failing(comm: stagelink.Handler) -> int:
    with posts(comm) as found, suppress(ValueError), comm.train(2) as session:
        _whole(comm, session)
        int("of the user")
    return found[MessageKind.END]


@pytest.mark.parametrize(
    ("case", "told"),
    [(_owing, [0, 1]), (_unsent, [1, 1]), (_unended, [1, 1]), (_failing, [1, 1])],
)
def test_who_is_not_through_tells(ranks: Ranks, case: Any, told: list[int]) -> None:
    assert ranks.run(ranks.plan((1, 1), line(2)), case) == told
