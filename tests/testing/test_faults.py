"""A faulty transport goes wrong where it was told to, and nowhere else."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, UsageError
from stagelink.plugins.problems import transport_problems
from stagelink.testing import run_threads
from stagelink.testing.faults import Corrupt, Fail, Gate, Hold, Point, faulty
from stagelink.testing.subject import Subject
from stagelink.transport.contract import (
    API_VERSION,
    Capabilities,
    Link,
    Message,
    NoOptions,
    Receiver,
    Sender,
    Transport,
    Verdict,
)
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.loopback import Loopback
from stagelink_gloo import Gloo
from tests.support.completion import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Announce, Done, Port

LINK = Link(0, 1, "faulty", "cpu")
PORT = cast(
    "Port", SimpleNamespace(link=LINK, rank=0, stream=SimpleNamespace(entered=nullcontext))
)


class Shelf(Transport):
    """Leaves payloads on a shelf that both ends know."""

    name: ClassVar[str] = "shelf"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(frozenset({"cpu"}), 0)

    def __init__(self, options: NoOptions) -> None:
        super().__init__(options)
        self.payloads: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.full = False

    @classmethod
    def probe(cls, options: NoOptions) -> Verdict:
        return Verdict(True)

    def open_sender(self, link: Link, port: Port, deadline: Deadline) -> Sender:
        return ShelfSender(self)

    def open_receiver(self, link: Link, port: Port, deadline: Deadline) -> Receiver:
        return ShelfReceiver(self)


class ShelfSender(Sender):
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def begin(self, message: Message, announce: Announce, done: Done) -> bool:
        if self.shelf.full:
            return False
        self.shelf.payloads.append(message.payload)
        announce(b"there")
        done()
        return True

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.shelf.calls.append(f"sender's note {note!r}")

    def abort(self, cause: BaseException) -> None:
        self.shelf.calls.append("sender aborts")

    def close(self, deadline: Deadline) -> None:
        self.shelf.calls.append("sender closes")


class ShelfReceiver(Receiver):
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def begin(
        self,
        header: Header,
        note: bytes,
        fds: Sequence[int],
        accept: Callable[[], torch.Tensor],
        done: Done,
    ) -> None:
        done(self.shelf.payloads.pop(0))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.shelf.calls.append(f"receiver's note {note!r}")

    def abort(self, cause: BaseException) -> None:
        self.shelf.calls.append("receiver aborts")

    def close(self, deadline: Deadline) -> None:
        self.shelf.calls.append("receiver closes")


class Pair:
    """Both ends of the link 0→1 by a faulty shelf."""

    def __init__(self, *faults: Fail | Hold | Corrupt) -> None:
        cls: Any = faulty(Shelf, *faults)
        self.shelf: Shelf = cls(NoOptions())
        self.sender: Sender = self.shelf.open_sender(LINK, PORT, Deadline(1))
        self.receiver: Receiver = self.shelf.open_receiver(LINK, PORT, Deadline(1))

    def begin(self, value: int) -> Completion | None:
        payload = torch.tensor([value, value], dtype=torch.uint8)
        header = Header(MessageKind.DATA, payload_bytes=2)
        told = Completion()
        taken = self.sender.begin(Message(header, payload), lambda note=b"", fds=(): None, told)
        return told if taken else None

    def receive(self) -> Completion:
        header = Header(MessageKind.DATA, payload_bytes=2)
        told = Completion()
        accept = partial(torch.empty, 2, dtype=torch.uint8)
        self.receiver.begin(header, b"there", (), accept, told)
        return told

    def carry(self, value: int) -> list[int]:
        sending = self.begin(value)
        assert sending is not None
        sending.wait()
        arrived = self.receive().wait()
        assert arrived is not None
        return arrived.tolist()

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            end.abort(OSError())
            end.close(Deadline(20))


def test_without_faults_everything_passes() -> None:
    pair = Pair()
    assert [pair.carry(value) for value in (1, 2)] == [[1, 1], [2, 2]]
    sending = pair.begin(3)
    assert sending is not None
    assert sending.over  # done within its begin


def test_core_accepts_the_class() -> None:
    cls = faulty(Shelf, Corrupt(message=0), name="torn")
    assert transport_problems(cls) == []
    assert (cls.name, cls.capabilities) == ("torn", Shelf.capabilities)


@pytest.mark.parametrize("point", Point)
def test_one_message_fails_at_one_point(point: Point) -> None:
    pair = Pair(Fail(message=1, at=point, error=OSError(5, "torn cable")))
    pair.carry(1)
    with pytest.raises(OSError, match="torn cable"):
        pair.carry(2)


def test_after_a_failure_in_finish_the_next_message_passes() -> None:
    pair = Pair(Fail(message=0, at=Point.RECEIVE_FINISH, error=OSError()))
    with pytest.raises(OSError):  # noqa: PT011 - it has no text
        pair.carry(1)
    assert pair.carry(2) == [2, 2]


def test_a_message_that_found_no_room_keeps_its_number() -> None:
    pair = Pair(Corrupt(message=0))
    pair.shelf.full = True
    assert pair.begin(1) is None
    pair.shelf.full = False
    assert pair.carry(1) == [254, 1]


def test_a_corrupted_message_leaves_the_senders_tensor_alone() -> None:
    pair = Pair(Corrupt(message=0))
    payload = torch.ones(2, dtype=torch.uint8)
    message = Message(Header(MessageKind.DATA, payload_bytes=2), payload)
    pair.sender.begin(message, lambda note=b"", fds=(): None, Completion())
    assert payload.tolist() == [1, 1]
    assert pair.shelf.payloads[0].tolist() == [254, 1]


def test_a_fault_of_another_link_is_not_met() -> None:
    pair = Pair(Corrupt(message=0, link=(1, 0)), Corrupt(message=1, link=(0, 1)))
    assert [pair.carry(1) for _ in range(2)] == [[1, 1], [254, 1]]


@pytest.mark.parametrize("point", [Point.SEND_FINISH, Point.RECEIVE_FINISH])
def test_a_held_message_passes_when_the_gate_opens(point: Point) -> None:
    gate = Gate()
    pair = Pair(Hold(message=0, at=point, until=gate))
    arrived: list[list[int]] = []
    carrying = threading.Thread(target=lambda: arrived.append(pair.carry(7)))
    carrying.start()
    assert not arrived
    gate.open()
    carrying.join()
    pair.close()
    assert arrived == [[7, 7]]


def test_what_follows_a_held_message_is_held() -> None:
    gate = Gate()
    pair = Pair(Hold(message=0, at=Point.SEND_FINISH, until=gate))
    first, second = pair.begin(1), pair.begin(2)
    assert first is not None
    assert second is not None
    with pytest.raises(TimeoutError):
        second.wait(0.01)
    gate.open()
    assert [first.wait(), second.wait()] == [None, None]
    pair.close()


class WatchedGate(Gate):
    """Tells when somebody has begun to wait at it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, given_up: Callable[[], bool]) -> bool:
        def watched() -> bool:
            self.asked.set()  # under the gate's lock: a nudge from now on finds a waiter
            return given_up()

        return super().wait(watched)


