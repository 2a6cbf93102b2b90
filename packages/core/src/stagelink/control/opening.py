"""Opening of a store by its address, with an error that says what is wrong there.

Names and ports are tried by Python's own calls before torch's, since those tell why they fail,
end in time, and can be interrupted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, Store, TCPStore

from stagelink.control.launch import StoreAddress
from stagelink.control.store import Remote, StoreClient, remote_of
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError
from stagelink.transport.interrupts import stops_caller

logger = logging.getLogger("stagelink")
_PAUSE_S = 0.1
_TORCHS = timedelta(seconds=300)
"""Torch's own time limit, for the calls of others."""

_TRY_S = 3.0
"""For one try to connect; a lost packet is sent again after 1 s and 3 s."""

_LENGTH = struct.Struct("<I")


def open_store(
    where: Store | StoreAddress, rank: int, world_size: int, deadline: Deadline
) -> StoreClient:
    """A client of the store at an address, where rank 0 hosts a ``tcp`` one; or of an open store.

    `ConnectError` where the port is in use (rank 0), nobody answers there, the host's name is not
    known, or the file cannot be used; the text says how the address was given.
    """
    if not isinstance(where, StoreAddress):
        return StoreClient.of(where, deadline)
    if where.kind == "file":
        return _open_file(where, world_size, deadline)
    return _open_tcp(where, deadline, hosts=where.kind == "tcp" and rank == 0)


# -- a file


def _open_file(where: StoreAddress, world_size: int, deadline: Deadline) -> StoreClient:
    client = StoreClient(str(where))

    def make(_: timedelta) -> Store:
        _check_file(where)
        return FileStore(where.path, world_size)  # the last one removes it

    client.make(make, deadline)
    return client


def _check_file(where: StoreAddress) -> None:
    # Torch tries for five minutes to open what cannot be opened, and for good to read what is no
    # store's file.
    folder = Path(where.path).parent
    if not folder.is_dir():
        raise ConnectError(f"{where.given}: there is no folder {str(folder)!r} on this host")
    try:
        number = os.open(where.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ConnectError(
            f"{where.given}: the file cannot be opened: {error.strerror}"
        ) from error
    with os.fdopen(number, "rb") as file:
        if not Path(where.path).is_file():
            raise ConnectError(f"{where.given}: that is no file that a store can be in")
        try:  # torch's store locks it so while it writes, and then there is half of an entry
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if stops_caller(error):
                raise
            return
        start = file.read(_LENGTH.size)
        size = os.fstat(file.fileno()).st_size
    if start and (len(start) < _LENGTH.size or _LENGTH.unpack(start)[0] > size):
        raise ConnectError(
            f"{where.given}: the file exists and is no store's; name one that does not exist"
        )


# -- a port


def _open_tcp(where: StoreAddress, deadline: Deadline, *, hosts: bool) -> StoreClient:
    remote = _reach(where, deadline, hosts=hosts)
    client = StoreClient(str(where))

    def make(limit: timedelta) -> Store:
        store = TCPStore(where.host, where.port, None, hosts, limit, wait_for_workers=False)
        store.set_timeout(_TORCHS)
        return store

    try:
        client.make(make, deadline, remote)
    except ConnectError as error:
        if stops_caller(error):
            raise
        raise ConnectError(_failure(where, deadline, error, hosts=hosts)) from error
    return client


def _failure(where: StoreAddress, deadline: Deadline, error: Exception, *, hosts: bool) -> str:
    cause = str(error.__cause__ or error).splitlines()[0]
    if hosts:
        return (
            f"rank 0 cannot host the store at {where.host}:{where.port} ({cause}; given as "
            f"{where.given}); another job may hold the port: choose another one; and the host "
            "must be rank 0's own"
        )
    return (
        f"what listens at {where.host}:{where.port} ({where.given}) does not answer as a store "
        f"within {deadline.seconds:g} s ({cause}); is it this job's rank 0, or its launcher?"
    )


def _holder(where: StoreAddress) -> str:
    if where.kind == "agent":
        return "the launcher's store: is the launcher up there, on the node of its rank 0?"
    return "missing: 0, which hosts the store: is rank 0 up there?"


def _reach(where: StoreAddress, deadline: Deadline, *, hosts: bool) -> Remote | None:
    """Wait until the host is known, and something listens there; who, if not this rank ``hosts``.

    A name may become known late, as in a cluster that starts.
    """
    told = False
    while True:
        found = _look_up(where, deadline)
        if isinstance(found, str):
            problem, cause, hint = f"cannot resolve host {where.host!r}", found, ""
            if not told:
                logger.warning("%s yet: %s (%s)", problem, cause, where.given)
                told = True
        elif hosts:
            return None
        else:
            answer = _dial(found, deadline)
            if not isinstance(answer, str):
                return answer
            problem, cause = f"no answer from the store at {where.host}:{where.port}", answer
            hint = f"; {_holder(where)}"
        if deadline.passed:
            raise ConnectError(
                f"{problem} within {deadline.seconds:g} s: {cause} ({where.given}){hint}"
            )
        time.sleep(min(_PAUSE_S, deadline.remaining_s))


def _dial(addresses: list[Any], deadline: Deadline) -> Remote | str:
    """Who listens at the first address that answers; a text says why none does."""
    cause = "not tried"
    for family, _, _, _, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(max(min(_TRY_S, deadline.remaining_s), 0.001))
            try:
                probe.connect(address)
                remote = remote_of(probe)
            except OSError as error:
                if stops_caller(error):
                    raise
                cause = _refusal(error)
            else:
                if remote is not None:
                    return remote
    return cause


def _refusal(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the host does not answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nobody listens there"
    return error.strerror or str(error)


def _look_up(where: StoreAddress, deadline: Deadline) -> list[Any] | str:
    with suppress(OSError, UnicodeError):  # an IP address asks nobody
        return socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    # In a thread of its own: a name server that is not there cannot be interrupted.
    found: list[list[Any] | str] = []

    def look() -> None:
        try:
            found.append(socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(str(getattr(error, "strerror", None) or error))

    thread = threading.Thread(target=look, name="stagelink-resolve", daemon=True)
    thread.start()
    thread.join(max(deadline.remaining_s, 0.05))
    return found[0] if found else "the name server does not answer"
