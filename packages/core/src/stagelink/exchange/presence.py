"""Which peers can still send something in which session."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stagelink.control.framing import decode
from stagelink.errors import PeerClosedError, ProtocolError
from stagelink.transport.header import MessageKind

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.exchange.endings import Endings
    from stagelink.links.arrival import Key

__all__ = ["STOPPED", "Presence"]

STOPPED = " because it was stopped"
"""Why a rank left that wants all to leave."""


class _End(NamedTuple):
    """How a peer left a session.

    Attributes:
        why: the error that ended it; empty where none did.
        due: (edge, microbatch) of what it is still to send, when it gets a place for it.
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


class Presence:
    """Who has left what.

    Args:
        plane: this rank's control plane.
        endings: which microbatches there are.

    Attributes:
        left: the last session that this rank has left, -1 at first.
    """

    def __init__(self, plane: Plane, endings: Endings) -> None:
        self.left = -1
        self._plane = plane
        self._endings = endings
        self._stopped = -1
        self._ended: dict[tuple[int, int], _End] = {}
        plane.handle(MessageKind.END, self._on_end)

    def leave(self, session: int) -> None:
        """This rank leaves a session, and all before it; with the plane's lock held."""
        self.left = max(session, self.left)
        self._ended = {key: why for key, why in self._ended.items() if key[0] > session}

    def _on_end(self, peer: int, frame: Frame) -> None:
        end = _End.unpack(frame.note)
        with self._plane.lock:
            if frame.header.session > self.left:
                self._ended[frame.header.session, peer] = end
                if end.why == STOPPED:
                    self._stopped = max(frame.header.session, self._stopped)
        self._plane.changed()

    def lost(self, peer: int, key: Key) -> bool:
        """Whether the peer has left the message's session without having it to send, or closed."""
        if peer in self._plane.gone:
            return True
        end = self._ended.get((key.session, peer))
        return end is not None and (key.edge, key.microbatch) not in end.due

    def stopped(self, session: int) -> bool:
        """Whether a peer has stopped a session for all."""
        return self._stopped == session

    def check_peer(self, peer: int, key: Key, awaited: str) -> None:
        """Raise if the peer is `lost`, so that what is awaited cannot come.

        Raises:
            PeerClosedError: it is.
            DisagreementError: it is right to be gone, there is no such microbatch.
        """
        if not self.lost(peer, key):
            return
        self._endings.check(key.session, key.microbatch)
        end = self._ended.get((key.session, peer))
        why = "" if end is None else end.why
        what = self._plane.gone.get(peer) or f"left session {key.session}"
        raise PeerClosedError(f"rank {self._plane.rank}: peer rank {peer} {what}{why}; {awaited}")
