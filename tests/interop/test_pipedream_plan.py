"""From what each rank says of itself to the plan: what fits together, and which transports."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.errors import PlanError
from stagelink.interop.pipedream.order import explain
from stagelink.interop.pipedream.topology import (
    WINDOW,
    Declaration,
    Edge,
    Topology,
    plan_of,
)
from stagelink.schedule import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

GLOO = ("gloo", 1)


def declarations(*stages: Sequence[int], skip: bool = False) -> list[Declaration]:
    """What the ranks of a topology say; with ``skip`` the first stage's also send to the last."""
    found = {}
    last = len(stages) - 1
    for s, ranks in enumerate(stages):
        previous = tuple(stages[s - 1]) if s else ()
        following = tuple(stages[s + 1]) if s < last else ()
        receives = {f"out{s - 1}": previous} if previous else {}
        sends = {f"out{s}": following} if following else {}
        if skip and s == 0:
            sends["skip"] = tuple(stages[last])
        if skip and s == last:
            receives["skip"] = tuple(stages[0])
        for replica, rank in enumerate(ranks):
            place = (rank, replica, len(ranks), previous, following)
            found[rank] = Declaration(*place, receives, sends, ("target",), True, "cpu")
    return [found[rank] for rank in sorted(found)]


def test_ranks_in_any_order() -> None:
    told = declarations([0, 1, 4, 5], [2, 6], [3, 7])
    topology = Topology.of([Declaration.from_json(asdict(declaration)) for declaration in told])
    assert topology.stages == ((0, 1, 4, 5), (2, 6), (3, 7))
    assert topology.places[6] == (1, 1)
    assert set(topology.edges) == {
        *(Edge(f"out{s}", s, s + 1, True) for s in range(2)),
        *(Edge("target", s, s + 1, False) for s in range(2)),
        *(Edge("ack", s, s + 1, True) for s in range(2)),
    }


def test_a_tensor_past_a_stage() -> None:
    topology = Topology.of(declarations([0, 1], [2, 3, 4], [5], skip=True))
    assert Edge("skip", 0, 2, True) in topology.edges
    assert verify(plan_of(topology, *GLOO, {})).ok


CONTRADICTIONS: list[tuple[int, dict[str, Any], str]] = [
    (2, {"replica": 1}, "rank 2 has rank_in_stage 1; the others' maps say 0"),
    (2, {"replicas": 3}, "rank 2 has num_ranks_in_stage 3; the others' maps say 2"),
    (3, {"previous": (0,)}, "rank 3 has ranks_in_previous_stage [0]; the others' maps say [0, 1]"),
    (3, {"following": (2,)}, "rank 3 has ranks_in_next_stage [2]; the others' maps say []"),
    (0, {"following": (2, 9)}, "rank 0 has ranks_in_next_stage [2, 9]: there is no rank 9"),
    (0, {"following": (1,)}, "rank 0 has ranks_in_next_stage [1]: a rank holds one place"),
    (0, {"following": (2,)}, "rank 3 is in no stage that is reached from the first"),
    (1, {"sends": {}}, "rank 1 and rank 0 are replicas of one stage, but for 'out0' send_ranks "),
    (3, {"targets": ()}, "rank 3 has target_tensor_names [], rank 0 ['target']"),
    (3, {"acks": False}, "'ack' has a tag on one of ranks 0 and 3 only"),
]


@pytest.mark.parametrize(("rank", "change", "text"), CONTRADICTIONS, ids=str)
def test_contradictions(rank: int, change: dict[str, Any], text: str) -> None:
    told = declarations([0, 1], [2, 3])
    told[rank] = replace(told[rank], **change)
    with pytest.raises(PlanError) as caught:
        Topology.of(told)
    assert str(caught.value).startswith(text)


def test_a_tensor_that_two_stages_use() -> None:
    """PipeDream keeps the last one, and the first waits for ever."""
    told = declarations([0], [1], [2], skip=True)
    told[1] = replace(told[1], receives={**told[1].receives, "skip": (0,)})
    with pytest.raises(PlanError, match="'skip' from stage 0 to stage 1: rank 0 does not send it"):
        Topology.of(told)
    told = declarations([0], [1], [2])
    told[1] = replace(told[1], receives={"out0": (0, 2)})
    with pytest.raises(PlanError, match=r"rank 1 has the ranks \[0, 2\] for 'out0'"):
        Topology.of(told)
    told = declarations([0], [1])
    told[0] = replace(told[0], previous=(1,))
    with pytest.raises(PlanError, match="no rank says that it is of the first stage"):
        Topology.of(told)


