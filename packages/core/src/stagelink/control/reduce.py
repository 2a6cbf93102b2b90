"""Small values over all ranks, by a spanning tree of the control connections.

Every rank adds its children's values to its own in a fixed order and hands the result to its
parent; the root's result comes back down. Sums of floats are therefore the same on every rank and
in every run.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stagelink.arguments import is_a
from stagelink.control.chain import Awaited
from stagelink.control.connection import Frame
from stagelink.control.plane import Plane
from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, ProtocolError, UsageError
from stagelink.transport.header import Direction, Header, MessageKind

_COMBINE: dict[str, Callable[[float, float], float]] = {
    "sum": lambda a, b: a + b,
    "max": max,
    "min": min,
}
_VALUE_BYTES = 8


class Tree(NamedTuple):
    """A rank's place in the spanning tree: its parent (None for the root) and its children."""

    parent: int | None
    children: tuple[int, ...]


def spanning_tree(neighbours: Mapping[int, Sequence[int]], rank: int) -> Tree:
    """The breadth-first tree from rank 0 over connected pairs; the same on every rank."""
    parent: dict[int, int | None] = {0: None}
    queue = deque([0])
    while queue:
        here = queue.popleft()
        for there in neighbours[here]:
            if there not in parent:
                parent[there] = here
                queue.append(there)
    return Tree(parent[rank], tuple(sorted(r for r, p in parent.items() if p == rank)))


def _numbers(values: Sequence[float]) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"reduce: values must be numbers, as many on every rank: {error}"
        ) from error


class Reducer:
    """Reductions of one rank, numbered in the order of the calls."""

    def __init__(self, plane: Plane, tree: Tree) -> None:
        self._plane = plane
        self._tree = tree
        self._round = 0
        self._arrived: dict[tuple[int, Direction, int], tuple[float, ...]] = {}
        plane.handle(MessageKind.REDUCE, self._on_reduce)

    def reduce(self, values: Sequence[float], op: str, deadline: Deadline) -> list[float]:
        """Combine all ranks' values, as `stagelink.Handler.reduce`; who takes no part is named."""
        combine = _COMBINE.get(op) if is_a(op, str) else None
        if combine is None:
            raise UsageError(f"reduce by {op!r}: it is one of {', '.join(map(repr, _COMBINE))}")
        total = _numbers(values)  # first: a call that is refused takes no number
        number, self._round = self._round, self._round + 1
        try:
            return self._combine(number, total, combine, deadline)
        except BaseException as error:
            self._plane.failure.interrupted(error)  # the others would wait for this rank's part
            raise

    def _combine(
        self,
        number: int,
        total: list[float],
        combine: Callable[[float, float], float],
        deadline: Deadline,
    ) -> list[float]:
        for child in self._tree.children:
            theirs = self._take(child, Direction.FORWARD, number, len(total), deadline)
            total = [combine(a, b) for a, b in zip(total, theirs, strict=True)]
        parent = self._tree.parent
        if parent is not None:
            self._send(parent, Direction.FORWARD, number, total)
            total = list(self._take(parent, Direction.BACKWARD, number, len(total), deadline))
        for child in self._tree.children:
            self._send(child, Direction.BACKWARD, number, total)
        return total

    def _send(self, peer: int, direction: Direction, number: int, values: list[float]) -> None:
        header = Header(MessageKind.REDUCE, direction, sequence=number)
        self._plane.post(peer, header, struct.pack(f"<{len(values)}d", *values))

    def _take(
        self, peer: int, direction: Direction, number: int, count: int, deadline: Deadline
    ) -> tuple[float, ...]:
        key = (peer, direction, number)
        rank = self._plane.rank

        def arrived() -> bool:
            return key in self._arrived or self._plane.goodbyes.check_here(
                peer, f"reduction {number}"
            )

        awaited = Awaited(peer, lambda: f"reduction {number}")
        if not self._plane.wait(arrived, deadline, awaited):
            why = self._plane.chain.explain(awaited)
            raise DeadlineError(
                f"rank {rank}: rank {peer} did not take part in reduction {number} within "
                f"{deadline.seconds:g} s{why}"
            )
        values = self._arrived.pop(key)
        if len(values) != count:
            raise ProtocolError(
                f"reduction {number}: {count} values on rank {rank}, "
                f"{len(values)} from rank {peer}"
            )
        return values

    def _on_reduce(self, peer: int, frame: Frame) -> None:
        header = frame.header
        key = (peer, header.direction, header.sequence)
        if len(frame.note) % _VALUE_BYTES:
            raise ProtocolError(
                f"rank {peer}: REDUCE {header.sequence} of {len(frame.note)} bytes, which are no "
                f"values of {_VALUE_BYTES} bytes each"
            )
        values = tuple(value for (value,) in struct.iter_unpack("<d", frame.note))
        with self._plane.lock:
            self._check_due(key)
            self._arrived[key] = values

    def _check_due(self, key: tuple[int, Direction, int]) -> None:
        """A child is at most one reduction ahead, a parent never."""
        peer, direction, number = key
        upward = direction is Direction.FORWARD
        if peer not in (self._tree.children if upward else (self._tree.parent,)):
            raise ProtocolError(
                f"rank {peer}: REDUCE {number} {'from' if upward else 'to'} a child, which "
                f"{'it' if upward else 'this rank'} is not"
            )
        due = range(max(0, self._round - 1), self._round + upward)
        if number not in due or key in self._arrived:
            raise ProtocolError(
                f"rank {peer}: REDUCE {number} is not due; this rank has begun {self._round}"
            )
