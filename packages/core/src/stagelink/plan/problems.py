"""What is wrong with a plan, in words: a line per problem, with place, value and near miss."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from stagelink.arguments import shown
from stagelink.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

__all__ = [
    "Problem",
    "did_you_mean",
    "plan_error",
    "quoted",
    "ranges",
    "repeats",
    "shown",
    "unknown",
]

_MOST_PROBLEMS = 100
_MOST_NAMES = 24
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


def quoted(names: Iterable[str], separator: str = ", ") -> str:
    """The names in quotes with a separator between; a long list is cut and counted."""
    every = list(names)
    text = separator.join(shown(name) for name in every[:_MOST_NAMES])
    return text if len(every) <= _MOST_NAMES else f"{text}{separator}… ({len(every)} in all)"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, runs of them as ``first-last``, as in ``1, 4-9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ", ".join("-".join(map(str, run)) for run in runs[:_MOST_NAMES])
    return text if len(runs) <= _MOST_NAMES else f"{text}, …"


def repeats(values: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    """The places of values that came before, each with the place of the first of its kind."""
    first: dict[Hashable, int] = {}
    for place, value in enumerate(values):
        if first.setdefault(value, place) != place:
            yield place, first[value]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A hint at the known name that the word most likely meant; empty where none is close."""
    if not isinstance(word, str):
        return ""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def unknown(kind: str, word: object, known: Iterable[str], *, owner: str = "the plan") -> str:
    """The text for a name that does not exist.

    Args:
        kind: what it should name: ``"stage"``, ``"key"``.
        word: the name found.
        known: the names that exist.
        owner: who has the known names.
    """
    names = list(known)
    hint = did_you_mean(word, names)
    return f"unknown {kind} {shown(word)}{hint}; {owner} has {quoted(names) or 'none'}"


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
