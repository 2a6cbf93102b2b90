"""Ranks meet by Unix sockets and by TCP; strangers are sent away and harm nobody."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import socket
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import HashStore

from stagelink.control.framing import encode
from stagelink.control.meeting import Meeting
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.control.store import StoreClient
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, DisagreementError
from stagelink.plan.document import Control
from stagelink.testing import RankFailedError, run_threads
from stagelink.transport.header import HEADER_BYTES, VERSION, Flag, Header, MessageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed import Store

Greeting = dict[str, Any]
LO = Control(interface="lo")


def rendezvous_of(store: Store, rank: int, world_size: int) -> Rendezvous:
    """A rank's, with its place; rank 0 takes its own first. In memory, so it has no thread."""
    client = StoreClient.of(store, Deadline(20))
    rendezvous = Rendezvous(client, "run", rank, world_size)
    rendezvous.claim(Deadline(20))
    return rendezvous


class Rank:
    """One rank up to its meeting: what `Handler` has at that moment."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        server: str = "here",
        judge: Callable[[int, Greeting], None] = lambda peer, greeting: None,
        control: Control = LO,
    ) -> None:
        self.plane = Plane(rank)
        self.rendezvous = rendezvous_of(store, rank, world_size)
        greeting = {"name": f"rank {rank}"}
        self.meeting = Meeting(self.plane, self.rendezvous, greeting, judge, server, control)
        self.others = [other for other in range(world_size) if other != rank]
        self.plane.reader.start()

    def meet(self, deadline_s: float = 20.0) -> dict[int, Greeting]:
        self.meeting.meet(self.others, Deadline(deadline_s))
        return self.meeting.greetings

    def close(self) -> None:
        self.plane.start_closing()
        self.plane.close(Deadline(5))


@contextmanager
def ready(*args: Any, **kwargs: Any) -> Iterator[Rank]:
    rank = Rank(*args, **kwargs)
    try:
        yield rank
    finally:
        rank.close()


def _wait_for_all(store: Store, rank: int, world_size: int) -> None:
    """Nobody closes before everybody is here."""
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(world_size)])


def _everybody(count: int) -> list[dict[int, Greeting]]:
    return [
        {other: {"name": f"rank {other}"} for other in range(count) if other != rank}
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    "servers", [["a"] * 4, ["a", "b", "c", "d"], ["b", "a", "a", "b"]], ids=["unix", "tcp", "both"]
)
def test_all_greet_all(servers: list[str]) -> None:
    def meet(rank: int, world_size: int, store: Store) -> dict[int, Greeting]:
        with ready(store, rank, world_size, server=servers[rank]) as me:
            greetings = me.meet()
            for peer, connection in me.plane.connections.items():
                near = servers[peer] == servers[rank]
                assert connection.sock.family == (socket.AF_UNIX if near else socket.AF_INET)
            _wait_for_all(store, rank, world_size)
            return dict(greetings)

    assert run_threads(meet, 4) == _everybody(4)


@pytest.mark.parametrize("together", [True, False])
def test_ranks_of_one_process_need_the_socket_no_more(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that say they are of two processes stand for two processes."""
    by_socket: list[MessageKind] = []
    pack = Header.pack

    def noted(header: Header, *sizes: int) -> bytes:
        by_socket.append(header.kind)
        return pack(header, *sizes)

    monkeypatch.setattr(Header, "pack", noted)
    if not together:
        names = (f"process {number}" for number in itertools.count())
        monkeypatch.setattr("stagelink.control.meeting.process_id", lambda: next(names))

    def meet(rank: int, world_size: int, store: Store) -> None:
        heard: list[bytes] = []
        with ready(store, rank, world_size) as me:
            me.plane.handle(MessageKind.REDUCE, lambda peer, frame: heard.append(frame.note))
            me.meet()
            me.plane.post(1 - rank, Header(MessageKind.REDUCE), b"news")
            assert me.plane.wait(lambda: heard == [b"news"], Deadline(20))
            _wait_for_all(store, rank, world_size)

    run_threads(meet, 2)
    assert by_socket.count(MessageKind.HELLO) == 2
    assert by_socket.count(MessageKind.REDUCE) == (0 if together else 2)


