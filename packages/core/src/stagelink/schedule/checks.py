"""Lists of actions of a user's own: read from text, and checked.

Each microbatch comes once, on its rank, and F before B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagelink.arguments import NAME, checked, instance
from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.schedule.actions import Action, Kind
from stagelink.schedule.routing import microbatches_of, rank_for
from stagelink.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["action_problems", "parse_actions"]


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
    """Everything that is wrong with the lists, one line each.

    Args:
        plan: the plan.
        microbatches: how many the session has in the whole pipeline.
        actions: by rank; a rank without a list does nothing.
    """
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
