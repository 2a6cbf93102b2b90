"""Messages on their way out of one rank: eager as far as their receiver grants, else a rendezvous.

What fits into the bytes that a peer has granted leaves at once. Of any other message only the
key goes (RTS), and the message itself when the peer has asked for it (CTS), or has granted
more (CREDIT). So a peer is never sent more than it allows of what it has not asked for, and what
it has asked for always goes: whatever else waits, nothing waits behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from stagelink.control.connection import Frame
from stagelink.control.plane import Plane
from stagelink.errors import StagelinkError
from stagelink.interop.c10d.mailbox import MatchingKey, cost_of
from stagelink.links.out_link import OutLink, SendJob
from stagelink.transport.header import Header, MessageKind


class Outbox:
    """Messages of one rank to others, guarded by its plane's lock.

    ``link_to`` gives the link to a peer, which is opened by asking.
    """

    def __init__(self, plane: Plane, link_to: Callable[[int], OutLink]) -> None:
        self._plane = plane
        self._link_to = link_to
        self._granted_bytes: defaultdict[int, int] = defaultdict(int)
        self._held: defaultdict[int, dict[MatchingKey, SendJob]] = defaultdict(dict)
        # messages to each peer that are held no more, and not yet the link's or connection's
        self._starting: defaultdict[int, int] = defaultdict(int)
        plane.handle(MessageKind.CTS, self._on_clear_to_send)
        plane.handle(MessageKind.CREDIT, self._on_credit)
        plane.goodbyes.hold(self._busy)

    def post(self, key: MatchingKey, job: SendJob) -> None:
        """Send a message to a peer, now or when there is room for it there; returns at once."""
        peer, plane = key.peer, self._plane
        with plane.lock:
            left_bytes = self._granted_bytes[peer] - cost_of(job.header)
            if left_bytes < 0:
                self._hold(key, job)
                return
            self._granted_bytes[peer] = left_bytes
            if isinstance(job.payload, bytes):  # as `_start` does, with no call more
                if peer not in plane.goodbyes.said:
                    plane.connections[peer].send(job.header, b"", job.payload)
                job.payload, job.finished = None, True
                return
            self._starting[peer] += 1
        self._start(peer, job)

    def _hold(self, key: MatchingKey, job: SendJob) -> None:
        if isinstance(job.payload, torch.Tensor):
            self._link_to(key.peer).detach(job, copy=False)
        self._held[key.peer][key] = job
        # With the lock held: the message itself, which another thread may send, comes behind it.
        header = key.header(job.header.direction, Header(MessageKind.RTS))
        self._plane.post(key.peer, header)

    def charge(self, peer: int, header: Header) -> None:
        """Count a message that goes without asking for room, as none waits for it."""
        with self._plane.lock:
            self._granted_bytes[peer] -= cost_of(header)

    def holds(self, key: MatchingKey) -> bool:
        """Whether a message waits to be asked for."""
        return key in self._held[key.peer]

    def held(self) -> dict[int, int]:
        """Count the messages that wait to be asked for, by peer."""
        return {peer: len(held) for peer, held in tuple(self._held.items()) if held}

    def _busy(self, peer: int) -> bool:
        # Who has said goodbye asks for nothing more.
        is_held = bool(self._held[peer]) and peer not in self._plane.gone
        return is_held or self._starting[peer] > 0

    def _start(self, peer: int, job: SendJob) -> None:
        """Send a message that its caller has counted as starting, with the lock."""
        plane = self._plane
        try:
            if isinstance(job.payload, bytes):
                plane.post(peer, job.header, payload=job.payload)
                job.payload, job.finished = None, True
            else:
                self._link_to(peer).submit(job, copy=False)
        except StagelinkError as error:
            plane.failure.raise_blamed(error, peer)
        finally:
            with plane.lock:
                self._starting[peer] -= 1
            if peer in plane.gone:  # and waits for the last of what it gets
                plane.goodbyes.say(peer)

    # -- on the reading thread

    def _on_clear_to_send(self, peer: int, frame: Frame) -> None:
        key = MatchingKey.of(peer, frame.header)
        with self._plane.lock:
            if peer in self._plane.goodbyes.said:  # nothing goes behind that
                return
            job = self._held[peer].pop(key, None)
            if job is None:  # there was room for it before
                return
            self._granted_bytes[peer] -= cost_of(job.header)
            self._starting[peer] += 1
        self._start(peer, job)
        self._plane.changed()

    def _on_credit(self, peer: int, frame: Frame) -> None:
        starts = []
        with self._plane.lock:
            granted_bytes = self._granted_bytes[peer] + frame.header.sequence
            held = self._held[peer]
            while held and peer not in self._plane.goodbyes.said:
                key, job = next(iter(held.items()))
                if cost_of(job.header) > granted_bytes:
                    break
                granted_bytes -= cost_of(job.header)
                del held[key]
                self._starting[peer] += 1
                starts.append(job)
            self._granted_bytes[peer] = granted_bytes
        for job in starts:
            self._start(peer, job)
        if starts:
            self._plane.changed()
