"""Handshake of two ranks: listen, find the address, dial, exchange HELLOs, be judged.

Within a server the connection is a Unix stream socket at an abstract address, across servers TCP.
The lower rank of a pair dials. A connection counts only after both ends have said HELLO with the
job's token; a connection without it is logged and dropped, and harms nobody.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from stagelink.control.connection import Connection, Frame
from stagelink.control.framing import Proof, decode, encode
from stagelink.control.plane import Plane
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, DisagreementError, ProtocolError
from stagelink.plan.document import Control
from stagelink.transport.addresses import (
    Address,
    address_of,
    check_reachable,
    family_of,
    own_address,
)
from stagelink.transport.gloo_groups import VARIABLE, named_by_variable
from stagelink.transport.header import VERSION
from stagelink.transport.host import process_id, server_id
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.sockets import BACKLOG, listen, tune

logger = logging.getLogger("stagelink")
_TELL_S = 0.25
"""How long a rank has waited for others when it leaves word of that."""

_OTHER_INTERFACE = "; [control] interface names another interface for it to listen at"
_KEY = "[control] interface"
_PORTS = "[control] ports"
_LOOPBACK = Address("127.0.0.1", "all ranks are on this host")
_UNIX = sys.platform == "linux"  # abstract addresses and peer credentials


class Meeting:
    """Handshakes of one rank's plane with its peers, whose addresses a rendezvous finds.

    HELLO has a greeting of JSON-able values. A ``judge`` is called with a peer's rank and greeting
    before it is accepted; it raises to refuse it, which fails the handler.
    """

    def __init__(
        self,
        plane: Plane,
        rendezvous: Rendezvous,
        greeting: Mapping[str, Any],
        judge: Callable[[int, dict[str, Any]], None],
        server: str,
        control: Control,
    ) -> None:
        self._plane = plane
        self._rendezvous = rendezvous
        self._judge = judge
        self._server = server
        self._control = control
        self._proof = Proof(rendezvous.generation)
        self._process = process_id()
        self._hello = self._proof.shown + encode(
            {"rank": plane.rank, "process": self._process, "greeting": greeting}
        )
        self._dialled: dict[Connection, int] = {}
        self._expected: frozenset[int] = frozenset()
        self.greetings: dict[int, dict[str, Any]] = {}
        plane.door.expect(self._on_hello, self._proof.check)

    def meet(self, peers: Iterable[int], deadline: Deadline) -> None:
        """Connect to every peer; afterwards `greetings` has what each said.

        Raises `ConnectError` where some peers do not come by the deadline, named, and
        `DisagreementError` where one has another version, or is refused by ``judge``.
        """
        self._expected = frozenset(peers)
        if self._control.interface is not None:  # said at once, also where nobody is far
            self._address(elsewhere=False)
        unix, host = self._listen_unix(), server_id()
        self._rendezvous.publish(
            "unix", {"server": self._server, "host": host, "wire": VERSION, "address": unix}
        )
        addresses = self._rendezvous.read("unix", sorted(self._expected), deadline)
        for peer, address in addresses.items():
            if address["wire"] != VERSION:
                raise DisagreementError(
                    f"rank {self._plane.rank} speaks wire version {VERSION}, rank {peer} "
                    f"{address['wire']}; install one version of stagelink everywhere"
                )
        near = {p for p, a in addresses.items() if a["server"] == self._server and _UNIX}
        far = self._expected - near
        if far:
            self._listen_tcp(elsewhere=any(addresses[p].get("host", host) != host for p in far))
        for peer in sorted(near):
            if peer > self._plane.rank:
                self._dial(socket.AF_UNIX, peer, f"\0{addresses[peer]['address']}", deadline)
        above = [peer for peer in sorted(far) if peer > self._plane.rank]
        for peer, address in self._rendezvous.read("tcp", above, deadline).items():
            host, port = address["host"], address["port"]
            self._dial(family_of(host), peer, (host, port), deadline)
        self._wait_greeted(deadline)
        self._plane.door.close()

    def _wait_greeted(self, deadline: Deadline) -> None:
        try:
            wait_for_ranks(self._plane, self._rendezvous, "HELLO", self._ungreeted, deadline)
        except ConnectError as error:
            short = self._plane.door.shortage
            if not short or stops_caller(error):
                raise
            raise ConnectError(
                f"{error}; rank {self._plane.rank} cannot accept connections: {short}"
            ) from error

    def _ungreeted(self) -> frozenset[int]:
        for connection, peer in self._dialled.items():
            if connection.fileno() < 0 and peer not in self.greetings:
                raise ConnectError(
                    f"rank {self._plane.rank}: rank {peer} hung up before it said HELLO; did "
                    "it fail?"
                )
        return self._expected - self.greetings.keys()

    def _listen_unix(self) -> str:
        if not _UNIX:
            return ""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"stagelink-{secrets.token_hex(12)}"
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        self._plane.door.open(listener)
        return name

    def _listen_tcp(self, *, elsewhere: bool) -> None:
        address = self._address(elsewhere=elsewhere)
        with self._named():
            listener = listen(address, self._control.ports, _PORTS)
        port = listener.getsockname()[1]
        logger.info(
            "rank %d: listens for ranks of other servers at %s, port %d (%s)",
            self._plane.rank, address.text, port, address.reason,
        )  # fmt: skip
        self._plane.door.open(listener)
        self._rendezvous.publish("tcp", {"host": address.text, "port": port})

    def _address(self, *, elsewhere: bool) -> Address:
        with self._named():
            host = self._rendezvous.store_host
            return own_address_by(self._control, host, elsewhere=elsewhere)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have an error say whose it is: it is told to others."""
        try:
            yield
        except ConnectError as error:
            raise ConnectError(f"rank {self._plane.rank}: {error}") from error.__cause__

    def _dial(
        self, family: socket.AddressFamily, peer: int, address: Any, deadline: Deadline
    ) -> None:
        with ExitStack() as unless_connected:
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
                unless_connected.callback(sock.close)
                sock.settimeout(max(deadline.remaining_s, 0.001))
                sock.connect(address)
                tune(sock)
            except OSError as error:
                if stops_caller(error):
                    raise
                raise ConnectError(
                    f"rank {self._plane.rank}: rank {peer} does not answer at {address!r}: {error}"
                    f"{'' if isinstance(address, str) else _OTHER_INTERFACE}"
                ) from error
            unless_connected.pop_all()
        connection = self._plane.door.adopt(sock, lambda c: self._dialled.__setitem__(c, peer))
        self._plane.door.greet(connection, self._hello)

    def _on_hello(self, connection: Connection, frame: Frame) -> None:
        fields = decode(frame.note)
        dialled = self._dialled.get(connection)
        _check_credentials(connection.sock)
        peer = fields.get("rank")
        awaited = self._expected - self.greetings.keys()
        if not isinstance(peer, int) or peer not in awaited or dialled not in (None, peer):
            raise ProtocolError(f"HELLO from rank {peer!r}, which is not expected here")
        if dialled is None:
            tune(connection.sock)
            self._plane.door.greet(connection, self._hello)
        if fields.get("process") == self._process:
            connection.hand_to(frame.header.sequence)
        self._plane.door.introduce(connection, peer)
        greeting = fields.get("greeting")
        if not isinstance(greeting, dict):
            raise ProtocolError("HELLO without a greeting")
        self._judge(peer, greeting)
        with self._plane.lock:
            self.greetings[peer] = greeting


