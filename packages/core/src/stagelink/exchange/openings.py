"""Agreement of ranks on how each session opens.

Every rank opens its sessions in the same order. The first stage says how many microbatches there
are; the others may say so too, or learn it from a neighbour. All that say something must say the
same.

It is said by an OPEN to each peer, and by nothing where a session opens as the one before it did:
then its first message to a peer tells that it is open. Where none is sent for a moment an OPEN
follows, as its ranks may do something else before they send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, cast, get_args

from stagelink.control.connection import Frame
from stagelink.control.framing import decode, encode
from stagelink.control.plane import Plane
from stagelink.deadline import Deadline
from stagelink.errors import DisagreementError, PlanError, ProtocolError
from stagelink.plan import Plan
from stagelink.schedule import UNTIL_END, Mode, check_microbatches, period
from stagelink.transport.header import Header, MessageKind

_MOMENT_S = 0.05
"""Time until an OPEN follows where a message was to stand for it."""


class Opening(NamedTuple):
    """Terms of a session that ranks agree on."""

    mode: Mode  # ``"train"`` (gradients come back) or ``"evaluate"`` (forward only)
    microbatches: int  # how many in the whole pipeline
    items: int | None  # samples in the batch, None where nobody counts


class _Said:
    """Terms of one rank's sessions: each time they change, and up to which session they hold."""

    __slots__ = ("_terms", "changed", "last")

    def __init__(self) -> None:
        self.last = -1  # the last session that the rank has opened, as far as is known
        self.changed = -1  # the last one of which it has said the terms
        self._terms: dict[int, Opening] = {}

    def say(self, number: int, terms: Opening) -> None:
        """The rank opens a session, on these terms; they hold until it says others."""
        self._terms[number] = terms
        self.changed = number
        self.last = max(number, self.last)

    def at(self, number: int) -> Opening | None:
        """Terms of one of its sessions; None: not opened yet, or forgotten."""
        found = None
        if number <= self.last:
            for first, terms in self._terms.items():
                if first <= number:
                    found = terms
        return found

    def forget(self, before: int) -> None:
        """Keep nothing that only sessions before this one need."""
        for first, following in pairwise([*self._terms]):
            if following <= before:
                del self._terms[first]


class Openings:
    """Terms on which this rank and its peers have opened their sessions."""

    def __init__(self, plane: Plane, plan: Plan) -> None:
        self._plane = plane
        self._plan = plan
        # With so many microbatches each route has one.
        self._each_route = math.lcm(*map(period, plan.stages))
        self._own = _Said()
        self._peers: dict[int, _Said] = {}
        self._told = -1
        self._follows = False
        plane.handle(MessageKind.OPEN, self._on_open)

    def open(
        self, number: int, mode: Mode, microbatches: int | None, items: int | None
    ) -> Opening:
        """Open a session, as `Sessions.open` says."""
        plane, own = self._plane, self._own
        if microbatches is None:
            plane.wait(lambda: self._heard(number), Deadline(math.inf))
            with plane.lock:
                learned = self._learned(number)
            microbatches, items = learned.microbatches, learned.items if items is None else items
        mine = Opening(mode, microbatches, items)
        with plane.lock:
            as_before = self._each_route <= microbatches < UNTIL_END and mine == own.at(own.last)
            if as_before:
                own.last = number
                self._tell_later()
                if all(number > said.changed for said in self._peers.values()):
                    return mine
            else:
                own.say(number, mine)
                own.forget(min((said.last for said in self._here()), default=number))
                self._tell(number, mine)
            theirs = {peer: said.at(number) for peer, said in self._peers.items()}
        for peer, terms in theirs.items():
            if terms is not None:
                self._compare(number, mine, peer, terms)
        return mine

    def _heard(self, number: int) -> bool:
        if any(said.last >= number for said in self._peers.values()):
            return True
        for peer in self._plane.gone:
            self._plane.goodbyes.check_here(peer, f"the opening of session {number}")
        return False

    def _learned(self, number: int) -> Opening:
        return next(filter(None, (said.at(number) for said in self._peers.values())))

    def _here(self) -> list[_Said]:
        gone = self._plane.gone
        return [self._of(peer) for peer in self._plane.peers if peer not in gone]

    def _of(self, peer: int) -> _Said:
        return self._peers.get(peer) or self._peers.setdefault(peer, _Said())

    def is_open(self, peer: int, number: int) -> None:
        """Note that something of a session has come from a peer; with the plane's lock held."""
        said = self._of(peer)
        if said.changed >= 0:  # else it is no rank that keeps to the protocol
            said.last = max(number, said.last)

    def is_awaited(self, number: int) -> bool:
        """Whether a peer is here that has not opened a session yet; with the plane's lock held."""
        return any(said.last < number for said in self._here())

    # -- what is said

    def _tell(self, number: int, mine: Opening) -> None:
        """Tell the peers how a session opens, unless they have been told; with the lock held.

        So that what is told in order goes in order.
        """
        if number <= self._told:
            return
        self._told = number
        header, note = Header(MessageKind.OPEN, session=number), _note(mine)
        for peer in self._plane.peers:
            self._plane.post(peer, header, note)

    def _tell_later(self) -> None:
        reader = self._plane.reader
        if self._follows:  # and tells of the session that is the last by then
            return
        if reader.blocked:
            self.tell_last()
            return
        self._follows = True
        reader.call_at(time.monotonic() + _MOMENT_S, self.tell_last)

    def tell_last(self) -> None:
        """Tell the peers how the last session was opened, unless they know; from any thread."""
        with self._plane.lock:
            self._follows = False
            mine = self._own.at(self._own.last)
            if mine is not None:
                self._tell(self._own.last, mine)

    def _on_open(self, peer: int, frame: Frame) -> None:
        number = frame.header.session
        theirs = self._opening(peer, number, decode(frame.note))
        with self._plane.lock:
            said = self._of(peer)
            if number <= said.changed:
                raise ProtocolError(
                    f"rank {peer}: OPEN of session {number}, and it has opened session "
                    f"{said.changed}"
                )
            said.say(number, theirs)
            said.forget(self._own.last + 1)
            mine = self._own.at(number)
        if mine is not None:
            self._compare(number, mine, peer, theirs)

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

    def _compare(self, number: int, mine: Opening, peer: int, theirs: Opening) -> None:
        for field, here, there in zip(Opening._fields, mine, theirs, strict=True):
            if here != there and not (field == "items" and None in (here, there)):
                with self._plane.lock:  # first: it must hear this before it hears that we failed
                    self._tell(number, mine)
                error = DisagreementError(
                    f"session {number}: {field} is {_shown(here)} on rank {self._plane.rank}, "
                    f"{_shown(there)} on rank {peer}; every rank opens the same sessions in one "
                    "order, and all replicas of the first stage are given the same batches"
                )
                self._plane.failure.fail(error)
                raise error


@lru_cache
def _note(opening: Opening) -> bytes:
    return encode(opening._asdict())


def _shown(value: object) -> str:
    return "until the end" if value == UNTIL_END else repr(value)
