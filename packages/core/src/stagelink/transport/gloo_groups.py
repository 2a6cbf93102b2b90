"""Groups of torch's gloo at an address of our choice, closed to strangers once they are complete.

A gloo group listens for as long as it lives, and a process that has no file descriptor left when
somebody connects is ended by gloo. Once every member is connected nobody has any business there:
a filter on the listening socket then drops all that comes to it. Groups themselves are connected
by sockets of their own and notice nothing.

Gloo cannot be told to give up: a wait that runs out of time closes every connection of its group,
so that is how one is broken off. And a group must not be destroyed in a forked child.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store

from stagelink.errors import ConnectError
from stagelink.transport.addresses import Address, address_of
from stagelink.transport.host import open_descriptors, socket_at

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Torch's own environment variable for the interface of gloo."""

THREADS = 2
"""Threads of a group for collectives, as torch has it."""

logger = logging.getLogger("stagelink")
_SO_ATTACH_FILTER = getattr(socket, "SO_ATTACH_FILTER", 26)
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of the kernel's packet filter: return 0, the bytes to keep."""

_SPARE_TAG = 2**31 - 1
_AT_ONCE = timedelta(milliseconds=1)
_making = threading.Lock()
_kept: WeakSet[Any] = WeakSet()


def named_by_variable() -> Address | None:
    """The address of the interface that `VARIABLE` names; None where it names none.

    Raises:
        ConnectError: it names several, or one that cannot be used.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if "," in name:
        raise ConnectError(
            f"{VARIABLE} = {name!r} names several interfaces, and a group here has one; name one"
        )
    return address_of(name, VARIABLE)


def gloo_group(  # noqa: PLR0913 - what a group is made of
    store: Store,
    rank: int,
    size: int,
    *,
    address: str,
    timeout: timedelta,
    threads: int,
    lazy: bool = False,
) -> Any:
    """Connect a `ProcessGroupGloo`; blocks until every member has connected with this one.

    Args:
        store: for its members only.
        rank: this member.
        size: how many there are.
        address: of this host, where the others reach it.
        timeout: of connecting and of every operation.
        threads: that carry out collectives; a send or receive needs none.
        lazy: connect with each member when it is first needed; then it stays open to strangers.

    Raises:
        RuntimeError: the address is none of this host's, or the members did not connect.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    device, listener = _listening_device(address, lazy=lazy)
    try:
        options._devices = [device]
        options._threads = threads
        options._timeout = timeout
        group = gloo(store, rank, size, options)
        if listener is not None and not lazy:
            _shut(listener)
    finally:
        if listener is not None:
            listener.close()
    keep_in_child(group)
    return group


def break_off(
    group: Any,
    rank: int,
    size: int,
    *,
    name: str = "stagelink-gloo-break",
    then: Callable[[], None] = lambda: None,
) -> threading.Thread | None:
    """Wake every wait in a gloo group, and make it useless; returns at once, on any thread.

    Returns:
        The thread that does it and calls ``then`` behind it, which ends soon; None for a group of
        one rank, in which nothing waits.
    """
    if size == 1:
        return None
    work = partial(_break_connections, group, (rank + 1) % size, then)
    # No daemon: gloo ends the process where the interpreter's end finds it at work.
    thread = threading.Thread(target=work, name=name, daemon=False)
    thread.start()
    return thread


def _break_connections(group: Any, other: int, then: Callable[[], None]) -> None:
    """Close the group's connections, waking every wait, by a receive that runs out of time."""
    with suppress(RuntimeError):  # to run out of time is the purpose; or they are closed already
        group.recv([torch.empty(1, device="cpu")], other, _SPARE_TAG).wait(_AT_ONCE)
    then()


def keep_in_child(owner: Any) -> None:
    """Keep a forked child, as a data loader's worker, from ever destroying an inherited object.

    For what owns a group of gloo or its handles. To destroy those would wait for threads that only
    the parent has, and take the parent's sockets out of the event queue that the two share, which
    ends the parent's process.
    """
    _kept.add(owner)


def _outlive() -> None:
    for owner in tuple(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


os.register_at_fork(after_in_child=_outlive)


def _listening_device(address: str, *, lazy: bool) -> tuple[Any, socket.socket | None]:
    """A gloo device, and a handle of our own for the socket at which it listens."""
    gloo: Any = dist.ProcessGroupGloo
    with _making:  # one at a time, so that what is new is this one's
        before = _sockets()
        device = gloo.create_device(hostname=address, lazy_init=lazy)
        new = [fd for name, fd in _sockets().items() if name not in before]
        listeners = [found for fd in new if (found := _listener(fd, address)) is not None]
    if len(listeners) == 1:
        logger.debug("gloo listens at %s, port %d", address, listeners[0].getsockname()[1])
        return device, listeners[0]
    # Not on Linux; or something else in this process began to listen there at the same moment.
    for listener in listeners:
        listener.close()
    return device, None


def _sockets() -> dict[str, int]:
    """The sockets of this process by the kernel's name, with a descriptor of each."""
    with suppress(FileNotFoundError):  # there is no /proc
        return {name: fd for fd, name in open_descriptors().items() if name.startswith("socket:")}
    return {}


def _listener(descriptor: int, address: str) -> socket.socket | None:
    """The socket behind a descriptor, which is left alone, if it listens at the address."""
    try:
        found = socket_at(descriptor)
    except OSError:  # another thread has closed it meanwhile, and perhaps opened a file
        return None
    with suppress(OSError):
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and found.family != socket.AF_UNIX and found.getsockname()[0] == address:
            return found
    found.close()
    return None


def _shut(listener: socket.socket) -> None:
    """Have the kernel drop all that comes to a listening socket from now on."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    # The kernel's struct sock_fprog: how many instructions, and where they stand.
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
    except OSError as error:
        logger.debug("gloo's port stays open to strangers: %s", error.strerror)
