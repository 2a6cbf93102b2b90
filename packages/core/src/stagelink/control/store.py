"""A client of the job's store whose calls all end: in time, by a signal, or with their link.

Torch's calls of a store cannot be interrupted, and where the network or the store's host has gone
without a word they return after a quarter of an hour, or never. Each client here therefore has a
thread of its own that makes the calls. A caller waits for it as long as it wants; a call that is
not back by then is given up: the client's socket is shut down, which frees the thread, and no call
is made any more.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast
from weakref import WeakSet, finalize

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from stagelink.deadline import Deadline
from stagelink.errors import ConnectError
from stagelink.transport.host import socket_at

logger = logging.getLogger("stagelink")
_T = TypeVar("_T")
Remote = tuple[str, int]
"""Address and port at the other end of a socket."""

_FREED_S = 0.5
"""How long a call whose socket was shut down takes to return, at most."""

_AGAIN_S = 0.05
_EXIT_S = 5.0
"""The same at the process's end, for a constructor."""

_TRY_S = (2.0, 4.0)
_LEAST_S = 0.05
_one_clone = threading.Lock()
_CLIENT = re.compile(r"client=TCPClient\(SocketImpl\(fd=(\d+)")
_MAPPED = "::ffff:"
_clients: WeakSet[StoreClient] = WeakSet()


