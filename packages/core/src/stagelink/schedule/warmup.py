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
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stagelink.schedule.graph import consumers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plan import Plan

__all__ = ["choose_warm_up", "default_warm_up", "least_warm_up", "safe_warm_up"]


def default_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """PipeDream's warm-up per stage of a line. Some shapes, as (4, 3, 1), hang with it.

    Args:
        replicas: of each stage.
    """
    return tuple((sum(replicas[stage:]) - 1) // own for stage, own in enumerate(replicas))


def least_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """The least warm-up per stage of a line with which synchronised replicas cannot hang.

    One less on any single stage hangs. More on one stage may need more on those before it.

    Args:
        replicas: of each stage.
    """
    warm_up = [0] * len(replicas)
    for stage in reversed(range(len(replicas) - 1)):
        own, next_ = replicas[stage : stage + 2]
        warm_up[stage] = _for_progress(own, next_, warm_up[stage + 1])
    return tuple(warm_up)


def safe_warm_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """The warm-up per stage of a line that fills it, and with which nothing can hang.

    Args:
        replicas: of each stage.
    """
    count = len(replicas)
    line = [[stage + 1] if stage + 1 < count else [] for stage in range(count)]
    return _chosen(replicas, line, [None] * count)


def choose_warm_up(plan: Plan, more: int = 0) -> tuple[int, ...]:
    """The warm-up per stage of a plan: what was set by hand, elsewhere what is safe with that.

    On a line without values set by hand it is `safe_warm_up`; in any other graph a stage looks to
    each of its consumers. A value set by hand below what is safe may hang: the walk tells.

    Args:
        plan: the plan.
        more: each stage is to be safe if its consumers had so much more warm-up than they have.
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
