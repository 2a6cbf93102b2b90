"""How the ranks agree on a session: its mode, its number of microbatches, the items of its batch.

Every rank opens its sessions in the same order. The first stage says how many microbatches there
are; the others may say so too, or learn it from the OPEN of a neighbour. All that say something
must say the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from stagelink.control.framing import decode, encode
from stagelink.deadline import Deadline
from stagelink.errors import DisagreementError, PlanError, ProtocolError
from stagelink.schedule import UNTIL_END, check_microbatches
from stagelink.transport.header import Header, MessageKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.plan import Plan

__all__ = ["Mode", "Opening", "Openings"]

Mode = Literal["train", "evaluate"]


class Opening(NamedTuple):
    """What is agreed on.

    Attributes:
        mode: ``"train"`` (gradients come back) or ``"evaluate"`` (forward only).
        microbatches: how many in the whole pipeline.
        items: samples in the batch, None where nobody counts.
    """

    mode: Mode
    microbatches: int
    items: int | None


class Openings:
    """The openings of one rank and what its peers say of theirs."""

    def __init__(self, plane: Plane, plan: Plan) -> None:
        self._plane = plane
        self._plan = plan
        self._last: dict[int, int] = {}
        self._mine: dict[int, Opening] = {}
        self._theirs: defaultdict[int, dict[int, Opening]] = defaultdict(dict)
        plane.handle(MessageKind.OPEN, self._on_open)

    def open(
        self, session: int, mode: Mode, microbatches: int | None, items: int | None
    ) -> Opening:
        """Open a session and tell the peers; waits only to learn what was left out.

        There is no deadline on that wait: a pipeline may idle for hours. Death, abort and goodbye
            end it.

        Raises:
            DisagreementError: a peer opened the same session with other values.
            PeerClosedError: a peer closed while its opening was waited for.
        """
        if microbatches is None:
            self._plane.wait(lambda: self._heard(session), Deadline(float("inf")))
            with self._plane.lock:
                learned = next(iter(self._theirs[session].values()))
            microbatches, items = learned.microbatches, learned.items if items is None else items
        mine = Opening(mode, microbatches, items)
        note = encode(mine._asdict())
        # First of all: a peer that disagrees must hear it before it hears that this rank failed.
        for peer in self._plane.peers:
            self._plane.post(peer, Header(MessageKind.OPEN, session=session), note)
        with self._plane.lock:
            self._mine[session] = mine
            heard = dict(self._theirs[session])
        for peer, theirs in heard.items():
            try:
                self._compare(session, mine, peer, theirs)
            except DisagreementError as error:
                self._plane.fail(error)
                raise
        self._forget(session)
        return mine

    def _heard(self, session: int) -> bool:
        if self._theirs.get(session):
            return True
        for peer in self._plane.gone:
            self._plane.check_here(peer, f"the opening of session {session}")
        return False

    def _on_open(self, peer: int, frame: Frame) -> None:
        session = frame.header.session
        theirs = self._opening(peer, session, decode(frame.note))
        with self._plane.lock:
            last = self._last.get(peer, -1)
            if session <= last:
                raise ProtocolError(
                    f"rank {peer}: OPEN of session {session}, and it has opened session {last}"
                )
            self._last[peer] = session
            self._theirs[session][peer] = theirs
            mine = self._mine.get(session)
        if mine is not None:
            self._compare(session, mine, peer, theirs)
            self._forget(session)

    def _opening(self, peer: int, session: int, said: Mapping[str, object]) -> Opening:
        """What a peer says, if it can be: it is computed with before anybody compares it."""

        def wrong(field: str, allowed: str) -> ProtocolError:
            return ProtocolError(
                f"rank {peer}: OPEN of session {session} with {field} {said.get(field)!r:.50}; "
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

    def _compare(self, session: int, mine: Opening, peer: int, theirs: Opening) -> None:
        for field, here, there in zip(Opening._fields, mine, theirs, strict=True):
            if here != there and not (field == "items" and None in (here, there)):
                raise DisagreementError(
                    f"session {session}: {field} is {_shown(here)} on rank {self._plane.rank}, "
                    f"{_shown(there)} on rank {peer}; every rank opens the same sessions in one "
                    "order, and all replicas of the first stage are given the same batches"
                )

    def _forget(self, session: int) -> None:
        """Keep nothing of a session that every peer has opened."""
        with self._plane.lock:
            heard = self._theirs.get(session, {})
            if session in self._mine and heard.keys() >= set(self._plane.peers):
                del self._mine[session], self._theirs[session]


def _shown(value: object) -> str:
    return "until the end" if value == UNTIL_END else repr(value)
