"""Leaks of a piece of code: threads, file descriptors, processes, shared memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stagelink.deadline import Deadline
from stagelink.ranks.processes import RankPool
from stagelink.transport.host import open_descriptors

Holdings = dict[Hashable, str]
"""What a process holds of one kind: identity → what to call it in an error."""


def _threads() -> Holdings:
    # A dummy stands for a native thread that came by, torch's autograd for one; it never ends.
    dummy = threading._DummyThread
    return {
        thread: f"thread {thread.name!r}"
        for thread in threading.enumerate()
        if not isinstance(thread, dummy)
    }


def _descriptors() -> Holdings:
    return {
        (number, target): f"file descriptor {number} → {target}"
        for number, target in open_descriptors().items()
    }


def _processes() -> Holdings:
    """Every process that this one started, directly or not, and that is still there."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            # The name itself may contain spaces and brackets.
            head, _, tail = Path("/proc", entry, "stat").read_text().rpartition(")")
            parents[int(entry)] = (int(tail.split()[1]), head.partition("(")[2])
    found: Holdings = {}
    for pid, (parent, name) in parents.items():
        ancestor = parent
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor][0]
        if ancestor == os.getpid():
            found[pid] = f"process {pid} ({name})"
    return found


def _shared_memory() -> Holdings:
    """The names in /dev/shm: of the whole machine, so another job's are counted as well."""
    return {name: f"shared memory {name!r}" for name in os.listdir("/dev/shm")}


def _shared_mappings() -> Holdings:
    """Memory that this process shares with others, mapped files included."""
    found: Holdings = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, device, inode, *name = line.split(maxsplit=5)
        if mode.endswith("s"):
            found[addresses, device, inode] = f"mapping of {''.join(name)!r}"
    return found


KINDS: dict[str, Callable[[], Holdings]] = {
    "threads": _threads,
    "descriptors": _descriptors,
    "processes": _processes,
    "shared memory": _shared_memory,
    "shared mappings": _shared_mappings,
}
"""What can be watched, and how it is counted."""


class LeakCheck:
    """Snapshot of what this process holds at the moment of construction, to compare with later.

    Args:
        kinds: some of `KINDS`; none given: all of them.
        pool: warm ranks, whose processes and pipes are no leak.
    """

    def __init__(self, *kinds: str, pool: RankPool | None = None) -> None:
        self._kinds = kinds or tuple(KINDS)
        self._pool = pool
        self._before = self._count()

    def verify(self, settle_s: float = 2.0) -> None:
        """Check that nothing has been added.

        Args:
            settle_s: how long threads and processes that are about to end may take for it.

        Raises:
            AssertionError: with one line for each thing that was not there before.
        """
        deadline = Deadline(settle_s)
        while added := self._added():
            if deadline.passed:
                raise AssertionError("left behind:\n  " + "\n  ".join(added))
            gc.collect()  # what only a reference cycle holds is not leaked
            time.sleep(0.01)

    def _added(self) -> list[str]:
        now = self._count()
        return sorted(now[key] for key in now.keys() - self._before.keys())

    def _count(self) -> Holdings:
        return {
            (kind, key): name
            for kind in self._kinds
            for key, name in KINDS[kind]().items()
            if not self._of_pool(kind, key)
        }

    def _of_pool(self, kind: str, key: Any) -> bool:
        if self._pool is None:
            return False
        if kind == "descriptors":
            return key[0] in self._pool.descriptors
        return kind == "processes" and key in self._pool.pids


@contextmanager
def no_leaks(*kinds: str, pool: RankPool | None = None, settle_s: float = 2.0) -> Iterator[None]:
    """Check that the body leaves nothing behind, by a `LeakCheck` around it.

    Raises:
        AssertionError: it did. An exception of the body's own goes before the check.
    """
    check = LeakCheck(*kinds, pool=pool)
    yield
    check.verify(settle_s)
