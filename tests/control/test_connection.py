"""Frames over a socket: whole and in order, however the stream is cut, and no write blocks."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.control.connection import MAX_FDS, Connection, Frame
from stagelink.errors import ProtocolError
from stagelink.transport.header import HEADER_BYTES, Flag, Header, MessageKind

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAMES = st.lists(st.tuples(st.binary(max_size=600), st.binary(max_size=600)), max_size=8)


class End:
    """A connection that notes how often it was blocked."""

    def __init__(self, sock: socket.socket) -> None:
        self.blocked = 0
        self.handed = 0
        self.connection = Connection(sock, self._on_blocked, self._on_handed)

    def _on_blocked(self, connection: Connection) -> None:
        assert connection is self.connection
        self.blocked += 1

    def _on_handed(self, connection: Connection) -> None:
        assert connection is self.connection
        self.handed += 1

    def send(self, note: bytes, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        flags = int(Flag.INLINE) if payload else 0
        header = Header(MessageKind.DATA, flags=flags, payload_bytes=len(payload))
        self.connection.send(header, note, payload, fds)

    def read(self) -> list[Frame]:
        return list(self.connection.read())


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        pair = [End(sock) for sock in socket.socketpair()]
        for end in pair:
            stack.callback(end.connection.close)
        yield pair[0], pair[1]


@pytest.fixture
def tcp_ends() -> Iterator[tuple[End, End]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server, ExitStack() as stack:
        dialled = socket.create_connection(server.getsockname())
        pair = [End(dialled), End(server.accept()[0])]
        for end in pair:
            stack.callback(end.connection.close)
        yield pair[0], pair[1]


def _bodies(frames: list[Frame]) -> list[tuple[bytes, bytes]]:
    return [(frame.note, frame.payload) for frame in frames]


def _read_until(end: End, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        frames += end.read()
    return frames


def _fill(end: End) -> int:
    """Send until the socket takes no more; how many frames that took."""
    count = 0
    while not end.blocked:
        end.send(b"", b"%06d" % count + bytes(20_000))
        count += 1
    return count


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_a_stream_cut_anywhere_gives_the_same_frames(
    frames: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    wire = b""
    for note, payload in frames:
        flags = int(Flag.INLINE) if payload else 0
        header = Header(MessageKind.DATA, flags=flags, payload_bytes=len(payload))
        wire += header.pack(len(note)) + note + payload
    ours, theirs = socket.socketpair()
    reader = End(ours)
    got: list[Frame] = []
    with closing(theirs), closing(reader.connection):
        for number in range(len(wire)):
            cut = cuts[number % len(cuts)]
            theirs.sendall(wire[:cut])
            wire = wire[cut:]
            got += reader.read()
            if not wire:
                break
    assert _bodies(got) == frames


def test_a_frame_that_comes_byte_by_byte() -> None:
    ours, theirs = socket.socketpair()
    reader = End(ours)
    wire = Header(MessageKind.NOTE, link=7).pack(3) + b"abc"
    with closing(theirs), closing(reader.connection):
        for byte in wire[:-1]:
            theirs.sendall(bytes([byte]))
            assert reader.read() == []
        theirs.sendall(wire[-1:])
        (frame,) = reader.read()
    assert (frame.header.link, frame.note) == (7, b"abc")


def test_without_data_nothing_is_read_and_nothing_blocks(ends: tuple[End, End]) -> None:
    assert ends[0].read() == []
    assert not ends[0].connection.ended


def test_what_the_socket_does_not_take_is_queued_and_flushed(ends: tuple[End, End]) -> None:
    writer, reader = ends
    count = _fill(writer)
    writer.send(b"last")
    assert writer.blocked == 1
    assert not writer.connection.flushed
    assert not writer.connection.flush()
    frames: list[Frame] = []
    while not writer.connection.flush():
        frames += reader.read()
    frames += _read_until(reader, count + 1 - len(frames))
    assert [frame.payload[:6] for frame in frames[:-1]] == [b"%06d" % n for n in range(count)]
    assert frames[-1].note == b"last"
    assert writer.connection.flushed


def test_blocked_again_after_a_flush_is_told_again(ends: tuple[End, End]) -> None:
    writer, reader = ends
    for round_number in (1, 2):
        writer.blocked = 0
        _fill(writer)
        assert writer.blocked == 1, round_number
        while not writer.connection.flush():
            reader.read()


def test_descriptors_travel_with_their_frame(ends: tuple[End, End]) -> None:
    writer, reader = ends
    pipes = [os.pipe() for _ in range(3)]
    writer.send(b"none")
    writer.send(b"two", fds=(pipes[0][1], pipes[1][1]))
    writer.send(b"one", fds=(pipes[2][1],))
    frames = _read_until(reader, 3)
    assert [len(frame.fds) for frame in frames] == [0, 2, 1]
    for frame, mine in zip(frames[1:], (pipes[:2], pipes[2:]), strict=True):
        for received, (read_end, _) in zip(frame.fds, mine, strict=True):
            os.write(received, b"x")
            assert os.read(read_end, 1) == b"x"
            os.close(received)
    for descriptor in [fd for pipe in pipes for fd in pipe]:
        os.close(descriptor)


def test_descriptors_wait_in_the_queue_by_themselves(ends: tuple[End, End]) -> None:
    writer, reader = ends
    count = _fill(writer)
    read_end, write_end = os.pipe()
    writer.send(b"fd", fds=(write_end,))
    os.close(write_end)  # the queue has a duplicate of its own
    frames: list[Frame] = []
    while not writer.connection.flush():
        frames += reader.read()
    frames += _read_until(reader, count + 1 - len(frames))
    (received,) = frames[-1].fds
    os.write(received, b"x")
    assert os.read(read_end, 1) == b"x"
    os.close(received)
    assert os.read(read_end, 1) == b""  # no other copy is left open
    os.close(read_end)


def test_as_many_descriptors_as_the_kernel_takes(ends: tuple[End, End]) -> None:
    writer, reader = ends
    writer.send(b"many", fds=(writer.connection.fileno(),) * MAX_FDS)
    (frame,) = _read_until(reader, 1)
    assert len(frame.fds) == MAX_FDS
    for descriptor in frame.fds:
        os.close(descriptor)
    with pytest.raises(ProtocolError, match=rf"{MAX_FDS + 1} file descriptors .*{MAX_FDS}"):
        writer.send(b"too many", fds=(writer.connection.fileno(),) * (MAX_FDS + 1))


def test_descriptors_that_nobody_took_are_closed(ends: tuple[End, End]) -> None:
    writer, reader = ends
    read_end, write_end = os.pipe()
    writer.connection.sock.setblocking(True)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, write_end.to_bytes(4, "little"))]
    writer.connection.sock.sendmsg([b"half a header"], rights)
    os.close(write_end)
    assert reader.read() == []
    reader.connection.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_descriptors_that_are_announced_and_do_not_come(ends: tuple[End, End]) -> None:
    writer, reader = ends
    writer.connection.sock.send(Header(MessageKind.NOTE).pack(0, fds=2))
    with pytest.raises(ProtocolError, match="announces 2 descriptors, 0 came"):
        reader.read()


def test_no_descriptors_between_servers(tcp_ends: tuple[End, End]) -> None:
    writer, reader = tcp_ends
    with pytest.raises(ProtocolError, match="1 file descriptors over a connection between"):
        writer.send(b"", fds=(0,))
    writer.send(b"goes on")
    assert _read_until(reader, 1)[0].note == b"goes on"


def test_the_end_of_the_stream_comes_after_what_was_queued(ends: tuple[End, End]) -> None:
    writer, reader = ends
    count = _fill(writer)
    writer.connection.finish_writes()
    writer.send(b"too late")
    frames: list[Frame] = []
    while not reader.connection.ended:
        writer.connection.flush()
        frames += reader.read()
    assert len(frames) == count


@pytest.mark.parametrize("kind", ["ends", "tcp_ends"])
def test_to_a_peer_that_is_gone_nothing_is_sent_or_raised(
    kind: str, request: pytest.FixtureRequest
) -> None:
    writer, reader = request.getfixturevalue(kind)
    reader.connection.close()
    for _ in range(100):
        writer.send(b"", bytes(30_000))
    writer.connection.flush()
    assert writer.connection.flushed
    while not writer.connection.ended:
        assert writer.read() == []


class Scripted:
    """A TCP socket that does what the script says, step by step."""

    family = socket.AF_INET

    def __init__(self, *steps: bytes | OSError) -> None:
        self._steps = list(steps)

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 1

    def setblocking(self, flag: bool) -> None: ...

    def send(self, data: bytes) -> int:
        return self.recv_into(bytearray(len(data)))

    def recv_into(self, buffer: bytearray) -> int:
        step = self._steps.pop(0)
        if isinstance(step, OSError):
            raise step
        buffer[: len(step)] = step
        return len(step)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETDOWN])
def test_a_cut_cable_is_a_peer_that_is_gone(number: int) -> None:
    end = End(cast("socket.socket", Scripted(OSError(number, os.strerror(number)))))
    end.send(b"lost")
    assert end.connection.flushed


def test_another_error_of_a_write_is_raised() -> None:
    end = End(cast("socket.socket", Scripted(OSError(errno.EBADF, "bug"))))
    with pytest.raises(OSError, match="bug"):
        end.send(b"lost")


def test_a_reset_is_not_the_end_of_what_can_be_read() -> None:
    frame = Header(MessageKind.BYE).pack()
    end = End(cast("socket.socket", Scripted(ConnectionResetError(), frame, b"")))
    assert [frame.header.kind for frame in end.read()] == [MessageKind.BYE]
    assert not end.connection.ended
    assert end.read() == []
    assert end.connection.ended


def test_what_a_peer_said_before_it_closed_with_unread_data_is_read(ends: tuple[End, End]) -> None:
    writer, reader = ends
    reader.send(b"unread")  # closing with it in the buffer resets the other end
    writer.send(b"goodbye")
    writer.connection.close()
    assert [frame.note for frame in reader.read()] == [b"goodbye"]
    assert reader.read() == []
    assert reader.connection.ended


def test_what_is_handed_over_needs_no_socket(ends: tuple[End, End]) -> None:
    one, other = ends
    one.connection.hand_to(other.connection.number)
    for number in range(3):
        one.send(b"%d" % number, b"payload")
    assert other.handed == 1  # told once, until it has taken them
    assert other.read() == []
    frames = list(other.connection.handed())
    assert _bodies(frames) == [(b"%d" % number, b"payload") for number in range(3)]
    assert list(other.connection.handed()) == []
    one.send(b"3", b"payload")
    assert other.handed == 2
    taking = other.connection.handed()
    assert next(taking).note == b"3"
    one.send(b"4")
    one.send(b"5")
    assert list(taking) == []
    assert other.handed >= 3  # what came while it took them has a turn of its own
    assert _bodies(list(other.connection.handed())) == [(b"4", b""), (b"5", b"")]


def test_after_the_end_of_writes_nothing_is_handed_over(ends: tuple[End, End]) -> None:
    one, other = ends
    one.connection.hand_to(other.connection.number)
    one.send(b"before")
    one.connection.finish_writes()
    one.send(b"after")
    assert _bodies(list(other.connection.handed())) == [(b"before", b"")]
    assert other.read() == []
    assert other.connection.ended


def test_descriptors_are_handed_over_and_closed_where_nobody_takes_them(
    ends: tuple[End, End],
) -> None:
    one, other = ends
    one.connection.hand_to(other.connection.number)
    before = len(os.listdir("/proc/self/fd"))
    with open("/dev/null", "rb") as file:
        one.send(b"kept", fds=(file.fileno(),))
        one.send(b"dropped", fds=(file.fileno(),))
        ((kept,),) = [frame.fds for frame in itertools.islice(other.connection.handed(), 1)]
        assert os.path.sameopenfile(kept, file.fileno())
    os.close(kept)
    other.connection.close()
    one.send(b"late", fds=(0,))
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the closed socket's


def test_descriptors_that_cannot_be_duplicated_are_not_leaked(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    one.connection.hand_to(other.connection.number)
    before = len(os.listdir("/proc/self/fd"))
    duplicate = os.dup
    made: list[int] = []

    def dup(fd: int) -> int:
        if len(made) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(duplicate(fd))
        return made[-1]

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(OSError, match="too many"):
        one.send(b"three", fds=(0, 0, 0))
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(other.connection.handed()) == []


def test_no_other_end_of_that_number(ends: tuple[End, End]) -> None:
    one, other = ends
    one.connection.hand_to(0)
    one.send(b"by socket")
    assert _bodies(other.read()) == [(b"by socket", b"")]


def test_closing_twice_is_silent(ends: tuple[End, End]) -> None:
    ends[0].connection.close()
    ends[0].connection.close()
    ends[0].send(b"nobody hears it")


@given(st.binary(min_size=HEADER_BYTES, max_size=3 * HEADER_BYTES))
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    reader = End(ours)
    with closing(theirs), closing(reader.connection):
        theirs.sendall(garbage)
        with pytest.raises(ProtocolError):
            reader.read()
