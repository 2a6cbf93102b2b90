"""What a rank does, as data: an ordered list of forwards and backwards of microbatches."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from stagelink.schedule.routing import microbatches_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plan import Plan

__all__ = ["Action", "Kind", "Mode", "actions_for"]

Mode: TypeAlias = Literal["train", "evaluate"]
"""What a session is for: training by the plan's schedule, or forwards alone."""


class Kind(enum.Enum):
    """The two kinds of work on a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one rank.

    A forward receives every tensor that the stage consumes for the microbatch, in the plan's edge
    order, then sends every tensor it produces. A backward receives the gradients of the latter and
    then sends those of the former.

    Attributes:
        kind: forward or backward.
        stage: index of the stage it works for.
        microbatch: global id of the microbatch, from 0 in each session.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Short form as in ``F3`` or ``B0``."""
        return f"{self.kind.value}{self.microbatch}"


def actions_for(
    plan: Plan, rank: int, microbatches: int, warm_up: Sequence[int], mode: Mode = "train"
) -> list[Action]:
    """What the rank does in a session, by the plan's schedule; its own microbatches ascending.

    Args:
        plan: the plan.
        rank: whose actions.
        microbatches: how many the session has in the whole pipeline; may be fewer than warm-up,
            replicas or stages, and 0.
        warm_up: per stage, as `stagelink.schedule.verify` chose it; only 1F1B looks at it.
        mode: evaluation is forwards alone, whatever the schedule.
    """
    stage = plan.stage_of(rank)
    mine = microbatches_of(stage, plan.replica_of(rank), microbatches)
    if mode == "evaluate" or plan.schedule == "forward":
        return [Action(Kind.FORWARD, stage.index, microbatch) for microbatch in mine]
    # GPipe is 1F1B whose warm-up is everything.
    ahead = len(mine) if plan.schedule == "gpipe" else warm_up[stage.index]
    return _one_forward_one_backward(stage.index, mine, min(ahead, len(mine)))


def _one_forward_one_backward(stage: int, mine: range, ahead: int) -> list[Action]:
    actions = []
    for step in range(len(mine) + ahead):
        if step < len(mine):
            actions.append(Action(Kind.FORWARD, stage, mine[step]))
        if step >= ahead:
            actions.append(Action(Kind.BACKWARD, stage, mine[step - ahead]))
    return actions
