"""Checks of the arguments of public calls: one table of kinds, and one sentence for each."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

from stagelink.errors import UsageError
from stagelink.text import shown

P = ParamSpec("P")
T = TypeVar("T")

_MOST_S = 1e300
"""Beyond the life of anything; whole numbers beyond it do not fit a float."""


class Expected(NamedTuple):
    """Condition on an argument."""

    words: str  # the end of "must be …"
    # whether a value, which may be any object, is that; must not raise
    accepts: Callable[[Any], bool]


def _is_seconds(value: Any) -> bool:
    if is_a(value, bool) or not is_a(value, Real):
        return False
    return bool(0 <= value < _MOST_S or value == math.inf)


SECONDS = Expected("a number of seconds, at least 0", _is_seconds)
COUNT = Expected("a whole number from 0", lambda value: type(value) is int and value >= 0)
FLAG = Expected("True or False", lambda value: type(value) is bool)
NAME = Expected("a string", lambda value: isinstance(value, str))
PATH = Expected("a path", lambda value: isinstance(value, (str, os.PathLike)))
MAPPING = Expected("a mapping", lambda value: isinstance(value, Mapping))
ITERABLE = Expected("iterable", lambda value: isinstance(value, Iterable))
CALLABLE = Expected("callable", callable)


def instance(kind: type | tuple[type, ...], words: str) -> Expected:
    """An object of a class, or of one of several."""
    return Expected(words, lambda value: isinstance(value, kind))


def is_a(value: object, kind: type) -> bool:
    """Like ``isinstance``, for a value whose annotation promises it: callers may break it."""
    return isinstance(value, kind)


def optional(expected: Expected) -> Expected:
    """Allow None beside what an expectation accepts."""
    accepts = expected.accepts
    return Expected(f"{expected.words}, or None", lambda value: value is None or accepts(value))


def expect(call: str, name: str, value: object, expected: Expected) -> None:
    """Refuse a value that is not what an argument must be.

    Raises:
        UsageError: it is not; the text has the call, the argument, the value and its type.
    """
    if not expected.accepts(value):
        raise UsageError(
            f"{call}: {name} must be {expected.words}, not {shown(value)} "
            f"(of type {type(value).__name__!r})"
        )


def given_seconds(call: str, name: str, value: float | None, otherwise: float) -> float:
    """Return the seconds that an argument says, or a default where it is None.

    Raises:
        UsageError: as `expect`.
    """
    if value is None:
        return otherwise
    expect(call, name, value, SECONDS)
    return value


def checked(**expected: Expected) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a callable so that the named arguments, where given, are checked before it runs.

    For calls that are not made for every message: it costs some microseconds.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = [*inspect.signature(function).parameters]
        places = [(name, parameters.index(name), kind) for name, kind in expected.items()]

        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            for name, place, kind in places:
                if name in options:
                    expect(function.__qualname__, name, options[name], kind)
                elif place < len(args):
                    expect(function.__qualname__, name, args[place], kind)
            return function(*args, **options)

        return call

    return decorate
