"""Accepting of connections: the handshake, and bounds on peers that are not known yet.

A stranger costs a descriptor until it has shown the job's proof. So there are never more than a
few, each has a moment to show it, and when this process is out of descriptors nobody is accepted
for a while, rather than again and again in vain.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial

from stagelink.control.connection import Connection, Frame
from stagelink.control.failure import Failure
from stagelink.control.framing import encode
from stagelink.control.reader import Reader
from stagelink.errors import ProtocolError
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.interrupts import stops_caller

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
    """The listeners of one rank, and its connections whose peer is not known yet: strangers.

    Those whose peer is known go to ``connections``. The reader calls ``on_ready`` with any of
    them, and what it is ready for.
    """

    def __init__(
        self,
        rank: int,
        reader: Reader,
        connections: dict[int, Connection],
        failure: Failure,
        on_ready: Callable[[Connection, int], None],
    ) -> None:
        self.shortage = ""  # why the last connection could not be accepted; empty where it was
        self.strangers: set[Connection] = set()  # those that were accepted or dialled
        self._rank = rank
        self._reader = reader
        self._connections = connections
        self._failure = failure
        self._on_ready = on_ready
        # judges the first frame of a connection, see `expect`
        self.on_hello: Callable[[Connection, Frame], None] = _expect_nobody
        self._check_proof: Callable[[bytes], None] = _expect_nobody
        self._listeners: list[socket.socket] = []
        self._accepted: dict[Connection, float] = {}
        self._resume_s = math.inf
        self._paused = False

    # -- the handshake

    def expect(
        self, handler: Callable[[Connection, Frame], None], check_proof: Callable[[bytes], None]
    ) -> None:
        """Name who judges the first frame of a new connection, before its peer is known.

        The proof is checked before anything else is read, by raising to refuse it; what came
        behind it is the handler's.
        """
        self.on_hello = handler
        self._check_proof = check_proof

    def adopt(
        self, sock: socket.socket, known: Callable[[Connection], None] | None = None
    ) -> Connection:
        """Read from a connected socket, owned from now on; its peer is unknown until HELLO.

        ``known`` is called with the connection before anything is read from it.
        """
        connection = Connection(sock, self._on_blocked, self._on_handed, self._check_proof)
        with self._reader.lock:
            self.strangers.add(connection)
        if known is not None:
            known(connection)
        self._reader.add(sock, partial(self._on_ready, connection))
        return connection

    def _on_blocked(self, connection: Connection) -> None:
        with self._reader.lock:
            self._reader.watch_writes(connection.sock, wanted=True)

    def _on_handed(self, connection: Connection) -> None:
        self._reader.call(partial(self._on_ready, connection, 0))

    def greet(self, connection: Connection, hello: bytes) -> None:
        """Say HELLO; the other end then takes this rank for a peer, and is told if it fails."""
        with self._reader.lock:
            connection.send(Header(MessageKind.HELLO, sequence=connection.number), hello)
            connection.greeted = True
            if self._failure.error is not None:
                connection.send(Header(MessageKind.ABORT), encode(self._failure.cause))

    def refuse(self, connection: Connection, error: ProtocolError) -> None:
        """Close the connection of a stranger that does not keep to the protocol."""
        logger.warning("rank %d: a stranger was refused: %s", self._rank, error)
        self.drop(connection)

    def introduce(self, connection: Connection, peer: int) -> None:
        """Take a connection's peer for known and trusted from now on."""
        with self._reader.lock:
            connection.introduce(peer)
            self._connections[peer] = connection
            self._passed(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection and forget it."""
        with self._reader.lock:
            self._reader.remove(connection.sock)
            connection.close()
            self._passed(connection)

    def _passed(self, connection: Connection) -> None:
        """Note that it is a stranger's no more: it is known, or was closed."""
        self.strangers.discard(connection)
        if self._accepted.pop(connection, None) is not None:
            self._look()

    # -- the listeners

    def open(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, owned from now on."""
        listener.setblocking(False)
        with self._reader.lock:
            self._listeners.append(listener)
            if not self._paused:
                self._reader.add(listener, partial(self._on_listener, listener))

    def _look(self) -> None:
        """Send away who took too long, and accept again where that is possible by now."""
        now = time.monotonic()
        with self._reader.lock:
            for connection, came_s in list(self._accepted.items()):
                if came_s + self._patience_s > now:
                    break
                said = "rank %d: a stranger was refused: no HELLO within %.1f s"
                logger.warning(said, self._rank, now - came_s)
                del self._accepted[connection]
                self.drop(connection)
            short = self.shortage and self._resume_s > now
            if self._paused and not short and len(self._accepted) < MAX_STRANGERS:
                self._paused, self._resume_s = False, math.inf
                for listener in self._listeners:
                    self._reader.add(listener, partial(self._on_listener, listener))
            self._set_alarm()

    @property
    def _patience_s(self) -> float:
        return _CROWDED_S if len(self._accepted) >= MAX_STRANGERS else HELLO_S

    def _set_alarm(self) -> None:
        oldest_s = next(iter(self._accepted.values()), math.inf)
        self._reader.call_at(min(oldest_s + self._patience_s, self._resume_s), self._look)

    def _on_listener(self, listener: socket.socket, mask: int) -> None:
        del mask
        with self._reader.lock:
            # Else somebody has paused or closed it meanwhile.
            if not self._paused and listener.fileno() >= 0:
                self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if stops_caller(error):
                raise
            if not isinstance(error, BlockingIOError):  # else who came has gone again
                self._pause(str(error))
            return
        self.shortage = ""
        self._accepted[self.adopt(sock)] = time.monotonic()
        if len(self._accepted) >= MAX_STRANGERS:
            self._pause("")
        self._set_alarm()

    def _pause(self, shortage: str) -> None:
        if shortage and not self.shortage:  # once, until one is accepted
            logger.warning("rank %d: a connection was not accepted: %s", self._rank, shortage)
        self.shortage = shortage
        self._resume_s = time.monotonic() + _SHORT_S if shortage else math.inf
        self._paused = True
        for listener in self._listeners:
            self._reader.remove(listener)
        self._set_alarm()

    def close(self) -> None:
        """Accept nobody any more, and send away who was accepted and is still a stranger."""
        with self._reader.lock:
            for listener in self._listeners:
                if not self._paused:
                    self._reader.remove(listener)
                listener.close()
            self._listeners.clear()
            accepted, self._accepted = [*self._accepted], {}
            for connection in accepted:
                self.drop(connection)
            self._set_alarm()

    def forget(self) -> None:
        """Give up, in a forked child, what it inherited."""
        for listener in self._listeners:
            listener.close()


def _expect_nobody(*given: object) -> None:
    del given
    raise ProtocolError("HELLO where nobody is expected")
