"""An incoming message and its matching key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stagelink.transport.header import Direction, Header
from stagelink.transport.streams import StreamEvent


class Key(NamedTuple):
    """Matching key of a message between two ranks."""

    session: int
    edge: int
    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        way = "forward" if self.direction is Direction.FORWARD else "backward"
        return f"microbatch {self.microbatch} ({way}, session {self.session})"


class Arrival:
    """One message at its receiver."""

    __slots__ = (
        "abandoned", "after", "buffer", "event", "header", "key", "on_complete", "payload", "peer",
        "refusal", "settled",
    )  # fmt: skip

    def __init__(
        self, header: Header, peer: int, on_complete: Callable[[Any], None] | None = None
    ) -> None:
        self.header = header  # what it is
        # what it is found by
        self.key = tuple.__new__(
            Key, (header.session, header.edge, header.direction, header.microbatch)
        )
        self.peer = peer  # who sent it
        # called with this arrival when a link has its payload, on the thread that finished it; of
        # one that no link carries nobody calls it
        self.on_complete = on_complete
        # what must be done before anything is written there, on a device with streams
        self.after: StreamEvent | None = None
        # where its receiver wants the payload, flat uint8 of its size; None: wherever
        self.buffer: torch.Tensor | None = None
        # when the payload is there, on a device with streams
        self.event: StreamEvent | None = None
        # its bytes once `settled`: flat uint8, or bytes where it came inline; None for a NONE or
        # REFUSED message
        self.payload: torch.Tensor | bytes | None = None
        self.settled = False  # whether nothing more has to come
        self.refusal: str | None = None  # the sender's error in place of a payload, or None
        # nobody will ask for it; it is to be answered and dropped when settled
        self.abandoned = False
