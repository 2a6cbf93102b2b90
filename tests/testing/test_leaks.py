"""The leak check sees each kind of thing, and lets pass what goes away in time."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING

import pytest

from stagelink.testing import LeakCheck, no_leaks

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool


def pid_of(rank: int, world_size: int, store: Store) -> int:
    return os.getpid()


def test_a_thread() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="left over")
    check = LeakCheck("threads")
    thread.start()
    with pytest.raises(AssertionError, match="thread 'left over'"):
        check.verify(settle_s=0)
    gate.set()
    thread.join()


def test_a_file_descriptor() -> None:
    check = LeakCheck("descriptors")
    with open("/dev/null"), pytest.raises(AssertionError, match=r"descriptor \d+ → /dev/null"):
        check.verify(settle_s=0)


def test_a_descriptor_that_took_the_number_of_another() -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    check = LeakCheck("descriptors")
    os.close(descriptor)
    assert os.open("/dev/zero", os.O_RDONLY) == descriptor
    with pytest.raises(AssertionError, match="→ /dev/zero"):
        check.verify(settle_s=0)
    os.close(descriptor)


def test_a_process_and_its_child() -> None:
    script = "import os, signal; os.fork(); os.write(1, b'.'); signal.pause()"
    check = LeakCheck("processes")
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout is not None
        process.stdout.read(2)
        with pytest.raises(AssertionError, match=r"(process \d+ \(python.*\s*){2}"):
            check.verify(settle_s=0)
        os.killpg(process.pid, signal.SIGKILL)


def test_shared_memory() -> None:
    check = LeakCheck("shared memory")
    memory = SharedMemory(create=True, size=64)
    with pytest.raises(AssertionError, match="shared memory 'psm_"):
        check.verify(settle_s=0)
    memory.close()
    memory.unlink()


def test_shared_mappings() -> None:
    check = LeakCheck("shared mappings")
    with mmap.mmap(-1, 4096), pytest.raises(AssertionError, match="mapping of '/dev/zero"):
        check.verify(settle_s=0)
    check.verify()


def test_all_that_is_left_is_listed() -> None:
    check = LeakCheck()
    with open("/dev/null"), open("/dev/zero"), pytest.raises(AssertionError) as caught:
        check.verify(settle_s=0)
    assert len(str(caught.value).splitlines()) == 3


def test_only_the_kinds_that_were_named() -> None:
    check = LeakCheck("threads")
    with open("/dev/null"):
        check.verify(settle_s=0)


def test_what_is_about_to_end_is_waited_for() -> None:
    gate = threading.Event()
    with no_leaks(settle_s=20):
        threading.Timer(0.05, gate.wait).start()
        gate.set()


def test_what_only_a_cycle_holds_is_no_leak() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.file = open("/dev/null", "rb", buffering=0)  # noqa: SIM115 - its end is the subject

        def __del__(self) -> None:
            self.file.close()

    with no_leaks():
        Cycle()


def test_an_exception_of_the_body_goes_first() -> None:
    opened: list[int] = []

    def open_and_fail() -> None:
        with no_leaks(settle_s=0):
            opened.append(os.open("/dev/null", os.O_RDONLY))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        open_and_fail()
    os.close(opened.pop())


def test_a_pool_that_grows_is_no_leak(rank_pool: RankPool) -> None:
    known = len(rank_pool.pids)
    with no_leaks(pool=rank_pool):
        rank_pool.run(pid_of, known + 1)
    assert len(rank_pool.pids) == known + 1
