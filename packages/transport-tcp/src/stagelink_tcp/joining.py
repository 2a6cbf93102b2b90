"""Connecting of a link's two ends: who listens, who dials, and how each proves who it is.

The higher rank of a pair listens, at one port of its host for all its peers; the lower one dials,
as with the control connection. The token that the dialling end must show, and the one that it is
answered with, are random, and told in the store of the job: so only who has the job's secret, by
which its keys are found there, knows them. A connection without the token is logged and dropped.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from stagelink.errors import ConnectError
from stagelink.transport.addresses import family_of
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.sockets import listen, tune

if TYPE_CHECKING:
    from stagelink.transport.addresses import Address
    from stagelink.transport.board import Board
    from stagelink.transport.contract import Port

__all__ = ["Door", "dial", "welcome"]

logger = logging.getLogger("stagelink")

MAX_STRANGERS = 64
"""So many that have not shown a token; the others wait in the system's queue."""

HELLO_S = 10.0
"""How long a stranger may take to show its token."""

_TOKEN_BYTES = 16
_HELLO_BYTES = _TOKEN_BYTES + 1
_KEY = "at"
_PORTS = "[transports.tcp] ports"
_INTERFACE = "[transports.tcp] interface names another interface"


class _Stranger(NamedTuple):
    sock: socket.socket
    came_s: float
    shown: bytearray


class _Expected:
    """One end's connections that are to come: their token, and those that came, by stream."""

    def __init__(self, listener: socket.socket, streams: int) -> None:
        self.listener = listener
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.answer = secrets.token_bytes(_TOKEN_BYTES)
        self.streams = streams
        self.came: dict[int, socket.socket] = {}


class Door:
    """Listeners of one rank, one for each of its addresses, open while somebody is expected.

    Safe from any thread: links are opened side by side.

    Args:
        ports: the first and the last port to listen at; None: any.

    Attributes:
        shortage: why the last connection could not be accepted; empty where it was.
    """

    def __init__(self, ports: tuple[int, int] | None) -> None:
        self.shortage = ""
        self._ports = ports
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._expected: list[_Expected] = []
        self._strangers: list[_Stranger] = []

    def expect(self, address: Address, streams: int) -> _Expected:
        """Listen at an address for so many connections.

        Raises:
            ConnectError: it cannot be listened at, or no port is free.
        """
        with self._lock:
            listener = self._listeners.get(address.text)
            if listener is None:
                listener = listen(address, self._ports, _PORTS)
                listener.setblocking(False)
                self._listeners[address.text] = listener
            expected = _Expected(listener, streams)
            self._expected.append(expected)
            return expected

    def look(self, expected: _Expected) -> bool:
        """Whether all that were expected have come; takes in those who are at the door."""
        with self._lock:
            for listener in self._listeners.values():
                self._accept(listener)
            now = time.monotonic()
            for stranger in tuple(self._strangers):
                reason = self._hear(stranger, now)
                if reason is not None:
                    self._strangers.remove(stranger)  # whatever comes of it, it is judged once
                    reason = reason or self._admit(stranger)
                    if reason:
                        logger.warning("tcp: a stranger was refused: %s", reason)
                        stranger.sock.close()
            return len(expected.came) == expected.streams

    def _accept(self, listener: socket.socket) -> None:
        while len(self._strangers) < MAX_STRANGERS:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if stops_caller(error):
                    raise
                if not isinstance(error, BlockingIOError):  # else nobody is there
                    self._note_shortage(str(error))
                return
            self.shortage = ""
            sock.setblocking(False)
            self._strangers.append(_Stranger(sock, time.monotonic(), bytearray()))

    def _note_shortage(self, reason: str) -> None:
        if not self.shortage:  # once, until one is accepted
            logger.warning("tcp: a connection was not accepted: %s", reason)
        self.shortage = reason

    def _hear(self, stranger: _Stranger, now: float) -> str | None:
        """Why to refuse a connection; empty: it has shown a token, None: it is to show one yet."""
        try:
            said = stranger.sock.recv(_HELLO_BYTES - len(stranger.shown))
        except BlockingIOError as error:
            if stops_caller(error):
                raise
            return None if stranger.came_s + HELLO_S > now else f"no token within {HELLO_S:g} s"
        except OSError as error:
            if stops_caller(error):
                raise
            return str(error)
        stranger.shown.extend(said)
        if len(stranger.shown) < _HELLO_BYTES:
            return None if said else "it hung up"
        return ""

    def _admit(self, stranger: _Stranger) -> str:
        """Take in a connection that has shown a token, or tell why not."""
        token, stream = stranger.shown[:_TOKEN_BYTES], stranger.shown[_TOKEN_BYTES]
        known = [one for one in self._expected if hmac.compare_digest(one.token, token)]
        if not known:
            return "it does not know this job's token"
        expected = known[0]
        if stream >= expected.streams or stream in expected.came:
            return f"stream {stream} is not expected"
        try:
            tune(stranger.sock)
            stranger.sock.send(expected.answer)
        except OSError as error:  # it has hung up: the rank itself may still come
            if stops_caller(error):
                raise
            return str(error)
        expected.came[stream] = stranger.sock
        return ""

    def dismiss(self, expected: _Expected) -> list[socket.socket]:
        """Expect nobody any more of these; those that came, by stream, now the caller's."""
        with self._lock:
            self._expected.remove(expected)
            if not any(one.listener is expected.listener for one in self._expected):
                expected.listener.close()
                self._listeners = {
                    address: one
                    for address, one in self._listeners.items()
                    if one is not expected.listener
                }
            if not self._expected:
                while self._strangers:
                    self._strangers.pop().sock.close()
            return [expected.came[stream] for stream in sorted(expected.came)]


