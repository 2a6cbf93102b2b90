"""Wrong values for any argument, and the judgement of what a call makes of them."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stagelink.errors import StagelinkError

__all__ = ["WRONG", "Call", "complaint", "variants"]

_SLOW_S = 10.0
"""Far above what any of these calls takes, and far below a hang."""


class Foreign:
    """An object of somebody else's, with nothing that a call could expect of it."""

    __slots__ = ()


class Hostile:
    """An object whose every operator raises, as an uninitialised proxy's would."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a foreign object has no {name!r}")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("a foreign object is compared with nothing")

    def __bool__(self) -> bool:
        raise RuntimeError("a foreign object is neither true nor false")

    __hash__ = None  # type: ignore[assignment]


WRONG: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "an empty string": str,
    "a string": lambda: "x",
    "bytes": lambda: b"\xff",
    "an empty list": list,
    "an empty dict": dict,
    "a list of lists": lambda: [[]],
    "minus one": lambda: -1,
    "a huge number": lambda: 2**80,
    "a number beyond all floats": lambda: 10**400,
    "a fraction": lambda: 0.5,
    "nan": lambda: math.nan,
    "true": lambda: True,
    "a path": lambda: Path("nowhere"),
    "a tensor": lambda: torch.ones(2),
    "a type": lambda: int,
    "a function": lambda: len,
    "a foreign object": Foreign,
    "a hostile object": Hostile,
}
"""What every argument is replaced by in turn: nothing, empty, negative, huge, of a wrong type."""


@dataclass(frozen=True)
class Call:
    """A public callable, and arguments with which it works.

    Attributes:
        name: as a reader would look it up, from what ``stagelink`` offers.
        function: called with a context of the sweep's, and the arguments by name.
        good: its arguments, each made anew for every call.
        fits: names of `WRONG` values that are right here, and do what they say.
    """

    name: str
    function: Callable[..., Any]
    good: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    fits: Collection[str] = ()

    def __str__(self) -> str:
        return self.name

    def arguments(self) -> dict[str, Any]:
        """Those with which it works."""
        return {name: make() for name, make in self.good.items()}


def variants(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every argument with every wrong value: both in words, and all arguments."""
    for name in call.good:
        for what, make in WRONG.items():
            if what in call.fits:
                continue
            yield f"{call} with {name} = {what}", {**call.arguments(), name: make()}


def complaint(call: Callable[[], Any]) -> str | None:
    """What is wrong with the way in which a call ends; None where nothing is.

    It may return, raise a library error, or raise a TypeError of the call itself: one that Python
    raises before the callable's first line. It may not take long.
    """
    began = time.monotonic()
    try:
        call()
    except StagelinkError:
        pass
    except TypeError as error:
        inner = inspect.getinnerframes(error.__traceback__)  # type: ignore[arg-type]
        if len(inner) > 2:  # this function, and what makes the call
            return _told(error)
    except Exception as error:
        return _told(error)
    seconds = time.monotonic() - began
    return f"took {seconds:.1f} s" if seconds > _SLOW_S else None


def _told(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "nowhere" if trace is None else trace.tb_frame.f_code.co_qualname
    return f"{type(error).__name__}: {str(error)[:150]!r} from {where}"
