"""PipeDream's own routing: which replica takes which microbatch, as a table that repeats.

The first stage goes round its replicas. From a stage to the next, replica ``r`` sends its own
``f``-th microbatch to replica ``(f + r) mod C`` of ``C``; so each next replica takes them by ``f``
and then by ``r``, which is the order of their global numbers. Every replica of the one talks to
every replica of the other, where round robin needs the least common multiple of pairs.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

from stagelink.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["diagonal"]

_LONGEST = 4000
"""Twice as many, and the warm-up, are walked to verify a plan."""


def diagonal(replicas: Sequence[int]) -> list[tuple[int, ...]]:
    """Replica of microbatch 0, 1, …, up to where it repeats, for each stage of a line.

    Args:
        replicas: of each stage.

    Raises:
        PlanError: they repeat too late.
    """
    tables = [tuple(range(replicas[0]))]
    for count, next_count in pairwise(replicas):
        before = tables[-1]
        # In one period of the table before, each replica has an equal share.
        share = len(before) // count
        if len(before) * (next_count // gcd(share, next_count)) > _LONGEST:
            shape = "-".join(map(str, replicas))
            raise PlanError(
                f"pipeline.routing: the diagonal of {shape} replicas repeats only after more than "
                f"{_LONGEST} microbatches, too many to verify; use 'round_robin'"
            )
        tables.append(_next(before * (next_count // gcd(share, next_count)), count, next_count))
    return tables


def _next(before: Sequence[int], count: int, next_count: int) -> tuple[int, ...]:
    had = [0] * count
    table = []
    for replica in before:
        table.append((had[replica] + replica) % next_count)
        had[replica] += 1
    return tuple(table)
