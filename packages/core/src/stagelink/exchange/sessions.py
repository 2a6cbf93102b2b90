"""State of each session: how it opens, where its data end, who left it.

A session may be open-ended: its data run out on the first stage and nowhere else. Its ranks then
say the number in a LAST message, the end of the stream, to the ranks that take from them, which
pass it on: who waits for a microbatch that will not come then knows. A LAST may overtake messages
in flight by a transport, so it is a number, not a mark.
"""

from __future__ import annotations

from typing import NamedTuple

from stagelink.control.connection import Frame
from stagelink.control.framing import decode
from stagelink.control.plane import Plane
from stagelink.errors import DisagreementError, PeerClosedError, ProtocolError
from stagelink.exchange.openings import Opening, Openings
from stagelink.links.arrival import Key
from stagelink.links.topology import followers_of, siblings_of
from stagelink.plan import Plan
from stagelink.schedule import UNTIL_END, Mode
from stagelink.transport.header import Header, MessageKind

_AFTER_ALL = 2**32

STOPPED = " because it was stopped"
"""Why a rank left that wants all to leave."""


class _End(NamedTuple):
    """How a peer left a session."""

    why: str  # the error that ended it; empty where none did
    # (edge, microbatch) of what it is still to send, when it has credit for it
    due: frozenset[tuple[int, int]]

    @classmethod
    def unpack(cls, note: bytes) -> _End:
        said = decode(note) if note else {}
        try:
            due = frozenset(
                (int(edge), int(microbatch)) for edge, microbatch in said.get("due", ())
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"damaged END message: {error}") from None
        return cls(str(said.get("why", "")), due)


