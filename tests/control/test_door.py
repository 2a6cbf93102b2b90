"""Strangers cost little: few descriptors, few bytes, a moment; and nobody once all are here."""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.control import door as door_module
from stagelink.control.framing import PROOF_BYTES, Framing, Proof
from stagelink.control.plane import Plane
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, PeerLostError, ProtocolError
from stagelink.testing import run_threads
from stagelink.transport.header import HEADER_BYTES, Flag, Header, MessageKind
from tests.control.test_meeting import _wait_for_all, ready
from tests.support.planes import join

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

    from stagelink.control.connection import Connection, Frame

LONG = 20.0
PROOF = Proof("5" * PROOF_BYTES)
HELLO = Header(MessageKind.HELLO).pack(PROOF_BYTES + 2) + PROOF.shown + b"{}"


class House:
    """A plane that listens, and takes whoever shows the proof for rank 1, 2, …"""

    def __init__(self) -> None:
        self.plane = Plane(0)
        self.guests: list[Frame] = []
        self.plane.door.expect(self._welcome, PROOF.check)
        self.address = f"\0stagelink-test-{id(self)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(100)
        self.plane.door.open(listener)
        self.plane.reader.start()
        self._visitors = ExitStack()

    def _welcome(self, connection: Connection, frame: Frame) -> None:
        with self.plane.lock:
            self.guests.append(frame)
            self.plane.door.introduce(connection, len(self.guests))
        self.plane.changed()

    def visit(self, wire: bytes = b"") -> socket.socket:
        sock = self._visitors.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(LONG)
        sock.connect(self.address)
        sock.sendall(wire)
        return sock

    def wait_guests(self, count: int) -> None:
        assert self.plane.wait(lambda: len(self.guests) >= count, Deadline(LONG))

    def close(self) -> None:
        self._visitors.close()
        self.plane.start_closing()
        self.plane.close(Deadline(LONG))


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def is_sent_away(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_guest_is_read_to_the_end_of_its_hello_and_goes_on(house: House) -> None:
    house.visit(HELLO + Header(MessageKind.BYE).pack())
    house.wait_guests(1)
    assert house.guests[0].note == b"{}"
    assert house.plane.wait(lambda: set(house.plane.gone) == {1}, Deadline(LONG))


def test_descriptors_of_a_stranger_are_none_of_ours(house: House) -> None:
    before, own = descriptors(), os.memfd_create("stranger")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own] * 253))]
    strangers = [house.visit() for _ in range(4)]
    for sock in strangers:
        sock.sendmsg([HELLO[:-1]], rights)  # one byte is missing: it stays a stranger
    house.visit(HELLO)
    house.wait_guests(1)
    # Both ends of five connections, and the descriptor itself.
    assert descriptors() <= before + 2 * 5 + 1
    os.close(own)


@pytest.mark.parametrize("more", [b"\0", bytes(100_000)], ids=["by drips", "at once"])
def test_without_the_proof_nothing_more_is_read(house: House, more: bytes) -> None:
    header = Header(MessageKind.HELLO).pack(16 * 1024 * 1024)
    sock = house.visit(header + bytes(PROOF_BYTES - 1))
    sock.sendall(more)
    assert is_sent_away(sock)
    assert not house.guests


def test_a_stranger_that_says_nothing_is_sent_away_in_time(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door_module, "HELLO_S", 0.05)
    assert is_sent_away(house.visit(HELLO[:20]))
    assert "a stranger was refused: no HELLO within" in caplog.text


def test_strangers_are_few_and_a_guest_comes_in_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_STRANGERS", 3)
    monkeypatch.setattr(door_module, "_CROWDED_S", 0.05)
    before = descriptors()
    strangers = [house.visit() for _ in range(8)]
    house.visit(HELLO)
    house.wait_guests(1)
    assert descriptors() <= before + 9 + 1 + 3
    assert is_sent_away(strangers[0])


