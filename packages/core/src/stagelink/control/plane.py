"""The control plane of one rank: its connections, who reads them, and what every frame means.

There is one reading loop, one table from message kind to handler, and one place where a peer is
declared dead. Core's upper layers add their kinds to the table; handlers run on the reading
thread, so they return at once and take `Plane.lock` for what callers look at.
"""

from __future__ import annotations

import _thread
import errno
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from stagelink.control.chain import Chain
from stagelink.control.connection import Connection, Frame, close_all
from stagelink.control.door import Door
from stagelink.control.failure import Failure
from stagelink.control.framing import decode, encode
from stagelink.control.reader import Reader
from stagelink.control.watches import readable, writable
from stagelink.deadline import Deadline
from stagelink.errors import (
    AbortedError,
    ClosedError,
    ForkedError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    StagelinkError,
    TransportError,
    UsageError,
)
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.interrupts import stops_caller

if TYPE_CHECKING:
    import socket

    from stagelink.control.chain import Awaited

__all__ = ["MessageHandler", "Plane"]

MessageHandler = Callable[[int, Frame], None]
"""What a kind of message does: called with the peer and the frame, on the reading thread."""

logger = logging.getLogger("stagelink")
_ABORT_FLUSH_S = 1.0
_EXPLAIN_S = 0.5
_STOP_S = 2.0
_BEFORE_BYE = frozenset(
    {MessageKind.OPEN, MessageKind.DATA, MessageKind.REDUCE, MessageKind.LAST, MessageKind.BYE}
)
"""What a rank says of its own accord, and so never behind its goodbye."""

_TIMED_OUT = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
)
_planes: weakref.WeakSet[Plane] = weakref.WeakSet()


