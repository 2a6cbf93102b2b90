"""Checks of stages and their ranks, and of what `[pipeline]` says of servers and observers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.plan.model import WITH_WARM_UP, most_microbatches
from stagelink.plan.problems import Problem
from stagelink.text import ranges, repeats, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.plan.document import Document

__all__ = [
    "microbatches",
    "observers",
    "ranks",
    "servers",
    "stage_names",
    "too_many_microbatches",
    "warm_ups",
]


def stage_names(document: Document) -> Iterator[Problem]:
    """Stage names that are taken."""
    names = [table.name for table in document.stages]
    for index, first in repeats(names):
        text = f"{names[index]!r} is already the name of stages[{first}]"
        yield Problem(("stages", index, "name"), text)


def too_many_microbatches(microbatches: int, stages: int) -> str | None:
    """What is wrong with so many microbatches; None where nothing is.

    Args:
        microbatches: in the whole pipeline.
        stages: how many there are.
    """
    most = most_microbatches(stages)
    if microbatches <= most:
        return None
    of_stages = f"{stages} stage{'s' * (stages != 1)}"
    return (
        f"{shown(microbatches)}: must be at most {most} with {of_stages}, since each rank lists "
        "and walks them before it starts; let a batch be smaller, or a session go on until the end"
    )


def microbatches(document: Document) -> Iterator[Problem]:
    """More microbatches than a session may have."""
    text = too_many_microbatches(document.pipeline.microbatches, len(document.stages))
    if text is not None:
        yield Problem(("pipeline", "microbatches"), text)


def warm_ups(document: Document) -> Iterator[Problem]:
    """Warm-up set by hand where the schedule has none, or larger than any session."""
    schedule, most = document.pipeline.schedule, most_microbatches(len(document.stages))
    for index, table in enumerate(document.stages):
        if table.warm_up is not None and (table.warm_up + 1) * len(table.ranks) > most:
            text = f"{table.warm_up}: no session has so many microbatches; at most {most} in all"
            yield Problem(("stages", index, "warm_up"), text)
        if table.warm_up is not None and schedule not in WITH_WARM_UP:
            text = f"{table.warm_up}: the schedule {schedule!r} has no warm-up to set; remove it"
            yield Problem(("stages", index, "warm_up"), text)


def ranks(document: Document) -> Iterator[Problem]:
    """Ranks that hold two places, and gaps in their numbers."""
    holders: dict[int, str] = {}
    for index, table in enumerate(document.stages):
        for replica, rank in enumerate(table.ranks):
            if rank in holders:
                text = f"rank {rank} is already {holders[rank]}; a rank holds one stage"
                yield Problem(("stages", index, "ranks", replica), text)
            holders.setdefault(rank, f"replica {replica} of stage {table.name!r}")
    yield from _gap(sorted(holders))


def servers(document: Document) -> Iterator[Problem]:
    """Servers whose lists of ranks do not name each rank once."""
    if document.pipeline.servers is None:
        return
    missing = {rank for table in document.stages for rank in table.ranks}
    last = len(missing) - 1
    for server, members in enumerate(document.pipeline.servers):
        for place, rank in enumerate(members):
            if rank not in missing:
                what = "is on two servers or twice on one" if rank <= last else "holds no stage"
                text = f"rank {rank} {what}; each of the ranks 0 to {last} belongs to one server"
                yield Problem(("pipeline", "servers", server, place), text)
            missing.discard(rank)
    if missing:
        text = f"no server has rank {ranges(sorted(missing))}; list every rank, or no servers"
        yield Problem(("pipeline", "servers"), text)


def observers(document: Document) -> Iterator[Problem]:
    """Observers that are named twice."""
    names = document.pipeline.observers
    for place, first in repeats(names):
        text = f"{names[place]!r} is already observers[{first}]"
        yield Problem(("pipeline", "observers", place), text)


def _gap(held: list[int]) -> Iterator[Problem]:
    count = len(held)
    beyond = [rank for rank in held if rank >= count]
    if beyond:
        missing = ranges(sorted(set(range(count)).difference(held)))
        text = f"a gap: {count} ranks are numbered 0 to {count - 1}; missing: {missing}"
        yield Problem(("stages",), f"{text}; too high: {ranges(beyond)}")
