"""How the ends of a link find each other, whom they let in, and what is said where they cannot."""

from __future__ import annotations

import errno
import json
import logging
import socket
import struct
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

from stagelink.errors import ConnectError
from stagelink.testing import no_leaks, run_threads
from stagelink.transport.addresses import Address
from stagelink.transport.contract import Endpoint, Link
from stagelink.transport.host import server_id
from stagelink.transport.sockets import tune
from stagelink_tcp import Tcp, TcpOptions, joining
from stagelink_tcp import transport as tcp
from tests.support.listeners import Listener, listeners
from tests.support.pipelines import Wire, document, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from tests.support.pipelines import Document

LINK = Link(0, 1, "tcp", "cpu")
HERE = Address("127.0.0.1", "a test says so")


def plan(**options: Any) -> Document:
    found = document(Wire("tcp", options=options))
    found["limits"]["connect_deadline_s"] = 15.0
    return found


def pass_one(
    rank: int, world_size: int, store: Store, plan: Document
) -> tuple[float, set[Listener]]:
    """Connect, send ones to rank 1 and their gradient back: the sum that came, and who listens."""
    with joined(rank, world_size, store, plan) as comm:
        heard = set(listeners())
        with comm.train(1) as session:
            if rank == 0:
                session.send("h", torch.ones(300_000, requires_grad=True), 0)
                found = session.recv_grad("h", 0)
            else:
                found = session.recv("h", 0)
                session.send_grad("h", None if found is None else 2 * found.detach(), 0)
        assert found is not None
        return float(found.detach().sum()), heard


SUMS = [600_000.0, 300_000.0]


# -- options


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"streams": 0}, "streams = 0; a link takes 1 to 64"),
        ({"streams": 65}, "streams = 65; a link takes 1 to 64"),
        ({"streams": "many"}, "streams"),
        ({"ports": [2, 1]}, r"ports = \[2, 1\]: must be the first and the last port, as"),
        ({"ports": [0, 1]}, r"ports = \[0, 1\]: must be"),
        ({"ports": [1, 65536]}, r"ports = \[1, 65536\]: must be"),
        ({"ports": 20000}, "ports"),
        ({"port": [1, 2]}, "port"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RuntimeError, match=wanted):
        run_threads(pass_one, 2, plan(**options))


def test_an_interface_that_is_none_is_refused_with_those_that_there_are() -> None:
    wanted = r"interface = 'nosuch0': there is no such network interface; .*'lo' \(127\.0\.0\.1\)"
    assert not Tcp.probe(TcpOptions(interface="nosuch0"))
    with pytest.raises(RuntimeError, match=wanted):
        run_threads(pass_one, 2, plan(interface="nosuch0"))


def test_two_hosts_are_not_linked_at_loopback() -> None:
    ends = [
        Endpoint(rank, f"server{rank}", f"p{rank}", {"host": f"h{rank}", "named": named})
        for rank, named in ((0, "10.0.0.1"), (1, "127.0.0.1"))
    ]
    transport = Tcp(TcpOptions())
    verdicts = [transport.can_connect(LINK, *ends), transport.can_connect(LINK, *ends[::-1])]
    assert not any(verdicts)
    assert verdicts[0].reason == verdicts[1].reason
    assert "cannot reach rank 1 at 127.0.0.1" in verdicts[0].reason


def test_a_host_is_described_by_the_address_that_is_named() -> None:
    named = Tcp(TcpOptions(interface="lo")).describe()
    assert named == {"host": server_id(), "named": "127.0.0.1"}
    assert Tcp(TcpOptions()).describe()["named"] is None


# -- where


def test_nobody_listens_once_the_links_are_open() -> None:
    before = set(listeners())
    found = run_threads(pass_one, 2, plan(streams=3))
    assert [total for total, _ in found] == SUMS
    assert [heard for _, heard in found] == [before, before]


def test_both_links_of_a_pair_take_one_port() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        port = held.getsockname()[1]
    found = run_threads(pass_one, 2, plan(ports=[port, port]))
    assert [total for total, _ in found] == SUMS


def test_a_range_without_a_free_port() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        port = held.getsockname()[1]
        wanted = rf"no port from {port} to {port} \(\[transports.tcp\] ports\) is free at 127"
        with pytest.raises(RuntimeError, match=wanted):
            run_threads(pass_one, 2, plan(ports=[port, port]))


# -- who


def _visit(at: tuple[str, int], said: bytes) -> socket.socket:
    visitor = socket.create_connection(at)
    visitor.sendall(said)
    return visitor


def _hang_up(at: tuple[str, int], token: bytes) -> None:
    _visit(at, token[:3]).close()


RESET: list[Any] = []
"""Addresses of visitors that reset their connection."""


def _reset(at: tuple[str, int], said: bytes) -> None:
    with socket.create_connection(at) as visitor:
        RESET.append(visitor.getsockname())
        visitor.sendall(said)
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _tune_once_reset(sock: socket.socket) -> None:
    with suppress(OSError):  # it has no peer any more
        while sock.getpeername() in RESET:
            pass
    tune(sock)


VISITS: dict[str, tuple[Callable[[tuple[str, int], bytes], socket.socket | None], str]] = {
    "a wrong token": (
        lambda at, token: _visit(at, bytes(len(token)) + b"\0"),
        "it does not know this job's token",
    ),
    "part of a token": (_hang_up, "it hung up"),
    "a stream too many": (lambda at, token: _visit(at, token + b"\2"), "stream 2 is not expected"),
    "a token, then a reset": (
        lambda at, token: _reset(at, token + b"\0"),
        "[Errno 104] Connection reset by peer",
    ),
    "nothing": (lambda at, token: _visit(at, token[:3]), "no token within 2 s"),
}


