"""Topology of a plan: which ranks are connected, and by which routes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from stagelink.plan import Edge, Plan, Stage
from stagelink.schedule import pairs


def neighbours(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Ranks that each rank is connected to, ascending.

    These are the ranks that it shares an edge with, and its neighbours in the ring of its stage's
    replicas, so that the death of a replica reaches the others without a detour.
    """
    found: defaultdict[int, set[int]] = defaultdict(set)
    for one, other in _connected_pairs(plan):
        found[one].add(other)
        found[other].add(one)
    return {rank: tuple(sorted(found[rank])) for rank in range(plan.world_size)}


def followers_of(plan: Plan, rank: int) -> frozenset[int]:
    """The ranks that take something from a rank."""
    outputs = plan.outputs(plan.stage_of(rank).index)
    found = (pair for edge in outputs for pair in pairs(plan, edge))
    return frozenset(target for source, target in found if source == rank)


def siblings_of(plan: Plan, rank: int) -> frozenset[int]:
    """On a stage that receives nothing, a rank's neighbours in the ring of its replicas."""
    stage = plan.stage_of(rank)
    if plan.inputs(stage.index):
        return frozenset()
    return frozenset(end for pair in _ring(stage) if rank in pair for end in pair) - {rank}


def _connected_pairs(plan: Plan) -> Iterable[tuple[int, int]]:
    for edge in plan.edges:
        yield from pairs(plan, edge)
    for stage in plan.stages:
        yield from _ring(stage)


def _ring(stage: Stage) -> Iterable[tuple[int, int]]:
    """The pairs of neighbours among the replicas of a stage; none where it has one."""
    if stage.replicas > 1:
        yield from zip(stage.ranks, stage.ranks[1:] + stage.ranks[:1], strict=True)


def routes_of(plan: Plan, rank: int) -> list[tuple[Edge, int, int]]:
    """(edge, source rank, target rank) of every route that begins or ends at a rank."""
    return [
        (edge, source, target)
        for edge in plan.edges
        for source, target in pairs(plan, edge)
        if rank in (source, target)
    ]
