"""Sessions and handlers that are left while messages wait: each arrives, or its sender is told."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import stagelink
from stagelink.schedule import UNTIL_END
from stagelink.transport.contract import Receiver, Sender
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import LOOPBACK, Ranks, check_same, document, tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.deadline import Deadline
    from stagelink.testing import RankPool
    from stagelink.transport.contract import Announce, Done, Link, Message, Port
    from stagelink.transport.header import Header

WINDOW = 2
SENT = 5
"""More than a window takes."""


def _value(microbatch: int) -> torch.Tensor:
    return torch.full((3000,), float(microbatch))


def _isend(session: stagelink.Session, name: str = "h", **how: bool) -> list[stagelink.SendHandle]:
    return [session.isend(name, _value(mb), mb, **how) for mb in range(SENT)]


def _recv(session: stagelink.Session, name: str = "h") -> None:
    for mb in range(SENT):
        check_same(session.recv(name, mb), _value(mb))


def _left_at_once(comm: stagelink.Handler) -> None:
    if comm.rank == 0:
        with suppress(ValueError), comm.evaluate(SENT + 1) as session:
            handles = _isend(session, copy=False)
            int("of the user")
        for handle in handles:
            handle.wait()
        comm.reduce([0.0])
        return
    with comm.evaluate(SENT + 1) as session:
        began = time.monotonic()
        # What will not come is told at once, also where what will come has no place yet.
        with pytest.raises(stagelink.PeerClosedError, match="left session 0 after ValueError: in"):
            session.recv("h", SENT)
        assert time.monotonic() - began < 10
        _recv(session)
        comm.reduce([0.0])


def test_what_was_sent_arrives_though_an_error_ended_its_session(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan(window=WINDOW), _left_at_once)


def _two_sessions(comm: stagelink.Handler) -> None:
    """The second session's messages go behind those of the first, be they read or not."""
    for reads in (True, False, True):
        with comm.evaluate(SENT) as session:
            if comm.rank == 0:
                _isend(session)
            if not reads:
                comm.reduce([0.0])
            elif comm.rank == 1:
                _recv(session)


def _until_end(comm: stagelink.Handler) -> None:
    with comm.evaluate(UNTIL_END) as session:
        if comm.rank == 0:
            _isend(session)
            session.end(SENT)
        else:
            taken = [action.microbatch for action in session.actions if _recv_one(session, action)]
            assert taken == [*range(SENT)]


def _recv_one(session: stagelink.Session, action: stagelink.Action) -> bool:
    check_same(session.recv("h", action.microbatch), _value(action.microbatch))
    return True


def _with_gradients(comm: stagelink.Handler) -> None:
    """A place is free again when the gradient has come, that nobody asks for any more."""
    with comm.train(SENT) as session:
        for mb in range(SENT):
            if comm.rank == 0:
                session.isend("h", _value(mb).requires_grad_(), mb)
                continue
            got = session.recv("h", mb)
            assert got is not None
            check_same(got.detach(), _value(mb))
            session.isend_grad("h", torch.ones(3000), mb)


@pytest.mark.parametrize("case", [_two_sessions, _until_end, _with_gradients])
def test_what_was_sent_arrives_in_every_kind_of_session(
    ranks: Ranks, case: Callable[[stagelink.Handler], None]
) -> None:
    ranks.run(ranks.plan(window=WINDOW), case)


def _several_consumers(comm: stagelink.Handler) -> None:
    with comm.evaluate(SENT) as session:
        if comm.rank == 0:
            _isend(session)
        comm.reduce([0.0])
        if comm.rank == 1:
            _recv(session)
        # Rank 2 reads nothing, and leaves.


def test_a_consumer_that_leaves_takes_nothing_from_another(ranks: Ranks) -> None:
    ranks.run(ranks.plan((1, 1, 1), [tensor("h", 0, 1, 2)], window=WINDOW), _several_consumers)


def _nobody_reads(comm: stagelink.Handler) -> None:
    session = comm.evaluate(SENT)
    if comm.rank == 0:
        _isend(session)
        session.leave()
        with pytest.raises(stagelink.DeadlineError, match=r"not delivered within 0.5 s: 3 on 0→1"):
            comm.close(0.5)
        return
    with pytest.raises(stagelink.PeerClosedError):
        comm.reduce([0.0])
    session.leave()


def test_a_close_tells_of_what_waits_for_who_does_not_read(ranks: Ranks) -> None:
    plan = ranks.plan(window=WINDOW)
    ranks.run(plan, _nobody_reads)


def _closed_in_its_session(comm: stagelink.Handler) -> None:
    session = comm.evaluate(SENT)
    if comm.rank == 0:
        _isend(session)
    comm.reduce([0.0])
    comm.close()


def test_nothing_waits_for_who_closes(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=WINDOW), _closed_in_its_session)


# -- a receiver that is gone, and a sender that cannot see it -------------------------------------


class Blind(Loopback):
    """Its sends wait for nothing but their abort; and nothing is ever received."""

    name = "blind"
    capabilities = replace(Loopback.capabilities, in_flight=2)
    raises = True

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return BlindSender(raises=self.raises)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return BlindReceiver()


class Quiet(Blind):
    """An abort may make it say that it is done as well as that it has failed."""

    name = "quiet"
    raises = False


class BlindSender(Sender):
    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.begun: list[Done] = []

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        announce()
        self.begun.append(done)
        return True

    def abort(self, cause: BaseException) -> None:
        for done in self.begun:
            if self.raises:
                done.failed(ConnectionAbortedError("given up"))
            else:
                done()


class BlindReceiver(Receiver):
    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        accept()


def _closes_early(comm: stagelink.Handler) -> str:
    session = comm.evaluate(SENT)
    if comm.rank == 1:
        comm.reduce([0.0])
        comm.close(0.3)
        return ""
    handles = _isend(session)
    comm.reduce([0.0])
    with pytest.raises(stagelink.PeerClosedError, match="rank 1 closed; room for 'h' of micro"):
        handles[0].wait()
    with pytest.raises(stagelink.PeerClosedError, match="peer rank 1 closed"):
        handles[-1].wait()
    began = time.monotonic()
    with pytest.raises(stagelink.PeerClosedError) as caught:
        comm.close()
    assert time.monotonic() - began < 10
    return str(caught.value)


@pytest.mark.parametrize("transport", [Blind, Quiet])
def test_a_sender_whose_receiver_has_gone_is_aborted_at_once(
    rank_pool: RankPool, transport: type[Blind]
) -> None:
    plan = document(LOOPBACK, window=WINDOW, limits={"close_deadline_s": 30.0})
    plan["links"] = [{"transport": transport.name}]
    text, _ = Ranks(LOOPBACK, rank_pool).run(plan, _closes_early, transports=[transport])
    assert text == (f"rank 0: not delivered, the peer closed: {SENT} on 0→1 by {transport.name}")
