"""Waits of ranks, and the cycle that they form in a deadlock, in words."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagelink.plan import Edge, Plan
from stagelink.schedule.actions import Action

_MOST_WAITS = 12


class Step(enum.Enum):
    """A part of an action; a rank may have to wait in each but the last."""

    RECEIVE = enum.auto()
    SEND = enum.auto()
    RECEIVE_GRADIENT = enum.auto()
    SYNCHRONISE = enum.auto()
    SEND_GRADIENT = enum.auto()


@dataclass(frozen=True, slots=True)
class Wait:
    """A deadlocked rank's wait."""

    rank: int  # who waits
    action: Action  # the action it is in
    step: Step  # the part of it that it cannot do
    edge: Edge | None  # the edge of that step; None where it synchronises with its replicas
    # the rank that would have to act first; the waiting one itself where its window is full of
    # messages whose gradients it takes only later
    blocker: int


def cycle(waits: Iterable[Wait]) -> list[Wait]:
    """The cycle of the wait-for graph that the first wait leads into.

    Each one's blocker is the rank of the next. All ranks that wait for ever are given, at least
    one, so each one's blocker is among them.
    """
    by_rank = {wait.rank: wait for wait in waits}
    path: dict[int, Wait] = {}
    rank = next(iter(by_rank))
    while rank not in path:
        path[rank] = by_rank[rank]
        rank = by_rank[rank].blocker
    ranks = list(path)
    return [path[member] for member in ranks[ranks.index(rank) :]]


def describe(plan: Plan, waits: Sequence[Wait], windows: Sequence[int]) -> str:
    """The waits of a cycle in words, one after the other; a long list is cut and counted."""
    texts = [
        f"rank {wait.rank} (stage {plan.stage_of(wait.rank).name!r}) waits in {wait.action} "
        f"{_what(wait, windows)}"
        for wait in waits[:_MOST_WAITS]
    ]
    if len(waits) > _MOST_WAITS:
        texts.append(f"and so on through {len(waits)} ranks, back to the first")
    return "; ".join(texts)


def _what(wait: Wait, windows: Sequence[int]) -> str:
    if wait.edge is None:
        return f"for its replica rank {wait.blocker} to come as far"
    message = f"{wait.edge.tensor.name!r} microbatch {wait.action.microbatch}"
    if wait.step is Step.RECEIVE:
        return f"for {message} from rank {wait.blocker}"
    if wait.step is Step.RECEIVE_GRADIENT:
        return f"for the gradient of {message} from rank {wait.blocker}"
    window = windows[wait.edge.index]
    places = "its one place is" if window == 1 else f"all {window} places are"
    if wait.blocker == wait.rank:
        until = "it receives a gradient, which it does only later"
    else:
        until = f"rank {wait.blocker} receives"
    return f"to send {message}: {places} taken until {until}"
