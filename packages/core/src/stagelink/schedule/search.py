"""The warm-up of a plan: by the formula where it holds, else found by walking.

The formula of `stagelink.schedule.warmup` is about round robin. Under the diagonal the last
replica of a wide stage gets its first microbatch late, so more warm-up before it may be needed.
"""

from __future__ import annotations

import dataclasses
from math import lcm
from typing import TYPE_CHECKING

from stagelink.schedule.actions import actions_for
from stagelink.schedule.routing import period
from stagelink.schedule.walk import walk
from stagelink.schedule.warmup import choose_warm_up
from stagelink.schedule.windows import training_windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plan import Plan

__all__ = ["find_warm_up", "free_warm_up", "until_it_repeats"]

_MOST_MORE = 16
_LONG_WALK = 10_000
"""Microbatches of a walk that stands for one without an end; replicas without a common factor
would take more to repeat."""


def find_warm_up(plan: Plan) -> tuple[int, ...]:
    """The warm-up per stage: what was set by hand, elsewhere what is safe with that.

    Where the formula does not hold, it is asked for so much more warm-up downstream than there is
    that a walk gets through. If none does it is what was tried last: `stagelink.schedule.verify`
    then tells.
    """
    warm_up = choose_warm_up(plan)
    if plan.routing == "round_robin":
        return warm_up
    more = 0
    while not _gets_through(plan, warm_up) and more < _MOST_MORE:
        more += 1
        warm_up = choose_warm_up(plan, more)
    return warm_up


def free_warm_up(plan: Plan) -> tuple[int, ...]:
    """Like `find_warm_up`, as if nothing had been set by hand."""
    free = tuple(dataclasses.replace(stage, warm_up=None) for stage in plan.stages)
    return find_warm_up(dataclasses.replace(plan, stages=free))


def until_it_repeats(plan: Plan, warm_up: Sequence[int]) -> int:
    """Microbatches that take every stage through its warm-up and twice through the routing.

    Fewer where nothing was set by hand: there the formula is the proof, the walk a check of it.
    """
    by_hand = plan.window is not None or any(s.warm_up is not None for s in plan.stages)
    if plan.routing == "round_robin" and not by_hand:
        return 4 * max(stage.replicas for stage in plan.stages)
    ahead = max((w + 1) * stage.replicas for w, stage in zip(warm_up, plan.stages, strict=True))
    around = lcm(*(period(stage) for stage in plan.stages))
    return min(ahead + 2 * around, max(_LONG_WALK, 2 * ahead))


def _gets_through(plan: Plan, warm_up: Sequence[int]) -> bool:
    count = until_it_repeats(plan, warm_up)
    programs = [actions_for(plan, rank, count, warm_up) for rank in range(plan.world_size)]
    windows = training_windows(dataclasses.replace(plan, window=None), count, warm_up)
    return not walk(plan, programs, count, windows, synchronise=plan.asynchronous).waits
