"""Actions of a rank as data: an ordered list of forwards and backwards of microbatches."""

from __future__ import annotations

import enum
import math
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from stagelink.arguments import COUNT, NAME, checked
from stagelink.errors import PlanError
from stagelink.schedule.routing import microbatches_of
from stagelink.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stagelink.plan import Plan, Stage

__all__ = ["UNTIL_END", "Action", "Kind", "Mode", "actions_for", "actions_of"]

UNTIL_END = 2**63 - 1
"""In place of a number of microbatches: as many as the data of the first stage make."""

_SHORT_FORM = re.compile(r"([FB])(0|[1-9][0-9]{0,18})")

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

    @classmethod
    @checked(text=NAME, stage=COUNT)
    def parse(cls, text: str, stage: int) -> Action:
        """The action of a stage whose short form this is; `parse_actions` reads whole lists.

        Args:
            text: as in ``F3`` or ``B0``.
            stage: index of the stage.

        Raises:
            PlanError: it is not one.
        """
        found = _SHORT_FORM.fullmatch(text)
        if found is None:
            raise PlanError(
                f"{shown(text)} is no action: F or B and the number of a microbatch, as in F3"
            )
        return cls(Kind(found[1]), stage, int(found[2]))


def actions_for(
    plan: Plan, rank: int, microbatches: int, warm_up: Sequence[int], mode: Mode = "train"
) -> list[Action]:
    """Actions of the rank in a session, by the plan's schedule; its own microbatches ascending.

    Args:
        plan: the plan.
        rank: whose actions.
        microbatches: how many the session has in the whole pipeline; may be fewer than warm-up,
            replicas or stages, and 0.
        warm_up: per stage, as `stagelink.schedule.verify` chose it; for schedules that have one.
        mode: evaluation is forwards alone, whatever the schedule.
    """
    stage = plan.stage_of(rank)
    mine = microbatches_of(stage, plan.replica_of(rank), microbatches)
    return list(actions_of(plan, stage, mine, warm_up[stage.index], mode))


def actions_of(
    plan: Plan, stage: Stage, mine: Iterable[int], warm_up: int, mode: Mode = "train"
) -> Iterator[Action]:
    """The actions of one replica of a stage, one at a time.

    Args:
        plan: the plan.
        stage: the stage.
        mine: the replica's microbatches, ascending. The next one is asked for when its forward is
            due, so they need not be known before.
        warm_up: the stage's.
        mode: as for `actions_for`.
    """
    if mode == "evaluate" or plan.schedule == "forward":
        return (Action(Kind.FORWARD, stage.index, microbatch) for microbatch in mine)
    # GPipe is 1F1B whose warm-up is everything.
    return _one_forward_one_backward(stage, mine, warm_up if plan.has_warm_up else math.inf)


def _one_forward_one_backward(stage: Stage, mine: Iterable[int], ahead: float) -> Iterator[Action]:
    under_way: deque[int] = deque()
    for microbatch in mine:
        yield Action(Kind.FORWARD, stage.index, microbatch)
        under_way.append(microbatch)
        if len(under_way) > ahead:
            yield Action(Kind.BACKWARD, stage.index, under_way.popleft())
    for microbatch in under_way:
        yield Action(Kind.BACKWARD, stage.index, microbatch)
