"""Which server and process this is."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.transport.host import memory_bytes, process_id, server_id
from tests.support.interrupts import struck

if TYPE_CHECKING:
    from collections.abc import Callable

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux_only
def test_memory_is_what_the_kernel_says() -> None:
    first = Path("/proc/meminfo").read_text().splitlines()[0]
    assert memory_bytes() == int(first.split()[1]) * 1024


def test_a_system_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert memory_bytes() is None


def test_one_process_is_on_one_server() -> None:
    assert server_id() == server_id()
    assert process_id() == process_id()
    assert process_id().startswith(server_id())


@linux_only
def test_a_server_is_a_boot_and_a_network() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert server_id() == f"{boot}/{os.readlink('/proc/self/ns/net')}"


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_another_process_on_the_same_server() -> None:
    before, read_end, write_end = process_id(), *os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, f"{server_id()} {process_id()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    server, process = os.read(read_end, 4096).decode().split()
    os.close(read_end)
    os.close(write_end)
    assert server == server_id()
    assert process != before
    assert process == before.removesuffix(str(os.getpid())) + str(child)


def test_without_proc_the_host_s_name_tells_servers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(os, "readlink", absent)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    assert server_id() == "node7/net"
    assert process_id() == f"node7/net/pid/{os.getpid()}"


@pytest.mark.parametrize(
    ("place", "name", "asked"),
    [
        (Path, "read_text", server_id),
        (os, "readlink", server_id),
        (os, "readlink", process_id),
        (os, "sysconf", memory_bytes),
    ],
)
def test_what_a_signal_handler_raises_is_no_answer(
    place: Any, name: str, asked: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, struck(TimeoutError))
    with pytest.raises(TimeoutError, match="a handler's"):
        asked()
