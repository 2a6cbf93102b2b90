"""Which peers can still send something in which session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.errors import PeerClosedError
from stagelink.transport.header import MessageKind

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from stagelink.control.plane import Plane
    from stagelink.exchange.arrival import Key

__all__ = ["Presence"]


class Presence:
    """Who has left what.

    Attributes:
        left: the last session that this rank has left, -1 at first.
    """

    def __init__(self, plane: Plane) -> None:
        self.left = -1
        self._plane = plane
        self._ended: dict[tuple[int, int], str] = {}
        plane.handle(MessageKind.END, self._on_end)

    def leave(self, session: int) -> None:
        """This rank leaves a session, and all before it; with the plane's lock held."""
        self.left = max(session, self.left)
        self._ended = {key: why for key, why in self._ended.items() if key[0] > session}

    def _on_end(self, peer: int, frame: Frame) -> None:
        with self._plane.lock:
            if frame.header.session > self.left:
                self._ended[frame.header.session, peer] = frame.note.decode(errors="replace")

    def lost(self, peer: int, key: Key) -> bool:
        """Whether the peer has left the message's session, or closed."""
        return peer in self._plane.gone or (key.session, peer) in self._ended

    def left_by_choice(self, session: int) -> bool:
        """Whether a peer has left a session without an error of its own."""
        with self._plane.lock:
            return any(key[0] == session and not why for key, why in self._ended.items())

    def check_peer(self, peer: int, key: Key, awaited: str) -> None:
        """Raise if the peer is `lost`, so that what is awaited cannot come.

        Raises:
            PeerClosedError: it is.
        """
        if not self.lost(peer, key):
            return
        why = self._ended.get((key.session, peer), "")
        what = "closed" if peer in self._plane.gone else f"left session {key.session}"
        raise PeerClosedError(f"rank {self._plane.rank}: peer rank {peer} {what}{why}; {awaited}")
