"""Agreement of ranks on each session: how it opens, where its data end, who left it.

Every rank opens its sessions in the same order. The first stage says how many microbatches there
are; the others may say so too, or learn it from the OPEN of a neighbour. All that say something
must say the same.

A session may be open-ended: its data run out on the first stage and nowhere else. Its ranks then
say the number in a LAST message, the end of the stream, to the ranks that take from them, which
pass it on: who waits for a microbatch that will not come then knows. A LAST may overtake messages
in flight by a transport, so it is a number, not a mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, cast, get_args

from stagelink.control.connection import Frame
from stagelink.control.framing import decode, encode
from stagelink.control.plane import Plane
from stagelink.deadline import Deadline
from stagelink.errors import DisagreementError, PeerClosedError, PlanError, ProtocolError
from stagelink.links.arrival import Key
from stagelink.links.topology import followers_of, siblings_of
from stagelink.plan import Plan
from stagelink.schedule import UNTIL_END, Mode, check_microbatches
from stagelink.transport.header import Header, MessageKind

_AFTER_ALL = 2**32

STOPPED = " because it was stopped"
"""Why a rank left that wants all to leave."""


class Opening(NamedTuple):
    """Terms of a session that ranks agree on.

    Attributes:
        mode: ``"train"`` (gradients come back) or ``"evaluate"`` (forward only).
        microbatches: how many in the whole pipeline.
        items: samples in the batch, None where nobody counts.
    """

    mode: Mode
    microbatches: int
    items: int | None


class _End(NamedTuple):
    """How a peer left a session.

    Attributes:
        why: the error that ended it; empty where none did.
        due: (edge, microbatch) of what it is still to send, when it has credit for it.
    """

    why: str
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
    """State of one session, as this rank and its peers have said it.

    Attributes:
        number: the session's, from 0.
        mine: how this rank opened it; None before.
        theirs: how peers opened it, by peer.
        count: how many microbatches it turned out to have; None: not known, or not needed.
        siblings_count: the same as another replica of the first stage says it.
        highest: the last microbatch that is known of, as long as the count is not.
        ended: how peers left it, by peer.
        stopped: whether a peer has stopped it for all.
    """

    __slots__ = (
        "count", "ended", "highest", "mine", "number", "siblings_count", "stopped", "theirs",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.mine: Opening | None = None
        self.theirs: dict[int, Opening] = {}
        self.count: int | None = None
        self.siblings_count: int | None = None
        self.highest = -1
        self.ended: dict[int, _End] = {}
        self.stopped = False

    def check(self, microbatch: int) -> None:
        """Raise if there can be no such microbatch, so that somebody must be wrong.

        Raises:
            DisagreementError: the session has fewer, says another rank of the first stage.
        """
        if self.count is None and self.siblings_count is None:
            self.highest = max(microbatch, self.highest)
            return
        for count in (self.count, self.siblings_count):
            if count is not None and microbatch >= count:
                raise DisagreementError(_fewer(self.number, count, microbatch))


class Sessions:
    """The records of one rank's sessions, each until nobody can say anything of it any more.

    Attributes:
        left: the last session that this rank has left, -1 at first.
        records: by session, of those that are known here; see `find`.
    """

    def __init__(self, plane: Plane, plan: Plan) -> None:
        self.left = self._last = -1
        self._plane = plane
        self._plan = plan
        self._followers = followers_of(plan, plane.rank)
        # Replicas of a first stage compare with each other: two that end differently are found
        # even if nobody takes from both.
        self._siblings = siblings_of(plan, plane.rank)
        self.records: dict[int, SessionRecord] = {}
        self._opened: dict[int, int] = {}
        plane.handle(MessageKind.OPEN, self._on_open)
        plane.handle(MessageKind.LAST, self._on_last)
        plane.handle(MessageKind.END, self._on_end)

    def find(self, number: int) -> SessionRecord | None:
        """The record of a session; None of one that was forgotten. With the plane's lock held."""
        record = self.records.get(number)
        if record is None and number > self.left:
            record = self.records[number] = SessionRecord(number)
        return record

    def leave(self, number: int) -> None:
        """This rank leaves a session, and all before it; with the plane's lock held."""
        self.left = self._last = max(number, self.left)
        self._forget()

    def close(self) -> None:
        """Leave every session that there may be; with the plane's lock held.

        The last record is kept: another replica's count may still come, and be another one.
        """
        self.left = _AFTER_ALL

    def _forget(self) -> None:
        """Keep nothing of a session before the last one left that every peer has opened.

        Of the last one as well others may still be wrong.
        """
        gone, peers = self._plane.gone, self._plane.peers
        for number, record in [*self.records.items()]:
            if number >= self._last or len(record.theirs) + len(gone) < len(peers):
                return  # nor those after it
            if all(peer in record.theirs or peer in gone for peer in peers):
                del self.records[number]

    # -- how it opens

    def open(
        self, number: int, mode: Mode, microbatches: int | None, items: int | None
    ) -> tuple[SessionRecord, Opening]:
        """Open a session and tell the peers; waits only to learn what was left out.

        There is no deadline on that wait: a pipeline may idle for hours. Death, abort and goodbye
        end it.

        Returns:
            Its record, and what was agreed on.

        Raises:
            DisagreementError: a peer opened the same session with other values.
            PeerClosedError: a peer closed while its opening was waited for.
        """
        with self._plane.lock:
            record = self.records.setdefault(number, SessionRecord(number))
        if microbatches is None:
            self._plane.wait(lambda: self._heard(record), Deadline(float("inf")))
            with self._plane.lock:
                learned = next(iter(record.theirs.values()))
            microbatches, items = learned.microbatches, learned.items if items is None else items
        mine = Opening(mode, microbatches, items)
        # First of all: a peer that disagrees must hear it before it hears that this rank failed.
        header, note = Header(MessageKind.OPEN, session=number), _note(mine)
        for peer in self._plane.peers:
            self._plane.post(peer, header, note)
        with self._plane.lock:
            record.mine = mine
            heard = dict(record.theirs)
        for peer, theirs in heard.items():
            try:
                self._compare_openings(number, mine, peer, theirs)
            except DisagreementError as error:
                self._plane.failure.fail(error)
                raise
        return record, mine

    def _heard(self, record: SessionRecord) -> bool:
        if record.theirs:
            return True
        for peer in self._plane.gone:
            self._plane.goodbyes.check_here(peer, f"the opening of session {record.number}")
        return False

    def _on_open(self, peer: int, frame: Frame) -> None:
        number = frame.header.session
        theirs = self._opening(peer, number, decode(frame.note))
        with self._plane.lock:
            last = self._opened.get(peer, -1)
            if number <= last:
                raise ProtocolError(
                    f"rank {peer}: OPEN of session {number}, and it has opened session {last}"
                )
            self._opened[peer] = number
            record = self.find(number)
            if record is None:
                return
            record.theirs[peer] = theirs
            mine = record.mine
            if number < self.left:
                self._forget()
        if mine is not None:
            self._compare_openings(number, mine, peer, theirs)

    def _opening(self, peer: int, number: int, said: Mapping[str, object]) -> Opening:
        """What a peer says, if it can be: it is computed with before anybody compares it."""

        def wrong(field: str, allowed: str) -> ProtocolError:
            return ProtocolError(
                f"rank {peer}: OPEN of session {number} with {field} {said.get(field)!r:.50}; "
                f"it is {allowed}"
            )

        mode, microbatches, items = (said.get(field) for field in Opening._fields)
        if mode not in get_args(Mode):
            raise wrong("mode", " or ".join(map(repr, get_args(Mode))))
        if items is not None and (type(items) is not int or items < 0):
            raise wrong("items", "a number from 0, or null")
        try:
            return Opening(cast("Mode", mode), check_microbatches(self._plan, microbatches), items)
        except PlanError as error:
            raise wrong("microbatches", f"a number that the plan allows: {error}") from None

    def _compare_openings(self, number: int, mine: Opening, peer: int, theirs: Opening) -> None:
        if mine == theirs:
            return
        for field, here, there in zip(Opening._fields, mine, theirs, strict=True):
            if here != there and not (field == "items" and None in (here, there)):
                raise DisagreementError(
                    f"session {number}: {field} is {_shown(here)} on rank {self._plane.rank}, "
                    f"{_shown(there)} on rank {peer}; every rank opens the same sessions in one "
                    "order, and all replicas of the first stage are given the same batches"
                )

    # -- where its data end

    def tell_count(self, record: SessionRecord, microbatches: int) -> None:
        """A session's data have ended after so many microbatches; from any thread, at once.

        Raises:
            DisagreementError: another rank of the first stage says another number.
        """
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
            record = self.find(number)
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
            record = self.find(number)
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
        """Raise if the peer is `lost`, so that what is awaited cannot come.

        Raises:
            PeerClosedError: it is.
            DisagreementError: the peer left correctly; the session has no such microbatch.
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


@lru_cache
def _note(opening: Opening) -> bytes:
    return encode(opening._asdict())


def _shown(value: object) -> str:
    return "until the end" if value == UNTIL_END else repr(value)


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
