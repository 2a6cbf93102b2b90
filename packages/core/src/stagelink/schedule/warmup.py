"""Warm-up: the forwards of a stage before its first backward in 1F1B.

Two things bound the warm-up ``W_s`` of stage ``s`` with ``R_s`` replicas from below.

*Throughput.* From a stage on, as many microbatches should be in flight as there are ranks:
``W_s >= (R_s + R_(s+1) + … - 1) // R_s``, PipeDream's default.

*Progress.* Let the replicas of a stage wait for each other in every backward, as in asynchronous
training. Round ``k`` of stage ``t`` needs the forwards of microbatches before
``(k + W_t + 1)·R_t``. A stage ``s`` that it takes from must send them while it waits only for
rounds that end before microbatch ``k·R_t``. That holds for every ``k`` if and only if
``W_s >= ceil(((W_t + 1)·R_t - gcd(R_s, R_t)) / R_s)``.

If it holds on every edge, nothing can hang, whatever the graph: the forward of microbatch ``g``
waits, over any path down and up again, only for forwards of microbatches before ``g``. It includes
waits for credit in a window of ``W_s + 1``, and holds all the more without synchronisation, where
it still buys throughput: a balanced (1, 4, 1) takes half the time that it takes by the default.

A stage that progress raises may run in step with the one before it, each waiting for the other;
more warm-up before it, set by hand, buys throughput there for memory.

All this is about round robin. Under the diagonal the last replica of a wide stage gets its first
microbatch late, so more warm-up before it may be needed: there it is found by walking.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from stagelink.plan import Plan
from stagelink.schedule.actions import actions_for
from stagelink.schedule.routing import period
from stagelink.schedule.walk import walk
from stagelink.schedule.windows import consumers, training_windows


def default_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """PipeDream's warm-up per stage of a line. Some shapes, as (4, 3, 1), hang with it."""
    return tuple((sum(replicas[stage:]) - 1) // own for stage, own in enumerate(replicas))


def least_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """The least warm-up per stage of a line with which synchronised replicas cannot hang.

    One less on any single stage hangs. More on one stage may need more on those before it.
    """
    warm_up = [0] * len(replicas)
    for stage in reversed(range(len(replicas) - 1)):
        own, next_ = replicas[stage : stage + 2]
        warm_up[stage] = _for_progress(own, next_, warm_up[stage + 1])
    return tuple(warm_up)


def safe_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """The warm-up per stage of a line that fills it, and with which nothing can hang."""
    count = len(replicas)
    line = [[stage + 1] if stage + 1 < count else [] for stage in range(count)]
    return _chosen(replicas, line, [None] * count)


def choose_warm_up(plan: Plan, more: int = 0) -> tuple[int, ...]:
    """The warm-up per stage of a plan: what was set by hand, elsewhere what is safe with that.

    On a line without values set by hand it is `safe_warm_up`; in any other graph a stage looks to
    each of its consumers, as if they had so much ``more`` warm-up. A value set by hand below what
    is safe may hang: the walk tells.
    """
    replicas = [stage.replicas for stage in plan.stages]
    return _chosen(replicas, consumers(plan), [stage.warm_up for stage in plan.stages], more)


def _chosen(
    replicas: Sequence[int],
    following: Sequence[Sequence[int]],
    by_hand: Sequence[int | None],
    more: int = 0,
) -> tuple[int, ...]:
    warm_up = [0] * len(replicas)
    under_way = [0] * len(replicas)
    for stage in reversed(range(len(replicas))):
        own, hand = replicas[stage], by_hand[stage]
        under_way[stage] = own + max((under_way[later] for later in following[stage]), default=0)
        least = [_for_progress(own, replicas[n], warm_up[n] + more) for n in following[stage]]
        warm_up[stage] = max([(under_way[stage] - 1) // own, *least]) if hand is None else hand
    return tuple(warm_up)


def _for_progress(own: int, later: int, later_warm_up: int) -> int:
    """The least warm-up of ``own`` replicas that feed ``later`` ones with their warm-up."""
    return -((math.gcd(own, later) - (later_warm_up + 1) * later) // own)


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
    around = math.lcm(*(period(stage) for stage in plan.stages))
    return min(ahead + 2 * around, max(_LONG_WALK, 2 * ahead))


def _gets_through(plan: Plan, warm_up: Sequence[int]) -> bool:
    count = until_it_repeats(plan, warm_up)
    programs = [actions_for(plan, rank, count, warm_up) for rank in range(plan.world_size)]
    windows = training_windows(dataclasses.replace(plan, window=None), count, warm_up)
    return not walk(plan, programs, count, windows, synchronise=plan.asynchronous).waits
