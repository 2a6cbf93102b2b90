"""Events and counters for observers: one event per step of a message, and a link's totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stagelink.transport.contract import Link
from stagelink.transport.header import Direction

EventName = Literal["send", "recv", "wait_window", "wait_peer", "wait_wire"]
"""The steps of a message, by `Event.name`.

``send`` and ``recv``: a message was handed to a link, or to the caller. ``wait_window``: a send
waited for credit (back-pressure). ``wait_peer``: a receive waited for the peer to send.
``wait_wire``: a message that was announced waited for its payload.
"""

_OF_SENDER = frozenset({"send", "wait_window"})


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one message.

    Attributes:
        name: which step.
        link: the link that carries the message; for a wait, the one waited for.
        edge: name of the edge.
        direction: forward for an activation, backward for a gradient.
        microbatch: global id of the microbatch.
        session: number of the session on this handler, from 0.
        payload_bytes: size of the message.
        seconds: how long the step took.
        ended_s: when it ended, by `time.monotonic`.
        trace: what the sender's `stagelink_trace` gave for the message; `NO_TRACE` where nobody
            implements it there.
    """

    name: EventName
    link: Link
    edge: str
    direction: Direction
    microbatch: int
    session: int
    payload_bytes: int
    seconds: float
    ended_s: float
    trace: bytes

    @property
    def rank(self) -> int:
        """The rank whose step it is."""
        return self.link.source if self.name in _OF_SENDER else self.link.target

    @property
    def peer(self) -> int:
        """The rank at the link's other end."""
        return self.link.target if self.name in _OF_SENDER else self.link.source


@dataclass(slots=True)
class LinkCounters:
    """Totals of one end of one link since it was opened.

    Attributes:
        messages: messages carried, inline ones included.
        payload_bytes: their payloads.
        window_wait_s: seconds in which sends waited for credit (back-pressure).
        peer_wait_s: seconds in which receives waited for the peer to send.
        wire_wait_s: seconds in which announced messages waited for their payload.
        inline_messages: messages whose payload travelled with the header, past the transport.
    """

    messages: int = 0
    payload_bytes: int = 0
    window_wait_s: float = 0.0
    peer_wait_s: float = 0.0
    wire_wait_s: float = 0.0
    inline_messages: int = 0
