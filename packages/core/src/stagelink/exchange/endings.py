"""How many microbatches a session turns out to have that was opened until the end.

The first stage's data run out there and nowhere else. Its ranks say so in a LAST message to the
ranks that take from them, which pass it on: whoever waits for a microbatch that will not come then
knows. A LAST may overtake messages on their way by a transport, so it is a number, not a mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.errors import DisagreementError, ProtocolError
from stagelink.transport.header import Header, MessageKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane

__all__ = ["Endings"]


class Endings:
    """The endings that one rank knows.

    Args:
        plane: this rank's control plane.
        followers: the ranks that take something from this one.
        siblings: on a first stage, the replicas to compare with: two that end differently are
            found even if nobody takes from both.
    """

    def __init__(
        self, plane: Plane, followers: Iterable[int], siblings: Iterable[int] = ()
    ) -> None:
        self._plane = plane
        self._followers = frozenset(followers)
        self._siblings = frozenset(siblings)
        self._counts: dict[int, int] = {}
        self._of_siblings: dict[int, int] = {}
        self._highest: dict[int, int] = {}
        self._left = -1
        plane.handle(MessageKind.LAST, self._on_last)

    def tell(self, session: int, microbatches: int) -> None:
        """The session has so many microbatches; from any thread, returns at once.

        Raises:
            DisagreementError: another rank of the first stage says another number.
        """
        with self._plane.lock:
            known = self._counts.get(session)
            others = self._of_siblings.get(session)
            news = session > self._left and known is None
            if news:
                self._counts[session] = microbatches
        self._compare(session, known, microbatches)
        self._compare(session, others, microbatches)
        if not news:
            return
        for rank in self._followers | self._siblings:
            self._plane.post(
                rank, Header(MessageKind.LAST, session=session, microbatch=microbatches)
            )
        self._plane.changed()

    def known(self, session: int) -> int | None:
        """How many microbatches the session has; None where that is not known yet."""
        return self._counts.get(session)

    def check(self, session: int, microbatch: int) -> None:
        """Raise if there can be no such microbatch, so that somebody must be wrong.

        Raises:
            DisagreementError: the session has fewer, says another rank of the first stage.
        """
        if session not in self._counts and session not in self._of_siblings:
            if session > self._left:
                self._highest[session] = max(microbatch, self._highest.get(session, -1))
            return
        with self._plane.lock:
            counts = [counts.get(session) for counts in (self._counts, self._of_siblings)]
        for count in counts:
            if count is not None and microbatch >= count:
                raise DisagreementError(_fewer(session, count, microbatch))

    def leave(self, session: int) -> None:
        """This rank leaves a session; with the plane's lock held.

        What is known of it stays until the next one is left: others may still be wrong.
        """
        self._left = max(session, self._left)
        for counts in (self._counts, self._of_siblings, self._highest):
            for old in [number for number in counts if number < self._left]:
                del counts[old]

    def _on_last(self, peer: int, frame: Frame) -> None:
        session, microbatches = frame.header.session, frame.header.microbatch
        if microbatches < 0:
            raise ProtocolError(
                f"rank {peer}: LAST of session {session} with {microbatches} microbatches; they "
                "are 0 or more"
            )
        highest = self._highest.get(session, -1)
        if microbatches <= highest:
            raise DisagreementError(_fewer(session, microbatches, highest))
        if peer not in self._siblings:
            self.tell(session, microbatches)
            return
        with self._plane.lock:
            known = self._counts.get(session)
            if session >= self._left:
                self._of_siblings[session] = microbatches
        self._compare(session, known, microbatches)

    @staticmethod
    def _compare(session: int, one: int | None, other: int) -> None:
        if one not in {None, other}:
            raise DisagreementError(
                f"session {session} ends after {one} microbatches on one rank of the first "
                f"stage, after {other} on another: their data differ"
            )


def _fewer(session: int, count: int, microbatch: int) -> str:
    return (
        f"session {session} ends after {count} microbatches on one rank of the first stage, and "
        f"another has microbatch {microbatch}: their data differ"
    )
