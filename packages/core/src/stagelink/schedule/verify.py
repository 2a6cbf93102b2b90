"""Verification of a plan: whether it can run, with what warm-up, windows and receive memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagelink.arguments import MAPPING, checked, instance, optional
from stagelink.errors import PlanError, VerificationError
from stagelink.plan import Plan
from stagelink.plan.model import too_many_microbatches
from stagelink.schedule.actions import UNTIL_END, Action, Mode, action_problems, actions_for
from stagelink.schedule.versions import version_problems
from stagelink.schedule.waits import cycle, describe
from stagelink.schedule.walk import Walked, walk
from stagelink.schedule.warmup import find_warm_up, free_warm_up, until_it_repeats
from stagelink.schedule.windows import (
    at_least_two,
    forward_windows,
    receive_bytes,
    training_windows,
)
from stagelink.text import quoted, shown

_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Verification:
    """Findings about a plan and a number of microbatches.

    Attributes:
        problem: why it cannot run, a line per problem; None where it can.
        microbatches: how many were walked; all that the training session has in the whole
            pipeline, but where it goes on until the end.
        warm_up: per stage, the forwards ahead of its first backward; 0 where the schedule has
            none.
        windows: per edge, the messages that may be in flight between two ranks in training.
        forward_windows: the same in evaluation.
        receive_bytes: by rank, the most that it may hold of what was sent to it; None where the
            dtype or shape of an edge is not declared.
        rounds: how long training takes, if every action took 1 and messages nothing; counted up to
            where it hangs if it does.
    """

    problem: str | None
    microbatches: int
    warm_up: tuple[int, ...]
    windows: tuple[int, ...]
    forward_windows: tuple[int, ...]
    receive_bytes: Mapping[int, int | None]
    rounds: int

    @property
    def ok(self) -> bool:
        """Whether the plan can run."""
        return self.problem is None


class Grid(NamedTuple):
    """Actions of a training session by rank and time slot, if each takes one and messages none."""

    # by rank, the action that ends in a slot, by the slot's number from 0
    rows: tuple[Mapping[int, Action], ...]
    # the action that a rank never ends, by rank; empty where there is no deadlock
    waits: Mapping[int, Action]
    cycle: frozenset[int]  # the ranks that wait for each other; others wait for these
    slots: int  # how many there are


@checked(plan=instance(Plan, "a Plan"), actions=optional(MAPPING))
def verify(
    plan: Plan,
    microbatches: int | None = None,
    actions: Mapping[int, Sequence[Action]] | None = None,
) -> Verification:
    """Walk all ranks through a training session, before anything is started.

    What it proves it proves for these actions; a loop that departs from them may still hang.

    An open-ended session is walked as far as its order of actions takes to repeat, where warm-up
    or window were set by hand: what comes after that waits for nothing else. Elsewhere the formula
    for the warm-up is the proof, and a short walk a check of it.

    Args:
        plan: the plan.
        microbatches: how many the session has in the whole pipeline, 0 included, or `UNTIL_END`;
            None: the plan's, or until the end where the schedule does not stop between batches.
        actions: lists of one's own by rank, instead of those of the plan's schedule.

    Returns:
        What was found, also where the plan cannot run; `require` turns that into an error.

    Raises:
        PlanError: ``microbatches`` is no int of at least 0, or too large.
    """
    if microbatches is None:
        microbatches = UNTIL_END if plan.asynchronous else plan.microbatches
    count = most = check_microbatches(plan, microbatches)
    warm_up = find_warm_up(plan) if plan.has_warm_up else (0,) * len(plan.stages)
    if count == UNTIL_END:
        if plan.schedule == "gpipe":
            raise PlanError(
                "microbatches: an open-ended session has no last microbatch to turn at, which "
                "the schedule 'gpipe' waits for; take '1f1b', or say how many"
            )
        count = until_it_repeats(plan, warm_up)
    programs, problems = _programs(plan, count, warm_up, actions)
    by_need = actions is not None and plan.window is None
    given = None if by_need else training_windows(plan, count, warm_up)
    walked = _walked(plan, programs, count, given)
    # What a walk without windows had in flight is enough for every other order of the same lists.
    windows = at_least_two(walked.peaks) if given is None else given
    forward = windows if plan.schedule == "forward" else forward_windows(plan)
    held = receive_bytes(plan, most, windows, forward)
    problems += _deadlock(plan, walked, windows)
    if plan.limits.receive_bytes is not None:
        declared = receive_bytes(plan, most, windows, forward, unknown=0)
        problems += _overflow(plan.limits.receive_bytes, held, declared)
    problems += version_problems(plan, warm_up)
    return Verification(_joined(problems), count, warm_up, windows, forward, held, walked.rounds)


def require(result: Verification) -> Verification:
    """The verification itself, if the plan can run.

    Raises:
        VerificationError: it cannot; the text is its problem.
    """
    if result.problem is not None:
        raise VerificationError(result.problem)
    return result


def grid(
    plan: Plan, result: Verification, actions: Mapping[int, Sequence[Action]] | None = None
) -> Grid:
    """The time slots of the session whose `verify` gave this result, with the same actions.

    Wrong lists of actions have no slots.
    """
    programs, _ = _programs(plan, result.microbatches, result.warm_up, actions)
    walked = _walked(plan, programs, result.microbatches, result.windows)
    rows = [
        dict(zip(ends, program, strict=False))
        for ends, program in zip(walked.ends, programs, strict=True)
    ]
    waits = {wait.rank: wait.action for wait in walked.waits}
    ring = frozenset(wait.rank for wait in cycle(walked.waits)) if waits else frozenset[int]()
    return Grid(tuple(rows), waits, ring, walked.rounds)


def check_microbatches(plan: Plan, microbatches: object) -> int:
    """The number of microbatches of a session, if it is one.

    Raises:
        PlanError: it is no int of at least 0, or more than a session may have.
    """
    if type(microbatches) is not int or microbatches < 0:
        raise PlanError(f"microbatches: {shown(microbatches)}: must be an int of at least 0")
    too_many = too_many_microbatches(microbatches, len(plan.stages))
    if too_many is not None and microbatches != UNTIL_END:
        raise PlanError(f"microbatches: {too_many}")
    return microbatches


def _programs(
    plan: Plan,
    microbatches: int,
    warm_up: Sequence[int],
    actions: Mapping[int, Sequence[Action]] | None,
) -> tuple[list[Sequence[Action]], list[str]]:
    """What each rank does, and what is wrong with it; nothing is left to do of what is wrong."""
    ranks = range(plan.world_size)
    if actions is None:
        return [actions_for(plan, rank, microbatches, warm_up) for rank in ranks], []
    problems = list(action_problems(plan, microbatches, actions))
    return [() if problems else actions.get(rank, ()) for rank in ranks], problems


def _walked(
    plan: Plan, programs: Sequence[Sequence[Action]], count: int, windows: Sequence[int] | None
) -> Walked:
    mode: Mode = "evaluate" if plan.schedule == "forward" else "train"
    return walk(plan, programs, count, windows, mode=mode, synchronise=plan.asynchronous)


def _deadlock(plan: Plan, walked: Walked, windows: Sequence[int]) -> Iterator[str]:
    if walked.waits:
        waits = describe(plan, cycle(walked.waits), windows)
        yield (
            f"deadlock: the ranks wait for each other in a cycle: {waits}{_advice(plan)}. F and B "
            "with a number are the forward and the backward of that microbatch"
        )


def _advice(plan: Plan) -> str:
    by_hand = [stage.name for stage in plan.stages if stage.warm_up is not None]
    texts = []
    if by_hand:
        values = ", ".join(map(str, free_warm_up(plan)))
        texts.append(
            f"leave out the warm_up of {quoted(by_hand)}: {values} is safe, stage by stage"
        )
    if plan.window is not None:
        texts.append(f"leave out window = {plan.window}, or make it larger")
    return f" ({'; and '.join(texts)})" if texts else ""


def _overflow(
    allowed: int, held: Mapping[int, int | None], declared: Mapping[int, int | None]
) -> Iterator[str]:
    """Too much; what is not declared adds to it, and is held against the limit as it comes."""
    for rank, needed in declared.items():
        if needed is not None and needed > allowed:
            more = "" if held[rank] is not None else ", and more whose shapes are not declared"
            text = f"rank {rank} may have to hold {needed} bytes of received messages{more}"
            yield f"{text}; limits.receive_bytes allows {allowed}"


def _joined(problems: Sequence[str]) -> str | None:
    lines = list(problems[:_MOST_PROBLEMS])
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"and {len(problems) - _MOST_PROBLEMS} more")
    return "\n".join(lines) or None
