"""From plan to verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagelink.errors import PlanError, VerificationError
from stagelink.plan import Plan
from stagelink.schedule import Action, Kind, require, verify, walk

MakePlan = Callable[..., Plan]
Programs = Callable[..., list[Sequence[Action]]]
Shapes = st.SearchStrategy[tuple[list[int], list[tuple[int, int, bool]]]]


def test_a_line(make_plan: MakePlan) -> None:
    verdict = verify(make_plan([1, 1, 1, 1], microbatches=8))
    assert verdict.ok
    assert verdict.microbatches == 8
    assert verdict.warm_up == (3, 2, 1, 0)
    assert verdict.windows == (4, 3, 2)
    assert verdict.forward_windows == (2, 2, 2)
    assert verdict.receive_bytes == dict.fromkeys(range(4))
    assert verdict.rounds == 2 * 8 + 2 * 3
    assert require(verdict) is verdict


def test_only_1f1b_has_a_warm_up(make_plan: MakePlan) -> None:
    for schedule in ("gpipe", "forward"):
        assert verify(make_plan([2, 1], schedule=schedule)).warm_up == (0, 0)


def test_one_stage_alone(make_plan: MakePlan) -> None:
    verdict = verify(make_plan([2], []))
    assert (verdict.ok, verdict.windows, verdict.receive_bytes) == (True, (), {0: 0, 1: 0})


def test_an_empty_session(make_plan: MakePlan) -> None:
    verdict = verify(make_plan([2, 3]), 0)
    assert (verdict.ok, verdict.microbatches, verdict.rounds) == (True, 0, 0)


@pytest.mark.parametrize("microbatches", [-1, 1.0, True, "4"])
def test_no_number_of_microbatches(microbatches: int, make_plan: MakePlan) -> None:
    with pytest.raises(PlanError, match=r"microbatches: .*: must be an int of at least 0"):
        verify(make_plan([1, 1]), microbatches)


def test_a_plan_that_cannot_run(make_plan: MakePlan) -> None:
    verdict = verify(make_plan([1, 1], warm_up={0: 0, 1: 1}))
    assert not verdict.ok
    with pytest.raises(VerificationError) as caught:
        require(verdict)
    assert str(caught.value) == verdict.problem


@pytest.mark.parametrize("count", [500_001, 10**12, 2**63 - 2])
def test_more_microbatches_than_can_be_listed(make_plan: MakePlan, count: int) -> None:
    with pytest.raises(PlanError, match=f"microbatches: {count}: must be at most 500000 with 2 s"):
        verify(make_plan([1, 1]), count)


def test_too_much_to_hold(make_plan: MakePlan) -> None:
    plan = make_plan([2, 1], limits={"receive_bytes": 99})
    tensor = dataclasses.replace(plan.tensors[0], dtype="float32", shape=(10,))
    edge = dataclasses.replace(plan.edges[0], tensor=tensor)
    plan = dataclasses.replace(plan, tensors=(tensor,), edges=(edge,))
    verdict = verify(plan)
    assert verdict.receive_bytes == {0: 80, 1: 80, 2: 160}
    text = "rank 2 may have to hold 160 bytes of received messages; limits.receive_bytes allows 99"
    assert verdict.problem == text


def test_too_much_to_hold_besides_what_is_not_known(make_plan: MakePlan) -> None:
    plan = make_plan([2, 1], limits={"receive_bytes": 99})
    known = dataclasses.replace(plan.tensors[0], name="known", dtype="float32", shape=(10,))
    edge = dataclasses.replace(plan.edges[0], index=1, tensor=known)
    tensors, edges = (*plan.tensors, known), (*plan.edges, edge)
    verdict = verify(dataclasses.replace(plan, tensors=tensors, edges=edges))
    assert verdict.receive_bytes == dict.fromkeys(range(3))
    assert verdict.problem == (
        "rank 2 may have to hold 160 bytes of received messages, and more whose shapes are not "
        "declared; limits.receive_bytes allows 99"
    )


def test_what_is_not_known_is_within_every_limit(make_plan: MakePlan) -> None:
    assert verify(make_plan([2, 1], limits={"receive_bytes": 1})).ok


def backwards_first(stage: int, mine: Sequence[int]) -> list[Action]:
    """The last microbatch first, forwards as well as backwards."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [Action(kind, stage, g) for kind in kinds for g in reversed(mine)]


def test_lists_of_ones_own_get_the_windows_that_they_need(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1, 1], [(0, 1), (1, 2), (0, 2, False)])
    lists = {rank: backwards_first(rank, range(7)) for rank in range(3)}
    verdict = verify(plan, 7, lists)
    assert verdict.ok
    assert verdict.windows == (7, 7, 3)
    assert verdict.forward_windows == (2, 2, 3)


def test_lists_of_ones_own_in_a_window_set_by_hand(make_plan: MakePlan) -> None:
    lists = {rank: backwards_first(rank, range(3)) for rank in range(2)}
    assert verify(make_plan([1, 1], window=3), 3, lists).windows == (3,)
    problem = verify(make_plan([1, 1], window=2), 3, lists).problem
    assert problem is not None
    assert "all 2 places are taken" in problem


def test_forward_lists_of_ones_own_may_change_the_order(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1], schedule="forward")
    ascending = [Action(Kind.FORWARD, 0, g) for g in range(4)]
    descending = [Action(Kind.FORWARD, 1, g) for g in reversed(range(4))]
    verdict = verify(plan, 4, {0: ascending, 1: descending})
    assert verdict.ok
    assert verdict.windows == verdict.forward_windows == (4,)


@settings(max_examples=200)
@given(data=st.data())
def test_lists_of_ones_own_run_in_the_windows_found(
    data: st.DataObject, shapes: Shapes, make_plan: MakePlan, programs: Programs
) -> None:
    plan = make_plan(*data.draw(shapes))
    microbatches = data.draw(st.integers(0, 11))
    warm_up = data.draw(st.lists(st.integers(0, 5), min_size=4, max_size=4))
    lists = programs(plan, microbatches, warm_up)
    verdict = verify(plan, microbatches, dict(enumerate(lists)))
    hangs = bool(walk(plan, lists, microbatches).waits)
    assert verdict.ok is not hangs
    assert bool(walk(plan, lists, microbatches, verdict.windows).waits) is hangs
