"""Deadlocks of PipeDream's loop: a walk through its order, with the callers' warm-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING

from stagelink.interop.pipedream.assignment import Assignment
from stagelink.interop.pipedream.line import ACK
from stagelink.plan import Plan
from stagelink.schedule import actions_of, choose_warm_up, default_warm_up, walk
from stagelink.schedule.waits import cycle, describe

if TYPE_CHECKING:
    from stagelink.interop.pipedream.line import Line
    from stagelink.schedule import Walked

__all__ = ["explain"]

_LONGEST = 4096
_MOST_MORE = 16


def explain(line: Line, counts: Sequence[Sequence[int]], found: Sequence[int | None]) -> str:
    """Explain whether training in PipeDream's loop deadlocks, and in which cycle.

    Args:
        line: the pipeline.
        counts: for each stage how many minibatches each replica has.
        found: for each stage the warm-up that its callers were seen to have, None where none has
            come to its first backward; PipeDream's default is taken for it.
    """
    replicas = [len(ranks) for ranks in line.stages]
    default = default_warm_up(replicas)
    warm_up = [own if seen is None else seen for seen, own in zip(found, default, strict=True)]
    model = _Model(line, counts)
    said = f"with a warm-up of {_listed(warm_up)}, stage by stage,"
    walked = model.walk(warm_up)
    if not walked.waits:
        return (
            f"{said} PipeDream's loop does not hang here: a rank is slow, or does something else"
        )
    ring = describe(model.plan, cycle(walked.waits), walked.peaks)
    text = (
        f"{said} and replicas that wait for each other in every backward, PipeDream's loop "
        f"deadlocks in a cycle: {ring}"
    )
    safe = model.safe_warm_up()
    return f"{text}; a stage_to_depth_map of {_listed(safe)} would not hang" if safe else text


class _Model:
    """The pipeline as a plan whose replicas take the callers' turns."""

    def __init__(self, line: Line, counts: Sequence[Sequence[int]]) -> None:
        replicas = [len(ranks) for ranks in line.stages]
        assignment = Assignment(counts)
        if not 0 < assignment.total <= _LONGEST:
            assignment = Assignment(_short(replicas))
        self.plan = _plan(line, assignment)
        self._assignment = assignment

    def walk(self, warm_up: Sequence[int]) -> Walked:
        """Go through it with so much warm-up."""
        programs = [
            [*actions_of(self.plan, stage, self._mine(rank), warm_up[stage.index])]
            for rank in range(self.plan.world_size)
            for stage in [self.plan.stage_of(rank)]
        ]
        return walk(self.plan, programs, self._assignment.total, synchronise=True)

    def safe_warm_up(self) -> tuple[int, ...] | None:
        """A warm-up with which it gets through, if one is found."""
        for more in range(_MOST_MORE):
            warm_up = choose_warm_up(self.plan, more)
            if not self.walk(warm_up).waits:
                return warm_up
        return None

    def _mine(self, rank: int) -> Sequence[int]:
        return self._assignment.mine[self.plan.stage_of(rank).index][self.plan.replica_of(rank)]


def _plan(line: Line, assignment: Assignment) -> Plan:
    names = [f"stage {stage}" for stage in range(len(line.stages))]
    plan = Plan.from_dict(
        {
            "pipeline": {"schedule": "pipedream", "microbatches": 1},
            "stages": [
                {"name": name, "ranks": [*ranks]}
                for name, ranks in zip(names, line.stages, strict=True)
            ],
            "tensors": [
                {
                    "name": f"{passed.name} {passed.source}>{passed.target}",
                    "from": names[passed.source],
                    "to": names[passed.target],
                    "grad": passed.answered,
                }
                for passed in line.passed
                if passed.name != ACK
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