def _check_credentials(sock: socket.socket) -> None:
    if not (_UNIX and sock.family == socket.AF_UNIX):
        return
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid not in (os.getuid(), 0):
        raise ProtocolError(f"HELLO from process {pid} of another user ({uid})")


def wait_for_ranks(
    plane: Plane,
    rendezvous: Rendezvous,
    step: str,
    absent: Callable[[], Collection[int]],
    deadline: Deadline,
) -> None:
    """Block until no rank is absent any more, while connecting; leave word of who is waited for.

    Each is to send what ``step`` says; ``absent`` is called with the plane's lock held. Raises as
    `Plane.wait`, and `ConnectError`, which names those who keep the others waiting.
    """
    look_s = min(_TELL_S, deadline.seconds / 4)
    told: list[int] = []
    while not plane.wait(lambda: not absent(), Deadline(min(look_s, deadline.remaining_s))):
        with plane.lock:
            late = sorted(absent())
        # These steps are too short for the wait itself to come to it: one of those that this
        # rank waits for may have failed, and have no connection by which to say so.
        if plane.reader.on_long_wait is not None:
            plane.reader.on_long_wait()
        if deadline.passed:
            raise rendezvous.late(step, late, deadline)
        if late != told:
            rendezvous.tell_wait(step, late)
            told = late
        # of a rank that no connection reaches yet
        rendezvous.find_failure(plane.failure.fail_as_told)


# -- addresses at which a rank listens for others


def own_address_by(control: Control, host: str | None, *, elsewhere: bool) -> Address:
    """The address at which this rank listens for ranks of other servers.

    ``host`` is the job's store's, see `stagelink.control.store.store_host`. Unless some of those
    ranks are ``elsewhere``, on other hosts, they are reached at loopback. `ConnectError` where the
    plan's interface cannot be used, or its address cannot be reached from another host; or none is
    named, and nothing tells which address is to be used.
    """
    if control.interface is not None:
        address = address_of(control.interface, _KEY)
    elif elsewhere:
        address = own_address(host)
    else:
        return _LOOPBACK
    if elsewhere:
        check_reachable(address, _KEY)
    return address


def gloo_address_by(control: Control, host: str | None, *, elsewhere: bool) -> str:
    """This host's address for a gloo group: that of torch's variable, else `own_address_by`."""
    named = named_by_variable()
    if named is None:
        return own_address_by(control, host, elsewhere=elsewhere).text
    if elsewhere:
        check_reachable(named, VARIABLE)
    return named.text
