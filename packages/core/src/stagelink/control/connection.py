"""One stream socket to one peer: frames out without ever blocking, frames in as they come.

Unix sockets within a server and TCP across are framed alike, so there is one reader. Nobody blocks
in a write: two readers blocked in writing to each other would never read again. What the socket
does not take at once is queued and flushed when it becomes writable.

Where both ends are in one process, each hands its frames to the other as they are. The socket
then only tells of the end.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

from stagelink.control.framing import MAX_FDS, READ_BYTES, Frame, Framing, close_all
from stagelink.errors import ProtocolError
from stagelink.transport.header import Header
from stagelink.transport.interrupts import stops_caller

__all__ = ["MAX_FDS", "Connection", "Frame", "close_all"]

_LOOPBACK = "127.0.0.1"
_GONE = frozenset(
    {
        errno.EPIPE,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        # A cut cable, when the kernel gives up.
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
    }
)


class _Writes(enum.Enum):
    OPEN = enum.auto()
    ENDING = enum.auto()
    """After what is queued."""

    BROKEN = enum.auto()
    CLOSED = enum.auto()


_OPEN = _Writes.OPEN  # asked for every frame: an enum's attribute is slow


class _Chunk(NamedTuple):
    data: memoryview
    fds: tuple[int, ...]


class Connection:
    """A non-blocking stream of frames over a connected socket, owned from now on.

    ``on_blocked`` is called once when output begins to queue, so that somebody watches for room,
    and ``on_handed`` when the other end has handed over a frame, on its thread.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_blocked: Callable[[Connection], None],
        on_handed: Callable[[Connection], None],
        check_proof: Callable[[bytes], None] | None = None,
    ) -> None:
        self.number = next(_numbers)  # what no other connection of this process has
        _connections[self.number] = self
        sock.setblocking(False)
        self.sock = sock
        self.peer: int | None = None  # the other end's rank, None until it has said HELLO
        self.greeted = False  # whether this end has said HELLO; only then may it say anything else
        self.ended = False  # whether the end of the peer's stream was read
        # the system's error that broke the connection; None where there was none
        self.lost_by: OSError | None = None
        self.address = _LOOPBACK if sock.family == socket.AF_UNIX else sock.getsockname()[0]
        self._passes_fds = sock.family == socket.AF_UNIX
        self._on_blocked = on_blocked
        self._on_handed = on_handed
        self._lock = threading.Lock()
        self._out: deque[_Chunk] = deque()
        self._writes = _Writes.OPEN
        self._twin: Connection | None = None
        # frames of the other end, where that is in this process; see `handed`
        self.handed_over: deque[Frame] = deque()
        # One buffer for all reads: a fresh one of this size costs more than the system call.
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._framing = Framing(check_proof)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    def introduce(self, peer: int) -> None:
        """The other end is that rank, and trusted from now on."""
        self.peer = peer
        self._framing.trusted = True

    # -- out

    def send(  # noqa: C901 - no frame more for each message
        self, header: Header, note: bytes = b"", payload: bytes = b"", fds: Sequence[int] = ()
    ) -> None:
        """Send one frame, now or as soon as the socket takes it; returns at once.

        To a peer that is gone nothing is sent and nothing is raised: only the reading side decides
        that a peer is dead. `ProtocolError` for descriptors that it cannot carry, or too many.
        """
        if fds:
            self._check_fds(len(fds))
        with self._lock:
            if self._writes is not _OPEN:
                return
            if self._twin is not None:
                kept = [*_duplicates(fds)] if fds else []
                self._twin._take_over(tuple.__new__(Frame, (header, note, payload, kept)))
                return
            data = header.pack(len(note), len(fds)) + note + payload
            if self._out:
                sent = 0
            elif fds:
                sent = self._write(data, fds)
            else:
                try:
                    sent = self.sock.send(data)
                except OSError as error:
                    sent = self._not_written(error)
            if sent == len(data) or self._is_broken:
                return
            left = _duplicates(() if sent else fds)
            self._out.append(_Chunk(memoryview(data)[sent:], left))
            first = len(self._out) == 1
        if first:
            self._on_blocked(self)

    def _check_fds(self, count: int) -> None:
        if not self._passes_fds:
            raise ProtocolError(f"{count} file descriptors over a connection between servers")
        if count > MAX_FDS:
            raise ProtocolError(f"{count} file descriptors in one frame; it takes {MAX_FDS}")

    def hand_to(self, number: int) -> None:
        """The other end is this process's connection of that number: frames need no socket.

        What was sent before is in the socket, and may be read later: the reader must not look at
        `handed` before it knows its peer, which is the last thing that comes by the socket.
        """
        with self._lock:
            self._twin = _connections.get(number)

    def _take_over(self, frame: Frame) -> None:
        self.handed_over.append(frame)
        if self._writes is _Writes.CLOSED:
            self._drop_handed()
        elif len(self.handed_over) == 1:  # else somebody has been told, and takes what is here
            self._on_handed(self)

    def flush(self) -> bool:
        """Write what is queued as far as it goes; True when nothing is left."""
        with self._lock:
            while self._out and not self._is_broken:
                chunk = self._out[0]
                sent = self._write(chunk.data, chunk.fds)
                if sent == 0 and not self._is_broken:
                    return False
                close_all(chunk.fds)
                if sent < len(chunk.data) and not self._is_broken:
                    self._out[0] = _Chunk(chunk.data[sent:], ())
                    return False
                self._out.popleft()
            self._drop_output()
            if self._writes is _Writes.ENDING:
                self._shut_writes()
        return True

    def finish_writes(self) -> None:
        """Send nothing more after what is queued: the peer then reads an end of file."""
        with self._lock:
            if self._writes is _Writes.OPEN:
                self._writes = _Writes.ENDING
            if self._writes is _Writes.ENDING and not self._out:
                self._shut_writes()

    @property
    def flushed(self) -> bool:
        """Whether no output is queued."""
        return not self._out

    @property
    def _is_broken(self) -> bool:
        return self._writes in {_Writes.BROKEN, _Writes.CLOSED}

    def _write(self, data: bytes | memoryview, fds: Sequence[int]) -> int:
        try:
            if not fds:
                return self.sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
            return self.sock.sendmsg([data], [rights])
        except OSError as error:
            return self._not_written(error)

    def _not_written(self, error: OSError) -> int:
        """Nothing was: the socket is full, or the peer gone; else it raises the error."""
        if stops_caller(error):
            raise error
        if not isinstance(error, BlockingIOError):
            if error.errno not in _GONE:
                raise error
            self._break(error)
        return 0

    def _shut_writes(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:  # the peer was faster; its end of file is read as usual
            if stops_caller(error):
                raise
            self._break(error)

    def _break(self, error: OSError) -> None:
        """Keep the reason: the system tells it once only."""
        self._writes = _Writes.BROKEN
        if error.errno not in (errno.EPIPE, errno.ENOTCONN):  # which say that it was over before
            self.lost_by = self.lost_by or error

    def _drop_output(self) -> None:
        for chunk in self._out:
            close_all(chunk.fds)
        self._out.clear()

    # -- in

    def read(self) -> Iterable[Frame]:
        """The frames that have arrived; sets `ended` at the end of the stream. Never blocks.

        Raises `ProtocolError`, also while they are iterated, for bytes that are no frames.
        """
        if not self._framing.trusted:
            return self._read_stranger()
        count = self._receive(self._buffer, fds=self._passes_fds)
        return self._framing.frames(bytes(self._buffer[:count])) if count else ()

    def _read_stranger(self) -> Iterator[Frame]:
        stranger = True
        while stranger:  # of whom nothing but its HELLO is read
            stranger = not self._framing.trusted
            room = self._buffer[: self._framing.room]
            count = self._receive(room, fds=self._passes_fds and not stranger)
            if not count:
                return
            yield from self._framing.feed(bytes(self._buffer[:count]))

    def handed(self) -> Iterator[Frame]:
        """The frames that the other end has handed over, if it is in this process."""
        for _ in range(len(self.handed_over)):
            try:
                yield self.handed_over.popleft()
            except IndexError:  # another thread has closed the connection meanwhile
                return
        if self.handed_over:  # what has come meanwhile has its turn after others
            self._on_handed(self)

    def _drop_handed(self) -> None:
        while self.handed_over:
            with suppress(IndexError):
                close_all(self.handed_over.popleft().fds)

    def forget(self) -> None:
        """Give up, in a forked child, what it inherited; the parent's end goes on."""
        self.sock.close()
        self._drop_handed()

    def _receive(self, room: memoryview, *, fds: bool) -> int:
        """Read into the buffer; how many bytes, 0 where there are none, or no more."""
        while True:
            ancillary: Sequence[tuple[int, int, bytes]] = ()
            flags = 0
            try:
                if fds:  # which the kernel drops where nobody asks for them
                    count, ancillary, flags, _ = self.sock.recvmsg_into(
                        [room], _FDS_SPACE, _CLOSE_ON_EXEC
                    )
                else:
                    count = self.sock.recv_into(room)
            except OSError as error:
                if stops_caller(error):
                    raise
                if isinstance(error, BlockingIOError):
                    return 0
                self.lost_by = self.lost_by or error
                if isinstance(error, ConnectionResetError):
                    # A Unix peer that closed with unread data resets us first; what it had sent
                    # before, its goodbye included, is still to be read.
                    continue
                count = 0
            if ancillary or flags & _TRUNCATED:
                self._take_fds(ancillary, flags)
            self.ended = not count
            return count

    def _take_fds(self, ancillary: Iterable[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._framing.add_fds(fds)
        if flags & _TRUNCATED:
            raise ProtocolError(
                "descriptors were handed over, and this process cannot have so many (ulimit -n)"
            )

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took. Silent when done before."""
        with self._lock:
            self._writes = _Writes.CLOSED
            self._twin = None
            self._drop_output()
            self.sock.close()
        self._drop_handed()
        self._framing.close()


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """Descriptors of our own for the same files, all or none."""
    kept: list[int] = []
    try:
        for fd in fds:
            kept.append(os.dup(fd))
    except OSError:
        close_all(kept)
        raise
    return tuple(kept)


_connections: WeakValueDictionary[int, Connection] = WeakValueDictionary()
_numbers = itertools.count(1)
_TRUNCATED = int(socket.MSG_CTRUNC)  # a plain number, since enum's operators are slow
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
