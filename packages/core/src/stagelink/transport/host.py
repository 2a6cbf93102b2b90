"""Identity of this server and this process, its descriptors, and the machine's memory."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from stagelink.transport.interrupts import stops_caller


def server_id() -> str:
    """A text that two processes have in common exactly when they are on one server.

    On Linux the kernel's boot id and the network namespace: containers with networks of their own
    are servers of their own, since neither Unix sockets nor loopback join them. Elsewhere the
    host's name. Read afresh at each call, so that a forked child is never told its parent's.
    """
    return f"{_boot_id()}/{_namespace('net')}"


def process_id() -> str:
    """A text that two threads have in common exactly when they are in one process.

    The server's with the process-id namespace and the process id, which alone may be equal in two
    containers that share a network.
    """
    return f"{server_id()}/{_namespace('pid')}/{os.getpid()}"


def open_descriptors() -> dict[int, str]:
    """The open file descriptors of this process, and what each refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # The one that listed the directory is closed by now.
        with suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def socket_at(descriptor: int) -> socket.socket:
    """A socket of the caller's own for a descriptor of another's; OSError where it is none."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:  # Windows has no sysconf
        if stops_caller(error):
            raise
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        if stops_caller(error):
            raise
        return socket.gethostname()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError as error:
        if stops_caller(error):
            raise
        return kind