def test_abort_wakes_the_wait_for_a_lost_message() -> None:
    gate = WatchedGate()
    pair = Pair(Hold(message=0, at=Point.RECEIVE_FINISH, until=gate))
    pair.begin(1)
    receiving = pair.receive()
    assert gate.asked.wait(20)
    with pytest.raises(TimeoutError):
        receiving.wait(0.01)
    pair.receiver.abort(OSError())
    with pytest.raises(ConnectionAbortedError):
        receiving.wait()
    pair.close()


def carry_three(rank: int, world_size: int, store: Store) -> list[bool]:
    torn = faulty(Gloo, Corrupt(message=1, link=(0, 1)), name="torn")
    subject = Subject("torn", (torn,), {"interface": "lo"})
    same = []
    with (
        subject.connect(subject.plan(), rank, world_size, store) as comm,
        comm.evaluate(3) as session,
    ):
        for number in session.mine:
            sent = torch.full((30_000,), float(number))
            if rank == 0:
                session.send("e0", sent, number)
            else:
                got = session.recv("e0", number)
                same.append(got is not None and torch.equal(got, sent))
    return same


def test_a_transport_that_tells_what_is_sent_can_be_wrapped(rank_pool: RankPool) -> None:
    assert rank_pool.run(carry_three, 2)[1] == [True, False, True]


def receive_what_is_held(rank: int, world_size: int, store: Store, gate: Gate) -> str:
    held = faulty(Loopback, Hold(message=0, at=Point.RECEIVE_FINISH, until=gate), name="held")
    subject = Subject("held", (held,))
    with (
        subject.connect(subject.plan(), rank, world_size, store) as comm,
        comm.evaluate(1) as session,
    ):
        if rank == 0:
            session.send("e0", torch.ones(30_000), 0)
            comm.reduce([0.0])
            return ""
        with pytest.raises(DeadlineError) as caught:
            session.recv("e0", 0, deadline_s=0.1)
        gate.open()
        session.recv("e0", 0)
        comm.reduce([0.0])
        return str(caught.value)


def test_a_payload_that_does_not_come_is_told_with_its_link() -> None:
    texts = run_threads(receive_what_is_held, 2, Gate())
    assert texts[1].startswith(
        "rank 1: the header came, and the payload over 0→1 by held did not, from rank 0 on edge "
        "'e0' within 0.1 s; expected microbatch 0 (forward, session 0), got"
    )


def test_a_begin_cannot_be_held() -> None:
    with pytest.raises(UsageError, match=r"not in 'Sender\.begin'"):
        Hold(message=0, at=Point.SEND_BEGIN, until=Gate())


def test_notes_abort_and_close_reach_the_transport() -> None:
    pair = Pair()
    for end in (pair.sender, pair.receiver):
        end.on_note(b"hi", ())
        end.abort(OSError())
        end.close(Deadline(1))
    assert pair.shelf.calls == [
        "sender's note b'hi'",
        "sender aborts",
        "sender closes",
        "receiver's note b'hi'",
        "receiver aborts",
        "receiver closes",
    ]
