"""Ways and pieces of a graph against brute force."""

from __future__ import annotations

from itertools import pairwise, permutations, product

from hypothesis import given
from hypothesis import strategies as st

from stagelink.plan.checks import pieces, shortest_path

NODES = range(5)
ENDS = st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)), max_size=8)
Ends = list[tuple[int, int]]


def shortest_by_trial(ends: Ends, start: int, goal: int) -> int | None:
    """Nodes on a shortest way, by trying every order of every choice of nodes between."""
    if start == goal:
        return 1
    between = [node for node in NODES if node not in (start, goal)]
    ways = [way for count in range(4) for way in permutations(between, count)]
    lengths = [
        len(way) + 2 for way in ways if all(step in ends for step in pairwise((start, *way, goal)))
    ]
    return min(lengths, default=None)


@given(ends=ENDS)
def test_shortest_path(ends: Ends) -> None:
    successors: dict[int, list[int]] = {}
    for source, target in ends:
        successors.setdefault(source, []).append(target)
    for start, goal in product(NODES, NODES):
        way = shortest_path(successors, start, goal)
        assert (None if way is None else len(way)) == shortest_by_trial(ends, start, goal)
        if way is not None:
            assert (way[0], way[-1]) == (start, goal)
            assert all(step in ends for step in pairwise(way))


@given(ends=ENDS)
def test_pieces(ends: Ends) -> None:
    whole = {node: {node} for end in ends for node in end}
    for _ in NODES:
        for one, other in ends:
            whole[one] |= whole[other]
            whole[other] |= whole[one]
    expected = {tuple(sorted(piece)) for piece in whole.values()}
    assert [tuple(piece) for piece in pieces(ends)] == sorted(expected)


def test_parallel_tensors_cost_nothing() -> None:
    """Every step of a long line doubled: a search that walks each copy would never end."""
    successors = {node: [node + 1, node + 1] for node in range(1000)}
    way = shortest_path(successors, 0, 1000)
    assert way == list(range(1001))
    assert shortest_path(successors, 0, 2000) is None
    assert pieces([(node, node + 1) for node in range(1000)] * 2) == [list(range(1001))]
