"""C049, C079: a rank and world size that do not fit are refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stagelink.errors import PlanError
from stagelink.plan import Plan

Chain = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def plan(chain: Chain) -> Plan:
    return Plan.from_dict(chain(2, 1))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_launch_that_fits(plan: Plan, rank: int) -> None:
    plan.check_launch(rank, 3)


@pytest.mark.parametrize(
    ("rank", "world_size", "reasons"),
    [
        (3, 3, ["the ranks of this world are 0 to 2"]),
        (-1, 3, ["a rank is not negative"]),
        ("0", 3, ["the rank must be an int"]),
        (True, 3, ["the rank must be an int"]),
        (0.0, 3, ["the rank must be an int"]),
        (None, 3, ["the rank must be an int"]),
        (0, "3", ["the world size must be an int"]),
        (0, True, ["the world size must be an int"]),
        (0, 3.0, ["the world size must be an int"]),
        ("0", None, ["the rank must be an int", "the world size must be an int"]),
        (0, 0, ["a world has at least 1 rank"]),
        (0, -2, ["a world has at least 1 rank"]),
        (-1, 0, ["a world has at least 1 rank", "a rank is not negative"]),
        (0, 4, ["the plan has 3 ranks, no stage holds rank 3"]),
        (3, 4, ["the plan has 3 ranks, no stage holds rank 3"]),
        (0, 9, ["the plan has 3 ranks, no stage holds rank 3 to 8"]),
        (0, 2, ["the plan has 3 ranks, nobody would be rank 2"]),
        (0, 1, ["the plan has 3 ranks, nobody would be rank 1 to 2"]),
        (
            5,
            2,
            [
                "the plan has 3 ranks, nobody would be rank 2",
                "the ranks of this world are 0 to 1",
            ],
        ),
    ],
)
def test_a_launch_that_does_not(
    plan: Plan, rank: Any, world_size: Any, reasons: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        plan.check_launch(rank, world_size)
    launched = f"launched as rank {rank!r} of a world of {world_size!r}"
    assert str(caught.value).split("\n") == [f"{launched}: {reason}" for reason in reasons]


def test_it_is_a_value_error(plan: Plan) -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        plan.check_launch(0, 0)
