"""Routing of microbatches to replicas: one pure function, asked by both ends of every edge.

Round robin: microbatch ``g`` runs on replica ``g mod R`` of a stage of ``R`` replicas. So any
counts of replicas and of microbatches fit, and nothing has to be remembered between messages.
PipeDream's diagonal is a table per stage, see `stagelink.plan.build`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

from stagelink.plan import Edge, Plan, Stage


def replica_for(stage: Stage, microbatch: int) -> int:
    """The replica of the stage that handles the microbatch."""
    if stage.turns is None:
        return microbatch % stage.replicas
    return stage.turns[microbatch % len(stage.turns)]


def rank_for(stage: Stage, microbatch: int) -> int:
    """The rank that handles the microbatch for the stage."""
    return stage.ranks[replica_for(stage, microbatch)]


def microbatches_of(stage: Stage, replica: int, microbatches: int) -> Sequence[int]:
    """The microbatches of a session of so many that a stage's replica handles, ascending."""
    if stage.turns is None:
        return range(replica, microbatches, stage.replicas)
    return _Repeating(_places(stage.turns, replica), len(stage.turns), microbatches)


def most_of_one(stage: Stage, microbatches: int) -> int:
    """Number of microbatches of that replica of a stage that has the most."""
    return max(len(microbatches_of(stage, r, microbatches)) for r in range(stage.replicas))


class _Repeating(Sequence[int]):
    """Numbers below a bound whose places in a period are given, ascending."""

    def __init__(self, places: Sequence[int], period: int, bound: int) -> None:
        self._places = places
        self._numbers = {place: number for number, place in enumerate(places)}
        self._period = period
        self._bound = bound

    def __len__(self) -> int:
        whole, rest = divmod(self._bound, self._period)
        return whole * len(self._places) + sum(place < rest for place in self._places)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        whole, number = divmod(index, len(self._places))
        value = whole * self._period + self._places[number]
        if index < 0 or value >= self._bound:
            raise IndexError(index)
        return value

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and 0 <= value < self._bound
            and value % self._period in self._numbers
        )

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """The place of a number that is in it."""
        del start, stop  # nobody looks for it twice
        if value not in self:
            raise ValueError(f"{value} is not one of these")
        whole, place = divmod(value, self._period)
        return whole * len(self._places) + self._numbers[place]


@lru_cache
def _places(turns: tuple[int, ...], replica: int) -> tuple[int, ...]:
    return tuple(place for place, turn in enumerate(turns) if turn == replica)


def period(stage: Stage) -> int:
    """Microbatches after which the replicas of a stage come in the same order again."""
    return stage.replicas if stage.turns is None else len(stage.turns)


def period_of_pairs(plan: Plan, edge: Edge) -> int:
    """Microbatches after which the pairs of ranks that talk on the edge repeat."""
    return math.lcm(period(plan.stages[edge.source]), period(plan.stages[edge.target]))


def channels(plan: Plan, edge: Edge) -> Sequence[int]:
    """Number, from 0, of the pair of ranks that each microbatch of a period goes by."""
    source, target = plan.stages[edge.source], plan.stages[edge.target]
    if source.turns is None and target.turns is None:
        return range(period_of_pairs(plan, edge))  # no pair comes twice
    numbers: dict[tuple[int, int], int] = {}
    ends = ((rank_for(source, g), rank_for(target, g)) for g in range(period_of_pairs(plan, edge)))
    return [numbers.setdefault(pair, len(numbers)) for pair in ends]


def pairs(plan: Plan, edge: Edge) -> tuple[tuple[int, int], ...]:
    """The (source rank, target rank) pairs that ever talk on the edge, ascending."""
    source, target = plan.stages[edge.source], plan.stages[edge.target]
    ends = ((rank_for(source, g), rank_for(target, g)) for g in range(period_of_pairs(plan, edge)))
    return tuple(sorted(set(ends)))


def peers(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks with which the rank shares an edge, ascending."""
    stage, replica = plan.stage_of(rank), plan.replica_of(rank)
    others = [(edge, edge.source) for edge in plan.inputs(stage.index)]
    others += [(edge, edge.target) for edge in plan.outputs(stage.index)]
    found = {
        rank_for(plan.stages[other], microbatch)
        for edge, other in others
        for microbatch in microbatches_of(stage, replica, period_of_pairs(plan, edge))
    }
    return tuple(sorted(found))
