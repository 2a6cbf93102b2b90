"""Windows by schedule, and that they never deadlock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.plan import Plan
from stagelink.schedule import Action, verify, walk
from stagelink.schedule.windows import distances, forward_windows, training_windows

MakePlan = Callable[..., Plan]
Programs = Callable[..., list[Sequence[Action]]]
Shapes = st.SearchStrategy[tuple[list[int], list[tuple[int, int, bool]]]]

SKIPS = [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)]


def test_a_skip_is_as_long_as_the_longest_way_that_it_spans(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1, 1, 1], [(0, 3), (0, 1), (1, 3), (0, 2), (2, 3), (0, 1)])
    assert distances(plan) == [2, 1, 1, 1, 1, 1]
    assert distances(make_plan([1] * 4, SKIPS)) == [1, 1, 1, 3, 2]
    # The last way that is found is not the longest.
    branches = [(0, 1), (1, 2), (2, 4), (0, 3), (3, 4), (0, 4)]
    assert distances(make_plan([1] * 5, branches)) == [1, 1, 1, 1, 1, 3]


def test_a_skip_does_not_throttle_the_stages_that_it_spans(
    make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan([1, 1, 1, 1], SKIPS)
    lists = programs(plan, 50, (0,) * 4, "evaluate")
    throttled = [2, 2, 2, 2, 2]
    assert walk(plan, lists, 50, forward_windows(plan), mode="evaluate").rounds == 50 + 3
    assert walk(plan, lists, 50, throttled, mode="evaluate").rounds > 70


def test_windows_by_schedule(make_plan: MakePlan) -> None:
    line = [1, 1, 1, 1]
    assert training_windows(make_plan(line, SKIPS), 8, (3, 2, 1, 0)) == (4, 3, 2, 4, 3)
    assert training_windows(make_plan(line, schedule="gpipe"), 8, (0,) * 4) == (8, 8, 8)
    assert training_windows(make_plan(line, schedule="gpipe"), 1, (0,) * 4) == (2, 2, 2)
    assert training_windows(make_plan(line, SKIPS, schedule="forward"), 8, (0,) * 4) == (
        2,
        2,
        2,
        4,
        3,
    )
    assert forward_windows(make_plan(line, SKIPS)) == (2, 2, 2, 4, 3)


def test_no_less_than_two(make_plan: MakePlan) -> None:
    assert training_windows(make_plan([1, 1], warm_up={0: 0}), 8, (0, 0)) == (2,)


def test_a_window_set_by_hand_is_taken_for_all(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1, 1, 1], SKIPS, window=7)
    assert training_windows(plan, 8, (3, 2, 1, 0)) == forward_windows(plan) == (7,) * 5


@given(data=st.data())
def test_forwards_alone_never_hang_whatever_the_windows(
    data: st.DataObject, shapes: Shapes, make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan(*data.draw(shapes))
    microbatches = data.draw(st.integers(0, 20))
    sizes = st.lists(st.integers(1, 3), min_size=len(plan.edges), max_size=len(plan.edges))
    lists = programs(plan, microbatches, (0,) * 4, "evaluate")
    assert not walk(plan, lists, microbatches, data.draw(sizes), mode="evaluate").waits


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "forward"])
@given(data=st.data())
def test_the_schedules_run_in_their_windows(
    schedule: str, data: st.DataObject, shapes: Shapes, make_plan: MakePlan
) -> None:
    plan = make_plan(*data.draw(shapes), schedule=schedule)
    assert verify(plan, data.draw(st.integers(0, 20))).problem is None
