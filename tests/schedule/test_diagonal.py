"""PipeDream's diagonal: its worked tables, its order for every pair, and a warm-up by walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.plan.build import diagonal
from stagelink.schedule import (
    UNTIL_END,
    Action,
    microbatches_of,
    pairs,
    rank_for,
    replica_for,
    verify,
    walk,
)
from stagelink.schedule.routing import channels, period_of_pairs

MakePlan = Callable[..., Plan]
Programs = Callable[..., list[Sequence[Action]]]

# (previous stage's replicas, this stage's): what each upstream replica sends to, in turn, and what
# each downstream one receives from; facts measured on the seed.
TABLES = {
    (1, 1): ([[0]], [[0]]),
    (2, 1): ([[0], [0]], [[0, 1]]),
    (1, 2): ([[0, 1]], [[0], [0]]),
    (2, 2): ([[0, 1], [1, 0]], [[0, 1], [1, 0]]),
    (3, 2): ([[0, 1], [1, 0], [0, 1]], [[0, 2, 1], [1, 0, 2]]),
    (4, 2): ([[0, 1], [1, 0], [0, 1], [1, 0]], [[0, 2, 1, 3], [1, 3, 0, 2]]),
    (2, 4): ([[0, 1, 2, 3], [1, 2, 3, 0]], [[0, 1], [1, 0], [1, 0], [1, 0]]),
    (3, 1): ([[0], [0], [0]], [[0, 1, 2]]),
    (2, 3): ([[0, 1, 2], [1, 2, 0]], [[0, 1], [1, 0], [1, 0]]),
}


def sends(plan: Plan, upstream: int, count: int) -> list[int]:
    """The replicas of stage 1 that a replica of stage 0 sends its microbatches to, in order."""
    source, target = plan.stages[:2]
    mine = islice(microbatches_of(source, upstream, UNTIL_END), count)
    return [replica_for(target, g) for g in mine]


def receives(plan: Plan, downstream: int, count: int) -> list[int]:
    source, target = plan.stages[:2]
    mine = islice(microbatches_of(target, downstream, UNTIL_END), count)
    return [replica_for(source, g) for g in mine]


@pytest.mark.parametrize("replicas", TABLES, ids=str)
def test_the_worked_tables(replicas: tuple[int, int], make_plan: MakePlan) -> None:
    plan = make_plan(replicas, routing="diagonal")
    sent, received = TABLES[replicas]
    for upstream, to in enumerate(sent):
        assert sends(plan, upstream, 2 * len(to)) == to * 2
    for downstream, from_ in enumerate(received):
        assert receives(plan, downstream, 2 * len(from_)) == from_ * 2


def rows_and_columns(previous: int, here: int, me: int, count: int) -> list[int]:
    """The walk over rows and columns, as facts/pipedream.md 3.1 puts it in words."""
    rows = [list(range(first, previous, here)) for first in range(here)]
    rows = [row for row in rows if row]
    row, column, found = min(me, len(rows) - 1), 0, []
    for _ in range(count):
        found.append(rows[row][column])
        column += 1
        if column == len(rows[row]):
            row, column = (row - 1) % len(rows), 0
    return found


@pytest.mark.parametrize("previous", range(1, 17))
def test_the_order_of_every_pair(previous: int, make_plan: MakePlan) -> None:
    """By the sender's own step, then by sender; the same as PipeDream's walk over rows."""
    for here in range(1, 17):
        plan = make_plan([previous, here], routing="diagonal")
        source, target = plan.stages
        for me in range(here):
            mine = [*islice(microbatches_of(target, me, UNTIL_END), 2 * previous)]
            assert mine == sorted(mine)
            steps = [(g // previous, replica_for(source, g)) for g in mine]
            assert steps == sorted(steps)
            assert receives(plan, me, 2 * previous) == rows_and_columns(
                previous, here, me, 2 * previous
            )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 80))
def test_each_microbatch_is_handled_once(replicas: list[int], microbatches: int) -> None:
    make = {
        "pipeline": {"microbatches": 4, "routing": "diagonal"},
        "stages": [
            {"name": f"s{i}", "ranks": [*range(sum(replicas[:i]), sum(replicas[: i + 1]))]}
            for i in range(len(replicas))
        ],
        "tensors": [
            {"name": f"t{i}", "from": f"s{i}", "to": f"s{i + 1}"} for i in range(len(replicas) - 1)
        ],
    }
    plan = Plan.from_dict(make)
    for stage in plan.stages:
        mine = [microbatches_of(stage, r, microbatches) for r in range(stage.replicas)]
        assert sorted(g for own in mine for g in own) == list(range(microbatches))
        for replica, own in enumerate(mine):
            assert len(own) == len(list(own))
            assert [own.index(g) for g in own] == list(range(len(own)))
            assert [own[n] for n in range(len(own))] == list(own)
            assert all(g in own for g in own)
            assert all(replica_for(stage, g) == replica for g in own)
            with pytest.raises(IndexError):
                own[len(own)]
            assert microbatches not in own
    for edge in plan.edges:
        of_edge = channels(plan, edge)
        found: dict[tuple[int, int], int] = {}
        for g in range(period_of_pairs(plan, edge)):
            ends = (rank_for(plan.stages[edge.source], g), rank_for(plan.stages[edge.target], g))
            assert found.setdefault(ends, of_edge[g]) == of_edge[g]
        assert sorted(found) == list(pairs(plan, edge))
        assert sorted(found.values()) == list(range(len(found)))


def test_it_repeats_in_equal_shares() -> None:
    for replicas in ([2, 4, 3], [3, 2, 5], [8, 4, 4], [1, 3, 1]):
        for table, count in zip(diagonal(replicas), replicas, strict=True):
            assert {table.count(replica) for replica in range(count)} == {len(table) // count}


DEFAULT_HANGS = [(2, 6), (2, 7), (2, 8), (3, 6), (3, 8), (4, 7), (4, 8), (1, 3, 1), (4, 3, 1)]


@pytest.mark.parametrize("replicas", DEFAULT_HANGS, ids=str)
def test_the_warm_up_is_found_by_walking(
    replicas: tuple[int, ...], make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan(replicas, routing="diagonal", schedule="pipedream")
    verdict = verify(plan)
    assert verdict.ok
    count = 3 * verdict.microbatches
    lists = programs(plan, count, verdict.warm_up)
    assert not walk(plan, lists, count, verdict.windows, synchronise=True).waits


@pytest.mark.parametrize(
    ("replicas", "least"),
    [((1, 2), 1), ((2, 4), 2), ((2, 6), 4), ((2, 8), 6), ((3, 6), 3), ((8, 6), 2), ((4, 8), 4)],
    ids=str,
)
def test_the_least_warm_up_is_the_measured_one(
    replicas: tuple[int, int], least: int, make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan(replicas, routing="diagonal", schedule="pipedream")
    for ahead in (least - 1, least):
        walked = walk(plan, programs(plan, 96, (ahead, 0)), 96, synchronise=True)
        assert bool(walked.waits) == (ahead < least)


def test_two_versions_go_with_round_robin_alone(make_plan: MakePlan) -> None:
    plan = make_plan([2, 1], routing="diagonal", schedule="pipedream_2bw", microbatches=4)
    problem = verify(plan).problem
    assert problem is not None
    assert "pipedream_2bw goes with round_robin" in problem


@pytest.mark.parametrize("first", range(1, 5))
def test_every_small_shape_has_a_safe_warm_up(first: int, make_plan: MakePlan) -> None:
    for second in range(1, 5):
        for third in range(1, 5):
            plan = make_plan([first, second, third], routing="diagonal", schedule="pipedream")
            verdict = verify(plan)
            assert verdict.ok, (first, second, third)
            assert max(verdict.warm_up) <= 12


def test_a_table_that_would_not_end(make_plan: MakePlan) -> None:
    with pytest.raises(
        PlanError, match="the diagonal of 7-9-11-13-16 replicas repeats only after"
    ):
        make_plan([7, 9, 11, 13, 16], routing="diagonal")
