"""Two questions about the graph of stages: is there a way, and is it in one piece."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["pieces", "shortest_path"]


def shortest_path(
    successors: Mapping[int, Iterable[int]], start: int, goal: int
) -> list[int] | None:
    """The nodes of a shortest way from start to goal, both included; None where there is none."""
    came_from = {start: start}
    waiting = deque([start])
    while waiting and goal not in came_from:
        node = waiting.popleft()
        for successor in successors.get(node, ()):
            if successor not in came_from:
                came_from[successor] = node
                waiting.append(successor)
    return _way_back(came_from, start, goal) if goal in came_from else None


def pieces(ends: Iterable[tuple[int, int]]) -> Sequence[list[int]]:
    """The connected pieces of an undirected graph, each sorted, by their smallest node."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for one, other in ends:
        neighbours[one].append(other)
        neighbours[other].append(one)
    unseen = set(neighbours)
    return [_piece(node, neighbours, unseen) for node in sorted(neighbours) if node in unseen]


def _way_back(came_from: Mapping[int, int], start: int, goal: int) -> list[int]:
    way = [goal]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return way[::-1]


def _piece(start: int, neighbours: Mapping[int, Iterable[int]], unseen: set[int]) -> list[int]:
    unseen.remove(start)
    found = [start]
    for node in found:
        fresh = [other for other in neighbours[node] if other in unseen]
        found += dict.fromkeys(fresh)
        unseen.difference_update(fresh)
    return sorted(found)