class Plane:
    """Connections, reading, dispatch, failure and goodbye.

    Args:
        rank: this rank.

    Attributes:
        lock: guards what handlers change and waiting callers look at.
        gone: peers that said goodbye, and how they left. They send no more messages, and still
            take what is on its way to them.
        ended: those of them whose connection has ended, so that nothing reaches them any more.
        farewell: how this rank leaves, told with its goodbye.
        reader: reads what comes.
        chain: who waits for whom.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        self.ended: set[int] = set()
        self.farewell = "closed"
        self._failure = Failure()
        self._connections: dict[int, Connection] = {}
        self._strangers: set[Connection] = set()
        self._handlers: dict[MessageKind, MessageHandler] = {
            MessageKind.ABORT: self._on_abort,
            MessageKind.BYE: self._on_bye,
        }
        self._on_hello: Callable[[Connection, Frame], None] | None = None
        self._check_proof: Callable[[bytes], None] = _expect_nobody
        self.chain = Chain(self)
        self._on_failure: list[Callable[[StagelinkError], None]] = []
        self._on_goodbye: list[Callable[[int], None]] = []
        self._on_ended: list[Callable[[int], None]] = []
        self._busy: list[Callable[[int], bool]] = []
        self._parted: set[int] = set()
        self._usable = True
        self._closing = False
        self._leaving = False
        self._closed = False
        self._process = os.getpid()
        self._forked = False
        self.reader = Reader(f"stagelink-reader-{rank}", self._fail_reading)
        self.lock = self.reader.lock
        self.changed = self.reader.changed
        self._door = Door(rank, self.reader, self.adopt, self.drop, self.lock)
        self.reader.on_alarm = self._look_at_door
        _planes.add(self)

    # -- for the upper layers

    def handle(self, kind: MessageKind, handler: MessageHandler, *, replace: bool = False) -> None:
        """Add one kind of message to the table; before connecting.

        Args:
            kind: of the messages.
            handler: is given each.
            replace: take the place of another handler.

        Raises:
            UsageError: the kind has a handler already, and ``replace`` is false.
        """
        if kind in self._handlers and not replace:
            raise UsageError(f"rank {self.rank}: {kind.name} has a handler already")
        self._handlers[kind] = handler

    def handle_hello(
        self, handler: Callable[[Connection, Frame], None], check_proof: Callable[[bytes], None]
    ) -> None:
        """Who judges the first frame of a new connection, before its peer is known.

        Args:
            handler: is given what came behind the proof.
            check_proof: is given the proof, before anything else is read; raises to refuse it.
        """
        self._on_hello = handler
        self._check_proof = check_proof

    def on_failure(self, callback: Callable[[StagelinkError], None]) -> None:
        """Call back once when the handler fails; on any thread, must return at once."""
        self._on_failure.append(callback)

    def on_goodbye(self, callback: Callable[[int], None]) -> None:
        """Call back with each peer that says goodbye; on the reading thread, returns at once."""
        self._on_goodbye.append(callback)

    def on_ended(self, callback: Callable[[int], None]) -> None:
        """Call back with each peer in `ended`; on the reading thread, must return at once."""
        self._on_ended.append(callback)

    def hold_goodbye(self, busy: Callable[[int], bool]) -> None:
        """Ask ``busy(peer)``, whether something is still on its way there, before a goodbye."""
        self._busy.append(busy)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, owned from now on."""
        with self.lock:
            self._door.open(listener)

    def stop_listening(self) -> None:
        """Everybody who is expected is here: accept nobody any more."""
        with self.lock:
            self._door.close()

    @property
    def shortage(self) -> str:
        """Why connections cannot be accepted at present; empty where they can."""
        return self._door.shortage

    def _look_at_door(self) -> None:
        with self.lock:
            self._door.look()

    def adopt(
        self, sock: socket.socket, known: Callable[[Connection], None] | None = None
    ) -> Connection:
        """Read from a connected socket, owned from now on; its peer is unknown until HELLO.

        ``known`` is called with the connection before anything is read from it.
        """
        connection = Connection(sock, self._on_blocked, self._on_handed, self._check_proof)
        with self.lock:
            self._strangers.add(connection)
        if known is not None:
            known(connection)
        self.reader.add(sock, partial(self._on_connection, connection))
        return connection

    def greet(self, connection: Connection, hello: bytes) -> None:
        """Say HELLO; the other end then takes this rank for a peer, and is told if it fails."""
        with self.lock:
            connection.send(Header(MessageKind.HELLO, sequence=connection.number), hello)
            connection.greeted = True
            if self.failure is not None:
                connection.send(Header(MessageKind.ABORT), encode(self.cause))

    def introduce(self, connection: Connection, peer: int) -> None:
        """The connection's peer is known and trusted from now on."""
        with self.lock:
            self._strangers.discard(connection)
            connection.introduce(peer)
            self._connections[peer] = connection
            self._door.passed(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection and forget it."""
        with self.lock:
            self._strangers.discard(connection)
            self.reader.remove(connection.sock)
            connection.close()
            self._door.passed(connection)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that this one is or was connected to."""
        return tuple(self._connections)

    def address_with(self, peer: int) -> str:
        """This host's address on the connection with a peer; loopback within a server."""
        return self._connections[peer].address

    def post(
        self, peer: int, header: Header, note: bytes = b"", payload: bytes = b"", fds: Any = ()
    ) -> None:
        """Send one frame to a peer; returns at once, and says nothing where the peer is gone."""
        if header.kind not in _BEFORE_BYE:
            self._connections[peer].send(header, note, payload, fds)
            return
        with self.lock:  # so that none of these comes behind this rank's goodbye
            if peer not in self._parted:
                self._connections[peer].send(header, note, payload, fds)

    def wait(
        self, ready: Callable[[], bool], deadline: Deadline, awaited: Awaited | None = None
    ) -> bool:
        """Block until ``ready()``, asked with `lock` held, is true; False when time ran out.

        Args:
            ready: the condition.
            deadline: for it.
            awaited: what it waits for, for other ranks that ask; see `Chain`.

        Raises:
            StagelinkError: as `check`, at once when it happens during the wait.
        """
        if awaited is None:
            return self._wait(ready, deadline, self.check)
        self.chain.begin(awaited)
        try:
            return self._wait(ready, deadline, self.check)
        finally:
            self.chain.end()

    def wait_while_closing(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """As `wait`, for what still has to end while the handler is being closed."""
        return self._wait(ready, deadline, self.check_failure)

    def _wait(
        self, ready: Callable[[], bool], deadline: Deadline, check: Callable[[], None]
    ) -> bool:
        check()  # before the lock: in a forked child nobody may ever release it
        try:
            return self.reader.wait(ready, deadline, check)
        except BaseException as error:
            self.interrupted(error)
            raise

    def interrupted(self, error: BaseException) -> None:
        """Fail if what leaves a call is a signal handler's exception, Ctrl-C included.

        It may have come in the middle of anything, a frame half dispatched, so the handler is of
        no use any more; the other ranks are told what came. The exception stays the caller's.
        """
        if stops_caller(error) and not isinstance(error, GeneratorExit):
            text = f": {error}" if str(error) else ""
            stopped = AbortedError(f"rank {self.rank} was stopped by {type(error).__name__}{text}")
            stopped.__cause__ = error
            self.fail(stopped)

    def check(self) -> None:
        """Raise if this handler can no longer be used.

        Raises:
            ForkedError: this process was forked from the one that connected.
            StagelinkError: the failure, as a fresh exception with the same cause.
            ClosedError: it was closed.
        """
        if self._usable:
            return
        try:
            self.check_failure()
        except StagelinkError:
            self._failure.reported = True
            raise
        raise ClosedError(f"rank {self.rank} is closed")

    def check_failure(self) -> None:
        """As `check`, but fine with a handler that is being closed."""
        if self._forked:
            raise ForkedError(
                f"rank {self.rank} was opened in process {self._process}, this is its fork "
                f"{os.getpid()}; connect again here, or start workers by spawn"
            )
        self._failure.check()

    def check_here(self, peer: int, awaited: str) -> bool:
        """False while the peer is here; for use in a ``ready``.

        Raises:
            PeerClosedError: the peer said goodbye, so what is awaited from it can never come.
        """
        if peer in self.gone:
            raise PeerClosedError(
                f"rank {self.rank}: peer rank {peer} {self.gone[peer]}; {awaited} expected"
            )
        return False

    def check_reached(self, peer: int, awaited: str) -> bool:
        """As `check_here` for what a peer still does after its goodbye, until its end."""
        return peer in self.ended and self.check_here(peer, awaited)

    def part(self, peer: int) -> bool:
        """Say goodbye to a peer, if nothing is on its way there any more; once. Returns at once.

        Returns:
            Whether it has been said.
        """
        if peer not in self._parted and not any(busy(peer) for busy in self._busy):
            self._say_goodbye(peer)
        return peer in self._parted

    def _say_goodbye(self, peer: int) -> None:
        with self.lock:
            if peer not in self._parted:
                self._parted.add(peer)
                self._connections[peer].send(Header(MessageKind.BYE), self.farewell.encode())

    def check_reported(self) -> None:
        """Raise a failure that no caller has been told of yet."""
        if not self._failure.reported:
            self.check_failure()

    @property
    def failure(self) -> StagelinkError | None:
        """What failed this handler, or None."""
        return self._failure.error

    @property
    def cause(self) -> Mapping[str, Any]:
        """What other ranks are told of it: the ``rank`` where it began and its ``text``."""
        return self._failure.cause

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that connected."""
        return self._forked

    # -- reading

    def _fail_reading(self, error: BaseException) -> None:
        if stops_caller(error):
            self.interrupted(error)
            raise error
        if isinstance(error, TransportError):
            self._blame_elsewhere(error)
        elif isinstance(error, StagelinkError):
            self.fail(error)
        else:
            wrapped = TransportError(f"rank {self.rank} failed while reading: {error!r}")
            wrapped.__cause__ = error
            self.fail(wrapped)

    def _on_blocked(self, connection: Connection) -> None:
        with self.lock:
            self.reader.watch_writes(connection.sock, wanted=True)

    def _on_handed(self, connection: Connection) -> None:
        self.reader.call(partial(self._on_connection, connection, 0))

    def _on_connection(self, connection: Connection, mask: int) -> None:
        if writable(mask):
            self._flush(connection)
        if self._read_frames(connection, mask) and readable(mask) and connection.ended:
            self._on_end(connection)

    def _read_frames(self, connection: Connection, mask: int) -> bool:
        """Read and dispatch; False if it was no frame."""
        try:
            if readable(mask):
                for frame in connection.read():
                    self._dispatch(connection, frame)
            if connection.peer is not None:  # else its HELLO is still in the socket
                for frame in connection.handed():
                    self._dispatch(connection, frame)
        except ProtocolError as error:
            if stops_caller(error):
                raise
            self._bad_bytes(connection, error)
            return False
        return True

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
                self._greeted(connection, frame)
                return
            handler = self._handlers.get(frame.header.kind)
            if handler is None or (connection.said_bye and frame.header.kind in _BEFORE_BYE):
                raise ProtocolError(
                    f"rank {connection.peer} sent {frame.header.kind.name} out of place"
                )
            handler(connection.peer, frame)
        finally:
            if frame.fds:  # nobody took them
                close_all(frame.take_fds())

    def _greeted(self, connection: Connection, frame: Frame) -> None:
        if self._on_hello is None:
            raise ProtocolError("HELLO where nobody is expected")
        self._on_hello(connection, frame)

    def _bad_bytes(self, connection: Connection, error: ProtocolError) -> None:
        if connection.peer is None:
            logger.warning("rank %d: a stranger was refused: %s", self.rank, error)
            self.drop(connection)
            return
        # Not dropped: the peer is still to be told.
        raise ProtocolError(f"rank {self.rank}: from rank {connection.peer}: {error}") from error

    # -- death and goodbye

    def _on_end(self, connection: Connection) -> None:
        """The one place where a death is decided: an end of file without a goodbye."""
        self.drop(connection)
        peer = connection.peer
        if peer is not None and not self.failure:
            # Who has said goodbye needs nothing more of the others.
            if not (connection.said_bye or self._leaving or peer in self._parted):
                raise PeerLostError(self._farewell(peer, connection.lost_by))
            with self.lock:
                self.gone.setdefault(peer, "closed")
                self.ended.add(peer)
            for callback in self._on_ended:
                callback(peer)
        self.changed()

    def _farewell(self, peer: int, error: OSError | None) -> str:
        """How a connection ended: by the peer's death, or by what is between, or here."""
        named = f"its connection to rank {self.rank}"
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

    def _on_bye(self, peer: int, frame: Frame) -> None:
        how = frame.note.decode(errors="replace") or "closed"
        with self.lock:
            self._connections[peer].said_bye = True
            self.gone[peer] = how
        for callback in self._on_goodbye:
            callback(peer)
        # The peer takes what is on its way to it until it hears that nothing is left.
        self.part(peer)
        self.changed()

    def _on_abort(self, peer: int, frame: Frame) -> None:
        if peer in self.gone and peer in self._parted:
            return  # neither needs anything of the other any more
        self.fail_as_told(decode(frame.note), told_by=peer)

    def fail(
        self,
        error: StagelinkError,
        *,
        origin: int | None = None,
        text: str | None = None,
        told_by: int | None = None,
    ) -> None:
        """Poison this handler and tell every rank; the first failure stays. Returns at once.

        Args:
            error: what every later call on this rank raises.
            origin: the rank where it began; None: here.
            text: what the other ranks are told; None: the error's own text.
            told_by: the peer that told us, which need not hear it again.
        """
        with self.lock:
            rank = self.rank if origin is None else origin
            if self._closed or not self._failure.set(error, rank, text or str(error)):
                return
            self._usable = False
            # With the lock held: whoever sees the failure may close at once, and then nothing
            # more is sent.
            for connection in (*self._connections.values(), *self._strangers):
                if connection.greeted and (told_by is None or connection.peer != told_by):
                    connection.send(Header(MessageKind.ABORT), encode(self.cause))
        for callback in self._on_failure:
            callback(error)
        self.changed()

    def blame(self, error: StagelinkError, peer: int | None = None) -> None:
        """Fail with a transport's error, unless reading explains it better within a moment.

        A transport often notices first that a peer is gone, but only the end of the peer's
        connection says that it died, or that it had said goodbye. It does not wait on the reading
        thread.

        Args:
            error: the transport's.
            peer: at the other end of its link.

        Raises:
            PeerClosedError: the peer has gone, after a goodbye: that is no failure.
        """

        def explained() -> bool:
            return self.failure is not None or peer in self.ended

        if not self.reader.reads_here:
            self.reader.wait(explained, Deadline(_EXPLAIN_S))
        if peer is not None and peer in self.ended and self.failure is None:
            raise PeerClosedError(
                f"rank {self.rank}: peer rank {peer} {self.gone[peer]}: {error}"
            ) from error
        self.fail(error)

    def _blame_elsewhere(self, error: StagelinkError) -> None:
        """`blame`, from the reading thread: another waits, so that reading goes on meanwhile."""
        try:
            # Below `threading`, whose threads tell when they have begun: this must not block.
            _thread.start_new_thread(self.blame, (error,))
        except RuntimeError:  # there is no memory for one
            self.fail(error)

    def raise_blamed(self, error: StagelinkError, peer: int | None = None) -> NoReturn:
        """`blame`, then raise what explains it best; for a caller's thread."""
        if stops_caller(error):
            self.interrupted(error)
            raise error
        self.blame(error, peer)
        if not self.reader.reads_here:
            self.check()
        raise error

    def fail_as_told(self, cause: Mapping[str, Any], told_by: int | None = None) -> None:
        """Fail with the cause of another rank's failure, see `cause`."""
        origin, text = cause.get("rank"), str(cause.get("text"))
        told = AbortedError(f"rank {origin} reports: {text}")
        self.fail(told, origin=origin, text=text, told_by=told_by)

    def start_closing(self) -> bool:
        """From now on every caller's wait ends with ClosedError; False if it was closed before."""
        with self.lock:
            if self._closing:
                return False
            self._closing = True
            self._usable = False
        self.changed()
        return True

    def close(self, deadline: Deadline) -> None:
        """Say goodbye, read every peer to its end, and give everything back, by the deadline.

        A failed handler only makes sure, for at most a second, that its ABORT is out.
        """
        if self._forked:
            return
        self._leaving = True
        connections = tuple(self._connections.values())
        try:
            self._take_leave(connections, deadline)
        finally:
            try:
                self.reader.stop(Deadline(_STOP_S))  # longer only if a plugin's call does not end
            finally:
                self._release()

    def _take_leave(self, connections: Sequence[Connection], deadline: Deadline) -> None:
        if self.failure is None:
            for peer in self.peers:  # to some it may have been said before
                self._say_goodbye(peer)
        for connection in connections:
            connection.finish_writes()
        if self.failure is None:
            self.reader.wait(lambda: all(c.ended for c in connections), deadline)
        else:
            patience = Deadline(min(_ABORT_FLUSH_S, deadline.remaining_s))
            self.reader.wait(lambda: all(c.flushed or c.ended for c in connections), patience)

    def _release(self) -> None:
        with self.lock:
            self._closed = True
            for connection in (*self._connections.values(), *self._strangers):
                connection.close()
            self._door.close()
            self.reader.close()
            _planes.discard(self)

    def _after_fork(self) -> None:
        # The child must not keep the parent's connections open, nor speak on them.
        self._forked = True
        self._usable = False
        self.reader.forget()
        self.lock = self.reader.lock
        for connection in (*self._connections.values(), *self._strangers):
            connection.forget()
        self._door.forget()


def _expect_nobody(proof: bytes) -> None:
    del proof
    raise ProtocolError("HELLO where nobody is expected")


def _forget_in_child() -> None:
    for plane in tuple(_planes):
        plane._after_fork()


os.register_at_fork(after_in_child=_forget_in_child)