def test_a_tcp_connection_is_quick_and_watched() -> None:
    def meet(rank: int, world_size: int, store: Store) -> list[int]:
        with ready(store, rank, world_size, server=f"server {rank}") as me:
            me.meet()
            (connection,) = me.plane.connections.values()
            option = connection.sock.getsockopt
            found = [
                option(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                option(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            ]
            _wait_for_all(store, rank, world_size)
            return found

    assert run_threads(meet, 2) == [[1, 1, 10_000]] * 2


def test_ports_of_a_range(caplog: pytest.LogCaptureFixture) -> None:
    """Both ranks listen on one host here: each takes a port of its own."""
    caplog.set_level(logging.INFO, logger="stagelink")
    with socket.create_server(("127.0.0.1", 0)) as held:
        first = held.getsockname()[1]
        control = Control(interface="lo", ports=(first, first + 20))

        def meet(rank: int, world_size: int, store: Store) -> int:
            with ready(store, rank, world_size, server=f"server {rank}", control=control) as me:
                me.meet()
                _wait_for_all(store, rank, world_size)
                return int(me.rendezvous.read("tcp", [rank], Deadline(20))[rank]["port"])

        ports = run_threads(meet, 2)
    assert len({first, *ports}) == 3
    assert all(first < port <= first + 20 for port in ports)
    wanted = f"at 127.0.0.1, port {ports[0]} ([control] interface = 'lo')"
    assert f"rank 0: listens for ranks of other servers {wanted}" in caplog.messages


def test_a_range_without_a_free_port() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        control = Control(interface="lo", ports=(port, port))
        with ready(store, 0, 2, server="a", control=control) as zero:
            address = {"server": "b", "wire": VERSION, "address": ""}
            rendezvous_of(store, 1, 2).publish("unix", address)
            with pytest.raises(ConnectError, match=f"rank 0: no port from {port} to {port} "):
                zero.meet()


@pytest.mark.parametrize("server", ["a", "b"])
def test_a_wrong_interface_is_refused_at_once(server: str) -> None:
    """Also where no rank is far, and the interface would not be listened at."""
    control = Control(interface="eht0")
    with (
        ready(HashStore(), 0, 2, server=server, control=control) as zero,
        pytest.raises(ConnectError, match=r"rank 0: \[control\] interface = 'eht0': there is no"),
    ):
        zero.meet()


def test_a_rank_that_does_not_come_is_named() -> None:
    with (
        ready(HashStore(), 0, 3) as zero,
        pytest.raises(ConnectError, match=r"rank 0: missing: 1, 2 within 0\.1 s: rank 1 did"),
    ):
        zero.meet(0.1)


def test_a_rank_that_was_there_and_does_not_answer_is_named() -> None:
    store = HashStore()
    address = {"server": "here", "wire": VERSION, "address": ""}
    rendezvous_of(store, 0, 2).publish("unix", address)  # and stops before it dials
    with ready(store, 1, 2) as one:
        wanted = r"rank 1: missing: 0 within 0\.1 s: rank 0 came \(.*\) and does not .* HELLO from"
        with pytest.raises(ConnectError, match=wanted):
            one.meet(0.1)


def test_an_address_where_nobody_listens() -> None:
    store = HashStore()
    with ready(store, 0, 2) as zero:
        address = {"server": "here", "wire": VERSION, "address": "stagelink-nobody"}
        rendezvous_of(store, 1, 2).publish("unix", address)
        began = time.monotonic()
        with pytest.raises(ConnectError, match=r"rank 0: rank 1 does not answer at '.*nobody'"):
            zero.meet()
        assert time.monotonic() - began < 15


def test_a_peer_that_hangs_up_before_it_greets_is_not_waited_for() -> None:
    store = HashStore()
    with ready(store, 0, 2) as zero, _listening(store, 1) as listener:

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        began = time.monotonic()
        with pytest.raises(ConnectError, match="rank 0: rank 1 hung up before it said HELLO"):
            zero.meet()
        assert time.monotonic() - began < 15
        thread.join()


def test_another_wire_version_is_told_on_both_sides() -> None:
    store = HashStore()
    with ready(store, 0, 2) as zero:
        address = {"server": "here", "wire": VERSION + 1, "address": "stagelink-newer"}
        rendezvous_of(store, 1, 2).publish("unix", address)
        wanted = rf"rank 0 speaks wire version {VERSION}, rank 1 {VERSION + 1}; install one"
        with pytest.raises(DisagreementError, match=wanted):
            zero.meet()


def test_a_peer_that_is_refused_hears_why() -> None:
    def refuse(peer: int, greeting: Greeting) -> None:
        raise DisagreementError(f"{greeting['name']} is not wanted")

    def meet(rank: int, world_size: int, store: Store) -> str:
        with ready(store, rank, world_size, **({"judge": refuse} if rank == 0 else {})) as me:
            try:
                me.meet()
                me.plane.wait(lambda: False, Deadline(20))
            except (ConnectError, RuntimeError) as error:
                return str(error)
        return "nothing was raised"

    texts = run_threads(meet, 2)
    assert texts == ["rank 1 is not wanted", "rank 0 reports: rank 1 is not wanted"]


# -- strangers -----------------------------------------------------------------------------------


@contextmanager
def _listening(store: Store, rank: int) -> Iterator[socket.socket]:
    """A false rank that listens where a true one would."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"stagelink-test-{id(listener)}"
        listener.bind(f"\0{name}")
        listener.listen()
        address = {"server": "here", "wire": VERSION, "address": name}
        rendezvous_of(store, rank, 2).publish("unix", address)
        yield listener


class Burglar:
    """Loading it from a pickle would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def _hello(token: str, **fields: Any) -> bytes:
    return _raw_hello(token.encode() + json.dumps(fields).encode())


def _raw_hello(note: bytes, announced: int | None = None) -> bytes:
    length = len(note) if announced is None else announced
    return Header(MessageKind.HELLO).pack(length) + note


STRANGERS = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 4,
    "half a header": b"SLNK" + bytes(10),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(HEADER_BYTES),
    "no token": _hello("", rank=0, greeting={}),
    "wrong token": _hello("0" * 32, rank=0, greeting={}),
    "half a token": _raw_hello(b"0" * 16),
    "token that is not ASCII": _raw_hello(bytes(range(128, 160)) + b"{}"),
    "the largest note": _raw_hello(b"0" * 32, 16 * 1024 * 1024),
    "deep JSON": _raw_hello(b"[" * 100_000),
    "a payload": Header(MessageKind.HELLO, flags=Flag.INLINE, payload_bytes=64).pack(32),
    "another kind": Header(MessageKind.ABORT).pack(2) + b"{}",
    "bye": Header(MessageKind.BYE).pack(),
}


def _visit(rendezvous: Rendezvous, wire: bytes) -> None:
    address = rendezvous.read("unix", [1], Deadline(20))[1]["address"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(f"\0{address}")
        sock.sendall(wire)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(20)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            return


@pytest.mark.parametrize("wire", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_harms_nobody(wire: bytes) -> None:
    def meet(rank: int, world_size: int, store: Store) -> dict[int, Greeting]:
        with ready(store, rank, world_size) as me:
            if rank == 0:
                _visit(me.rendezvous, wire)
            greetings = me.meet()
            me.plane.check()
            _wait_for_all(store, rank, world_size)
            return dict(greetings)

    assert run_threads(meet, 2) == _everybody(2)


def test_a_pickle_in_place_of_a_header_is_not_loaded(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    pickled = pickle.dumps(Burglar(trap))
    framed = Header(MessageKind.HELLO).pack(len(pickled)) + pickled
    for wire in (pickled + bytes(HEADER_BYTES), framed):
        test_a_stranger_harms_nobody(wire)
    assert not trap.exists()
    pickle.loads(pickled).close()  # it is a real one
    assert trap.exists()


def test_a_known_peer_that_greets_twice_is_a_protocol_error() -> None:
    def meet(rank: int, world_size: int, store: Store) -> str:
        with ready(store, rank, world_size) as me:
            try:
                me.meet()
                if rank == 0:
                    again = encode({"rank": 0, "greeting": {}})
                    me.plane.post(1, Header(MessageKind.HELLO), again)
                me.plane.wait(lambda: False, Deadline(20))
            except (ConnectionError, RuntimeError) as error:
                return str(error)
        return "nothing was raised"

    zero, one = run_threads(meet, 2)
    assert "rank 0 sent HELLO out of place" in one
    assert "rank 0 sent HELLO out of place" in zero


@pytest.mark.parametrize("claimed", [2, 7, -1, None, "0", [0]])
def test_a_rank_that_is_not_expected_is_sent_away(claimed: Any) -> None:
    def meet(rank: int, world_size: int, store: Store) -> dict[int, Greeting]:
        with ready(store, rank, world_size) as me:
            if rank == 0:
                token = me.rendezvous.generation
                _visit(me.rendezvous, _hello(token, rank=claimed, greeting={}))
            greetings = dict(me.meet())
            _wait_for_all(store, rank, world_size)
            return greetings

    assert run_threads(meet, 2) == _everybody(2)


def test_a_process_of_another_user_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 4711)
    real = struct.unpack
    monkeypatch.setattr(
        "stagelink.control.meeting.struct.unpack",
        lambda layout, raw: (1, 4712, 0) if layout == "3i" else real(layout, raw),
    )

    def meet(rank: int, world_size: int, store: Store) -> None:
        with ready(store, rank, world_size) as me:
            me.meet(1)

    with pytest.raises(RankFailedError) as caught:
        run_threads(meet, 2)
    assert isinstance(caught.value.__cause__, ConnectError)
