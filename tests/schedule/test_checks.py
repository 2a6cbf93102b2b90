"""A user's own lists: everything that is wrong with them is said at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stagelink.plan import Plan
from stagelink.schedule import Action, Kind, verify

MakePlan = Callable[..., Plan]
Problems = Callable[..., list[str]]


def actions(text: str, stage: int) -> list[Action]:
    return [Action(Kind(word[0]), stage, int(word[1:])) for word in text.split()]


@pytest.fixture(scope="session")
def problems(make_plan: MakePlan) -> Problems:
    """What is said of the lists of two replicas, ranks 0 and 1, before one, rank 2."""

    def find(
        first: str = "F0 F2 B0 B2",
        second: str = "F1 B1",
        third: str = "F0 B0 F1 B1 F2 B2",
        **pipeline: object,
    ) -> list[str]:
        lists = {0: actions(first, 0), 1: actions(second, 0), 2: actions(third, 1)}
        problem = verify(make_plan([2, 1], **pipeline), 3, lists).problem
        return [] if problem is None else problem.split("\n")

    return find


def test_right_lists(problems: Problems) -> None:
    assert problems() == []
    assert problems(third="F2 F1 F0 B0 B1 B2", first="F2 F0 B0 B2") == []


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("F0 F2 B0", "B2 is missing"),
        ("F0 F2 B0 F2 B2", "F2 comes twice"),
        ("F0 F2 B0 B2 B0", "B0 comes twice"),
        ("F0 B2 F2 B0", "B2 comes without F2 before it"),
        ("F0 F2 B0 B2 F1", "F1: the microbatch goes to rank 1"),
        ("F0 F2 B0 B2 F4", "F4: there are 3 microbatches, numbered from 0"),
        ("F0 F2 B0 B2 F-2", "F-2: there are 3 microbatches, numbered from 0"),
    ],
)
def test_one_thing_wrong(first: str, expected: str, problems: Problems) -> None:
    assert problems(first=first) == [f"actions of rank 0: {expected}"]


def test_all_that_is_wrong(problems: Problems) -> None:
    assert problems(first="F0 B2", second="", third="F0 B0 F1 B1 F2 B2 F0") == [
        "actions of rank 0: B2 comes without F2 before it",
        "actions of rank 0: B0 is missing",
        "actions of rank 0: F2 is missing",
        "actions of rank 1: F1 is missing",
        "actions of rank 1: B1 is missing",
        "actions of rank 2: F0 comes twice",
    ]


def test_backwards_where_the_schedule_has_none(problems: Problems) -> None:
    found = problems("F0 F2", "F1", "F0 F1 F2 B2", schedule="forward")
    assert found == ["actions of rank 2: B2: schedule 'forward' has no backwards"]


def test_another_stage(make_plan: MakePlan) -> None:
    lists = {0: actions("F0", 1), 1: actions("F0 B0", 1)}
    assert verify(make_plan([1, 1]), 1, lists).problem == (
        "actions of rank 0: F0 is for stage 1; the rank holds stage 0\n"
        "actions of rank 0: F0 is missing\n"
        "actions of rank 0: B0 is missing"
    )


def test_no_action_at_all(make_plan: MakePlan) -> None:
    lists: dict[int, list[Any]] = {0: [*actions("F0 B0", 0), "B0"], 1: actions("F0 B0", 1)}
    problem = verify(make_plan([1, 1]), 1, lists).problem
    assert problem == "actions of rank 0: 'B0' is no Action"


def test_a_rank_that_does_not_exist(make_plan: MakePlan) -> None:
    lists = {0: actions("F0 B0", 0), 1: actions("F0 B0", 1), 2: actions("F0", 1)}
    problem = verify(make_plan([1, 1]), 1, lists).problem
    assert problem == "actions for rank 2: the plan's ranks are 0 to 1"


def test_a_rank_without_microbatches_needs_no_list(make_plan: MakePlan) -> None:
    lists = {0: actions("F0 B0", 0), 2: actions("F0 B0", 1)}
    assert verify(make_plan([2, 1]), 1, lists).ok


def test_a_long_list_of_problems_is_cut(make_plan: MakePlan) -> None:
    problem = verify(make_plan([1, 1]), 50, {}).problem
    assert problem is not None
    lines = problem.split("\n")
    assert len(lines) == 21
    assert lines[-1] == "and 180 more"
