"""Where connections come in: accepting them, and bounds on those of whom nothing is known yet.

A stranger costs a descriptor until it has shown the job's proof. So there are never more than a
few, each has a moment to show it, and when this process is out of descriptors nobody is accepted
for a while, rather than again and again in vain.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    import socket
    from contextlib import AbstractContextManager

    from stagelink.control.connection import Connection
    from stagelink.control.reader import Reader

__all__ = ["Door"]

logger = logging.getLogger("stagelink")

MAX_STRANGERS = 64
"""So many that have not shown their proof; the others wait in the system's queue."""

HELLO_S = 10.0
"""How long a stranger may take to say who it is."""

_CROWDED_S = 1.0
"""How long it may where others wait for its place."""

_SHORT_S = 0.25
"""How long nobody is accepted after the system could give no descriptor."""


class Door:
    """The listeners of one rank, and who came by them.

    Args:
        rank: this rank.
        reader: where the listeners are watched.
        adopt: makes a connection of a socket.
        drop: closes a connection of a stranger.
        lock: the plane's, held for everything here.

    Attributes:
        shortage: why the last connection could not be accepted; empty where it was.
    """

    def __init__(
        self,
        rank: int,
        reader: Reader,
        adopt: Callable[[socket.socket], Connection],
        drop: Callable[[Connection], None],
        lock: AbstractContextManager[Any],
    ) -> None:
        self.shortage = ""
        self._rank = rank
        self._reader = reader
        self._adopt = adopt
        self._drop = drop
        self._lock = lock
        self._listeners: list[socket.socket] = []
        self._strangers: dict[Connection, float] = {}
        self._resume_s = -math.inf
        self._paused = False

    def open(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, owned from now on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        if not self._paused:
            self._watch(listener)

    def _watch(self, listener: socket.socket) -> None:
        self._reader.add(listener, partial(self._on_listener, listener))

    def passed(self, connection: Connection) -> None:
        """A connection is a stranger's no more: it is known, or was closed."""
        if self._strangers.pop(connection, None) is not None:
            self.look()

    def look(self) -> None:
        """Send away who took too long, and accept again where that is possible by now."""
        now = time.monotonic()
        for connection, came_s in list(self._strangers.items()):
            if came_s + self._patience_s > now:
                break
            logger.warning(
                "rank %d: a stranger was refused: no HELLO within %.1f s",
                self._rank,
                now - came_s,
            )
            del self._strangers[connection]
            self._drop(connection)
        if self._paused and self._resume_s <= now and len(self._strangers) < MAX_STRANGERS:
            self._paused = False
            for listener in self._listeners:
                self._watch(listener)
        self._set_alarm()

    @property
    def _patience_s(self) -> float:
        return _CROWDED_S if len(self._strangers) >= MAX_STRANGERS else HELLO_S

    def _set_alarm(self) -> None:
        oldest_s = next(iter(self._strangers.values()), math.inf)
        due_s = oldest_s + self._patience_s
        self._reader.call_at(min(due_s, self._resume_s) if self._paused_short else due_s)

    @property
    def _paused_short(self) -> bool:
        return self._paused and self._resume_s > -math.inf

    def _on_listener(self, listener: socket.socket, mask: int) -> None:
        del mask
        with self._lock:
            # Else somebody has paused or closed it meanwhile.
            if not self._paused and listener.fileno() >= 0:
                self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:  # who came has gone again
            return
        except OSError as error:
            if stops_caller(error):
                raise
            self._pause(str(error))
            return
        self.shortage, self._resume_s = "", -math.inf
        self._strangers[self._adopt(sock)] = time.monotonic()
        if len(self._strangers) >= MAX_STRANGERS:
            self._pause("")
        self._set_alarm()

    def _pause(self, shortage: str) -> None:
        if shortage and not self.shortage:  # once, until one is accepted
            logger.warning("rank %d: a connection was not accepted: %s", self._rank, shortage)
        self.shortage = shortage
        self._resume_s = time.monotonic() + _SHORT_S if shortage else -math.inf
        self._paused = True
        for listener in self._listeners:
            self._reader.remove(listener)
        self._set_alarm()

    def close(self) -> None:
        """Accept nobody any more, and send away who is still a stranger."""
        for listener in self._listeners:
            if not self._paused:
                self._reader.remove(listener)
            listener.close()
        self._listeners.clear()
        strangers, self._strangers = [*self._strangers], {}
        for connection in strangers:
            self._drop(connection)
        self._set_alarm()

    def forget(self) -> None:
        """Give up, in a forked child, what it inherited."""
        for listener in self._listeners:
            listener.close()
