"""The two ends of one link in one thread: what one says, the other hears at once."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, cast

import torch

from stagelink.deadline import Deadline
from stagelink.transport.contract import Link, Message
from stagelink.transport.header import Header, MessageKind
from stagelink_shm import Shm, ShmOptions
from tests.support.completion import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Port, Receiver, Sender

LINK = Link(0, 1, "shm", "cpu")
SOON_S = 20.0


def pattern(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


class End:
    """What `stagelink.transport.contract.Port` asks for, for one of the ends."""

    link = LINK
    peer = 1

    def __init__(self, window: int, on_note: Callable[[bytes, Sequence[int]], None]) -> None:
        self.window = window
        self.failure: BaseException | None = None
        self.rooms = 0
        self.calls: deque[Callable[[], None]] = deque()
        self._on_note = on_note

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        self._on_note(note, [os.dup(fd) for fd in fds])

    def room(self) -> None:
        self.rooms += 1

    def fail(self, error: BaseException) -> None:
        self.failure = error

    def call(self, action: Callable[[], None]) -> None:
        self.calls.append(action)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


class Pair:
    """A sender and its receiver.

    Args:
        window: of the link.
        link_bytes: the option.

    Attributes:
        held: with ``hold``, headers that the receiver has not been shown yet.
    """

    def __init__(self, window: int = 4, link_bytes: int = 64 << 20) -> None:
        shm = Shm(ShmOptions(link_bytes=link_bytes))
        self.hold = False
        self.held: deque[tuple[Header, bytes, list[int]]] = deque()
        self.begun: deque[tuple[Completion, torch.Tensor | None]] = deque()
        self.from_sender = End(window, self._to_receiver)
        self.from_receiver = End(window, self._to_sender)
        self.sender: Sender = shm.open_sender(
            LINK, cast("Port", self.from_sender), Deadline(SOON_S)
        )
        self.receiver: Receiver = shm.open_receiver(
            LINK, cast("Port", self.from_receiver), Deadline(SOON_S)
        )

    def _to_receiver(self, note: bytes, fds: Sequence[int]) -> None:
        self.receiver.on_note(note, fds)

    def _to_sender(self, note: bytes, fds: Sequence[int]) -> None:
        self.sender.on_note(note, fds)

    def send(self, payload: torch.Tensor) -> Completion | None:
        """Begin to send; None where there is no room."""
        self.read()
        header = Header(MessageKind.DATA, payload_bytes=payload.numel())

        def announce(note: bytes = b"", fds: Sequence[int] = ()) -> None:
            self.held.append((header, note, [os.dup(fd) for fd in fds]))
            if not self.hold:
                self.show()

        done = Completion()
        return done if self.sender.begin(Message(header, payload), announce, done) else None

    def show(self) -> None:
        """Show the receiver what was held."""
        while self.held:
            header, note, fds = self.held.popleft()
            accepted: list[torch.Tensor] = []

            def accept(
                size: int = header.payload_bytes, accepted: list[torch.Tensor] = accepted
            ) -> torch.Tensor:
                accepted.append(torch.empty(size, dtype=torch.uint8))
                return accepted[0]

            done = Completion()
            self.receiver.begin(header, note, fds, accept, done)
            self.begun.append((done, accepted[0] if accepted else None))

    def take(self) -> torch.Tensor:
        """The oldest message."""
        done, accepted = self.begun.popleft()
        payload = done.wait(0)
        assert (payload is None) != (accepted is None)
        return cast("torch.Tensor", accepted if payload is None else payload)

    def pass_on(self, payload: torch.Tensor) -> torch.Tensor:
        """Send one that fits a slot, and take it."""
        done = self.send(payload)
        assert done is not None
        assert done.over
        return self.take()

    def read(self) -> None:
        """Do what the receiver has put off until it reads next: send slots home."""
        while self.from_receiver.calls:
            self.from_receiver.calls.popleft()()
