"""Problems of a plan, or of its launch, in words: a line for each, with place and value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeGuard

from stagelink.errors import PlanError
from stagelink.text import shown

_MOST_PROBLEMS = 100
_BARE_KEY = re.compile(r"[A-Za-z0-9_\-\[\]]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    path: tuple[str | int, ...]  # keys and indices that lead to it in the plan's mapping
    text: str  # what was found there, and what is allowed


def plan_error(where: str, problems: Iterable[Problem], raw: object) -> PlanError:
    """One error for all problems, each of its lines with ``where``, a word for the plan's origin.

    The mapping they were found in, ``raw``, tells a list from a scalar that stood for one.
    """
    found = list(islice(problems, _MOST_PROBLEMS + 1))
    lines = [_line(where, problem, raw) for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        lines.append(f"{where}: and more, beyond these {_MOST_PROBLEMS}")
    return PlanError("\n".join(lines))


def _line(where: str, problem: Problem, raw: object) -> str:
    path = _path_text(problem.path, raw)
    return f"{where}: {path}: {problem.text}" if path else f"{where}: {problem.text}"


def _path_text(path: tuple[str | int, ...], raw: object) -> str:
    text = ""
    for place, item in enumerate(path):
        if isinstance(raw, list | tuple) and isinstance(item, int):
            text += f"[{item}]"
            raw = raw[item]
        elif isinstance(raw, dict) and (item in raw or place == len(path) - 1):
            text += f".{item if _BARE_KEY.fullmatch(str(item)) else shown(item)}"
            raw = raw.get(item)
        # Anything else names no place in the file: the index of a scalar that stands for a list of
        # one, or a tag by which the validator tells the branches of a union apart.
    return text.removeprefix(".")


def check_launch(rank: object, world_size: object, plan_size: int) -> None:
    """Refuse a rank and world size, of any types, that do not fit each other or the plan.

    Raises:
        PlanError: with a line for each thing that is wrong.
    """
    launched = f"launched as rank {shown(rank)} of a world of {shown(world_size)}"
    reasons = [*_reasons(rank, world_size, plan_size)]
    if reasons:
        raise PlanError("\n".join(f"{launched}: {reason}" for reason in reasons))


def _reasons(rank: object, world_size: object, plan_size: int) -> Iterator[str]:
    if not _is_int(rank):
        yield "the rank must be an int"
    if not _is_int(world_size):
        yield "the world size must be an int"
        return
    if world_size < 1:
        yield "a world has at least 1 rank"
    elif world_size > plan_size:
        extra = _span(plan_size, world_size)
        yield f"the plan has {plan_size} ranks, no stage holds rank {extra}"
    elif world_size < plan_size:
        missing = _span(world_size, plan_size)
        yield f"the plan has {plan_size} ranks, nobody would be rank {missing}"
    if _is_int(rank) and rank < 0:
        yield "a rank is not negative"
    elif _is_int(rank) and rank >= world_size >= 1:
        yield f"the ranks of this world are {_span(0, world_size)}"


def _span(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start} to {stop - 1}"


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
