"""The cycle of waits, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from stagelink.plan import Plan
from stagelink.schedule import Action, Kind, verify, walk
from stagelink.schedule.waits import cycle, describe

MakePlan = Callable[..., Plan]
Programs = Callable[..., list[Sequence[Action]]]

PREFIX = "deadlock: the ranks wait for each other in a cycle: "
SUFFIX = ". F and B with a number are the forward and the backward of that microbatch"


def actions(text: str, stage: int) -> list[Action]:
    return [Action(Kind(word[0]), stage, int(word[1:])) for word in text.split()]


def test_a_gradient_and_a_message(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1], warm_up={0: 0, 1: 1})
    assert verify(plan).problem == (
        f"{PREFIX}"
        "rank 0 (stage 's0') waits in B0 for the gradient of 't00' microbatch 0 from rank 1; "
        "rank 1 (stage 's1') waits in F1 for 't00' microbatch 1 from rank 0 "
        "(leave out the warm_up of 's0', 's1': 1, 0 is safe, stage by stage)"
        f"{SUFFIX}"
    )


def test_a_window_that_only_the_waiting_rank_itself_would_free(make_plan: MakePlan) -> None:
    assert verify(make_plan([1, 1, 1], window=2)).problem == (
        f"{PREFIX}"
        "rank 0 (stage 's0') waits in F2 to send 't00' microbatch 2: all 2 places are taken until "
        "it receives a gradient, which it does only later "
        "(leave out window = 2, or make it larger)"
        f"{SUFFIX}"
    )


def test_a_window_that_the_other_rank_would_free(make_plan: MakePlan) -> None:
    plan = make_plan([1, 1], [(0, 1, False)], window=1)
    lists = {0: actions("F0 F1 B0 B1", 0), 1: actions("F1 F0 B0 B1", 1)}
    assert verify(plan, 2, lists).problem == (
        f"{PREFIX}"
        "rank 0 (stage 's0') waits in F1 to send 't00' microbatch 1: its one place is taken until "
        "rank 1 receives; "
        "rank 1 (stage 's1') waits in F1 for 't00' microbatch 1 from rank 0 "
        "(leave out window = 1, or make it larger)"
        f"{SUFFIX}"
    )


def test_replicas_that_synchronise(make_plan: MakePlan, programs: Programs) -> None:
    plan = make_plan([4, 3, 1])
    walked = walk(plan, programs(plan, 12, (1, 1, 0)), 12, synchronise=True)
    ring = cycle(walked.waits)
    assert describe(plan, ring, (2, 2)) == (
        "rank 0 (stage 's0') waits in B0 for its replica rank 3 to come as far; "
        "rank 3 (stage 's0') waits in B3 for the gradient of 't00' microbatch 3 from rank 4; "
        "rank 4 (stage 's1') waits in B3 for its replica rank 6 to come as far; "
        "rank 6 (stage 's1') waits in F8 for 't00' microbatch 8 from rank 0"
    )


def test_who_waits_for_the_cycle_is_no_part_of_it(make_plan: MakePlan, programs: Programs) -> None:
    plan = make_plan([1, 1, 1])
    walked = walk(plan, programs(plan, 4, (0, 0, 1)), 4)
    assert [wait.rank for wait in walked.waits] == [0, 1, 2]
    assert [wait.rank for wait in cycle(walked.waits)] == [1, 2]


def test_a_large_cycle_is_cut(make_plan: MakePlan) -> None:
    line = [(stage, stage + 1, False) for stage in range(19)]
    plan = make_plan([1] * 20, [*line, (0, 19)], warm_up={0: 0} | dict.fromkeys(range(1, 20), 1))
    problem = verify(plan).problem
    assert problem is not None
    assert problem.count("waits in") == 12
    assert "; and so on through 20 ranks, back to the first" in problem


@pytest.mark.parametrize("microbatches", [0, 1])
def test_too_few_microbatches_to_hang(microbatches: int, make_plan: MakePlan) -> None:
    assert verify(make_plan([1, 1], warm_up={0: 0, 1: 1}), microbatches).ok
