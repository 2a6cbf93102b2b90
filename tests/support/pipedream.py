"""PipeDream's configurations, made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SHAPES", "configuration"]

SHAPES = {
    (4, 3, 1): (2, 1, 0),
    (1, 3, 1): (5, 1, 0),
    (2, 6): (3, 0),
    (8, 4, 4): (1, 1, 0),
    (15, 1): (1, 0),
    (1,) * 8 + (3, 1): (11, 10, 9, 8, 7, 6, 5, 5, 1, 0),
}
"""Replicas of shapes that people ran, with the safe warm-up of each stage."""


def configuration(replicas: Sequence[int], depths: Sequence[int] | None = None) -> dict[str, Any]:
    """A line of stages with so many replicas, and so much warm-up."""
    ranks = iter(range(sum(replicas)))
    found: dict[str, Any] = {
        "module_to_stage_map": [*range(len(replicas)), len(replicas) - 1],
        "stage_to_rank_map": {
            str(stage): [next(ranks) for _ in range(count)] for stage, count in enumerate(replicas)
        },
    }
    if depths is not None:
        found["stage_to_depth_map"] = {str(stage): depth for stage, depth in enumerate(depths)}
    return found
