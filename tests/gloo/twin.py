"""One of two ranks as a transport sees core: a port for each link, a wire for notes and headers.

Enough of core to drive the transport by hand: a reading thread that begins what arrives, and tells
the ends of the peer's death. Below it what rank processes run.
"""

from __future__ import annotations

import gc
import json
import math
import os
import queue
import resource
import signal
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Self

import torch
from torch.distributed import PrefixStore

from stagelink.deadline import Deadline
from stagelink.transport.contract import Link, Message
from stagelink.transport.header import HEADER_BYTES, Header, MessageKind
from stagelink.transport.streams import HostStream
from stagelink_gloo import Gloo, GlooOptions
from tests.support.completion import Completion
from tests.support.listeners import listeners

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from types import TracebackType
    from typing import Any

    from torch.distributed import Store

    from stagelink.transport.contract import Receiver, Sender
    from stagelink.transport.streams import Stream

HEADER, NOTE = 0, 1
LONG_S = 20.0


def lo() -> Gloo:
    return Gloo(GlooOptions(interface="lo"))


def pattern(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


@dataclass
class TwinPort:
    """What `stagelink.transport.contract.Port` asks for."""

    link: Link
    twin: Twin

    @property
    def rank(self) -> int:
        return self.twin.rank

    @property
    def peer(self) -> int:
        return self.twin.peer

    @property
    def address(self) -> str:
        return "127.0.0.1"

    @property
    def window(self) -> int:
        return 4

    @property
    def stream(self) -> Stream:
        return HostStream(self.buffer)

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.twin.post(NOTE, note)

    def room(self) -> None:
        raise AssertionError("there is always room")

    def fail(self, error: BaseException) -> None:
        self.twin.fail(error)

    def watch(self, fd: int, action: Callable[[], bool], *, writable: bool = False) -> None:
        raise AssertionError("there is no descriptor to watch")

    def unwatch(self, fd: int) -> None:
        raise AssertionError("nothing is watched")

    def wait(self, ready: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        return self.twin.wait(ready, deadline or Deadline(math.inf))

    def pause(self, seconds: float) -> None:
        self.twin.check()
        time.sleep(seconds)

    def wake(self) -> None:
        self.twin.wake()

    def call(self, action: Callable[[], None]) -> None:
        raise AssertionError("nothing is lent")

    def store(self) -> Store:
        return self.twin.store

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


@dataclass
class Incoming:
    """A message that the receiver has begun.

    Attributes:
        done: what the receiver says of it.
        buffer: what was lent to it.
        note: what the sender has announced it with.
    """

    done: Completion
    buffer: torch.Tensor
    note: bytes

    def take(self, seconds: float = LONG_S) -> torch.Tensor:
        payload = self.done.wait(seconds)
        return self.buffer if payload is None else payload


class Sent(Completion):
    """A message that the sender has begun; as in core, a failure of the twin ends the wait."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self._twin = twin

    def wait(self, seconds: float = LONG_S) -> None:
        if not self._twin.wait(lambda: self.over, Deadline(seconds)):
            raise TimeoutError(f"not done within {seconds:g} s")
        assert super().wait(0) is None


class Twin:
    """One rank of a pair, connected in both directions. A context manager; closes in order.

    Args:
        transport: this rank's.
        rank: this rank.
        peer: the other.
        store: for the two to meet in.
        reading: whether to read from the start what the peer sends.
        deaf: whether to keep the peer's death to itself.
    """

    def __init__(
        self,
        transport: Gloo,
        rank: int,
        peer: int,
        store: Store,
        *,
        reading: bool = True,
        deaf: bool = False,
    ) -> None:
        self.transport = transport
        self.rank = rank
        self.peer = peer
        pair = f"{min(rank, peer)}-{max(rank, peer)}"
        self.store: Store = PrefixStore(f"gloo/{pair}", store)
        self.failure: BaseException | None = None
        self.incoming: queue.Queue[Incoming] = queue.Queue()
        self._changed = threading.Condition()
        self._deaf = deaf
        self._begun = 0
        self._under_way: list[Completion] = []
        self._writing = threading.Lock()
        self._noting = threading.Lock()
        self._closed = False
        self._wire = _wire(rank < peer, PrefixStore(f"wire/{pair}", store))
        deadline = Deadline(LONG_S)
        self.sender: Sender
        self.receiver: Receiver
        for source, target in sorted([(rank, peer), (peer, rank)]):
            link = Link(source, target, "gloo", "cpu")
            port = TwinPort(link, self)
            if source == rank:
                self.sender = transport.open_sender(link, port, deadline)
            else:
                self.receiver = transport.open_receiver(link, port, deadline)
        self._reader = threading.Thread(target=self._read, name=f"reader-{rank}-{peer}")
        if reading:
            self.read()

    def read(self) -> None:
        """Begin to read."""
        self._reader.start()

    def send(self, payload: torch.Tensor) -> Sent:
        """Begin to send a flat uint8 tensor."""
        header, done = self._header(payload.numel()), Sent(self)
        assert self.sender.begin(
            Message(header, payload),
            lambda note=b"", fds=(): self.post(HEADER, header.pack() + note),
            done,
        )
        self._under_way.append(done)
        return done

    def only_announce(self, size_bytes: int, note: bytes = b"") -> None:
        """Send a header whose payload never comes."""
        self.post(HEADER, self._header(size_bytes).pack() + note)

    def next(self, timeout_s: float = LONG_S) -> Incoming:
        """Block until one more message has begun to come in."""
        return self.incoming.get(timeout=timeout_s)

    def post(self, kind: int, body: bytes) -> None:
        with self._writing:
            self._wire.send((kind, body))

    def check(self) -> None:
        """Raise what this rank has failed with."""
        if self.failure is not None:
            raise ConnectionAbortedError(str(self.failure))

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        def look() -> bool:
            self.check()
            return ready()

        with self._changed:
            return self._changed.wait_for(look, min(deadline.remaining_s, 1e6))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail as core does: both ends are told, and every wait ends."""
        self.failure = self.failure or error
        self.sender.abort(error)
        self.receiver.abort(error)
        self.wake()

    def close(self) -> None:
        """Close the transport, then wait for the peer to have done so."""
        if self._wire.closed:
            return
        deadline = Deadline(math.inf)
        if not all(done.over for done in self._under_way):
            self.fail(ConnectionAbortedError("it is being closed"))
        self._under_way.clear()
        with self._noting:
            self._closed = True
        self.sender.close(deadline)
        self.receiver.close(deadline)
        self.transport.close(deadline)
        with suppress(BrokenPipeError):
            self._wire.send(None)
        if self._reader.ident is not None:
            self._reader.join()
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _header(self, size_bytes: int) -> Header:
        self._begun += 1
        return Header(MessageKind.DATA, sequence=self._begun, payload_bytes=size_bytes)

    def _read(self) -> None:
        try:
            while (frame := self._wire.recv()) is not None:
                kind, body = frame
                if kind == NOTE:
                    with self._noting:
                        if not self._closed:
                            self.sender.on_note(body, ())
                else:
                    self._begin(Header.unpack(body), body[HEADER_BYTES:])
                self.wake()
        except (EOFError, ConnectionResetError):
            if not self._deaf:
                self.fail(ConnectionError(f"rank {self.peer} died"))

    def _begin(self, header: Header, note: bytes) -> None:
        buffer = torch.zeros(header.payload_bytes, dtype=torch.uint8)
        done = Completion()
        try:
            self.receiver.begin(header, note, (), lambda: buffer, done)
        except Exception as error:  # it was announced on a connection that is closed by now
            self.fail(error)
        else:
            self._under_way.append(done)
            self.incoming.put(Incoming(done, buffer, note))


def _wire(dials: bool, store: Store) -> Connection:
    if dials:
        store.wait(["address"])
        return Client(store.get("address").decode())
    with (
        tempfile.TemporaryDirectory() as folder,
        Listener(f"{folder}/wire", "AF_UNIX") as listener,
    ):
        store.set("address", f"{folder}/wire")
        return listener.accept()


# -- what rank processes run ----------------------------------------------------------------------

VICTIM, SURVIVOR = 1, 0
BIG_BYTES = 256 * 1024 * 1024


def exchange(rank: int, world_size: int, store: Store, sizes: list[int]) -> None:
    """Send and receive messages of these sizes, both ways at once, without a deadline."""
    with Twin(lo(), rank, 1 - rank, store) as twin:
        for number, size in enumerate(sizes):
            pending = twin.send(pattern(size, 2 * number + rank))
            received = twin.next().take()
            pending.wait()
            assert torch.equal(received, pattern(size, 2 * number + twin.peer)), size


def send_huge(rank: int, world_size: int, store: Store, size_bytes: int) -> None:
    """Send one message beyond what 31 bits count."""
    with Twin(lo(), rank, 1 - rank, store) as twin:
        if rank == 0:
            payload = torch.ones(size_bytes, dtype=torch.uint8)
            payload[-1] = 77
            twin.send(payload).wait(3 * LONG_S)
        else:
            received = twin.next(3 * LONG_S).take(3 * LONG_S)
            assert received[-1] == 77
            assert received[:-1].min() == 1


@dataclass(frozen=True)
class Case:
    """How a rank loses its peer.

    Attributes:
        sends: whether it is the one that sends.
        under_way: whether bytes of the payload have moved by then.
        number: what happens to the peer: SIGKILL or SIGSTOP.
        ends: what ends the survivor's message: the peer's ``"death"``, or its own ``"abort"``.
    """

    sends: bool
    under_way: bool
    number: signal.Signals
    ends: str


@dataclass(frozen=True)
class Loss:
    """What the survivor saw.

    Attributes:
        error: type and text of what its message has failed with.
        seconds: from the strike or the abort to the error.
        arrived: whether the payload was whole after all.
        left: native threads and descriptors more than before.
    """

    error: str
    seconds: float
    arrived: bool
    left: tuple[int, int]


def holdings() -> tuple[int, int]:
    """Native threads and file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def left_since(before: tuple[int, int]) -> tuple[int, int]:
    """How many more there are now; waits for threads that have been joined to be gone."""
    deadline = Deadline(2)
    while True:
        threads, descriptors = holdings()
        left = max(0, threads - before[0]), max(0, descriptors - before[1])
        if left == (0, 0) or deadline.passed:
            return left
        time.sleep(0.001)


def lose_peer(rank: int, world_size: int, store: Store, case: Case) -> Loss | None:
    """Be struck in the middle of a message, or live to tell of it."""
    before = holdings()
    twin = Twin(
        lo(),
        rank,
        1 - rank,
        store,
        reading=rank == SURVIVOR or case.under_way or not case.sends,
        # Of a receiver gloo must see to it alone.
        deaf=case.ends == "death" and not case.sends,
    )
    if rank == VICTIM:
        _be_lost(twin, store, case)
    pending, buffer = _begin(twin, case)
    if not (case.sends and case.under_way):
        _strike(store, case, buffer)
    error, seconds = _finish(twin, pending, store, case)
    arrived = not case.sends and bool(buffer[-1])
    twin.transport.close(Deadline(LONG_S))
    with suppress(ProcessLookupError):
        os.kill(int(store.get("pid")), signal.SIGKILL)
    twin.close()
    return Loss(f"{type(error).__name__}: {error}", seconds, arrived, left_since(before))


def _be_lost(twin: Twin, store: Store, case: Case) -> None:
    store.set("pid", str(os.getpid()))
    kept: Any = None
    if case.sends and case.under_way:
        _strike(store, case, twin.next().buffer)
    elif case.under_way:
        kept = twin.send(torch.ones(BIG_BYTES, dtype=torch.uint8))
    elif not case.sends:
        twin.only_announce(1000)
    threading.Event().wait()
    del kept


def _begin(twin: Twin, case: Case) -> tuple[Completion, torch.Tensor]:
    if case.sends:
        payload = torch.ones(BIG_BYTES, dtype=torch.uint8)
        return twin.send(payload), payload
    incoming = twin.next()
    return incoming.done, incoming.buffer


def _strike(store: Store, case: Case, buffer: torch.Tensor) -> None:
    """Kill or stop the victim, as soon as the first byte is in where one is on its way."""
    while case.under_way and not buffer[0]:
        time.sleep(0)
    store.set("struck", repr(time.monotonic()))
    os.kill(int(store.get("pid")), case.number)


def _finish(
    twin: Twin, pending: Completion, store: Store, case: Case
) -> tuple[BaseException, float]:
    began: dict[str, float] = {}

    def abort() -> None:
        store.wait(["struck"])
        began["abort"] = time.monotonic()
        twin.fail(ConnectionAbortedError("for a test"))

    aborter = threading.Thread(target=abort)
    if case.ends == "abort":
        aborter.start()
    try:
        pending.wait()
    except OSError as error:
        end = time.monotonic()
        if case.ends == "abort":
            aborter.join()
        began["death"] = float(store.get("struck"))
        return error, end - began[case.ends]
    raise AssertionError("it is done")


def be_flooded(rank: int, world_size: int, store: Store, most: int, strangers: int) -> int:
    """Exchange a message after strangers came to rank 0's port in numbers; how many got in.

    Args:
        most: file descriptors that rank 0 may have.
        strangers: how many connect, all of them from rank 1.
    """
    with Twin(lo(), rank, 1 - rank, store) as twin, ExitStack() as guests:
        came: list[socket.socket] = []
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            store.set("ports", json.dumps([listener.port for listener in listeners()]))
        else:
            ports = json.loads(store.get("ports"))
            came += [guests.enter_context(_stranger(ports)) for _ in range(strangers)]
            store.set("flooded", "1")
        store.wait(["flooded"])
        pending = twin.send(pattern(1000, rank))
        assert torch.equal(twin.next().take(), pattern(1000, twin.peer))
        pending.wait()
        return sum(map(_connected, came))


def _stranger(ports: list[int]) -> socket.socket:
    (port,) = ports
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", port))
    return sock


def _connected(sock: socket.socket) -> bool:
    with suppress(OSError):
        sock.getpeername()
        return True
    return False


def fork_and_go_on(rank: int, world_size: int, store: Store) -> None:
    """Let a forked child drop all that it inherited; the parent's connection must not notice."""
    with Twin(lo(), rank, 1 - rank, store) as twin:
        for number in range(3):
            pending = twin.send(pattern(1000, number))
            assert torch.equal(twin.next().take(), pattern(1000, number))
            pending.wait()
            del pending
            if rank == 0:
                _drop_in_child(twin)


def _drop_in_child(twin: Twin) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # should it hang
        del twin.transport, twin.sender, twin.receiver
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
