"""Round robin: any counts, remainders included, and the same answer at both ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.errors import PlanError
from stagelink.plan import Plan, Stage
from stagelink.schedule import microbatches_of, pairs, peers, rank_for, replica_for

MakePlan = Callable[..., Plan]
Shapes = st.SearchStrategy[tuple[list[int], list[tuple[int, int, bool]]]]

COUNTS = st.integers(1, 9)


def test_goes_round_the_replicas_in_their_order() -> None:
    stage = Stage(0, "s", ranks=(7, 2, 5))
    assert [replica_for(stage, g) for g in range(5)] == [0, 1, 2, 0, 1]
    assert [rank_for(stage, g) for g in range(5)] == [7, 2, 5, 7, 2]


@given(COUNTS, st.integers(0, 40))
def test_each_microbatch_is_handled_once(replicas: int, microbatches: int) -> None:
    stage = Stage(0, "s", tuple(range(replicas)))
    mine = [microbatches_of(stage, replica, microbatches) for replica in range(replicas)]
    assert sorted(g for own in mine for g in own) == list(range(microbatches))
    assert all(
        replica_for(stage, g) == replica for replica in range(replicas) for g in mine[replica]
    )
    assert max(map(len, mine)) - min(map(len, mine)) <= 1


@pytest.mark.parametrize(("producers", "consumers"), [(2, 3), (3, 2), (1, 3), (3, 1)])
def test_sizes_that_do_not_divide(producers: int, consumers: int) -> None:
    source, target = Stage(0, "a", tuple(range(producers))), Stage(1, "b", tuple(range(consumers)))
    sent = [g for replica in range(producers) for g in microbatches_of(source, replica, 7)]
    received = [g for replica in range(consumers) for g in microbatches_of(target, replica, 7)]
    assert sorted(sent) == sorted(received) == list(range(7))


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([2, 2], [(0, 2), (1, 3)]),
        ([3, 1], [(0, 3), (1, 3), (2, 3)]),
        ([4, 2], [(0, 4), (1, 5), (2, 4), (3, 5)]),
        ([2, 3], [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]),
    ],
)
def test_pairs(replicas: int, expected: list[tuple[int, int]], make_plan: MakePlan) -> None:
    plan = make_plan(replicas)
    assert list(pairs(plan, plan.edges[0])) == expected


@given(COUNTS, COUNTS)
def test_only_these_pairs_talk(make_plan: MakePlan, producers: int, consumers: int) -> None:
    plan = make_plan([producers, consumers])
    source, target = plan.stages
    talking = {(rank_for(source, g), rank_for(target, g)) for g in range(200)}
    assert list(pairs(plan, plan.edges[0])) == sorted(talking)
    assert len(talking) == math.lcm(producers, consumers)


@given(data=st.data())
def test_peers_are_the_other_ends_of_the_pairs(
    data: st.DataObject, shapes: Shapes, make_plan: MakePlan
) -> None:
    plan = make_plan(*data.draw(shapes))
    talking = {pair for edge in plan.edges for pair in pairs(plan, edge)}
    for rank in range(plan.world_size):
        others = {a if b == rank else b for a, b in talking if rank in {a, b}}
        assert list(peers(plan, rank)) == sorted(others)


def test_an_unknown_rank_has_no_peers(make_plan: MakePlan) -> None:
    with pytest.raises(PlanError, match=r"there is no rank 3; the plan's ranks are 0 to 2"):
        peers(make_plan([2, 1]), 3)
