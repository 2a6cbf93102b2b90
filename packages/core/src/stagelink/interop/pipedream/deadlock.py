"""Deadlocks of PipeDream's loop: a walk through its order, with the callers' warm-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import lcm

from stagelink.interop.pipedream.assignment import Assignment
from stagelink.interop.pipedream.topology import ACK, Topology
from stagelink.plan import Plan
from stagelink.schedule import Walked, actions_of, choose_warm_up, default_warm_up, walk
from stagelink.schedule.waits import cycle, describe

__all__ = ["explain"]

_LONGEST = 4096
_MOST_MORE = 16


def explain(
    topology: Topology, counts: Sequence[Sequence[int]], found: Sequence[int | None]
) -> str:
    """Explain whether training in PipeDream's loop deadlocks, and in which cycle.

    Args:
        topology: the pipeline.
        counts: for each stage how many minibatches each replica has.
        found: for each stage the warm-up that its callers were seen to have, None where none has
            come to its first backward; PipeDream's default is taken for it.
    """
    replicas = [len(ranks) for ranks in topology.stages]
    default = default_warm_up(replicas)
    warm_up = [own if seen is None else seen for seen, own in zip(found, default, strict=True)]
    assignment = Assignment(counts)
    if not 0 < assignment.total <= _LONGEST:
        assignment = Assignment(_short(replicas))
    plan = _plan(topology, assignment)
    said = f"with a warm-up of {_listed(warm_up)}, stage by stage,"
    walked = _walked(plan, assignment, warm_up)
    if not walked.waits:
        return (
            f"{said} PipeDream's loop does not hang here: a rank is slow, or does something else"
        )
    text = (
        f"{said} and replicas that wait for each other in every backward, PipeDream's loop "
        f"deadlocks in a cycle: {describe(plan, cycle(walked.waits), walked.peaks)}"
    )
    tried = (choose_warm_up(plan, more) for more in range(_MOST_MORE))
    safe = next((one for one in tried if not _walked(plan, assignment, one).waits), None)
    return f"{text}; a stage_to_depth_map of {_listed(safe)} would not hang" if safe else text


def _walked(plan: Plan, assignment: Assignment, warm_up: Sequence[int]) -> Walked:
    programs = []
    for rank in range(plan.world_size):
        stage = plan.stage_of(rank)
        mine = assignment.mine[stage.index][plan.replica_of(rank)]
        programs.append([*actions_of(plan, stage, mine, warm_up[stage.index])])
    return walk(plan, programs, assignment.total, synchronise=True)


def _plan(topology: Topology, assignment: Assignment) -> Plan:
    names = [f"stage {stage}" for stage in range(len(topology.stages))]
    plan = Plan.from_dict(
        {
            "pipeline": {"schedule": "pipedream", "microbatches": 1},
            "stages": [
                {"name": name, "ranks": [*ranks]}
                for name, ranks in zip(names, topology.stages, strict=True)
            ],
            "tensors": [
                {
                    "name": f"{edge.name} {edge.source}>{edge.target}",
                    "from": names[edge.source],
                    "to": names[edge.target],
                    "grad": edge.answered,
                }
                for edge in topology.edges
                if edge.name != ACK
            ],
        }
    )
    stages = [
        dataclasses.replace(stage, turns=tuple(table))
        for stage, table in zip(plan.stages, assignment.replicas, strict=True)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def _short(replicas: Sequence[int]) -> list[list[int]]:
    """Even numbers of minibatches: enough to fill the pipeline, and soon gone through."""
    even = lcm(*(one * other for one, other in zip(replicas, (*replicas[1:], 1), strict=True)))
    total = even * max(1, _LONGEST // 4 // even)
    return [[total // own] * own for own in replicas]


def _listed(warm_up: Sequence[int]) -> str:
    return ", ".join(map(str, warm_up))
