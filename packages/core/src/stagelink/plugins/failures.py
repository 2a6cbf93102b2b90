"""Errors out of a plugin's code as PluginErrors: cause, line where it broke, and remedy."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
import pydantic

from stagelink.errors import PluginError
from stagelink.transport.interrupts import raised_by_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["attempt", "broken", "raised"]

_MOST_CAUSES = 5
_CALLERS = (importlib.__file__, pluggy.__file__, pydantic.__file__, __file__)
_BETWEEN = (
    "<frozen ",  # the machinery of imports
    "<string>",  # what dataclasses make
    *(f"{Path(file).parent}{os.sep}" for file in _CALLERS),
)
"""Where files begin that call a plugin, or are called by one to import something."""


def attempt(
    who: str, what: str, function: Callable[..., Any], *given: object, hint: str = ""
) -> Any:
    """Call code of a plugin.

    Args:
        who: the plugin, in words.
        what: of it is called.
        function: the code.
        given: its arguments.
        hint: a remedy to name, should it raise.

    Raises:
        PluginError: it raised, or would have ended the process.
    """
    try:
        return function(*given)
    except (Exception, SystemExit) as error:
        if raised_by_signal_handler(error):
            raise
        raise broken(who, [raised(what, error) + hint]) from error


def broken(who: str, problems: Sequence[str]) -> PluginError:
    """Make the error for a plugin with problems.

    Args:
        who: the plugin, in words.
        problems: one text each.
    """
    if len(problems) == 1:
        return PluginError(f"{who} cannot be used: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return PluginError(f"{who} cannot be used:{listed}")


def raised(what: str, error: BaseException) -> str:
    """Word an exception of a plugin's, with its causes and the line where it broke.

    Args:
        what: of the plugin raised it.
        error: with its traceback.
    """
    causes = [f"{type(one).__name__}: {one}" for one in _causes(error)]
    return f"{what} raised {', because of '.join(causes)}{_place(error)}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it, as far as a traceback would show them."""
    one: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _place(error: BaseException) -> str:
    """The line where it began, and the plugin's that led there; empty where none is known."""
    *_, first = _causes(error)
    lines = [*_lines(error), *([] if first is error else _lines(first))]
    if isinstance(first, SyntaxError) and first.filename is not None:
        lines.append(f"{first.filename}, line {first.lineno}")
    if not lines:
        return ""
    through = f", reached from {lines[0]}" if lines[0] != lines[-1] else ""
    return f" (in {lines[-1]}{through})"


def _lines(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{frame.filename}, line {frame.lineno}"
        for frame in frames
        if not frame.filename.startswith(_BETWEEN)
    ]