def welcome(
    door: Door, board: Board, port: Port, address: Address, streams: int
) -> list[socket.socket]:
    """Listen for the peer's end until it has connected each of its streams.

    Raises:
        ConnectError: the address cannot be listened at.
        TimeoutError: the peer did not come in time.
    """
    expected = door.expect(address, streams)
    came: list[socket.socket] = []
    try:
        place = expected.listener.getsockname()[1]
        logger.info(
            "rank %d: tcp: listens for rank %d at %s, port %d (%s)",
            port.rank,
            port.peer,
            address.text,
            place,
            address.reason,
        )
        offer = [address.text, place, expected.token.hex(), expected.answer.hex()]
        board.put(_KEY, json.dumps(offer))
        board.look_until(
            lambda: door.look(expected),
            f"rank {port.peer} has not connected to {address.text}, port {place},",
        )
    except TimeoutError as error:
        if stops_caller(error) or not door.shortage:
            raise
        raise TimeoutError(f"{error}; it cannot accept connections: {door.shortage}") from error
    finally:
        came = door.dismiss(expected)
        if len(came) < streams:
            _close(came)
    return came


def dial(board: Board, port: Port, address: Address, streams: int) -> list[socket.socket]:
    """Connect to the peer's end, once for each stream.

    Raises:
        ConnectError: it cannot be reached from this host's address, or somebody else is there.
        TimeoutError: it did not come, or did not answer, in time.
    """
    offer = json.loads(board.take(_KEY, f"rank {port.peer} did not come"))
    host, place, token, answer = offer
    where = f"rank {port.peer} at {host}, port {place}"
    who = f"rank {port.rank} at {address.text} ({address.reason})"
    with ExitStack() as unless_connected:
        calls: list[_Call] = []
        try:
            for stream in range(streams):
                sock = socket.socket(family_of(host), socket.SOCK_STREAM)
                unless_connected.callback(sock.close)
                sock.setblocking(False)
                sock.bind((address.text, 0))
                hello = bytes.fromhex(token) + bytes([stream])
                calls.append(_Call(sock, (host, place), hello, bytes.fromhex(answer)))
            board.look_until(
                lambda: all([call.proved() for call in calls]), f"{where} does not answer"
            )
        except OSError as error:
            if stops_caller(error) or isinstance(error, ConnectError | TimeoutError):
                raise
            raise ConnectError(
                f"{who} cannot reach {where}: {error.strerror or error}; {_INTERFACE}"
            ) from error
        unless_connected.pop_all()
    logger.info("rank %d: tcp with rank %d at %s (%s)", port.rank, port.peer, *address)
    return [call.sock for call in calls]


class _Call:
    """One connection on its way to the peer: connects, shows the token, waits for the answer."""

    def __init__(
        self, sock: socket.socket, address: tuple[str, int], hello: bytes, answer: bytes
    ) -> None:
        self.sock = sock
        self._address = address
        self._hello = hello
        self._answer = answer
        self._heard = b""

    def proved(self) -> bool:
        """Go on as far as that goes at once; whether the peer has given its answer.

        Raises:
            OSError: it cannot be reached, or is somebody else.
        """
        if self._hello and not self._connected():
            return False
        with suppress(BlockingIOError):
            while len(self._heard) < _TOKEN_BYTES:
                heard = self.sock.recv(_TOKEN_BYTES - len(self._heard))
                if not heard:
                    raise ConnectionError("it hung up")
                self._heard += heard
        if len(self._heard) < _TOKEN_BYTES:
            return False
        if not hmac.compare_digest(self._heard, self._answer):
            raise ConnectionError("who is there does not know this job's token")
        return True

    def _connected(self) -> bool:
        code = self.sock.connect_ex(self._address)
        if code in (errno.EINPROGRESS, errno.EALREADY):
            return False
        if code not in (0, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        tune(self.sock)
        self.sock.send(self._hello)  # a socket that is new takes so much
        self._hello = b""
        return True


def _close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()
