"""Helpers for error texts: names in quotes, ranges of numbers, near misses."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Hashable, Iterable, Iterator

_MOST_NAMES = 24
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def quoted(names: Iterable[str], separator: str = ", ") -> str:
    """Join names in quotes with a separator; a long list is cut and counted."""
    every = list(names)
    text = separator.join(shown(name) for name in every[:_MOST_NAMES])
    return text if len(every) <= _MOST_NAMES else f"{text}{separator}… ({len(every)} in all)"


def ranges(numbers: Iterable[int]) -> str:
    """Join ascending numbers, runs of them as ``first-last``: ``1, 4-9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ", ".join("-".join(map(str, run)) for run in runs[:_MOST_NAMES])
    return text if len(runs) <= _MOST_NAMES else f"{text}, …"


def repeats(values: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield the index of each repeated value, with the index of its first occurrence."""
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield index, first[value]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Hint at the known name that a word most likely meant; empty where none is close."""
    if not isinstance(word, str):
        return ""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def unknown(kind: str, word: object, known: Iterable[str], *, owner: str = "the plan") -> str:
    """Word an unknown name of a kind, with near misses and the names that its owner has."""
    names = list(known)
    hint = did_you_mean(word, names)
    return f"unknown {kind} {shown(word)}{hint}; {owner} has {quoted(names) or 'none'}"


def shown(value: object) -> str:
    """Shorten a value's repr where it is long, deep or circular."""
    try:
        return _repr.repr(value)
    except ValueError:  # an int of more digits than Python agrees to print
        return f"<{type(value).__name__}>"


def kind(value: object) -> str:
    """A value's kind in words, for an error."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return "None" if value is None else f"a {type(value).__qualname__}"
