"""The graph of stages: who takes from whom, and how far apart the ends of an edge are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plan import Plan

__all__ = ["consumers", "distances"]


def consumers(plan: Plan) -> list[list[int]]:
    """Per stage, the stages that take something from it, ascending; all come after it."""
    return [sorted({edge.target for edge in plan.outputs(stage.index)}) for stage in plan.stages]


def distances(plan: Plan) -> list[int]:
    """Per edge, how many edges the longest way from its source to its target has, at least 1."""
    following = consumers(plan)
    longest = [_longest_ways(stage.index, following) for stage in plan.stages]
    return [longest[edge.source][edge.target] for edge in plan.edges]


def _longest_ways(start: int, following: Sequence[Sequence[int]]) -> dict[int, int]:
    """The longest way from a stage to each that can be reached, up to its furthest consumer."""
    longest = {start: 0}
    for stage in range(start, max(following[start], default=start)):
        if stage in longest:
            for consumer in following[stage]:
                longest[consumer] = max(longest.get(consumer, 0), longest[stage] + 1)
    return longest
