"""Loopback hands memory over within the process; with ``rendezvous`` only when it is taken."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import pytest
import torch

import stagelink
from stagelink.transport import loopback
from stagelink.transport.contract import FINISHED, Deadline, Link, Message, Receiver, Sender
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.loopback import Loopback, LoopbackOptions
from tests.support.pipelines import LOOPBACK, RENDEZVOUS, Ranks, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Pending, Port

LINK = Link(0, 1, "loopback", "cpu")


class Ports:
    """Both ends' ports in one: notes go to the twin at once."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.noted: list[bytes] = []
        self._changed = threading.Condition()

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        self.noted.append(note)
        if self.sender is not None:
            self.sender.on_note(note, fds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, deadline.remaining_s)


class Pair:
    """A sender and its receiver; `send` returns the pending and the note that was announced."""

    def __init__(self, *, rendezvous: bool) -> None:
        transport = Loopback(LoopbackOptions(rendezvous=rendezvous))
        self.ports = Ports()
        port = cast("Port", self.ports)
        self.sender = transport.open_sender(LINK, port, Deadline(1))
        self.receiver: Receiver = transport.open_receiver(LINK, port, Deadline(1))
        self.ports.sender = self.sender

    def send(self, payload: torch.Tensor) -> tuple[Pending | None, bytes]:
        notes: list[bytes] = []
        header = Header(MessageKind.DATA, payload_bytes=payload.numel())
        pending = self.sender.begin(
            Message(header, payload), lambda note=b"", fds=(): notes.append(note)
        )
        (note,) = notes
        return pending, note

    def take(self, note: bytes) -> torch.Tensor:
        header = Header(MessageKind.DATA)
        pending = self.receiver.begin(header, note, (), lambda: torch.empty(0))
        payload = pending.finish(Deadline(1))
        assert payload is not None
        return payload


@pytest.fixture(autouse=True)
def _nothing_stays_on_the_shelf() -> object:
    before = set(loopback._shelf)
    yield
    assert set(loopback._shelf) == before


def test_a_send_is_done_at_once_and_its_bytes_are_copied() -> None:
    pair = Pair(rendezvous=False)
    payload = torch.full((4,), 7, dtype=torch.uint8)
    pending, note = pair.send(payload)
    payload.fill_(9)
    assert pending is FINISHED
    assert pair.take(note).tolist() == [7] * 4


def test_a_rendezvous_is_done_when_it_is_taken() -> None:
    pair = Pair(rendezvous=True)
    pending, note = pair.send(torch.ones(4, dtype=torch.uint8))
    assert pending is not None
    with pytest.raises(TimeoutError, match=r"did not take the message within 0\.05 s"):
        pending.finish(Deadline(0.05))
    taker = threading.Timer(0.05, pair.take, args=(note,))
    taker.start()
    assert pending.finish(Deadline(20)) is None
    taker.join()


def test_messages_are_told_apart_and_taken_in_any_order() -> None:
    pairs = [Pair(rendezvous=False) for _ in range(2)]
    sent = [
        (pair, pair.send(torch.full((3,), 10 * n + k, dtype=torch.uint8))[1], 10 * n + k)
        for n, pair in enumerate(pairs)
        for k in range(3)
    ]
    for pair, note, value in reversed(sent):
        assert pair.take(note).tolist() == [value] * 3


def test_what_was_taken_is_the_receivers_own_memory() -> None:
    pair = Pair(rendezvous=False)
    payload = torch.ones(4, dtype=torch.uint8)
    _, note = pair.send(payload)
    taken = pair.take(note)
    assert taken.data_ptr() != payload.data_ptr()
    taken.fill_(3)
    assert payload.tolist() == [1] * 4


def test_abort_clears_what_nobody_took() -> None:
    pair = Pair(rendezvous=True)
    for _ in range(3):
        pair.send(torch.ones(4, dtype=torch.uint8))
    pair.sender.abort(RuntimeError("gone"))


def test_close_leaves_what_was_sent_to_a_slow_receiver() -> None:
    pair = Pair(rendezvous=False)
    _, note = pair.send(torch.ones(4, dtype=torch.uint8))
    pair.sender.close(Deadline(1))
    assert pair.take(note).tolist() == [1] * 4


def _many_unread(comm: stagelink.Handler, fails: bool) -> None:
    with comm.evaluate(20) as session:
        if comm.rank == 0:
            for mb in range(20):
                session.send("h", torch.ones(3), mb)
            comm.reduce([0.0])
            return
        comm.reduce([0.0])
        if fails:
            with pytest.raises(stagelink.PeerClosedError):
                comm.reduce([0.0])  # it has closed, and thinks of nothing bad
            raise ZeroDivisionError("of the user")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wire", [LOOPBACK, RENDEZVOUS], ids=str)
def test_what_nobody_reads_does_not_stay(rank_pool: RankPool, wire: Wire, fails: bool) -> None:
    ranks = Ranks(wire, rank_pool)
    plan = ranks.plan(window=20, limits={"close_deadline_s": 0.5})
    ranks.run_to_ends(plan, _many_unread, fails)
