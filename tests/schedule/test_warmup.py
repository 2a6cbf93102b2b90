"""Warm-up: the closed form against the walk, on lines and on any other graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagelink.plan import Plan
from stagelink.schedule import (
    Action,
    choose_warm_up,
    default_warm_up,
    least_warm_up,
    safe_warm_up,
    walk,
)

MakePlan = Callable[..., Plan]
Programs = Callable[..., list[Sequence[Action]]]
Shapes = st.SearchStrategy[tuple[list[int], list[tuple[int, int, bool]]]]
Hangs = Callable[..., bool]
Line = tuple[int, ...]

LINES = [shape for stages in (2, 3) for shape in product(range(1, 5), repeat=stages)]


@pytest.fixture(scope="session")
def hangs(make_plan: MakePlan, programs: Programs) -> Hangs:
    """Whether a line hangs with a warm-up, by default with synchronised replicas."""

    def walks(
        replicas: Line,
        warm_up: Sequence[int],
        microbatches: int | None = None,
        *,
        synchronise: bool = True,
    ) -> bool:
        # Enough for every alignment of the replicas' rounds to come by after the warm-up.
        many = 24 + 4 * sum(replicas) if microbatches is None else microbatches
        plan = make_plan(replicas)
        lists = programs(plan, many, warm_up)
        return bool(walk(plan, lists, many, synchronise=synchronise).waits)

    return walks


@pytest.mark.parametrize("replicas", LINES, ids=str)
def test_the_least_is_enough_and_one_less_is_not(replicas: Line, hangs: Hangs) -> None:
    least = least_warm_up(replicas)
    assert not hangs(replicas, least)
    for stage in range(len(replicas)):
        if least[stage] > 0:
            less = [warm_up - (at == stage) for at, warm_up in enumerate(least)]
            assert hangs(replicas, less)


@pytest.mark.parametrize("replicas", LINES, ids=str)
def test_the_safe_never_hangs(replicas: Line, hangs: Hangs) -> None:
    safe = safe_warm_up(replicas)
    for microbatches in range(20):
        assert not hangs(replicas, safe, microbatches)
        assert not hangs(replicas, safe, microbatches, synchronise=False)
    assert not hangs(replicas, safe)


def test_the_default_hangs_in_eight_lines_of_three(hangs: Hangs) -> None:
    lines = product(range(1, 5), repeat=3)
    assert [line for line in lines if hangs(line, default_warm_up(line))] == [
        (1, 3, 1),
        (1, 3, 4),
        (1, 4, 1),
        (1, 4, 2),
        (2, 3, 1),
        (3, 4, 1),
        (3, 4, 2),
        (4, 3, 1),
    ]


@pytest.mark.parametrize(
    ("replicas", "default", "least", "safe"),
    [
        ((1, 1, 1, 1), (3, 2, 1, 0), (0, 0, 0, 0), (3, 2, 1, 0)),
        ((4, 3, 1), (1, 1, 0), (1, 0, 0), (2, 1, 0)),
        ((1, 3, 1), (4, 1, 0), (2, 0, 0), (5, 1, 0)),
        ((2, 6), (3, 0), (2, 0), (3, 0)),
        ((1, 1, 3, 1), (5, 4, 1, 0), (2, 2, 0, 0), (5, 5, 1, 0)),
        ((7,), (0,), (0,), (0,)),
    ],
    ids=str,
)
def test_values(replicas: Line, default: Line, least: Line, safe: Line) -> None:
    assert default_warm_up(replicas) == default
    assert least_warm_up(replicas) == least
    assert safe_warm_up(replicas) == safe


def test_more_downstream_needs_more_upstream(hangs: Hangs) -> None:
    assert hangs((4, 3, 1), (1, 1, 0))
    assert not hangs((4, 3, 1), (2, 1, 0))
    assert not hangs((4, 3, 1), (1, 0, 0))
    assert not hangs((4, 3, 1), (1, 1, 0), synchronise=False)


def test_eight_stages_before_three_replicas(hangs: Hangs) -> None:
    replicas = (*(1,) * 8, 3, 1)
    assert hangs(replicas, default_warm_up(replicas))
    assert safe_warm_up(replicas) == (11, 10, 9, 8, 7, 6, 5, 5, 1, 0)
    assert not hangs(replicas, safe_warm_up(replicas))


@settings(max_examples=200)
@given(data=st.data())
def test_a_chosen_warm_up_never_hangs_in_any_graph(
    data: st.DataObject, shapes: Shapes, make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan(*data.draw(shapes))
    microbatches = data.draw(st.integers(0, 24))
    warm_up = choose_warm_up(plan)
    windows = [warm_up[edge.source] + 1 for edge in plan.edges]
    lists = programs(plan, microbatches, warm_up)
    for synchronise in (False, True):
        assert not walk(plan, lists, microbatches, windows, synchronise=synchronise).waits


def test_a_line_with_skips_is_a_line(make_plan: MakePlan) -> None:
    plan = make_plan([4, 3, 1], [(0, 1), (1, 2), (0, 2, False), (0, 2)])
    assert choose_warm_up(plan) == safe_warm_up([4, 3, 1])


def test_branches_do_not_wait_for_each_other(make_plan: MakePlan) -> None:
    assert choose_warm_up(make_plan([1, 1, 1], [(0, 2), (1, 2)])) == (1, 1, 0)


def test_a_value_set_by_hand_is_kept_and_looked_at_upstream(make_plan: MakePlan) -> None:
    assert choose_warm_up(make_plan([1, 1, 1], warm_up={1: 4})) == (4, 4, 0)
    assert choose_warm_up(make_plan([1, 1, 1], warm_up={0: 0})) == (0, 1, 0)
