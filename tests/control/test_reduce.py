"""Small values over all ranks: the same on every rank, by a tree that all compute alike."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.control.plane import Plane
from stagelink.control.reduce import Reducer, spanning_tree
from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, PeerClosedError, ProtocolError, UsageError
from stagelink.testing import RankFailedError, run_threads
from tests.support.planes import join

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import Store

LINE = {0: (1,), 1: (0, 2), 2: (1,)}
DIAMOND = {0: (1, 2), 1: (0, 3), 2: (0, 3), 3: (1, 2)}
STAR = {0: (1,), 1: (0, 2, 3), 2: (1,), 3: (1,)}


@st.composite
def connected(draw: Callable[..., object]) -> dict[int, tuple[int, ...]]:
    count = draw(st.integers(1, 9))
    assert isinstance(count, int)
    found: dict[int, set[int]] = {rank: set() for rank in range(count)}
    for rank in range(1, count):
        other = draw(st.integers(0, rank - 1))
        assert isinstance(other, int)
        found[rank].add(other)
        found[other].add(rank)
    return {rank: tuple(sorted(peers)) for rank, peers in found.items()}


@given(connected())
def test_the_tree_holds_every_rank_once(neighbours: dict[int, tuple[int, ...]]) -> None:
    trees = {rank: spanning_tree(neighbours, rank) for rank in neighbours}
    assert trees[0].parent is None
    assert sorted(child for tree in trees.values() for child in tree.children) == sorted(
        rank for rank in neighbours if rank
    )
    for rank, tree in trees.items():
        for child in tree.children:
            assert trees[child].parent == rank
            assert child in neighbours[rank]


def _reduced(
    neighbours: Mapping[int, Sequence[int]],
    work: Callable[[int, Reducer], object],
) -> list[object]:
    planes = [Plane(rank) for rank in neighbours]
    reducers = [Reducer(plane, spanning_tree(neighbours, plane.rank)) for plane in planes]
    for rank, peers in neighbours.items():
        for peer in peers:
            if peer > rank:
                join(planes[rank], planes[peer])

    def run(rank: int, world_size: int, store: Store) -> object:
        planes[rank].reader.start()
        try:
            return work(rank, reducers[rank])
        finally:
            planes[rank].start_closing()
            planes[rank].close(Deadline(5))

    return run_threads(run, len(planes))


@pytest.mark.parametrize("neighbours", [LINE, DIAMOND, STAR, {0: ()}], ids=str)
def test_sum_max_and_min(neighbours: dict[int, tuple[int, ...]]) -> None:
    def work(rank: int, reducer: Reducer) -> object:
        values = [float(rank), -float(rank), 1.0]
        return [reducer.reduce(values, op, Deadline(20)) for op in ("sum", "max", "min")]

    last = float(len(neighbours) - 1)
    total = last * (last + 1) / 2
    wanted = [[total, -total, last + 1], [last, 0.0, 1.0], [0.0, -last, 1.0]]
    assert _reduced(neighbours, work) == [wanted] * len(neighbours)


def test_sums_of_floats_are_equal_on_all_ranks_and_in_all_runs() -> None:
    draw = random.Random(7)
    values = [
        [draw.uniform(-1, 1) * 10.0 ** draw.randint(-9, 9) for _ in range(50)] for _ in "1234"
    ]

    def work(rank: int, reducer: Reducer) -> object:
        return reducer.reduce(values[rank], "sum", Deadline(20))

    runs = [result for _ in range(3) for result in _reduced(DIAMOND, work)]
    assert all(result == runs[0] for result in runs)


def test_many_rounds_do_not_mix() -> None:
    def work(rank: int, reducer: Reducer) -> object:
        return [reducer.reduce([rank + n], "sum", Deadline(20))[0] for n in range(100)]

    assert _reduced(LINE, work) == [[3.0 + 3 * n for n in range(100)]] * 3


def test_nothing_is_a_value_too() -> None:
    assert (
        _reduced(LINE, lambda rank, reducer: reducer.reduce([], "sum", Deadline(20))) == [[]] * 3
    )


def test_a_rank_that_does_not_take_part_is_named() -> None:
    over = threading.Event()

    def work(rank: int, reducer: Reducer) -> object:
        if rank == 2:
            return over.wait(20)
        if rank == 1:
            with pytest.raises(
                DeadlineError, match=r"rank 1: rank 2 did not take part in reduction 0 .* 0\.1 s"
            ):
                reducer.reduce([1.0], "sum", Deadline(0.1))
            over.set()
        return True

    assert _reduced(LINE, work) == [True] * 3


def test_a_rank_that_closed_is_named() -> None:
    def work(rank: int, reducer: Reducer) -> object:
        if rank == 0:
            with pytest.raises(PeerClosedError, match="peer rank 1 closed; reduction 0 expected"):
                reducer.reduce([1.0], "sum", Deadline(20))
        return True

    assert _reduced({0: (1,), 1: (0,)}, work) == [True] * 2


def test_another_number_of_values_names_both() -> None:
    def work(rank: int, reducer: Reducer) -> object:
        return reducer.reduce([1.0] * (rank + 1), "sum", Deadline(1))

    with pytest.raises(RankFailedError) as caught:
        _reduced({0: (1,), 1: (0,)}, work)
    assert isinstance(caught.value.__cause__, ProtocolError)
    assert "reduction 0: 1 values on rank 0, 2 from rank 1" in str(caught.value)


def test_an_operation_that_there_is_not() -> None:
    reducer = Reducer(plane := Plane(0), spanning_tree({0: ()}, 0))
    with pytest.raises(UsageError, match="reduce by 'mean': it is one of 'sum', 'max', 'min'"):
        reducer.reduce([1.0], "mean", Deadline(1))
    plane.close(Deadline(1))