class _Call(Generic[_T]):
    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self.done = threading.Event()
        self.outcome: list[_T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.outcome.append(self._work())
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class StoreClient:
    """Calls of one store, which end by the deadline that each is given.

    Used from any thread. A call raises `ConnectError` where the store does not answer in time, or
    is gone, and then every further one does at once. In a forked child it must not be used.

    Args:
        where: what the store is called in errors.
        store: an open store that nobody else calls; or None, and `make` comes next.
    """

    def __init__(self, where: str, store: Store | None = None) -> None:
        self.where = where
        self._store = store
        self._lent: WeakSet[Any] = WeakSet()
        self._broken = ""
        self._making: set[int] | None = None
        self._remote: Remote | None = None
        self._process = os.getpid()
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        # A store in this process's own memory does not block, and needs no thread.
        self._thread: threading.Thread | None = None
        if not isinstance(_base(store), HashStore):
            self._thread = threading.Thread(
                target=_work, args=(self._calls,), name="stagelink-store", daemon=True
            )
            # For one that is never closed; first, as a signal may end the start of a thread.
            finalize(self, self._calls.put, None).atexit = False
            self._thread.start()
        _clients.add(self)

    @classmethod
    def of(cls, store: Store, deadline: Deadline) -> StoreClient:
        """A client beside one that is open: a connection of its own where the store has any."""
        if isinstance(_base(store), HashStore | FileStore):
            return cls(_name(store), store)
        client = cls(_name(store))
        client.make(lambda limit: _clone(store, limit), deadline, _peer(_descriptor(store)))
        return client

    def make(
        self, make: Callable[[timedelta], Store], deadline: Deadline, remote: Remote | None = None
    ) -> None:
        """Open the store, once, by torch's constructor, which is given the time that it has.

        Where nobody answers at ``remote``, which it connects to, it is freed by that.
        """
        self._remote = remote
        try:
            self._store = self._made(make, deadline)
        except BaseException:
            self.close(0.0)
            raise

    def _tried(self, make: Callable[[timedelta], Store], deadline: Deadline) -> Store:
        # Often, and not for long: a constructor whose connection ends begins again for as long as
        # it has, and sleeps in between.
        limit_s = _TRY_S[0]
        while True:
            left_s = max(deadline.remaining_s, _LEAST_S)
            try:
                store = make(timedelta(seconds=min(limit_s, left_s)))
            except RuntimeError as error:
                if self._broken or deadline.passed or "timed out" not in str(error):
                    raise
            else:
                return store
            limit_s = min(2 * limit_s, _TRY_S[1])

    def _made(self, make: Callable[[timedelta], Store], deadline: Deadline) -> Store:
        self._making = {socket_ for _, socket_ in _sockets_to(self._remote)}
        store = self._ask(lambda: self._tried(make, deadline), deadline)
        self._making = None  # not where it failed: the constructor may still be at work
        return store

    @property
    def host(self) -> str | None:
        """Host of the store, as this client calls it; None where it has none."""
        return store_host(self._store)

    def call(self, work: Callable[[Store], _T], deadline: Deadline) -> _T:
        """Make one call and wait for its end; a signal interrupts the wait, not the call."""
        return self._ask(lambda: work(self._open_store()), deadline)

    def submit(self, work: Callable[[Store], None]) -> threading.Event | None:
        """Have a call made soon, and what it raises logged; returns at once.

        An event that is set when it has ended; None where the store was given up.
        """
        call = _Call(lambda: self._logged(work))
        return call.done if self._enter(call) else None

    def _logged(self, work: Callable[[Store], None]) -> None:
        try:
            work(self._open_store())
        except (RuntimeError, MemoryError) as error:  # it may be gone at the end of a job
            self._broken = self._broken or f"is gone: {_first_line(error)}"
            logger.debug("the store at %s %s", self.where, self._broken)

    def _open_store(self) -> Store:
        if self._broken or self._store is None:
            raise ConnectError(f"the store at {self.where} {self._broken or 'was closed'}")
        return self._store

    def _enter(self, call: _Call[Any]) -> bool:
        if self._broken or os.getpid() != self._process:
            return False
        if self._thread is None:
            call.run()
        else:
            self._calls.put(call)
        return True

    def _ask(self, work: Callable[[], _T], deadline: Deadline) -> _T:
        call = _Call(work)
        if self._enter(call) and not call.done.wait(deadline.remaining_s):
            self.cut(f"did not answer within {deadline.seconds:g} s")
        if call.outcome:
            return call.outcome[0]
        error, call.error = call.error, None  # else they would keep each other
        if error is not None and not isinstance(error, RuntimeError):
            raise error
        if error is not None:
            self._broken = self._broken or f"is gone: {_first_line(error)}"
        raise ConnectError(f"the store at {self.where} {self._broken}") from error

    def lend(self, prefix: str, deadline: Deadline) -> Store:
        """A store for others, by a connection of its own and under a prefix.

        It is theirs to call and to wait for; `cut` frees them.
        """
        store = self._open_store()
        if isinstance(_base(store), HashStore | FileStore):
            # No waiting call keeps others from it. And torch counts the clients of a file, to
            # remove it after the last: more of them than ranks, and it would be too early.
            return PrefixStore(prefix, store)
        twin = self._made(lambda limit: _clone(store, limit), deadline)
        twin.set_timeout(timedelta(seconds=max(deadline.remaining_s, 1.0)))
        lent = PrefixStore(prefix, twin)
        self._lent.add(lent)
        return lent

    def cut_lent(self) -> None:
        """Free callers that wait in a store that was lent: their calls fail."""
        for lent in tuple(self._lent):
            _shut_down(_descriptor(lent))

    def cut(self, why: str) -> None:
        """Give the store up: the call in progress is freed, and no other is made."""
        if os.getpid() != self._process:
            return  # the sockets are the parent's as well
        self._broken = self._broken or why
        self.cut_lent()
        _shut_down(_descriptor(self._store))
        if self._making is not None:
            for number, socket_ in _sockets_to(self._remote):
                if socket_ not in self._making:
                    _shut_down(number)

    def close(self, seconds: float, freed_s: float = _FREED_S) -> None:
        """Let what was submitted end, for so many seconds at most, and let go of everything.

        A call that is freed then has ``freed_s`` to return.
        """
        thread = self._thread
        if os.getpid() != self._process:
            return
        if thread is not None:
            self._calls.put(None)
            thread.join(0.0 if self._broken else seconds)
            until = Deadline(freed_s)
            while thread.is_alive() and not until.passed:
                self.cut("was closed")  # again and again: a constructor connects again
                thread.join(_AGAIN_S)
        self._broken = self._broken or "was closed"
        self.cut_lent()
        self._store = None
        if thread is None or not thread.is_alive():  # else the end of the process tries again
            _clients.discard(self)


def _work(calls: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()


def _clone(store: Store, limit: timedelta) -> Store:
    """Another connection to a store; it has the time limit of the first, but while it is made."""
    with _one_clone:
        usual: timedelta = cast("Any", store).timeout  # missing in torch's stubs
        store.set_timeout(limit)
        try:
            twin: Store = cast("Any", store).clone()  # missing in torch's stubs
        finally:
            store.set_timeout(usual)
    twin.set_timeout(usual)
    return twin


def _base(store: Store | None) -> Store | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def store_host(store: Store | None) -> str | None:
    """The host of a c10d store as its client has it; None for a store that has none."""
    base = _base(store)
    return str(base.host) if isinstance(base, TCPStore) else None


def _name(store: Store) -> str:
    base = _base(store)
    if isinstance(base, TCPStore):
        host = f"[{base.host}]" if ":" in base.host else base.host
        return f"tcp://{host}:{base.port}"
    if isinstance(base, FileStore):
        return f"file://{cast('Any', base).path}"  # missing in torch's stubs
    return type(base).__name__


# -- a client's socket, which torch does not give away but in the client's text


def _descriptor(store: Store | None) -> int | None:
    base = _base(store)
    found = _CLIENT.search(repr(base)) if isinstance(base, TCPStore) else None
    return int(found[1]) if found else None


def _shut_down(number: int | None) -> None:
    """End a socket's connection, which is somebody else's to close."""
    if number is not None:
        with suppress(OSError), socket_at(number) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def _peer(number: int | None) -> Remote | None:
    if number is None:
        return None
    try:
        with socket_at(number) as sock:
            return remote_of(sock)
    except OSError:  # no socket, or not connected
        return None


def remote_of(sock: socket.socket) -> Remote | None:
    """Address and port that a TCP socket is connected to, or None."""
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return None
    host, port = sock.getpeername()[:2]
    return str(host).removeprefix(_MAPPED), int(port)


def _sockets_to(remote: Remote | None) -> Iterator[tuple[int, int]]:
    """This process's sockets that are connected to an address, where the system tells.

    Each by its descriptor, which soon is another's, and its number in the kernel.
    """
    if remote is None:
        return
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if _peer(int(name)) == remote:
                yield int(name), os.stat(int(name)).st_ino


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# -- the end of the process


def _cut_all() -> None:
    """No thread may be in torch's code when the interpreter ends: that ends by SIGABRT."""
    for client in tuple(_clients):
        client.close(0.0, _EXIT_S)


def _forget_in_child() -> None:
    _clients.clear()


atexit.register(_cut_all)
os.register_at_fork(after_in_child=_forget_in_child)
