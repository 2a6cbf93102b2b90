"""Hosts for tests: network namespaces on one machine, a switch between them, a cable to each.

A host has its own network, host name, ``/etc/hosts`` and no name server, and is a server of its
own to stagelink. Its kernel objects belong to a process that holds them and that ends when its
standard input does, so that nothing is left even where the test's process is killed. Where the
system does not permit it, `hosts` skips the test and says why.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from torch.distributed import TCPStore

from stagelink.testing import run_fresh
from tests.support.pipelines import End, _end_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from stagelink.testing import RankProcesses
    from tests.support.pipelines import Document

__all__ = ["Host", "Hosts", "NotPermittedError", "hosts"]

T = TypeVar("T")

_ENV = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin", "LC_ALL": "C"}
_COMMAND_S = 20.0
_KINDS = ("net", "uts", "mnt")  # the mount namespace last: it changes what paths mean
_MOUNT = """
set -e
mount -t tmpfs none /mnt
touch /mnt/file
mount --bind /mnt/file "$1"
umount /mnt
"""
_ports = itertools.count(29500)
"""Of stores; in a namespace of its own a number is nobody else's."""


class NotPermittedError(Exception):
    """The system does not let this process lay hosts; the text says what failed."""


class Host:
    """One namespace and the process that holds it.

    Args:
        name: its host name.
        address: its IPv4 address on the cable.

    Attributes:
        name, address: as given.
        interface: the name of its end of the cable.
    """

    interface = "eth0"

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._bound: set[str] = set()
        self._holder = _hold(["--net", "--uts", "--mount"])
        try:
            self.run("hostname", name)
            self.run("ip", "link", "set", "lo", "up")
            self.set_names("127.0.0.1 localhost")
            self._bind("", "/etc/resolv.conf")  # nobody is asked, and nobody is waited for
        except BaseException:
            self.close()
            raise

    @property
    def holder(self) -> int:
        """Process id of the process that holds the namespaces."""
        return self._holder.pid

    def run(self, *command: str, text: str = "") -> str:
        """Run a command in this host, as ``ip`` with its arguments; its output.

        Args:
            command: the program and its arguments.
            text: its standard input.

        Raises:
            NotPermittedError: it failed.
        """
        enter = ["nsenter", "--target", str(self.holder), "--net", "--uts", "--mount", "--"]
        return _run([*enter, *command], text)

    def set_names(self, *lines: str) -> None:
        """Have ``/etc/hosts`` consist of these lines, in this host only."""
        self._bind("\n".join((*lines, "")), "/etc/hosts")

    def _bind(self, text: str, path: str) -> None:
        # In memory, and gone with the namespace. From the second time on it is written to.
        if path not in self._bound:
            self.run("sh", "-c", _MOUNT, "sh", path)
            self._bound.add(path)
        self.run("sh", "-c", 'cat > "$1"', "sh", path, text=text)

    def close(self) -> None:
        """End the holder, and with it the namespaces, once the last process in them has ended."""
        _release(self._holder)


