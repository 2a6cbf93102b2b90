"""Actions by rank and time slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.plan import Plan
from stagelink.schedule import Action, actions_for, grid, parse_actions, verify

MakePlan = Callable[..., Plan]
Shape = tuple[list[int], list[tuple[int, int, bool]]]


def rows(plan: Plan, lists: dict[int, list[Action]] | None = None) -> list[str]:
    found = grid(plan, verify(plan, None if lists is None else plan.microbatches, lists), lists)
    return [" ".join(str(row.get(slot, ".")) for slot in range(found.slots)) for row in found.rows]


def test_one_forward_one_backward(make_plan: MakePlan) -> None:
    assert rows(make_plan([1, 1, 1])) == [
        "F0 F1 F2 . . B0 F3 B1 . B2 . B3",
        ". F0 F1 . B0 F2 B1 F3 B2 . B3 .",
        ". . F0 B0 F1 B1 F2 B2 F3 B3 . .",
    ]


def test_replicas(make_plan: MakePlan) -> None:
    assert rows(make_plan([2, 1], schedule="gpipe")) == [
        "F0 F2 . . . . B0 . B2 .",
        "F1 F3 . . . . . B1 . B3",
        ". F0 F1 F2 F3 B0 B1 B2 B3 .",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream", "pipedream_2bw", "forward"])
def test_each_rank_does_its_actions_in_order(schedule: str, make_plan: MakePlan) -> None:
    plan = make_plan([2, 4, 1], schedule=schedule, microbatches=8)
    result = verify(plan)
    found = grid(plan, result)
    assert (result.ok, found.slots, found.waits) == (True, result.rounds, {})
    for rank, row in enumerate(found.rows):
        assert list(row.values()) == actions_for(plan, rank, result.microbatches, result.warm_up)
        assert list(row) == sorted(row)


@given(data=st.data())
def test_what_a_forward_takes_was_sent_in_a_slot_before(
    data: st.DataObject, make_plan: MakePlan, shapes: st.SearchStrategy[Shape]
) -> None:
    plan = make_plan(*data.draw(shapes))
    found = grid(plan, verify(plan))
    ends = {action: slot for row in found.rows for slot, action in row.items()}
    for action, slot in ends.items():
        for edge in plan.inputs(action.stage) if str(action).startswith("F") else ():
            assert ends[Action(action.kind, edge.source, action.microbatch)] < slot


def test_a_deadlock_has_a_place(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1, 1], microbatches=2)
    lists = parse_actions(plan, "0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n2: F0 F1 B0 B1")
    found = grid(plan, verify(plan, 2, lists), lists)
    assert rows(plan, lists) == ["F0 F1 . .", ". F0 . .", ". . F0 ."]
    assert {rank: str(action) for rank, action in found.waits.items()} == {
        0: "B0",
        1: "B0",
        2: "F1",
    }
    assert found.cycle == {1, 2}


def test_wrong_lists_have_no_slots(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1])
    assert rows(plan, parse_actions(plan, "0: F0")) == ["", ""]