def links(backend: str | None, size: int, *stages: Sequence[int]) -> list[tuple[Any, ...]]:
    """Ranks and transport of each rule."""
    plan = plan_of(Topology.of(declarations(*stages)), backend, size, {})
    return [
        (rule.keys.get("tensor", rule.keys.get("from_rank")), *rule.transports)
        for rule in plan.rules
    ]


def test_the_backend_within_servers_and_gloo_across() -> None:
    stages = [0, 1], [2], [3]
    acks = (("ack 0>2", "ack 1>2", "ack 2>3"), "gloo")
    assert links("gloo", 2, *stages) == [(None, "gloo")]
    assert links("nccl", 1, *stages) == [(None, "gloo")]
    assert links("nccl", 4, *stages) == [acks, ((0, 1, 2, 3), "nccl")]
    assert links("nccl", 2, *stages) == [acks, ((2, 3), "nccl"), (None, "gloo")]
    assert links("mpi", 4, *stages) == [acks, ((0, 1, 2, 3), "auto")]
    assert links(None, 3, *stages) == [acks, ((0, 1, 2), "auto"), (None, "gloo")]
    # Servers that only have replicas of one stage have no links inside.
    assert links("nccl", 2, [0, 1], [2, 3]) == [(None, "gloo")]
    assert links("nccl", 2, [0, 2], [1, 3]) == [
        (("ack 0>1", "ack 0>3", "ack 2>1", "ack 2>3"), "gloo"),
        ((0, 1), "nccl"),
        ((2, 3), "nccl"),
        (None, "gloo"),
    ]


def test_the_callers_tables_go_first() -> None:
    topology = Topology.of(declarations([0], [1]))
    plan = plan_of(topology, *GLOO, {})
    assert (plan.window, plan.limits.deadline_s, plan.limits.first_deadline_s) == (
        WINDOW,
        600,
        1800,
    )
    tables: dict[str, Any] = {
        "pipeline": {"window": 5},
        "limits": {"deadline_s": 7.0},
        "links": [{"transport": "shm"}],
    }
    plan = plan_of(topology, *GLOO, tables)
    assert (plan.window, plan.limits.deadline_s, plan.limits.first_deadline_s) == (5, 7, 1800)
    assert [rule.transports for rule in plan.rules] == [("shm",)]
    with pytest.raises(PlanError, match=r"the plan of PipeDream's maps: limits\.dedline_s"):
        plan_of(topology, *GLOO, {"limits": {"dedline_s": 7.0}})


def test_the_window_is_no_bound_for_any_shape() -> None:
    for stages in ([[0]], [[*range(8)], [*range(8, 12)], [*range(12, 16)]]):
        topology = Topology.of(declarations(*stages))
        if topology.edges:
            assert verify(plan_of(topology, *GLOO, {})).ok


@pytest.mark.parametrize(
    ("stages", "counts", "found", "text"),
    [
        ([[0, 1, 2, 3], [4, 5, 6], [7]], 12, [1, 1, 0], "a stage_to_depth_map of 2, 1, 0 would"),
        ([[0, 1, 2, 3], [4, 5, 6], [7]], 12, [None, 1, None], "a stage_to_depth_map of 2, 1, 0 w"),
        (
            [[0, 1, 2, 3], [4, 5, 6], [7]],
            12,
            [2, 1, 0],
            "of 2, 1, 0, stage by stage, PipeDream's ",
        ),
        # More than are walked.
        ([[0, 1, 2, 3], [4, 5, 6], [7]], 120_000, [1, 1, 0], "would not hang"),
        ([[0, 1], [2, 3, 4, 5, 6, 7]], 24, [3, 0], "stage_to_depth_map of 5, 0 would not hang"),
    ],
    ids=str,
)
def test_what_is_said_of_a_hang(
    stages: list[list[int]], counts: int, found: list[int | None], text: str
) -> None:
    topology = Topology.of(declarations(*stages))
    own = [[counts // len(ranks)] * len(ranks) for ranks in stages]
    assert text in explain(topology, own, found)
