"""UCX is a guest in its process: what it does there when it is loaded, in a fork, at the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ucx.here import needs_ucx

pytestmark = needs_ucx

HEAD = """
import ctypes, os, sys
from pathlib import Path
from stagelink.deadline import Deadline

def caught():  # signals that a process may use
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(one for one in lines if "SigCgt" in one)
    return int(line.split()[1], 16) & 0x7FFFFFFF

def held():
    fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")}
    return len(os.listdir("/proc/self/task")), fds, sorted(os.listdir("/dev/shm"))

libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
PATCHED = ["mmap", "munmap", "mremap", "madvise", "shmat", "shmdt", "brk", "sbrk"]

def code():
    addresses = [ctypes.cast(getattr(libc, name), ctypes.c_void_p).value for name in PATCHED]
    return [ctypes.string_at(address, 16) for address in addresses]

from stagelink_ucx.library import load
from stagelink_ucx.context import Context, ContextError
from stagelink_ucx.worker import Worker
"""


def run(body: str, **environment: str) -> str:
    """Run a program that begins with `HEAD`; what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("wires", ["tcp", "sm"])
def test_it_leaves_signals_and_the_c_library_alone_and_nothing_behind(wires: str) -> None:
    body = f"""
held()
signals, patches, before, environment = caught(), code(), held(), dict(os.environ)
worker = Worker(Context(load(), {{"TLS": {wires!r}}}))
assert caught() == signals, (hex(signals), hex(caught()))
assert code() == patches
worker.close(Deadline(5))
assert held() == before, (before, held())
assert os.environ == environment
assert libc.getenv(b"UCX_MEM_EVENTS") is None
"""
    assert run(body) == ""


def test_it_writes_nothing_to_standard_output() -> None:
    body = """
for config in ({"TLS": "pigeons"}, {"TLS": "tcp,pigeons"}, {"NET_DEVICES": "nosuch0"}):
    try:
        Context(load(), config).close()
    except ContextError:
        pass
"""
    assert run(body) == ""


def test_the_environments_word_counts() -> None:
    body = """
try:
    Context(load(), {"TLS": "pigeons"})
except ContextError:
    pass
"""
    assert "no usable transports" in run(body, UCX_LOG_LEVEL="error")


@pytest.mark.parametrize("wires", ["tcp", "sm"])
def test_a_forked_child_leaves_the_parents_worker_alone(wires: str) -> None:
    body = f"""
import torch
from tests.ucx.ends import Ends, pattern
ends = Ends({wires!r}).connect()
child = os.fork()
if not child:
    ends.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
sent, (received, buffer) = ends.send(pattern(3 << 20)), ends.receive(3 << 20)
ends.progress_until(lambda: sent.over and received.over)
assert torch.equal(buffer, pattern(3 << 20))
ends.close()
"""
    assert run(body) == ""


def test_a_process_that_is_killed_leaves_no_shared_memory() -> None:
    body = """
import signal
def shared(): return os.listdir("/dev/shm"), Path("/proc/sysvipc/shm").read_text().count("\\n")
before = shared()
child = os.fork()
if not child:
    Worker(Context(load(), {"TLS": "sm"}))
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(child, 0)[1] == signal.SIGKILL
assert shared() == before
"""
    assert run(body) == ""
