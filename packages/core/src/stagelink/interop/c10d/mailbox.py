"""Messages that have come to one rank, and receives that are posted.

Messages are told apart by group, peer, tag and number. A receive that is posted first has the
message put into its own tensor; others wait here, as many bytes of each peer as it was granted.
What goes beyond that stays with its sender, who only tells that it is there (RTS, ready to send),
until a receive asks for it (CTS, clear to send).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from stagelink.control.connection import Frame
from stagelink.control.plane import Plane
from stagelink.errors import ProtocolError
from stagelink.links.arrival import Arrival
from stagelink.links.in_link import InLink
from stagelink.links.out_link import SendJob
from stagelink.transport.header import NO_TRACE, Direction, Flag, Header, MessageKind
from stagelink.transport.modes import outside_modes

_WORD = 2**32
_MESSAGE_BYTES = 1024  # of a message's header and entry
MAX_TEXT = 10_000
"""Characters that are kept of why a message was refused."""


class MatchingKey(NamedTuple):
    """Matching key of a message."""

    group: int  # number of the group, the same on all its ranks; below 2 to the 64th
    peer: int  # the other rank, by its place in the mesh
    tag: int  # the caller's
    number: int  # how many there were before between the two with that tag in that group

    def header(self, direction: Direction, like: Header) -> Header:
        """The header of a message to this key; kind, dtype, size and flags as given."""
        return like._replace(
            direction=direction,
            session=self.group // _WORD,
            edge=self.group % _WORD,
            microbatch=self.tag,
            sequence=self.number,
        )

    def message(
        self,
        direction: Direction,
        flags: int,
        dtype_code: int,
        payload_bytes: int,
        shape: tuple[int, ...],
    ) -> Header:
        """The header of the message itself."""
        session, edge = divmod(self.group, _WORD)
        return tuple.__new__(
            Header,
            (MessageKind.DATA, direction, flags, session, edge, self.tag, self.number,
             0, dtype_code, 0, 0, payload_bytes, shape, NO_TRACE),
        )  # fmt: skip

    @classmethod
    def of(cls, peer: int, header: Header) -> MatchingKey:
        """Key of a message that a peer sends."""
        group = header.session * _WORD + header.edge
        return tuple.__new__(cls, (group, peer, header.microbatch, header.sequence))


def cost_of(header: Header) -> int:
    """Bytes that a message counts while nobody has asked for it: its payload, and an entry's."""
    return header.payload_bytes + _MESSAGE_BYTES


class Claim(Protocol):
    """A posted receive."""

    def meet(self, arrival: Arrival) -> None:
        """The header is here: say where the payload is best put; with a lock held."""

    def take(self, arrival: Arrival) -> None:
        """The message is whole; called once, on whichever thread finished it; never raises."""

    def give_up(self) -> None:
        """The group was destroyed, and the message will not be looked for."""


class Unwanted:
    """Claim of a message that nobody wants: it is dropped."""

    def meet(self, arrival: Arrival) -> None:
        """Nothing of it is put anywhere."""

    def take(self, arrival: Arrival) -> None:
        """Nothing is kept."""

    def give_up(self) -> None:
        """Do nothing: there is no waiter."""


