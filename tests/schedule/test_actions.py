"""What each rank does, by schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.schedule import Action, Kind, actions_for, parse_actions

MakePlan = Callable[..., Plan]


def written(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"),
        (1, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        (2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
    ],
)
def test_one_forward_one_backward(rank: int, expected: str, make_plan: MakePlan) -> None:
    plan = make_plan([1, 1, 1, 1])
    assert written(actions_for(plan, rank, 5, (3, 2, 1, 0))) == expected


def test_replicas_take_turns(make_plan: MakePlan) -> None:
    plan = make_plan([2, 3])
    lists = [written(actions_for(plan, rank, 7, (1, 0))) for rank in range(5)]
    assert lists == [
        "F0 F2 B0 F4 B2 F6 B4 B6",
        "F1 F3 B1 F5 B3 B5",
        "F0 B0 F3 B3 F6 B6",
        "F1 B1 F4 B4",
        "F2 B2 F5 B5",
    ]


def test_gpipe_forwards_all_then_backwards_all(make_plan: MakePlan) -> None:
    plan = make_plan([2, 1], schedule="gpipe")
    assert written(actions_for(plan, 0, 5, (0, 0))) == "F0 F2 F4 B0 B2 B4"
    assert written(actions_for(plan, 2, 3, (0, 0))) == "F0 F1 F2 B0 B1 B2"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "forward"])
def test_evaluation_is_forwards_alone(schedule: str, make_plan: MakePlan) -> None:
    plan = make_plan([2, 1], schedule=schedule)
    assert written(actions_for(plan, 1, 5, (1, 0), "evaluate")) == "F1 F3"


def test_a_forward_schedule_trains_without_backwards(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1], schedule="forward")
    assert written(actions_for(plan, 1, 2, (0, 0))) == "F0 F1"


@pytest.mark.parametrize(("microbatches", "expected"), [(2, "F0 F1 B0 B1"), (1, "F0 B0"), (0, "")])
def test_fewer_microbatches_than_warm_up(
    microbatches: int, expected: str, make_plan: MakePlan
) -> None:
    assert written(actions_for(make_plan([1, 1]), 0, microbatches, (3, 0))) == expected


def test_an_unknown_rank_has_no_actions(make_plan: MakePlan) -> None:
    with pytest.raises(PlanError, match="there is no rank 2"):
        actions_for(make_plan([1, 1]), 2, 4, (1, 0))


@given(
    st.integers(1, 5), st.integers(0, 20), st.integers(0, 7), st.sampled_from(["1f1b", "gpipe"])
)
def test_no_more_than_warm_up_is_ahead(
    make_plan: MakePlan, replicas: int, microbatches: int, warm_up: int, schedule: str
) -> None:
    plan = make_plan([replicas, 1], schedule=schedule)
    for rank in range(replicas):
        actions = actions_for(plan, rank, microbatches, (warm_up, 0))
        mine = list(range(rank, microbatches, replicas))
        for kind in Kind:
            assert [a.microbatch for a in actions if a.kind is kind] == mine
        ahead = [
            sum(1 if a.kind is Kind.FORWARD else -1 for a in actions[:n])
            for n in range(len(actions))
        ]
        first = min(len(mine), len(mine) if schedule == "gpipe" else warm_up + 1)
        assert max(ahead, default=0) == first
        assert min(ahead, default=0) >= 0
        assert all(action.stage == 0 for action in actions)


def test_an_action_in_short() -> None:
    assert (str(Action(Kind.FORWARD, 1, 3)), str(Action(Kind.BACKWARD, 0, 12))) == ("F3", "B12")


# From text


@given(st.builds(Action, st.sampled_from(Kind), st.integers(0, 9), st.integers(0, 10**18)))
def test_an_action_is_read_as_it_is_written(action: Action) -> None:
    assert Action.parse(str(action), action.stage) == action


@pytest.mark.parametrize("text", ["", "F", "f3", "F-1", "F03", "F3 ", "3F", "X3", "F³", "F1.0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is no action: F or B and the number of a microbatch"):
        Action.parse(text, 0)


def test_lists_are_read_as_they_are_written(make_plan: MakePlan) -> None:
    plan = make_plan([2, 3])
    lists = {rank: actions_for(plan, rank, 7, (1, 0)) for rank in range(5)}
    text = "".join(f"{rank}: {written(actions)}\n" for rank, actions in lists.items())
    assert parse_actions(plan, text) == lists
    assert parse_actions(plan, text.replace(" ", ",\t") + "\n# no more\n") == lists


def test_every_wrong_line_is_told(make_plan: MakePlan) -> None:
    text = "0: F0 B0\n1 F1\n2: F0 X1\n0: F1\n-1: F0\n9: F0\n1: # nothing\n"
    with pytest.raises(PlanError) as caught:
        parse_actions(make_plan([2, 1]), text, where="lists.txt")
    line = "must be a rank and its actions, as in 0: F0 F1 B0 B1"
    assert str(caught.value).splitlines() == [
        f"lists.txt: line 2: '1 F1': {line}",
        "lists.txt: line 3: 'X1' is no action: F or B and the number of a microbatch, as in F3",
        "lists.txt: line 4: rank 0 has a list already",
        f"lists.txt: line 5: '-1: F0': {line}",
        "lists.txt: line 6: there is no rank 9; the plan's ranks are 0 to 2",
    ]