def test_without_descriptors_nobody_is_accepted_for_a_while(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door_module, "_SHORT_S", 0.02)
    full = OSError(errno.EMFILE, "Too many open files")
    tried: list[int] = []

    class Full:
        """A listener of a process that is out of descriptors for five attempts."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

        def accept(self) -> Any:
            tried.append(1)
            if len(tried) <= 5:
                raise full
            return self._sock.accept()

    with house.plane.lock:
        (listener,) = house.plane.door._listeners
        house.plane.reader.remove(listener)
        house.plane.door._listeners.clear()
        house.plane.door.open(Full(listener))  # type: ignore[arg-type]
    sock = house.visit(HELLO)
    house.wait_guests(1)
    assert len(tried) == 6
    assert caplog.text.count("a connection was not accepted: [Errno 24]") == 1
    sock.close()


def test_a_shortage_is_told_where_a_rank_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(rank: int, world_size: int, store: Store) -> str:
        with ready(store, rank, world_size) as me:
            if rank == 1:
                monkeypatch.setattr(me.plane.door, "_accept", lambda listener: None)
                me.plane.door.shortage = "[Errno 24] Too many open files"
            with pytest.raises(ConnectError) as caught:
                me.meet(deadline_s=0.3)
            _wait_for_all(store, rank, world_size)
        return str(caught.value)

    _, text = run_threads(meet, 2)
    assert "missing: 0 within" in text
    assert "rank 1 cannot accept connections: [Errno 24] Too many open files" in text


def test_nobody_is_accepted_once_all_are_here(house: House) -> None:
    stranger = house.visit()
    house.visit(HELLO)
    house.wait_guests(1)
    house.plane.door.close()
    assert is_sent_away(stranger)
    with pytest.raises(ConnectionRefusedError):
        house.visit()


# -- frames


def test_a_large_frame_is_looked_at_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    unpack = Header.unpack

    def count(data: bytes, at: int = 0) -> Header:
        looked.append(at)
        return unpack(data, at)

    monkeypatch.setattr(Header, "unpack", count)
    framing, note = Framing(None), bytes(4_000_000)
    wire = Header(MessageKind.NOTE).pack(len(note)) + note
    frames = [
        frame for at in range(0, len(wire), 1000) for frame in framing.feed(wire[at : at + 1000])
    ]
    assert [len(frame.note) for frame in frames] == [len(note)]
    assert len(looked) == 2


@pytest.mark.parametrize("kind", [kind for kind in MessageKind if kind not in {
    MessageKind.NOTE, MessageKind.DATA, MessageKind.GRAD
}])  # fmt: skip
def test_kinds_without_descriptors_take_none(kind: MessageKind) -> None:
    with pytest.raises(ProtocolError, match=f"{kind.name} with 1 descriptors takes none"):
        Header.unpack(Header(kind).pack(0, 1))


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        (Header(MessageKind.NOTE).pack(0, 0), "2 descriptors came, 0 are announced"),
        (Header(MessageKind.CREDIT).pack(), "2 descriptors came, 0 are announced"),
        (Header(MessageKind.NOTE).pack(8, 1), "2 descriptors came, 1 are announced"),
    ],
)
def test_descriptors_that_no_frame_announces(frames: bytes, wanted: str) -> None:
    framing = Framing(None)
    framing.add_fds(os.pipe())
    with pytest.raises(ProtocolError, match=wanted):
        list(framing.feed(frames))
    framing.close()


@contextmanager
def planes() -> Iterator[tuple[Plane, Plane, socket.socket]]:
    one, other = Plane(0), Plane(1)
    mine, _ = join(one, other)
    try:
        yield one, other, mine
    finally:
        for plane in (one, other):
            plane.start_closing()
            plane.close(Deadline(0.0))


@pytest.mark.parametrize("kind", [MessageKind.NOTE, MessageKind.DATA, MessageKind.GRAD])
@pytest.mark.parametrize("fails", [True, False])
def test_descriptors_that_nobody_takes_are_closed(kind: MessageKind, *, fails: bool) -> None:
    with planes() as (one, other, _):
        heard: list[int] = []

        def ear(peer: int, frame: Frame) -> None:
            heard.append(len(frame.fds))
            if fails:
                raise ProtocolError("it does not fit")

        other.handle(kind, ear)
        out, into = os.pipe()
        try:
            before = descriptors()
            one.post(1, Header(kind), fds=(out, into))
            if fails:
                with pytest.raises(ProtocolError, match="it does not fit"):
                    other.wait(lambda: False, Deadline(LONG))
            else:
                assert other.wait(lambda: bool(heard), Deadline(LONG))
            assert heard == [2]
            assert descriptors() == before
        finally:
            os.close(out)
            os.close(into)


def test_too_few_descriptors_here_is_said_by_its_name() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with planes() as (one, other, _):
        out, into = os.pipe()
        before = descriptors()
        try:
            one.post(1, Header(MessageKind.NOTE), fds=(out,) * 20)
            resource.setrlimit(resource.RLIMIT_NOFILE, (_room_for(5), hard))
            with pytest.raises(ProtocolError, match=r"rank 1: from rank 0: .*\(ulimit -n\)"):
                other.wait(lambda: False, Deadline(LONG))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(out)
            os.close(into)
        assert descriptors() <= before + 5  # the rest goes with the connection
    assert descriptors() <= before - 2


def _room_for(count: int) -> int:
    """The limit that leaves so many descriptors."""
    taken, limit = set(map(int, os.listdir("/proc/self/fd"))), 0
    while count:
        count -= limit not in taken
        limit += 1
    return limit


# -- how a connection ends


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (0, "rank 0 died: its connection to rank 1 ended without a goodbye"),
        (errno.ETIMEDOUT, "rank 0 is lost: its connection to rank 1 timed out .*Errno 110"),
        (errno.EHOSTUNREACH, "rank 0 is lost: its connection to rank 1 timed out .*Errno 113"),
        (errno.ECONNRESET, "rank 0 died: its connection to rank 1 was reset .*Errno 104"),
        (errno.ENOMEM, "rank 0 is lost: reading its connection to rank 1 failed .*Errno 12"),
    ],
)
@pytest.mark.parametrize("found_by", ["reading", "writing"])
def test_how_a_connection_ended_is_told(number: int, wanted: str, found_by: str) -> None:
    if number == errno.ENOMEM:  # a write that fails so is its caller's error
        found_by = "reading"
    with planes() as (one, other, mine):
        connection = other.connections[0]
        error = OSError(number, os.strerror(number)) if number else None
        connection.sock = Broken(connection.sock, found_by, error)  # type: ignore[assignment]
        if found_by == "writing":
            other.post(0, Header(MessageKind.CREDIT))
        mine.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError, match=wanted):
            other.wait(lambda: False, Deadline(LONG))
        assert one.failure.error is None


class Broken:
    """A socket whose first call of a kind fails."""

    def __init__(self, sock: socket.socket, kind: str, error: OSError | None) -> None:
        self._sock, self._kind, self._error = sock, kind, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _fail(self, kind: str) -> None:
        error, self._error = (self._error, None) if kind == self._kind else (None, self._error)
        if error is not None:
            raise error

    def recvmsg_into(self, *given: Any) -> Any:
        self._fail("reading")
        return self._sock.recvmsg_into(*given)

    def send(self, *given: Any) -> Any:
        self._fail("writing")
        return self._sock.send(*given)


def test_a_payload_belongs_to_kinds_that_have_one() -> None:
    for header, wanted in (
        (Header(MessageKind.NOTE, payload_bytes=8), "NOTE with .* a payload of 8 bytes"),
        (Header(MessageKind.DATA, payload_bytes=2**60), f"a payload of {2**60} bytes; at most"),
        (
            Header(MessageKind.DATA, flags=Flag.INLINE, payload_bytes=2**20),
            "an inline payload of 1048576 bytes; at most 65536",
        ),
        (Header(MessageKind.DATA, flags=0x80), "flags 0x80, known are 0x3"),
    ):
        with pytest.raises(ProtocolError, match=wanted):
            Header.unpack(header.pack())
    assert len(Header(MessageKind.BYE).pack()) == HEADER_BYTES