class SessionRecord:
    """State of one session, as this rank and its peers have said it."""

    __slots__ = (
        "count", "ended", "highest", "number", "open_ended", "siblings_count", "stopped",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number  # the session's, from 0
        # whether this rank has opened it, and its number of microbatches comes later
        self.open_ended = False
        # how many microbatches it turned out to have; None: not known, or not needed
        self.count: int | None = None
        # the same as another replica of the first stage says it
        self.siblings_count: int | None = None
        self.highest = -1  # the last microbatch that is known of, as long as the count is not
        self.ended: dict[int, _End] = {}  # how peers left it, by peer
        self.stopped = False  # whether a peer has stopped it for all

    def check(self, microbatch: int) -> None:
        """Raise `DisagreementError` if there can be no such microbatch: somebody must be wrong."""
        if self.count is None and self.siblings_count is None:
            self.highest = max(microbatch, self.highest)
            return
        for count in (self.count, self.siblings_count):
            if count is not None and microbatch >= count:
                raise DisagreementError(_fewer(self.number, count, microbatch))


class Sessions:
    """The records of one rank's sessions, each until nobody can say anything of it any more."""

    def __init__(self, plane: Plane, plan: Plan) -> None:
        self.left = -1  # the last session that this rank has left, -1 at first
        self._plane = plane
        self._followers = followers_of(plan, plane.rank)
        # Replicas of a first stage compare with each other: two that end differently are found
        # even if nobody takes from both.
        self._siblings = siblings_of(plan, plane.rank)
        # by session, of those that are known here; see `find`
        self.records: dict[int, SessionRecord] = {}
        self.openings = Openings(plane, plan)  # how each is opened
        plane.handle(MessageKind.LAST, self._on_last)
        plane.handle(MessageKind.END, self._on_end)

    def find(self, number: int, peer: int) -> SessionRecord | None:
        """The record of a session that a peer sends something of; None of one that was forgotten.

        With the plane's lock held.
        """
        record = self.records.get(number)
        if record is None and number > self.left:
            record = self.records[number] = SessionRecord(number)
            self.openings.is_open(peer, number)
        return record

    def leave(self, number: int) -> None:
        """This rank leaves a session, and all before it; with the plane's lock held."""
        self.left = max(number, self.left)
        for known, record in [*self.records.items()]:
            # Of an open-ended one others may still say another number, as of the last one left.
            if known < number and not (record.open_ended and self.openings.is_awaited(known)):
                del self.records[known]

    def close(self) -> None:
        """Leave every session that there may be; with the plane's lock held.

        The last record is kept: another replica's count may still come, and be another one.
        """
        self.left = _AFTER_ALL
        self.openings.tell_last()  # so that who hears the goodbye knows which were opened

    # -- how it opens

    def open(
        self, number: int, mode: Mode, microbatches: int | None, items: int | None
    ) -> tuple[SessionRecord, Opening]:
        """Open a session and tell the peers; waits only to learn what was left out.

        There is no deadline on that wait: a pipeline may idle for hours. Death, abort and goodbye
        (`PeerClosedError`) end it. `DisagreementError` where a peer opened it with other values.
        """
        try:
            opening = self.openings.open(number, mode, microbatches, items)
            with self._plane.lock:
                record = self.records.get(number)
                if record is None:
                    record = self.records[number] = SessionRecord(number)
        except BaseException as error:
            self._plane.failure.interrupted(error)  # some peers may have been told
            raise
        record.open_ended = opening.microbatches == UNTIL_END
        return record, opening

    # -- where its data end

    def tell_count(self, record: SessionRecord, microbatches: int) -> None:
        """A session's data have ended after so many microbatches; from any thread, at once."""
        with self._plane.lock:
            known, others = record.count, record.siblings_count
            news = known is None and record.number > self.left
            if news:
                record.count = microbatches
        _compare_counts(record.number, known, microbatches)
        _compare_counts(record.number, others, microbatches)
        if not news:
            return
        header = Header(MessageKind.LAST, session=record.number, microbatch=microbatches)
        for rank in self._followers | self._siblings:
            self._plane.post(rank, header)
        self._plane.changed()

    def _on_last(self, peer: int, frame: Frame) -> None:
        number, microbatches = frame.header.session, frame.header.microbatch
        if microbatches < 0:
            raise ProtocolError(
                f"rank {peer}: LAST of session {number} with {microbatches} microbatches; they "
                "are 0 or more"
            )
        with self._plane.lock:
            record = self.find(number, peer)
        if record is None:
            return
        if microbatches <= record.highest:
            raise DisagreementError(_fewer(number, microbatches, record.highest))
        if peer not in self._siblings:
            self.tell_count(record, microbatches)
            return
        with self._plane.lock:
            record.siblings_count = microbatches
        _compare_counts(number, record.count, microbatches)

    # -- who left it

    def _on_end(self, peer: int, frame: Frame) -> None:
        end, number = _End.unpack(frame.note), frame.header.session
        with self._plane.lock:
            record = self.find(number, peer)
            if record is not None and number > self.left:
                record.ended[peer] = end
                record.stopped |= end.why == STOPPED
        self._plane.changed()

    def lost(self, peer: int, key: Key) -> bool:
        """Whether the peer has left the message's session without having it to send, or closed."""
        if peer in self._plane.gone:
            return True
        record = self.records.get(key.session)
        end = None if record is None else record.ended.get(peer)
        return end is not None and (key.edge, key.microbatch) not in end.due

    def check_peer(self, peer: int, key: Key, awaited: str) -> None:
        """Raise `PeerClosedError` if the peer is `lost`, so that what is awaited cannot come.

        `DisagreementError` where it left correctly, and the session has no such microbatch.
        """
        if not self.lost(peer, key):
            return
        record, why = self.records.get(key.session), ""
        if record is not None:
            record.check(key.microbatch)
            end = record.ended.get(peer)
            why = "" if end is None else end.why
        what = self._plane.gone.get(peer) or f"left session {key.session}"
        raise PeerClosedError(f"rank {self._plane.rank}: peer rank {peer} {what}{why}; {awaited}")


def _compare_counts(number: int, one: int | None, other: int) -> None:
    if one not in {None, other}:
        raise DisagreementError(
            f"session {number} ends after {one} microbatches on one rank of the first "
            f"stage, after {other} on another: their data differ"
        )


def _fewer(number: int, count: int, microbatch: int) -> str:
    return (
        f"session {number} ends after {count} microbatches on one rank of the first stage, and "
        f"another has microbatch {microbatch}: their data differ"
    )
