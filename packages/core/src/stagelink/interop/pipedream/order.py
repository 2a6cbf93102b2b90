"""Order of the minibatches in PipeDream's loop: which replica has each, and where it deadlocks.

Replica ``r`` of a stage sends its ``f``-th minibatch to replica ``(f + r) mod C`` of the ``C`` of
the next stage, and each of those takes them by ``f``, then by ``r``. Numbers of minibatches need
not divide: a replica that has as many as it asked for is passed over. Minibatches have numbers in
the pipeline as a whole, in the order in which the first stage's replicas take turns.

Deadlocks are found by a walk through that order, with the warm-up that the callers have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from math import lcm

from stagelink.errors import DisagreementError
from stagelink.interop.pipedream.topology import ACK, Topology
from stagelink.plan import Plan
from stagelink.schedule import Walked, actions_of, choose_warm_up, default_warm_up, walk
from stagelink.schedule.waits import cycle, describe

_LONGEST = 4096
_MOST_MORE = 16


class Assignment:
    """The minibatches of every replica of every stage, by how many each of them has."""

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self.total = sum(counts[0])  # how many there are in the whole pipeline
        for stage, own in enumerate(counts):
            if sum(own) != self.total:
                raise DisagreementError(
                    f"the replicas of stage 0 were started with {_listed(counts[0])} iterations, "
                    f"in all {self.total}, those of stage {stage} with {_listed(own)}, in all "
                    f"{sum(own)}; every stage handles every minibatch once"
                )
        self.mine = [_first(counts[0])]  # for each stage and replica its minibatches, in its order
        for own in counts[1:]:
            self.mine.append(_next(self.mine[-1], own))

    @cached_property
    def replicas(self) -> list[list[int]]:
        """Replica of each minibatch, by stage."""
        found = [[0] * self.total for _ in self.mine]
        for table, stage in zip(found, self.mine, strict=True):
            for replica, own in enumerate(stage):
                for minibatch in own:
                    table[minibatch] = replica
        return found


def _first(counts: Sequence[int]) -> list[list[int]]:
    mine: list[list[int]] = [[] for _ in counts]
    steps = (r for step in range(max(counts)) for r, own in enumerate(counts) if step < own)
    for minibatch, replica in enumerate(steps):
        mine[replica].append(minibatch)
    return mine


def _next(before: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    mine: list[list[int]] = [[] for _ in counts]
    for minibatch, step, sender in _by_step(before):
        replica = (step + sender) % len(counts)
        while len(mine[replica]) == counts[replica]:
            replica = (replica + 1) % len(counts)
        mine[replica].append(minibatch)
    return mine


def _by_step(mine: Sequence[Sequence[int]]) -> Iterable[tuple[int, int, int]]:
    """Every minibatch with its place among its replica's own, and the replica: by the two."""
    steps = (
        [(own, step, replica) for replica, own in enumerate(column) if own is not None]
        for step, column in enumerate(zip_longest(*mine))
    )
    return chain.from_iterable(steps)


def explain(
    topology: Topology, counts: Sequence[Sequence[int]], found: Sequence[int | None]
) -> str:
    """Explain whether training in PipeDream's loop deadlocks, and in which cycle.

    The counts are those of `Assignment`; found is the warm-up that the callers of each stage were
    seen to have, in place of None PipeDream's default.
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
