"""The receiving end of one link: begin as soon as the header is in, finish in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from stagelink.control.connection import close_all
from stagelink.errors import ProtocolError, TransportError
from stagelink.links.link_end import FOREVER, LinkEnd, raise_mapped
from stagelink.transport.contract import Pending, Ready
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.payload import payload_problem

if TYPE_CHECKING:
    from stagelink.deadline import Deadline
    from stagelink.errors import StagelinkError
    from stagelink.links.arrival import Arrival
    from stagelink.links.bound import Bound
    from stagelink.transport.contract import Capabilities, Link, Receiver
    from stagelink.transport.lanes import Lane

__all__ = ["InLink"]


class _Received(NamedTuple):
    pending: Pending
    arrival: Arrival


class _Announced(NamedTuple):
    arrival: Arrival
    note: bytes
    fds: Sequence[int]


class InLink(LinkEnd):
    """The receiving end of one link.

    Args:
        link: what it connects.
        capabilities: of its transport.
        lane: where receive buffers come from, and what is done is queued.
        bound: how large a payload may be.
        changed, fail: see `LinkEnd`.
    """

    def __init__(
        self,
        link: Link,
        capabilities: Capabilities,
        lane: Lane,
        bound: Bound,
        changed: Callable[[], None],
        fail: Callable[[StagelinkError], None],
    ) -> None:
        super().__init__(link, "recv", lane, fail, changed)
        self._bound = bound
        self._drains = False
        self._receiver: Receiver | None = None
        self._capabilities = capabilities
        self._queue: deque[_Announced] = deque()
        self._begun: deque[_Received] = deque()
        self._finishing = threading.RLock()

    def announced(self, arrival: Arrival, note: bytes, fds: Sequence[int]) -> None:
        """A header came in; runs on the reading thread, and returns at once.

        Raises:
            StagelinkError: the transport failed in ``begin``.
            ProtocolError: the message is larger than anything that can be received here.
        """
        try:
            self._bound.check(self.link, arrival.header)
        except ProtocolError:
            close_all(fds)
            raise
        with self._lock:
            if self._stopped:
                close_all(fds)
                return
            self.unfinished += 1
            self._queue.append(_Announced(arrival, note, fds))
            ready = self._pump()
        self._settle(ready)

    def opened(self, receiver: Receiver) -> None:
        """The transport's end is there: begin what was held for it."""
        self._opened(receiver)
        with self._lock:
            self._receiver = receiver
            ready = self._pump()
        self._settle(ready)

    @property
    def finishes_in_caller(self) -> bool:
        """Whether `drive` does the work, and not a worker."""
        return self._capabilities.caller_thread

    @property
    def drivable(self) -> bool:
        """Whether `drive` has something to finish."""
        return self._capabilities.caller_thread and bool(self._begun)

    def drive(self, deadline: Deadline) -> None:
        """Finish the oldest message in the caller's thread, where `finishes_in_caller`."""
        timeout_s = min(deadline.remaining_s, threading.TIMEOUT_MAX)
        try:  # from before it has the lock: a signal handler may raise as soon as it has
            # Else another thread is at it; the caller looks at its own deadline.
            if self._finishing.acquire(timeout=timeout_s) and self._begun:
                self._finish_oldest(deadline)
        finally:
            try:  # nor may one raise between here and the release
                self._finishing.release()
            except RuntimeError as error:  # it is not this thread's
                if stops_caller(error):
                    raise

    def hand_over(self, arrival: Arrival) -> None:
        """The caller's stream goes on when the payload is there."""
        if arrival.moment is not None and isinstance(arrival.payload, torch.Tensor):
            self.lane.hand_over(arrival.payload, arrival.moment)

    def drain(self) -> None:
        """Nobody will ask for some of what has begun: let the worker finish it."""
        self._drain(for_good=False)

    def drain_for_good(self) -> None:
        """Nobody will ask for anything any more, whatever still comes."""
        self._drain(for_good=True)

    def _drain(self, *, for_good: bool) -> None:
        with self._lock:
            self._drains |= for_good
            if self._begun:
                self._call_worker()

    def close(self, deadline: Deadline) -> None:
        """As `LinkEnd.close`; what has not begun never will."""
        super().close(deadline)
        with self._lock:
            while self._queue:
                close_all(self._queue.popleft().fds)

    def _pump(self) -> list[Arrival]:
        """Begin what can begin; returns what is ready at once, to be settled without the lock."""
        ready: list[Arrival] = []
        receiver = self._receiver
        while self._queue and receiver and len(self._begun) < self._capabilities.in_flight:
            announced = self._queue.popleft()
            if self._begin(receiver, announced):
                ready.append(announced.arrival)
        return ready

    def _settle(self, ready: Sequence[Arrival]) -> None:
        for arrival in ready:
            if arrival.on_complete is not None:
                arrival.on_complete(arrival)

    def _begin(self, receiver: Receiver, announced: _Announced) -> bool:
        arrival, note, fds = announced
        header = arrival.header

        def accept() -> torch.Tensor:
            wanted = arrival.buffer
            payload = self.lane.buffer(header.payload_bytes) if wanted is None else wanted
            arrival.payload = payload
            return payload

        self._begins = threading.get_ident()
        try:
            with self.lane.entered(arrival.after):
                pending: object = receiver.begin(header, note, fds, accept)
        except Exception as error:
            raise_mapped(f"receiving on {self.link}", error)
        finally:
            self._begins = None
        if isinstance(pending, Ready):
            self._arrived(arrival, pending.payload)
            return True
        if not isinstance(pending, Pending):
            raise TransportError(
                f"receiving on {self.link}: its begin returns {pending!r}, where a Pending is due"
            )
        self._begun.append(_Received(pending, arrival))
        if not self._capabilities.caller_thread or arrival.abandoned or self._drains:
            self._call_worker()
        return False

    def _check_payload(self, arrival: Arrival, payload: object) -> None:
        size_bytes, device = arrival.header.payload_bytes, self.lane.device.type
        lent = arrival.payload
        if isinstance(lent, torch.Tensor) and (payload is None or payload is lent):
            return  # the usual case: no time for words
        problem = payload_problem(payload, size_bytes, None, device)
        if problem is not None:
            raise TransportError(
                f"receiving on {self.link}, microbatch {arrival.header.microbatch}: the transport "
                f"{problem}"
            )

    def _arrived(self, arrival: Arrival, payload: torch.Tensor | None) -> None:
        self._check_payload(arrival, payload)
        self.unfinished -= 1
        arrival.moment = self.lane.moment()
        if payload is not None:
            arrival.payload = payload

    def _has_work(self) -> bool:
        return bool(self._begun)

    def _finish_head(self) -> None:
        with self._finishing:
            if self._begun:
                self._finish_oldest(FOREVER)

    def _finish_oldest(self, deadline: Deadline) -> None:
        pending, arrival = self._begun[0]
        try:
            with self.lane.entered():
                payload = pending.finish(deadline)
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and deadline.passed
            if timed_out and self._capabilities.caller_thread and not stops_caller(error):
                return  # it may come yet; that the caller waits no longer is the caller's to say
            raise_mapped(f"receiving on {self.link}", error)
        with self._lock:
            self._arrived(arrival, payload)
            self._begun.popleft()
            ready = self._pump()
        self._settle([arrival, *ready])
