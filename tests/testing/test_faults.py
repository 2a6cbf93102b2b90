"""A faulty transport goes wrong where it was told to, and nowhere else."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from stagelink.deadline import Deadline
from stagelink.errors import UsageError
from stagelink.plugins.problems import transport_problems
from stagelink.testing.faults import Corrupt, Fail, Gate, Hold, Point, faulty
from stagelink.testing.subject import Subject
from stagelink.transport.contract import (
    API_VERSION,
    FINISHED,
    Capabilities,
    Link,
    Message,
    NoOptions,
    Pending,
    Receiver,
    Sender,
    Transport,
    Verdict,
)
from stagelink.transport.header import Header, MessageKind
from stagelink_gloo import Gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink.transport.contract import Announce, Port

NO_PORT = cast("Port", None)


class Shelf(Transport):
    """Leaves payloads on a shelf that both ends know."""

    name: ClassVar[str] = "shelf"
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(frozenset({"cpu"}), 0, caller_thread=True)

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

    def begin(self, message: Message, announce: Announce) -> Pending | None:
        if self.shelf.full:
            return None
        self.shelf.payloads.append(message.payload)
        announce(b"there")
        return FINISHED

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
    ) -> Pending:
        return Taking(self.shelf.payloads.pop(0))

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        self.shelf.calls.append(f"receiver's note {note!r}")

    def abort(self, cause: BaseException) -> None:
        self.shelf.calls.append("receiver aborts")

    def close(self, deadline: Deadline) -> None:
        self.shelf.calls.append("receiver closes")


@dataclass
class Taking(Pending):
    payload: torch.Tensor

    def finish(self, deadline: Deadline) -> torch.Tensor:
        return self.payload


class Pair:
    """Both ends of the link 0→1 by a faulty shelf."""

    def __init__(self, *faults: Fail | Hold | Corrupt) -> None:
        cls: Any = faulty(Shelf, *faults)
        self.shelf: Shelf = cls(NoOptions())
        link = Link(0, 1, cls.name, "cpu")
        self.sender: Sender = self.shelf.open_sender(link, NO_PORT, Deadline(1))
        self.receiver: Receiver = self.shelf.open_receiver(link, NO_PORT, Deadline(1))

    def begin(self, value: int) -> Pending | None:
        payload = torch.tensor([value, value], dtype=torch.uint8)
        header = Header(MessageKind.DATA, payload_bytes=2)
        return self.sender.begin(Message(header, payload), lambda note=b"", fds=(): None)

    def receive(self) -> Pending:
        header = Header(MessageKind.DATA, payload_bytes=2)
        return self.receiver.begin(header, b"there", (), lambda: torch.empty(2, dtype=torch.uint8))

    def carry(self, value: int, timeout_s: float = 20) -> list[int]:
        sending = self.begin(value)
        assert sending is not None
        sending.finish(Deadline(timeout_s))
        arrived = self.receive().finish(Deadline(timeout_s))
        assert arrived is not None
        return arrived.tolist()


def test_without_faults_everything_passes() -> None:
    pair = Pair()
    assert [pair.carry(value) for value in (1, 2)] == [[1, 1], [2, 2]]
    assert pair.begin(3) is FINISHED


def test_core_accepts_the_class() -> None:
    cls = faulty(Shelf, Corrupt(message=0), name="torn")
    assert transport_problems(cls) == []
    assert (cls.name, cls.capabilities.caller_thread) == ("torn", False)
    assert Shelf.capabilities.caller_thread


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
    pair.sender.begin(message, lambda note=b"", fds=(): None)
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
    assert arrived == [[7, 7]]


def test_a_lost_message_runs_into_the_deadline() -> None:
    pair = Pair(Hold(message=0, at=Point.RECEIVE_FINISH, until=Gate()))
    with pytest.raises(TimeoutError, match=r"held for 0\.01 s"):
        pair.carry(1, timeout_s=0.01)


class WatchedGate(Gate):
    """Tells when somebody has begun to wait at it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, deadline: Deadline, given_up: Callable[[], bool]) -> bool:
        def watched() -> bool:
            self.asked.set()  # under the gate's lock: a nudge from now on finds a waiter
            return given_up()

        return super().wait(deadline, watched)


def test_abort_wakes_the_wait_for_a_lost_message() -> None:
    gate, deadline = WatchedGate(), Deadline(10)
    pair = Pair(Hold(message=0, at=Point.RECEIVE_FINISH, until=gate))
    pair.begin(1)
    pending = pair.receive()

    def abort_when_asked() -> None:
        gate.asked.wait()
        pair.receiver.abort(OSError())

    aborting = threading.Thread(target=abort_when_asked, daemon=True)
    aborting.start()
    with pytest.raises(ConnectionAbortedError):
        pending.finish(deadline)
    assert not deadline.passed
    aborting.join()


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
