"""The control plane of one rank: its connections, who reads them, and what every frame means.

There is one reading loop, one table from message kind to handler, and one place where a peer is
declared dead. Core's upper layers add their kinds to the table; handlers run on the reading
thread, so they return at once and take `Plane.lock` for what callers look at.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Sequence
from select import EPOLLOUT
from threading import get_ident
from typing import Any

from stagelink.control.chain import Awaited, Chain
from stagelink.control.connection import Connection, Frame, close_all
from stagelink.control.door import Door
from stagelink.control.failure import Failure, State
from stagelink.control.framing import decode, encode
from stagelink.control.goodbyes import Goodbyes
from stagelink.control.reader import Reader
from stagelink.deadline import Deadline
from stagelink.errors import PeerLostError, ProtocolError, UsageError
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.interrupts import stops_caller

MessageHandler = Callable[[int, Frame], None]
"""What a kind of message does: called with the peer and the frame, on the reading thread."""

_ABORT_FLUSH_S = 1.0
_STOP_S = 2.0
_BEFORE_BYE = frozenset(
    {
        MessageKind.OPEN,
        MessageKind.DATA,
        MessageKind.RTS,
        MessageKind.REDUCE,
        MessageKind.LAST,
        MessageKind.BYE,
    }
)
"""What a rank says of its own accord, and so never behind its goodbye."""

_TIMED_OUT = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
)
_planes: weakref.WeakSet[Plane] = weakref.WeakSet()


class Plane:
    """Connections of one rank, reading, and dispatch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # to each peer. What may not come behind this rank's goodbye is sent on one with the lock
        # held, and not to those in ``goodbyes.said``: by `post`, where no frame of Python's is to
        # be spared
        self.connections: dict[int, Connection] = {}
        self._process = os.getpid()
        self.reader = Reader(f"stagelink-reader-{rank}")
        self.lock = self.reader.lock  # guards what handlers change and waiting callers look at
        self.changed = self.reader.changed  # has every waiting caller look again
        self.goodbyes = Goodbyes(rank, self.reader, self.connections)
        # peers that said goodbye, and how they left, see `Goodbyes`
        self.gone = self.goodbyes.gone
        # what ends the use of this rank's handler
        self.failure = Failure(rank, self.reader, self.goodbyes.ended, self._tell_failure)
        self.check = self.failure.check  # raises if it can no longer be used, see `Failure.check`
        self.fail = self.failure.fail  # fails it, see `Failure.fail`
        self.door = Door(rank, self.reader, self.connections, self.failure, self._on_ready)
        self.chain = Chain(rank, self.reader, self.connections, self.post, self.wait)
        self._handlers: dict[MessageKind, MessageHandler] = {
            MessageKind.ABORT: self._on_abort,
            MessageKind.BYE: self.goodbyes.hear,
            MessageKind.WAITS: self.chain.hear,
        }
        _planes.add(self)

    # -- for the upper layers

    def handle(self, kind: MessageKind, handler: MessageHandler, *, replace: bool = False) -> None:
        """Add one kind of message to the table, or ``replace`` its handler; before connecting."""
        if kind in self._handlers and not replace:
            raise UsageError(f"rank {self.rank}: {kind.name} has a handler already")
        self._handlers[kind] = handler

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that this one is or was connected to."""
        return tuple(self.connections)

    def address_with(self, peer: int) -> str:
        """This host's address on the connection with a peer; loopback within a server."""
        return self.connections[peer].address

    def post(
        self, peer: int, header: Header, note: bytes = b"", payload: bytes = b"", fds: Any = ()
    ) -> None:
        """Send one frame to a peer; returns at once, and says nothing where the peer is gone."""
        if header.kind not in _BEFORE_BYE:
            self.connections[peer].send(header, note, payload, fds)
            return
        with self.lock:  # so that none of these comes behind this rank's goodbye
            if peer not in self.goodbyes.said:
                self.connections[peer].send(header, note, payload, fds)

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        awaited: Awaited | None = None,
        *,
        closing: bool = False,
    ) -> bool:
        """Block until ``ready()``, asked with `lock` held, is true; False when time ran out.

        Other ranks that ask are told of ``awaited``, see `Chain`. While the handler is being
        closed the wait goes on only with ``closing``. Raises as `check`, at once when it happens
        during the wait.
        """
        check = self.failure.check_failure if closing else self.check
        if self.reader.ending:
            check()  # before the lock: in a forked child nobody may ever release it
        try:
            if awaited is not None:
                self.chain.waits[get_ident()] = awaited
            return self.reader.wait(ready, deadline, check)
        except BaseException as error:
            self.failure.interrupted(error)
            raise
        finally:
            if awaited is not None:
                self.chain.waits.pop(get_ident(), None)

    # -- reading

    def _on_ready(self, connection: Connection, mask: int) -> None:  # noqa: C901 - a frame fewer
        if mask & EPOLLOUT:
            self._flush(connection)
        can_read = mask & ~EPOLLOUT  # be it an error or the end
        try:
            if can_read:
                for frame in connection.read():
                    self._dispatch(connection, frame)
            if connection.handed_over and connection.peer is not None:  # else HELLO comes first
                for frame in connection.handed():
                    self._dispatch(connection, frame)
        except ProtocolError as error:
            if stops_caller(error):
                raise
            if connection.peer is not None:
                # Not dropped: the peer is still to be told.
                raise ProtocolError(
                    f"rank {self.rank}: from rank {connection.peer}: {error}"
                ) from error
            self.door.refuse(connection, error)
            return
        if connection.ended and can_read:
            self._on_end(connection)

    def _flush(self, connection: Connection) -> None:
        if not connection.flush():
            return
        with self.lock:
            # Not if more has been queued meanwhile: that was watched for before this.
            if connection.flushed:
                self.reader.watch_writes(connection.sock, wanted=False)
        self.changed()

    def _dispatch(self, connection: Connection, frame: Frame) -> None:
        try:
            if connection.peer is None:
                self.door.on_hello(connection, frame)
                return
            kind = frame.header.kind
            handler = self._handlers.get(kind)
            if handler is None or (connection.peer in self.gone and kind in _BEFORE_BYE):
                raise ProtocolError(f"rank {connection.peer} sent {kind.name} out of place")
            try:
                handler(connection.peer, frame)
            except ProtocolError:
                raise
            except Exception as error:  # the frames behind this one may explain it
                self.failure.fail_reading(error)
        finally:
            if frame.fds:  # nobody took them
                close_all(frame.take_fds())

    # -- death and goodbye

    def _on_end(self, connection: Connection) -> None:
        """The one place where a death is decided: an end of file without a goodbye."""
        self.door.drop(connection)
        peer = connection.peer
        if peer is not None and self.failure.error is None:
            # Who has said goodbye needs nothing more of the others.
            leaves = self.failure.state in {State.LEAVING, State.CLOSED}
            if not (leaves or peer in self.gone or peer in self.goodbyes.said):
                raise PeerLostError(_how_lost(peer, self.rank, connection.lost_by))
            self.goodbyes.end(peer)
        self.changed()

    def _on_abort(self, peer: int, frame: Frame) -> None:
        if peer in self.gone and peer in self.goodbyes.said:
            return  # neither needs anything of the other any more
        self.failure.fail_as_told(decode(frame.note), told_by=peer)

    def _tell_failure(self, told_by: int | None) -> None:
        for connection in (*self.connections.values(), *self.door.strangers):
            if connection.greeted and (told_by is None or connection.peer != told_by):
                connection.send(Header(MessageKind.ABORT), encode(self.failure.cause))

    # -- closing

    def start_closing(self) -> bool:
        """End every caller's wait with ClosedError from now on; False if it was closed before."""
        with self.lock:
            if self.failure.state is not State.OPEN:
                return False
            self.failure.enter(State.CLOSING)
        self.changed()
        return True

    def close(self, deadline: Deadline) -> None:
        """Say goodbye, read every peer to its end, and give everything back, by the deadline.

        A failed handler only makes sure, for at most a second, that its ABORT is out.
        """
        if self.failure.forked:
            return
        if self.failure.state is not State.CLOSED:
            self.failure.enter(State.LEAVING)
        try:
            self._take_leave(tuple(self.connections.values()), deadline)
        finally:
            try:
                self.reader.stop(Deadline(_STOP_S))  # longer only if a plugin's call does not end
            finally:
                self._release()

    def _take_leave(self, connections: Sequence[Connection], deadline: Deadline) -> None:
        failed = self.failure.error is not None
        if not failed:
            for peer in self.peers:  # to some it may have been said before
                self.goodbyes.say(peer, anyway=True)
        for connection in connections:
            connection.finish_writes()
        if failed:
            patience = Deadline(min(_ABORT_FLUSH_S, deadline.remaining_s))
            self.reader.wait(lambda: all(c.flushed or c.ended for c in connections), patience)
        else:
            self.reader.wait(lambda: all(c.ended for c in connections), deadline)

    def _release(self) -> None:
        with self.lock:
            self.failure.enter(State.CLOSED)
            for connection in (*self.connections.values(), *self.door.strangers):
                connection.close()
            self.door.close()
            self.reader.close()
            _planes.discard(self)

    def _after_fork(self) -> None:
        # The child must not keep the parent's connections open, nor speak on them.
        self.failure.fail_forked(
            f"rank {self.rank} was opened in process {self._process}, this is its fork "
            f"{os.getpid()}; connect again here, or start workers by spawn"
        )
        for connection in (*self.connections.values(), *self.door.strangers):
            connection.forget()
        self.door.forget()
        self.reader.forget()
        self.lock = self.reader.lock


def _how_lost(peer: int, rank: int, error: OSError | None) -> str:
    """How a connection ended: by the peer's death, or by what is between, or here."""
    named = f"its connection to rank {rank}"
    if error is None:
        return f"rank {peer} died: {named} ended without a goodbye"
    if error.errno in _TIMED_OUT:
        return (
            f"rank {peer} is lost: {named} timed out ({error}); its server is down or "
            "stopped, or the network between is cut"
        )
    if isinstance(error, ConnectionError):
        return f"rank {peer} died: {named} was reset without a goodbye ({error})"
    return f"rank {peer} is lost: reading {named} failed ({error})"


def _forget_in_child() -> None:
    for plane in tuple(_planes):
        plane._after_fork()


os.register_at_fork(after_in_child=_forget_in_child)