class Mailbox:
    """Messages that were received, and receives that are posted.

    Each peer may send ``eager_bytes`` of messages that nobody has asked for; see `cost_of`.
    ``link_from`` gives the link that a peer's messages come by, which is opened by asking.
    """

    def __init__(self, plane: Plane, link_from: Callable[[int], InLink], eager_bytes: int) -> None:
        self._plane = plane
        self._link_from = link_from
        self._eager_bytes = eager_bytes
        self._lock = threading.Lock()
        self._claims: dict[MatchingKey, Claim] = {}
        self._here: dict[MatchingKey, Arrival] = {}
        self._claimed: dict[Arrival, Claim] = {}
        self._offered: set[MatchingKey] = set()
        self._lent: dict[Arrival, SendJob] = {}
        self._unasked_bytes: defaultdict[int, int] = defaultdict(int)
        self._owed_bytes: defaultdict[int, int] = defaultdict(int)
        self._forgotten: set[int] = set()
        for kind in (MessageKind.DATA, MessageKind.REFUSED):
            plane.handle(kind, self._on_message)
        plane.handle(MessageKind.RTS, self._on_ready_to_send)

    def open(self) -> None:
        """Grant every peer what it may send unasked; all of them are connected."""
        for peer in self._plane.peers:
            self._grant(peer, self._eager_bytes)

    def _grant(self, peer: int, size_bytes: int) -> None:
        if peer != self._plane.rank:
            self._plane.post(peer, Header(MessageKind.CREDIT, sequence=size_bytes))

    def _clear(self, key: MatchingKey) -> None:
        header = key.header(Direction.BACKWARD, Header(MessageKind.CTS))
        self._plane.post(key.peer, header)

    # -- what comes

    def _on_message(self, peer: int, frame: Frame) -> None:
        header = frame.header
        arrival = Arrival(header, peer, self._on_settled)
        key = MatchingKey.of(peer, header)
        if header.kind is MessageKind.REFUSED:
            arrival.refusal = frame.note.decode(errors="replace")[:MAX_TEXT]
        is_whole = arrival.refusal is not None or header.flags & Flag.INLINE
        if is_whole:
            arrival.payload, arrival.settled = frame.payload, True
        with self._lock:
            if self._offered:  # it may have found room since
                self._offered.discard(key)
            claim = self._claims.pop(key, None)
            if claim is not None and not is_whole:
                claim.meet(arrival)
                self._claimed[arrival] = claim
            kept = claim is None and self._keep(key, arrival)
            granted = 0 if kept else self._count_asked(peer, header)
        if granted:
            self._grant(peer, granted)
        if not is_whole:
            self._link_from(peer).announced(arrival, frame.note, frame.take_fds())
        elif claim is not None:  # who waits looks again at the end of this turn of reading
            claim.take(arrival)

    def _keep(self, key: MatchingKey, arrival: Arrival) -> bool:
        """With the lock: keep what nobody has asked for; False where nobody ever will."""
        if key in self._here:
            raise ProtocolError(f"two messages of {key}")
        if key.group in self._forgotten:
            return False
        unasked_bytes = self._unasked_bytes[key.peer] + cost_of(arrival.header)
        # Errors do not ask for room, nor does this rank of itself.
        if unasked_bytes > self._eager_bytes and not (
            arrival.refusal is not None or key.peer == self._plane.rank
        ):
            raise ProtocolError(
                f"messages of {unasked_bytes} bytes that nobody has asked for; granted are "
                f"{self._eager_bytes} (c10d.eager_bytes)"
            )
        self._unasked_bytes[key.peer] = unasked_bytes
        self._here[key] = arrival
        return True

    def _count_asked(self, peer: int, header: Header) -> int:
        """With the lock: a message was asked for; how much to grant its sender now for it.

        Not for each message, which would cost as much as a message.
        """
        owed_bytes = self._owed_bytes[peer] + cost_of(header)
        due = 2 * owed_bytes >= self._eager_bytes
        self._owed_bytes[peer] = 0 if due else owed_bytes
        return owed_bytes if due else 0

    def _on_ready_to_send(self, peer: int, frame: Frame) -> None:
        key = MatchingKey.of(peer, frame.header)
        with self._lock:
            if key in self._here or key in self._offered:
                raise ProtocolError(f"two messages of {key}")
            # Of a group that was destroyed it is taken and dropped: its sender need not wait.
            wanted = key in self._claims or key.group in self._forgotten
            if not wanted:
                self._offered.add(key)
            owed_bytes, self._owed_bytes[peer] = self._owed_bytes[peer], 0
        if wanted:
            self._clear(key)
        if owed_bytes:
            self._grant(peer, owed_bytes)

    def _on_settled(self, arrival: Arrival) -> None:
        """A message is whole; on whichever thread finished it."""
        with self._lock:
            arrival.settled = True
            claim = self._claimed.pop(arrival, None)
        if claim is not None:
            claim.take(arrival)
            self._plane.changed()

    # -- what is asked for

    def ask(self, key: MatchingKey, claim: Claim) -> None:
        """Have ``claim`` take the message, now or when it is whole."""
        offered, granted, settled = False, 0, False
        with self._lock:
            arrival = self._here.pop(key, None)
            if arrival is None:
                self._claims[key] = claim
                if self._offered:
                    offered = key in self._offered
                    self._offered.discard(key)
            else:
                granted = self._count_kept(arrival)
                settled = arrival.settled
                if not settled:
                    self._claimed[arrival] = claim
        if offered:
            self._clear(key)
        if granted:
            self._grant(key.peer, granted)
        if settled and arrival is not None:
            claim.take(arrival)
            self._return_lent(arrival)

    def _count_kept(self, arrival: Arrival) -> int:
        """With the lock: a message is kept no more; returns as `_count_asked`."""
        self._unasked_bytes[arrival.peer] -= cost_of(arrival.header)
        return self._count_asked(arrival.peer, arrival.header)

    def awaits(self, key: MatchingKey) -> bool:
        """Whether somebody has asked for a message whose header is not here."""
        with self._lock:
            return key in self._claims

    def forget(self, group: int) -> None:
        """A group was destroyed: drop what came and comes for it, and tell those that asked."""
        with self._lock:
            self._forgotten.add(group)
            dropped = [self._here.pop(one) for one in [*self._here] if one.group == group]
            claims = [self._claims.pop(one) for one in [*self._claims] if one.group == group]
            offered = {one for one in self._offered if one.group == group}
            self._offered -= offered
            granted = [(arrival.peer, self._count_kept(arrival)) for arrival in dropped]
        for key in offered:
            self._clear(key)
        for peer, size_bytes in granted:
            if size_bytes:
                self._grant(peer, size_bytes)
        for claim in claims:
            claim.give_up()
        for arrival in dropped:
            self._return_lent(arrival)
        self._plane.changed()

    # -- from this rank to itself

    def put(self, key: MatchingKey, arrival: Arrival) -> SendJob | None:
        """Take a message of this rank to itself, with the sender's memory as its payload.

        Returns None where that memory is the sender's again; else, where no more may wait here, a
        job that is finished when the message has been asked for.
        """
        payload, job = arrival.payload, None
        room_bytes = self._eager_bytes - self._unasked_bytes[key.peer]
        fits = cost_of(arrival.header) <= room_bytes
        if fits and isinstance(payload, torch.Tensor):
            with outside_modes():
                arrival.payload = payload.clone()
        with self._lock:
            claim = self._claims.pop(key, None)
            if claim is None:
                arrival.settled = True
                if self._keep(key, arrival) and not fits:
                    job = self._lent[arrival] = SendJob(arrival.header, payload)
        if claim is not None:
            claim.take(arrival)
            self._plane.changed()
        return job

    def _return_lent(self, arrival: Arrival) -> None:
        """A message of this rank to itself was taken, or dropped: its memory is the sender's."""
        job = self._lent.pop(arrival, None) if self._lent else None
        if job is not None:
            job.payload, job.finished = None, True
            self._plane.changed()
