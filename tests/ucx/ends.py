"""Both ends of a link on one thread, each with a worker of its own, and a port that notes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import torch

from stagelink.deadline import Deadline
from stagelink.transport.contract import Link, Message
from stagelink.transport.header import Header, MessageKind
from stagelink_ucx.context import Context
from stagelink_ucx.library import load
from stagelink_ucx.link import UcxReceiver, UcxSender
from stagelink_ucx.worker import Worker
from tests.support.completion import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Port

LINK = Link(0, 1, "ucx", "cpu")
SOON_S = 20.0


def pattern(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def worker(wires: str) -> Worker:
    return Worker(Context(load(), {"TLS": wires}))


class End:
    """What `stagelink.transport.contract.Port` asks for, for one of the ends."""

    link = LINK

    def __init__(self, rank: int) -> None:
        self.rank, self.peer = rank, 1 - rank
        self.notes: list[bytes] = []
        self.failures: list[BaseException] = []
        self.rooms = 0
        self.watched: dict[int, Callable[[], bool]] = {}

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.notes.append(note)

    def room(self) -> None:
        self.rooms += 1

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        assert not writable
        self.watched[fd] = action


class Numbered(Completion):
    """One that notes its number in a list when it is done."""

    def __init__(self, order: list[int], number: int) -> None:
        super().__init__()
        self._order, self._number = order, number

    def __call__(self, payload: torch.Tensor | None = None) -> None:
        super().__call__(payload)
        self._order.append(self._number)


class Ends:
    """A sender and its receiver.

    Args:
        wires: of both workers.
    """

    def __init__(self, wires: str) -> None:
        self.workers = worker(wires), worker(wires)
        self.ports = End(0), End(1)
        self.sender = UcxSender(self.workers[0], cast("Port", self.ports[0]))
        self.receiver = UcxReceiver(self.workers[1], cast("Port", self.ports[1]))
        self.sent: list[int] = []
        self.received: list[int] = []
        self._begun = [0, 0]

    def connect(self) -> Ends:
        """Let each end have the other's note."""
        self.sender.on_note(self.ports[1].notes.pop(), ())
        self.receiver.on_note(self.ports[0].notes.pop(), ())
        return self

    def send(self, payload: torch.Tensor) -> Completion:
        """Begin to send."""
        header = Header(MessageKind.DATA, payload_bytes=payload.numel())
        announced: list[bytes] = []
        done = self._numbered(0, self.sent)
        message = Message(header, payload)
        assert self.sender.begin(message, lambda note=b"", fds=(): announced.append(note), done)
        assert announced == [b""]
        return done

    def receive(self, size_bytes: int) -> tuple[Completion, torch.Tensor]:
        """Begin to receive."""
        buffer = torch.zeros(size_bytes, dtype=torch.uint8)
        header = Header(MessageKind.DATA, payload_bytes=size_bytes)
        done = self._numbered(1, self.received)
        self.receiver.begin(header, b"", (), lambda: buffer, done)
        return done, buffer

    def _numbered(self, end: int, order: list[int]) -> Completion:
        self._begun[end] += 1
        return Numbered(order, self._begun[end] - 1)

    def progress_until(self, ready: Callable[[], bool], *of: Worker) -> None:
        """Have these workers make progress, both if none is given, until it is so."""
        until = time.monotonic() + SOON_S
        while not ready():
            assert time.monotonic() < until, "it did not come"
            for each in of or self.workers:
                each.progress()

    def close(self) -> None:
        """Close what is open."""
        self.sender.abort(ConnectionAbortedError("for a test"))
        self.receiver.abort(ConnectionAbortedError("for a test"))
        for each in self.workers:
            each.close(Deadline(SOON_S))
