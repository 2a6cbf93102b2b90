"""Problems of a plan in words: a line for each, with place, value and near miss."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from stagelink.errors import PlanError
from stagelink.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Problem",
    "plan_error",
]

_MOST_PROBLEMS = 100
_BARE_KEY = re.compile(r"[A-Za-z0-9_\-\[\]]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: keys and indices that lead to it in the plan's mapping.
        text: what was found there, and what is allowed.
    """

    path: tuple[str | int, ...]
    text: str


def plan_error(where: str, problems: Iterable[Problem], raw: object) -> PlanError:
    """One error for all problems.

    Args:
        where: the file, or another word for where the plan came from; every line begins with it.
        problems: in the order to show; past the first hundred they are not even looked for.
        raw: the mapping they were found in; it tells a list from a scalar that stood for one.
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
