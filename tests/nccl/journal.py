"""What a process issued, on which thread and with which slots; and whether NCCL allows it.

Each rank keeps a journal; their times are of one machine's monotonic clock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from stagelink_nccl import issuer, link
from stagelink_nccl.slot import IssueSlot

if TYPE_CHECKING:
    from stagelink.transport.contract import Link
    from stagelink_nccl.slot import SlotUser

__all__ = ["Entry", "Journal", "faults", "journal"]


class Operation(NamedTuple):
    """The how manyth operation from which rank to which."""

    source: int
    target: int
    number: int

    def __str__(self) -> str:
        return f"{self.source}→{self.target}#{self.number}"


class Entry(NamedTuple):
    """One operation on one rank; times in seconds.

    Attributes:
        operation: which.
        thread: that issued it, with its name, since numbers are given again.
        held: when the slot was taken for it, or None if it was not held when it was issued.
        issued: when.
        freed: when the slot was let go, or None if it was so before.
    """

    operation: Operation
    thread: str
    held: float | None
    issued: float
    freed: float | None


Journal = list[Entry]


def faults(journals: Sequence[Journal]) -> list[str]:
    """What NCCL does not allow, or the rules of the slots, in the journals of all ranks."""
    found: list[str] = []
    ends: dict[Operation, dict[int, Entry]] = {}
    for rank, entries in enumerate(journals):
        threads = {entry.thread for entry in entries}
        if len(threads) > 1:
            found.append(f"rank {rank} issued on {len(threads)} threads")
        for entry in entries:
            ends.setdefault(entry.operation, {})[rank] = entry
    for operation, both in ends.items():
        found += _slot_faults(operation, both)
    return [*found, *_circles(journals)]


def _slot_faults(operation: Operation, both: dict[int, Entry]) -> Iterator[str]:
    if both.keys() != {operation.source, operation.target}:
        yield f"{operation} was issued on {sorted(both)} only"
    for rank, entry in both.items():
        for other, theirs in both.items():
            if theirs.held is None or theirs.held > entry.issued:
                yield f"rank {rank} issued {operation} without the slot of rank {other}"
            elif theirs.freed is None or theirs.freed < entry.issued:
                yield f"the slot of rank {other} was let go while rank {rank} issued {operation}"


def _circles(journals: Sequence[Journal]) -> Iterator[str]:
    graph: TopologicalSorter[Operation] = TopologicalSorter()
    for entries in journals:
        ordered = sorted(entries, key=lambda entry: entry.issued)
        for before, after in pairwise(ordered):
            graph.add(after.operation, before.operation)
    try:
        graph.prepare()
    except CycleError as error:
        yield f"the ranks' orders make a cycle: {' before '.join(map(str, error.args[1]))}"


@contextmanager
def journal(kind: type[IssueSlot] = IssueSlot) -> Iterator[Journal]:
    """Keep the journal of the handler that this process opens in the block.

    Args:
        kind: of slot that it is to use.
    """
    writer = _Writer()

    class Written(kind):  # type: ignore[misc, valid-type]
        """A slot whose holder is written down."""

        _holder: SlotUser | None = None

        @property
        def holder(self) -> SlotUser | None:
            return self._holder

        @holder.setter
        def holder(self, user: SlotUser | None) -> None:
            writer.held_by(user)
            self._holder = user

    do = link._LinkTask._do

    def _do(task: Any, operation: Any) -> None:
        writer.issued(task, task._port.link)
        do(task, operation)

    with patch.object(issuer, "IssueSlot", Written), patch.object(link._LinkTask, "_do", _do):
        yield writer.entries


class _Writer:
    """Keeps a journal."""

    def __init__(self) -> None:
        self.entries: Journal = []
        self._counts: Counter[Link] = Counter()
        self._holder: SlotUser | None = None
        self._since = 0.0
        self._open: int | None = None

    def held_by(self, user: SlotUser | None) -> None:
        now = time.monotonic()
        if self._open is not None:
            self.entries[self._open] = self.entries[self._open]._replace(freed=now)
            self._open = None
        self._holder, self._since = user, now

    def issued(self, user: SlotUser, by: Link) -> None:
        operation = Operation(by.source, by.target, self._counts[by])
        self._counts[by] += 1
        held = self._since if self._holder is user else None
        if held is not None:
            self._open = len(self.entries)
        here = threading.current_thread()
        thread = f"{here.name} {here.ident}"
        entry = Entry(operation, thread, held, time.monotonic(), None)
        self.entries.append(entry)
