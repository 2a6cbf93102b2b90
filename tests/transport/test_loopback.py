"""Loopback hands memory over within the process, and at once."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, cast

import pytest
import torch

import stagelink
from stagelink.deadline import Deadline
from stagelink.transport import loopback
from stagelink.transport.contract import Link, Message, NoOptions, Receiver, Sender
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.loopback import Loopback
from tests.support.completion import Completion
from tests.support.pipelines import LOOPBACK, SYNCHRONOUS, Ranks, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Port

LINK = Link(0, 1, "loopback", "cpu")


class Ports:
    """Both ends' ports in one: notes go to the twin at once."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.rooms = 0

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        assert self.sender is not None
        self.sender.on_note(note, fds)

    def room(self) -> None:
        self.rooms += 1


class Pair:
    """A sender and its receiver."""

    def __init__(self) -> None:
        transport = Loopback(NoOptions())
        self.ports = Ports()
        port = cast("Port", self.ports)
        self.sender = self.ports.sender = transport.open_sender(LINK, port, Deadline(1))
        self.receiver: Receiver = transport.open_receiver(LINK, port, Deadline(1))

    def send(self, payload: torch.Tensor) -> Completion:
        header = Header(MessageKind.DATA, payload_bytes=payload.numel())
        announced: list[bytes] = []
        done = Completion()
        assert self.sender.begin(
            Message(header, payload), lambda note=b"", fds=(): announced.append(note), done
        )
        assert announced == [b""]
        return done

    def take(self) -> torch.Tensor:
        header = Header(MessageKind.DATA)
        done = Completion()
        self.receiver.begin(header, b"", (), lambda: torch.empty(0), done)
        payload = done.wait(0)
        assert payload is not None
        return payload


def _mailboxes_left() -> int:
    gc.collect()
    return len(loopback._mailboxes)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = _mailboxes_left()
    yield
    soon = Deadline(10)  # a worker may be on its last lines
    while _mailboxes_left() != before and not soon.passed:
        threading.Event().wait(0.01)
    assert _mailboxes_left() == before


def test_a_send_is_done_at_once_and_its_bytes_are_copied() -> None:
    pair = Pair()
    payload = torch.full((4,), 7, dtype=torch.uint8)
    assert pair.send(payload).over
    payload.fill_(9)
    assert pair.take().tolist() == [7] * 4


def test_nothing_begins_before_the_receiver_is_there() -> None:
    transport = Loopback(NoOptions())
    ports = Ports()
    port = cast("Port", ports)
    ports.sender = transport.open_sender(LINK, port, Deadline(1))
    payload = torch.ones(4, dtype=torch.uint8)
    message = Message(Header(MessageKind.DATA, payload_bytes=4), payload)
    done = Completion()
    assert not ports.sender.begin(message, lambda note=b"", fds=(): pytest.fail("announced"), done)
    transport.open_receiver(LINK, port, Deadline(1))
    assert ports.rooms == 1
    assert not done.over
    assert ports.sender.begin(message, lambda note=b"", fds=(): None, done)
    assert done.over


def test_messages_of_two_links_are_told_apart() -> None:
    pairs = [Pair() for _ in range(2)]
    for k in range(3):
        for n, pair in enumerate(pairs):
            pair.send(torch.full((3,), 10 * n + k, dtype=torch.uint8))
    for n, pair in enumerate(pairs):
        assert [pair.take().tolist() for _ in range(3)] == [[10 * n + k] * 3 for k in range(3)]


def test_what_was_taken_is_the_receivers_own_memory() -> None:
    pair = Pair()
    payload = torch.ones(4, dtype=torch.uint8)
    pair.send(payload)
    taken = pair.take()
    assert taken.data_ptr() != payload.data_ptr()
    taken.fill_(3)
    assert payload.tolist() == [1] * 4


def test_after_an_abort_nothing_can_be_taken() -> None:
    pair = Pair()
    pair.send(torch.ones(4, dtype=torch.uint8))
    pair.sender.abort(RuntimeError("gone"))
    with pytest.raises(ConnectionError, match="the sender has given the message up"):
        pair.take()


def test_close_leaves_what_was_sent_to_a_slow_receiver() -> None:
    pair = Pair()
    pair.send(torch.ones(4, dtype=torch.uint8))
    pair.sender.close(Deadline(1))
    assert pair.take().tolist() == [1] * 4


@pytest.mark.parametrize("ends", ["close", "abort"])
def test_a_receiver_that_ends_keeps_no_message(ends: str) -> None:
    pair = Pair()
    payload = torch.ones(4, dtype=torch.uint8)
    pair.send(payload)
    if ends == "close":
        pair.receiver.close(Deadline(1))
    else:
        pair.receiver.abort(RuntimeError("gone"))
    pair.send(payload)  # it has not heard of it
    assert not any(loopback._mailboxes.values())


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
@pytest.mark.parametrize("wire", [LOOPBACK, SYNCHRONOUS], ids=str)
def test_what_nobody_reads_does_not_stay(rank_pool: RankPool, wire: Wire, fails: bool) -> None:
    ranks = Ranks(wire, rank_pool)
    plan = ranks.plan(window=20, limits={"close_deadline_s": 0.5})
    ranks.run_to_ends(plan, _many_unread, fails)
