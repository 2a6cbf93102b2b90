"""Torch's own tools and a group's calls: torch.compile and the profiler."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["recorded", "untraced"]

P = ParamSpec("P")
T = TypeVar("T")


def untraced(call: Callable[P, T]) -> Callable[P, T]:
    """A call that torch.compile leaves out of its graphs, as it does those of gloo, which are C++.

    Without it the call is traced, and fails at the first attribute of the group.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(call)
    def plain(*args: P.args, **options: P.kwargs) -> T:
        if not disabled:
            # `torch.compiler.disable` imports the compiler, which takes a second; as long as
            # nothing else has, nothing is compiled.
            if "torch._dynamo" not in sys.modules:
                return call(*args, **options)
            disabled.append(torch.compiler.disable(call))
        return disabled[0](*args, **options)

    return plain


def recorded(name: str, *inputs: object) -> AbstractContextManager[None]:
    """A span in the trace of a profiler, if one is on; else it costs less than a microsecond.

    Args:
        name: of the span.
        inputs: tensors, for their shapes, and numbers.
    """
    span: AbstractContextManager[None] = _RecordFunctionFast(name, inputs, {})
    return span
