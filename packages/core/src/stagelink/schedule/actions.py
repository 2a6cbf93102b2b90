"""Actions of a rank as data: an ordered list of forwards and backwards of microbatches.

By the plan's schedule, or a list of a user's own, which is read from text and checked: each
microbatch comes once, on its rank, and F before B.
"""

from __future__ import annotations

import enum
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagelink.arguments import COUNT, NAME, checked, instance
from stagelink.errors import PlanError
from stagelink.plan import Plan, Stage
from stagelink.schedule.routing import microbatches_of, rank_for
from stagelink.text import shown

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

    Of ``microbatches`` in the whole pipeline there may be fewer than warm-up, replicas or stages,
    and 0. The warm-up is per stage, as `stagelink.schedule.verify` chose it, where there is one.
    In mode ``"evaluate"`` there are forwards alone, whatever the schedule.
    """
    stage = plan.stage_of(rank)
    mine = microbatches_of(stage, plan.replica_of(rank), microbatches)
    return list(actions_of(plan, stage, mine, warm_up[stage.index], mode))


def actions_of(
    plan: Plan, stage: Stage, mine: Iterable[int], warm_up: int, mode: Mode = "train"
) -> Iterator[Action]:
    """The actions of one replica of a stage, one at a time; as `actions_for`.

    The next one of ``mine``, the replica's microbatches, ascending, is asked for when its forward
    is due, so they need not be known before. The warm-up is the stage's.
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


@checked(plan=instance(Plan, "a Plan"), text=NAME, where=NAME)
def parse_actions(plan: Plan, text: str, *, where: str = "actions") -> dict[int, list[Action]]:
    """Read lists of actions by rank, to verify and to train with.

    Each line has a rank and its actions in order, as in ``0: F0 F1 B0 B1``. Spaces, commas and
    empty lines mean nothing; ``#`` begins a comment.

    Args:
        plan: whose ranks do them.
        text: the lines.
        where: what errors call it; each of their lines begins with it.

    Raises:
        PlanError: with a line for each that cannot be read.
    """
    found: dict[int, list[Action]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            try:
                rank, actions = _parsed(plan, content)
                if rank in found:
                    problems.append(f"{where}: line {number}: rank {rank} has a list already")
                found[rank] = actions
            except PlanError as error:
                problems.append(f"{where}: line {number}: {error}")
    if problems:
        raise PlanError("\n".join(problems))
    return found


def _parsed(plan: Plan, line: str) -> tuple[int, list[Action]]:
    rank, colon, actions = line.partition(":")
    if not colon or not rank.strip().isdecimal():
        raise PlanError(f"{shown(line)}: must be a rank and its actions, as in 0: F0 F1 B0 B1")
    stage = plan.stage_of(int(rank)).index
    return int(rank), [Action.parse(word, stage) for word in actions.replace(",", " ").split()]


def action_problems(
    plan: Plan, microbatches: int, actions: Mapping[int, Sequence[Action]]
) -> Iterator[str]:
    """Everything that is wrong with lists by rank, a line each; without one a rank is idle."""
    ranks = range(plan.world_size)
    for rank in actions:
        if rank not in ranks:
            yield f"actions for rank {rank!r}: the plan's ranks are 0 to {ranks[-1]}"
    for rank in ranks:
        for text in _problems_of(plan, rank, microbatches, actions.get(rank, ())):
            yield f"actions of rank {rank}: {text}"


def _problems_of(
    plan: Plan, rank: int, microbatches: int, actions: Sequence[Action]
) -> Iterator[str]:
    seen: set[Action] = set()
    for action in actions:
        misfit = _misfit(plan, rank, microbatches, action)
        if misfit is not None:
            yield misfit
            continue
        forward = Action(Kind.FORWARD, action.stage, action.microbatch)
        if action in seen:
            yield f"{action} comes twice"
        elif action != forward and forward not in seen:
            yield f"{action} comes without {forward} before it"
        seen.add(action)
    for action in _expected(plan, rank, microbatches):
        if action not in seen:
            yield f"{action} is missing"


def _misfit(plan: Plan, rank: int, microbatches: int, action: object) -> str | None:
    """What is wrong with the action wherever it stands."""
    stage = plan.stage_of(rank)
    if not isinstance(action, Action):
        return f"{action!r} is no Action"
    if action.stage != stage.index:
        return f"{action} is for stage {action.stage}; the rank holds stage {stage.index}"
    if action.microbatch not in range(microbatches):
        return f"{action}: there are {microbatches} microbatches, numbered from 0"
    if rank_for(stage, action.microbatch) != rank:
        return f"{action}: the microbatch goes to rank {rank_for(stage, action.microbatch)}"
    if action.kind not in _kinds(plan):
        return f"{action}: schedule {plan.schedule!r} has no backwards"
    return None


def _expected(plan: Plan, rank: int, microbatches: int) -> Iterator[Action]:
    stage = plan.stage_of(rank)
    for microbatch in microbatches_of(stage, plan.replica_of(rank), microbatches):
        for kind in _kinds(plan):
            yield Action(kind, stage.index, microbatch)


def _kinds(plan: Plan) -> tuple[Kind, ...]:
    return (Kind.FORWARD,) if plan.schedule == "forward" else (Kind.FORWARD, Kind.BACKWARD)
