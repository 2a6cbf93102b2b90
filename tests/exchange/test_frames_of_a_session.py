"""What crosses for a session itself, beside its messages: a batch is not a handshake."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink.control.reader import Reader
from stagelink.exchange import openings
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


# -- who opens


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No OPEN follows where a message is to stand for it, so that there is nothing but that."""
    monkeypatch.setattr(openings, "_MOMENT_S", math.inf)
    monkeypatch.setattr(Reader, "blocked", False)
    return monkeypatch


def _open(
    comm: stagelink.Handler, microbatches: int, items: int | None = None
) -> stagelink.Session:
    """The first stage says the number, and the others learn it."""
    return comm.train(microbatches, items=items) if comm.stage.index == 0 else comm.train()


def _again_and_again(comm: stagelink.Handler) -> list[int]:
    found = []
    with posts(comm) as counted:
        for microbatches, items in ((6, 12), (6, 12), (6, 12), (6, 11), (6, 11), (1, 1), (1, 1)):
            with _open(comm, microbatches, items=items) as session:
                assert (session.microbatches, session.items) == (microbatches, items)
                _whole(comm, session)
            found.append(counted.pop(MessageKind.OPEN, 0) // len(comm._plane.peers))
    return found


@pytest.mark.usefixtures("alone")
def test_a_session_like_the_one_before_opens_by_its_first_message(ranks: Ranks) -> None:
    """But where some routes have no message, as with fewer microbatches than replicas."""
    found = ranks.run(ranks.plan((2, 3, 1), line(3)), _again_and_again)
    assert found == [[1, 0, 0, 1, 0, 1, 1]] * 6


@pytest.mark.parametrize("blocked", [False, True])
def test_an_open_follows_where_nothing_is_sent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    """A rank may wait, before it sends, for what its peers do in the session."""
    monkeypatch.setattr(Reader, "blocked", blocked)
    plan = ranks.plan((1, 1), line(2), limits={"first_deadline_s": 10.0})
    told, _ = ranks.run(plan, _reduces_before_it_sends)
    assert told == 1


def _reduces_before_it_sends(comm: stagelink.Handler) -> int:
    with _open(comm, 2) as session:
        _whole(comm, session)
    with posts(comm) as found, _open(comm, 2) as session:
        comm.reduce([0.0])
        _whole(comm, session)
    return found[MessageKind.OPEN] // len(comm._plane.peers)


def _changes_alone(comm: stagelink.Handler) -> None:
    for items in (8, 8, 8 + comm.rank):
        with comm.train(4, items=items):
            comm.reduce([0.0])


@pytest.mark.usefixtures("alone")
def test_who_has_said_nothing_does_so_where_another_says_otherwise(ranks: Ranks) -> None:
    for rank, end in enumerate(ranks.run_to_ends(ranks.plan((1, 1), line(2)), _changes_alone)):
        assert end.kind == "DisagreementError"
        assert end.text.startswith(f"session 2: items is {8 + rank} on rank {rank}, ")


def _leaves_at_once(comm: stagelink.Handler) -> None:
    for _ in range(3):
        with _open(comm, 2) as session:
            assert session.microbatches == 2


@pytest.mark.usefixtures("alone")
def test_who_leaves_without_a_message_has_opened(ranks: Ranks) -> None:
    ranks.run(ranks.plan((1, 1), line(2)), _leaves_at_once)


def _sessions_ahead(comm: stagelink.Handler) -> list[int]:
    """Session 1 is told of by nothing before the OPEN of session 2, as its messages are parked."""
    found = []
    for microbatches in (2, 2, 3):
        with comm.evaluate(microbatches if comm.rank == 0 else None) as session:
            found.append(session.microbatches)
            if comm.rank == 1 and len(found) == 1:
                comm.reduce([0.0])
                assert comm._engine.sessions.records.keys() == {0}
            for mb in range(session.microbatches):
                if comm.rank == 0:
                    session.isend("h0", torch.ones(3), mb)
                else:
                    session.recv("h0", mb)
            if comm.rank == 0 and len(found) == 3:
                comm.reduce([0.0])
    return found


@pytest.mark.usefixtures("alone")
def test_a_session_whose_messages_wait_is_told_of_by_a_later_one(ranks: Ranks) -> None:
    plan = ranks.plan((1, 1), line(2), window=1, schedule="forward")
    assert ranks.run(plan, _sessions_ahead) == [[2, 2, 3]] * 2


def _kept(comm: stagelink.Handler) -> list[int]:
    """What is kept at most, of many sessions; some are as the one before."""
    sessions = comm._engine.sessions
    found = [0, 0, 0]
    for number in range(60):
        with _open(comm, 6 + number // 2 % 3) as session:
            _whole(comm, session)
        terms = [said._terms for said in sessions.openings._peers.values()]
        sizes = len(sessions.records), len(sessions.openings._own._terms), *map(len, terms)
        found = [max(found[0], sizes[0]), max(found[1], sizes[1]), max(found[2], *sizes[2:])]
    return found


def test_sessions_that_are_over_are_forgotten(ranks: Ranks) -> None:
    for records, own, theirs in ranks.run(ranks.plan((2, 2), line(2)), _kept):
        assert records <= 4
        assert max(own, theirs) <= 20  # of 60: as far ahead as windows let ranks be
