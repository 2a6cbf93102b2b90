"""The receiving end of one link: begin as soon as the header is in, whether asked for or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident

import torch

from stagelink.control.connection import close_all
from stagelink.deadline import Deadline
from stagelink.errors import StagelinkError, TransportError
from stagelink.links.arrival import Arrival
from stagelink.links.bound import Bound
from stagelink.links.calls import raise_mapped
from stagelink.links.completion import Begun
from stagelink.links.link_end import LinkEnd
from stagelink.transport.contract import Capabilities, Link, Receiver
from stagelink.transport.modes import outside_modes
from stagelink.transport.payload import payload_problem
from stagelink.transport.streams import Stream

_Announced = tuple[Arrival, bytes, Sequence[int]]
"""A message whose header has come, with its note and descriptors."""


class InLink(LinkEnd[Arrival]):
    """The receiving end of one link.

    Args:
        stream: where receive buffers come from, and what is done is queued.
        bound: how large a payload may be.
        changed, fail: see `LinkEnd`.
    """

    _DOING = "receiving on"

    def __init__(
        self,
        link: Link,
        capabilities: Capabilities,
        stream: Stream,
        bound: Bound,
        changed: Callable[[], None],
        fail: Callable[[StagelinkError], None],
    ) -> None:
        super().__init__(link, stream, fail, changed)
        self._bound = bound
        self._receiver: Receiver | None = None
        self._in_flight = capabilities.in_flight
        self._queue: deque[_Announced] = deque()

    def announced(self, arrival: Arrival, note: bytes, fds: Sequence[int]) -> None:
        """A header came in; runs on the reading thread, and returns at once.

        Raises where the transport fails in ``begin``, or the message is larger than anything that
        can be received here (`ProtocolError`).
        """
        if arrival.header.payload_bytes > self._bound.most_bytes:
            close_all(fds)
            self._bound.refuse(self.link, arrival.header)
        with self._lock:
            if self.given_up:
                close_all(fds)
                return
            self.unfinished += 1
            self._queue.append((arrival, note, fds))
            done = self._pump()
        if done:
            self._tell(done)
        if self.was_told:
            self._catch_up()

    def opened(self, receiver: Receiver) -> None:
        """The transport's end is there: begin what was held for it."""
        self._opened(receiver)
        self._receiver = receiver
        self.told(None)

    @property
    def idle(self) -> bool:
        """Whether nothing is being received, so that what is unfinished never will be done."""
        return self.given_up or self._receiver is None

    def hand_to_caller(self, arrival: Arrival) -> None:
        """The caller's stream goes on when the payload is there."""
        if arrival.event is not None and isinstance(arrival.payload, torch.Tensor):
            self.stream.hand_to_caller(arrival.payload, arrival.event)

    def close(self, deadline: Deadline) -> None:
        """Close the end; what has not begun never will."""
        super().close(deadline)
        with self._lock:
            while self._queue:
                close_all(self._queue.popleft()[2])

    def _pump(self) -> list[Arrival]:
        done = self._take_told() if self.was_told else []
        receiver = self._receiver
        while (
            self._queue and receiver and not self.given_up and len(self._begun) < self._in_flight
        ):
            self._begin(receiver, self._queue.popleft())
            done += self._take_told()
        return done

    def _begin(self, receiver: Receiver, announced: _Announced) -> None:
        arrival, note, fds = announced
        begun, accept = Begun(self, arrival), partial(self._accept, arrival)
        self.beginning = get_ident(), begun
        try:
            with outside_modes() if self._on_host else self.stream.entered(arrival.after):
                given: object = receiver.begin(arrival.header, note, fds, accept, begun)
        except Exception as error:
            raise_mapped(self._name, error)
        finally:
            self.beginning = None
        if given is not None:
            raise TransportError(f"{self._name}: its begin returns {given!r}, where None is due")
        self._begun.append(begun)

    def _accept(self, arrival: Arrival) -> torch.Tensor:
        payload = arrival.buffer
        if payload is None:
            payload = self.stream.buffer(arrival.header.payload_bytes)
        arrival.payload = payload
        return payload

    def _take(self, message: Arrival, payload: torch.Tensor | None) -> None:
        lent = message.payload
        # The buffer that it has accepted is the usual case: no time for words.
        if not isinstance(lent, torch.Tensor) or not (payload is None or payload is lent):
            self._check_payload(message, payload)
        if not self._on_host:
            message.event = self.stream.record()
        if payload is not None:
            message.payload = payload

    def _check_payload(self, arrival: Arrival, payload: object) -> None:
        size_bytes, device = arrival.header.payload_bytes, self.stream.device.type
        problem = payload_problem(payload, size_bytes, None, device)
        if problem is not None:
            raise TransportError(
                f"{self._name}, microbatch {arrival.header.microbatch}: the transport {problem}"
            )

    def _tell(self, done: list[Arrival]) -> None:
        for arrival in done:
            if arrival.on_complete is not None:
                arrival.on_complete(arrival)