@pytest.mark.parametrize("visit", VISITS)
def test_a_stranger_is_refused_and_the_job_goes_on(
    visit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One place for strangers only: the job's own rank gets in when this one has been refused."""
    call, wanted = VISITS[visit]
    visitors: list[socket.socket | None] = []

    def first_a_stranger(board: Any, *rest: Any) -> list[socket.socket]:
        host, port, token, _ = json.loads(board.take("at", "nobody came"))
        if not visitors:
            visitors.append(call((host, port), bytes.fromhex(token)))
        return joining.dial(board, *rest)

    monkeypatch.setattr(tcp, "dial", first_a_stranger)
    monkeypatch.setattr(joining, "MAX_STRANGERS", 1)
    monkeypatch.setattr(joining, "HELLO_S", 2.0)
    monkeypatch.setattr(joining, "tune", _tune_once_reset)
    with caplog.at_level(logging.WARNING, logger="stagelink"):
        found = run_threads(pass_one, 2, plan(streams=2))
    assert [total for total, _ in found] == SUMS
    refusals = [one.getMessage() for one in caplog.records if "refused" in one.getMessage()]
    assert f"tcp: a stranger was refused: {wanted}" in refusals
    for visitor in visitors:
        if visitor is not None:
            visitor.settimeout(10.0)
            with closing(visitor), suppress(ConnectionError):
                assert visitor.recv(99) == b""


def test_who_was_let_in_stays_so_whoever_resets_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "tune", _tune_once_reset)
    with no_leaks("descriptors"), ExitStack() as peers:
        door = joining.Door(None)
        expected = door.expect(HERE, 2)
        at = expected.listener.getsockname()
        first = peers.enter_context(_visit(at, expected.token + b"\0"))
        _reset(at, expected.token + b"\1")
        while 0 not in expected.came or door._strangers:
            assert not door.look(expected)
        second = peers.enter_context(_visit(at, expected.token + b"\1"))
        while not door.look(expected):
            pass
        for sock in door.dismiss(expected):
            sock.close()
        for peer in (first, second):
            assert peer.recv(99) == expected.answer


class Patient:
    """A board that looks a few times, and then finds that time has run out."""

    def put(self, key: str, value: str) -> None:
        del key, value

    def look_until(self, found: Callable[[], bool], missing: str) -> None:
        for _ in range(3):
            assert not found()
        raise TimeoutError(f"{missing} within 0 s")


class Crowded(joining.Door):
    """A door of a process that has no descriptor left."""

    def expect(self, address: Address, streams: int) -> Any:
        expected = super().expect(address, streams)
        listener = Mock(wraps=expected.listener)
        listener.accept.side_effect = OSError(errno.EMFILE, "Too many open files")
        self._listeners[address.text] = listener
        return expected


def test_who_cannot_accept_says_why_nobody_came(caplog: pytest.LogCaptureFixture) -> None:
    board: Any = Patient()
    port: Any = Mock(rank=1, peer=0)
    wanted = "rank 0 has not connected .*; it cannot accept connections: .*Too many open files"
    with no_leaks("descriptors"), pytest.raises(TimeoutError, match=wanted):
        joining.welcome(Crowded(None), board, port, HERE, 1)
    assert [one.getMessage() for one in caplog.records] == [
        "tcp: a connection was not accepted: [Errno 24] Too many open files"
    ]


class OneOffer:
    """A board on which a peer's offer is, and which looks once more than that takes."""

    def __init__(self, at: tuple[str, int]) -> None:
        self._offer = json.dumps([*at, (16 * b"t").hex(), (16 * b"a").hex()])

    def take(self, key: str, missing: str) -> str:
        del key, missing
        return self._offer

    def look_until(self, found: Callable[[], bool], missing: str) -> None:
        del missing
        while not found():
            pass


class Zero:
    rank, peer = 0, 1


def _dial(at: tuple[str, int]) -> list[socket.socket]:
    board: Any = OneOffer(at)
    port: Any = Zero()
    return joining.dial(board, port, HERE, 2)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [(16 * b"x", "who is there does not know this job's token"), (b"aaa", "it hung up")],
)
def test_somebody_else_who_listens_there_is_no_peer(said: bytes, wanted: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other, no_leaks("descriptors"):
        host, port = other.getsockname()

        def answer() -> None:
            for _ in range(2):
                with other.accept()[0] as visitor, suppress(ConnectionError):
                    visitor.recv(99)  # with that unread its close would be a reset
                    visitor.sendall(said)

        run = [None, answer]
        match = rf"rank 0 at 127.* \(a test says so\) cannot reach rank 1 at {host}, port {port}: "

        def rank(me: int, *_: object) -> None:
            work = run[me]
            if work is None:
                with pytest.raises(ConnectError, match=match + wanted):
                    _dial((host, port))
            else:
                work()

        run_threads(rank, 2)


def test_nobody_there_is_told_with_both_addresses() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        at = held.getsockname()
    wanted = "cannot reach rank 1 at .*, port .*: Connection refused; .* names another interface"
    with no_leaks("descriptors"), pytest.raises(ConnectError, match=wanted):
        _dial(at)
