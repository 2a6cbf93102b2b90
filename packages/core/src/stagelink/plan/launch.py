"""Checks that a rank and a world size, as given at launch, fit each other and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["launch_problems"]


def launch_problems(rank: object, world_size: object, plan_size: int) -> Iterator[str]:
    """A line for each thing that is wrong, with both values."""
    launched = f"launched as rank {shown(rank)} of a world of {shown(world_size)}"
    for reason in _reasons(rank, world_size, plan_size):
        yield f"{launched}: {reason}"


def _reasons(rank: object, world_size: object, plan_size: int) -> Iterator[str]:
    numbers = {"the rank": rank, "the world size": world_size}
    for name, value in numbers.items():
        if not _is_int(value):
            yield f"{name} must be an int"
    if isinstance(world_size, int) and _is_int(world_size):
        yield from _size_reasons(world_size, plan_size)
        if isinstance(rank, int) and _is_int(rank):
            yield from _rank_reasons(rank, world_size)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size_reasons(world_size: int, plan_size: int) -> Iterator[str]:
    if world_size < 1:
        yield "a world has at least 1 rank"
    elif world_size > plan_size:
        extra = _span(plan_size, world_size)
        yield f"the plan has {plan_size} ranks, no stage holds rank {extra}"
    elif world_size < plan_size:
        missing = _span(world_size, plan_size)
        yield f"the plan has {plan_size} ranks, nobody would be rank {missing}"


def _rank_reasons(rank: int, world_size: int) -> Iterator[str]:
    if rank < 0:
        yield "a rank is not negative"
    elif world_size >= 1 and rank >= world_size:
        yield f"the ranks of this world are {_span(0, world_size)}"


def _span(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start} to {stop - 1}"
