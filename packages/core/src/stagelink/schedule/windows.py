"""Windows: how many messages may be in flight between two ranks on an edge.

A window is as large as the schedule's own order makes use of, so that it bounds memory and never
throttles: in training, as many microbatches as the producer forwards before it takes a gradient
back; in forwards alone, as many as fit along the longest way that the edge spans, since what goes
by a shortcut waits for what goes by every stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stagelink.plan import Plan

__all__ = ["at_least_two", "consumers", "distances", "forward_windows", "training_windows"]


def forward_windows(plan: Plan) -> tuple[int, ...]:
    """The window of each edge in evaluation, and in training where the schedule is forwards alone.

    With microbatches ascending on every rank no window can hang: the rank that is at the lowest
    microbatch, furthest upstream, waits for nobody.
    """
    if plan.window is not None:
        return (plan.window,) * len(plan.edges)
    return at_least_two(distance + 1 for distance in distances(plan))


def training_windows(plan: Plan, microbatches: int, warm_up: Sequence[int]) -> tuple[int, ...]:
    """The window of each edge in training by the plan's schedule.

    Args:
        plan: the plan.
        microbatches: how many the session has in the whole pipeline.
        warm_up: per stage.
    """
    if plan.window is not None or plan.schedule == "forward":
        return forward_windows(plan)
    if plan.schedule == "gpipe":
        return at_least_two([microbatches] * len(plan.edges))
    return at_least_two(warm_up[edge.source] + 1 for edge in plan.edges)


def at_least_two(needed: Iterable[int]) -> tuple[int, ...]:
    """The windows needed, but two at least: one message is taken while the next one is made."""
    return tuple(max(2, window) for window in needed)


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
