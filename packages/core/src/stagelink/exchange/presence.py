"""Which peers can still send something in which session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.errors import PeerClosedError
from stagelink.transport.header import MessageKind

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.exchange.arrival import Key
    from stagelink.exchange.endings import Endings

__all__ = ["STOPPED", "Presence"]

STOPPED = " because it was stopped"
"""Why a rank left that wants all to leave."""


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
        self._ended: dict[tuple[int, int], str] = {}
        plane.handle(MessageKind.END, self._on_end)

    def leave(self, session: int) -> None:
        """This rank leaves a session, and all before it; with the plane's lock held."""
        self.left = max(session, self.left)
        self._ended = {key: why for key, why in self._ended.items() if key[0] > session}

    def _on_end(self, peer: int, frame: Frame) -> None:
        with self._plane.lock:
            if frame.header.session > self.left:
                why = frame.note.decode(errors="replace")
                self._ended[frame.header.session, peer] = why
                if why == STOPPED:
                    self._stopped = max(frame.header.session, self._stopped)
        self._plane.changed()

    def lost(self, peer: int, key: Key) -> bool:
        """Whether the peer has left the message's session, or closed."""
        return peer in self._plane.gone or (key.session, peer) in self._ended

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
        why = self._ended.get((key.session, peer), "")
        what = "closed" if peer in self._plane.gone else f"left session {key.session}"
        raise PeerClosedError(f"rank {self._plane.rank}: peer rank {peer} {what}{why}; {awaited}")