class Hosts:
    """Several hosts with a cable each to one switch. A context manager: at its end all are gone.

    The hosts are named ``host0``, ``host1``, …, know each other's names, and have the addresses
    10.77.0.1, 10.77.0.2, … on their interface ``eth0``. ``fd77::1``, … on request by `add_ipv6`.

    Args:
        count: how many.

    Raises:
        NotPermittedError: the system does not let this process lay them.
    """

    def __init__(self, count: int = 2) -> None:
        self._hosts: list[Host] = []
        self._switch = _hold(["--net"])
        try:
            self._in_switch("ip", "link", "add", "bridge", "type", "bridge")
            self._in_switch("ip", "link", "set", "bridge", "up")
            for number in range(count):
                self._hosts.append(Host(f"host{number}", f"10.77.0.{number + 1}"))
                self.lay(number, Host.interface, f"{self[number].address}/24")
            self.restore_names()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def lay(self, number: int, interface: str, *addresses: str) -> None:
        """Lay a cable from a host to the switch.

        Args:
            number: the host's.
            interface: the name of its end in the host.
            addresses: of the interface, with the length of their prefix.
        """
        host, port = self[number], _port(number, interface)
        ends = ["peer", "name", interface, "netns", str(host.holder)]
        self._in_switch("ip", "link", "add", port, "type", "veth", *ends)
        self._in_switch("ip", "link", "set", port, "master", "bridge", "up")
        for address in addresses:
            # Else an IPv6 address is of no use for seconds, until it is known to be unique.
            more = ("nodad",) if ":" in address else ()
            host.run("ip", "address", "add", address, "dev", interface, *more)
        host.run("ip", "link", "set", interface, "up")

    def restore_names(self) -> None:
        """Have every host know the names of all."""
        lines = [f"{host.address} {host.name}" for host in self._hosts]
        for host in self._hosts:
            host.set_names("127.0.0.1 localhost", *lines)

    def cut(self, number: int, interface: str = Host.interface) -> None:
        """Cut a host's cable: nothing comes through, and nobody is told."""
        self._in_switch("ip", "link", "set", _port(number, interface), "down")

    def restore(self, number: int, interface: str = Host.interface) -> None:
        """Mend a cable that was cut."""
        self._in_switch("ip", "link", "set", _port(number, interface), "up")

    def store(self, number: int = 0) -> str:
        """An address on a host for a c10d store, never given before."""
        return f"tcp://{self[number].address}:{next(_ports)}"

    def start(
        self,
        function: Callable[..., T],
        places: Sequence[int],
        *args: Any,
        store: str | None = None,
    ) -> RankProcesses[T]:
        """Start ``function(rank, world_size, store, *args)`` on processes of these hosts.

        Args:
            function: stands at a module's top level.
            places: the host's number of each rank.
            args: what can be pickled.
            store: the address that the function is given; None: a new one on rank 0's host.
        """
        holders = [self[place].holder for place in places]
        where = self.store(places[0]) if store is None else store
        return run_fresh(_on_host, len(places), holders, where, function, args)

    def start_to_ends(
        self, plan: Document, case: Callable[..., object], places: Sequence[int], *args: Any
    ) -> RankProcesses[End]:
        """Start ``case(comm, *args)`` with an open handler on each rank; how each ended."""
        return self.start(_end_process, places, plan, case, args, ())

    def close(self) -> None:
        """End the hosts and the switch."""
        for host in self._hosts:
            host.close()
        _release(self._switch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _in_switch(self, *command: str) -> None:
        _run(["nsenter", "--target", str(self._switch.pid), "--net", "--", *command])


@contextmanager
def hosts(count: int = 2) -> Iterator[Hosts]:
    """`Hosts` for the body of a ``with``, or of a fixture; skips where they are not permitted."""
    try:
        laid = Hosts(count)
    except NotPermittedError as error:
        pytest.skip(f"no hosts as network namespaces here: {error}")
    with laid:
        yield laid


def _port(number: int, interface: str) -> str:
    return f"p{number}-{interface}"


def _hold(kinds: Sequence[str]) -> subprocess.Popen[str]:
    """A process in new namespaces of these kinds, which ends with its standard input."""
    command = ["unshare", *kinds, "sh", "-c", "echo there && exec cat"]
    pipe = subprocess.PIPE
    try:
        holder = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_ENV
        )
    except OSError as error:
        raise NotPermittedError(f"{command[0]}: {error}") from error
    assert holder.stdout is not None
    if holder.stdout.readline() == "there\n":
        return holder
    _, told = holder.communicate()
    raise NotPermittedError(f"{' '.join(command[:-3])}: {told.strip()}")


def _release(holder: subprocess.Popen[str]) -> None:
    holder.communicate()  # closes its standard input, at whose end it ends


def _run(command: Sequence[str], text: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            env=_ENV,
            timeout=_COMMAND_S,
            check=False,
        )
    except OSError as error:
        raise NotPermittedError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _on_host(
    rank: int,
    world_size: int,
    unused: object,
    holders: Sequence[int],
    store: str,
    function: Callable[..., T],
    args: tuple[Any, ...],
) -> T:
    del unused
    enter(holders[rank])
    if rank == 0:
        # The first store that a process serves opens a pipe for good, which is no leak of a case.
        TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return function(rank, world_size, store, *args)


def enter(holder: int) -> None:
    """Move this thread, the only one of its process, into the namespaces of a host for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = Path.cwd()
    doors = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
    try:
        for door in doors:
            if libc.setns(door, 0):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), "setns")
    finally:
        for door in doors:
            os.close(door)
    os.chdir(folder)
