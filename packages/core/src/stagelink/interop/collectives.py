"""Collectives of torch's own groups, whose errors say which rank failed and why.

A gloo operation that loses a peer says "Connection closed by peer" of whichever connection broke,
and one whose peer merely waits for a dead rank says nothing at all. The control plane knows more:
an error is replaced by the failure that it has heard of.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.futures import Future

    Explain = Callable[[RuntimeError], BaseException]
    from contextlib import AbstractContextManager

__all__ = ["ExplainedGroup", "ExplainedWork", "explained", "recorded", "untraced"]


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
    """A span in the trace of a profiler, if one is on; else it costs less than a microsecond."""
    span: AbstractContextManager[None] = _RecordFunctionFast(name, inputs, {})
    return span


_WITHOUT_END = timedelta(0)
"""A wait's time-out as torch writes none: the group's own then holds."""


class ExplainedWork(dist.Work):
    """An operation of another group, in progress.

    Args:
        work: the operation.
        explain: gives the error to raise in place of the group's own; may block for a moment.
    """

    def __init__(self, work: dist.Work, explain: Explain) -> None:
        super().__init__()
        self._work = work
        self._explain = explain

    def wait(self, timeout: timedelta = _WITHOUT_END) -> bool:
        """Block until the operation is done.

        Raises:
            RuntimeError: it failed, or time ran out; or what `explain` gave.
        """
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            raise self._explain(error) from error

    def is_completed(self) -> bool:
        """Whether the operation is done; never blocks."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the operation is done and has not failed; never blocks."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return the group's own exception of a failed operation."""
        return self._work.exception()

    def result(self) -> Any:
        """The operation's tensors, once it is done."""
        return self._work.result()

    def get_future(self) -> Future[Any]:
        """The operation's future; `DistributedDataParallel` waits for this one."""

        def value(done: Future[Any]) -> Any:
            try:
                return done.value()
            except RuntimeError as error:
                raise self._explain(error) from error

        return self._work.get_future().then(value)


def explained(name: str) -> Any:
    """A method that starts the collective ``name`` of ``self.inner``, explained by ``self``.

    A group that leaves a collective to torch's base class has it called with Python's lock held,
    which a thread of gloo's takes while it has the lock that they wait for (seen with torch 2.13).
    """

    def collective(self: Any, *args: Any, **options: Any) -> dist.Work:
        try:
            return ExplainedWork(getattr(self.inner, name)(*args, **options), self.explain)
        except RuntimeError as error:
            raise self.explain(error) from error

    collective.__name__ = name
    collective.__doc__ = f"Torch's own ``{name}``."
    return untraced(collective)


class ExplainedGroup(dist.ProcessGroup):
    """A process group whose collectives another group carries out, with errors explained.

    Attributes:
        inner: the group that carries them out.
        explain: the subclass's: gives the error to raise in place of one of the inner group's;
            may block for a moment.
    """

    inner: dist.ProcessGroup
    explain: Explain

    allgather = explained("allgather")
    allgather_into_tensor_coalesced = explained("allgather_into_tensor_coalesced")
    allreduce = explained("allreduce")
    allreduce_coalesced = explained("allreduce_coalesced")
    alltoall_base = explained("alltoall_base")
    barrier = explained("barrier")
    broadcast = explained("broadcast")
    monitored_barrier = explained("monitored_barrier")
    reduce_scatter = explained("reduce_scatter")
    reduce_scatter_tensor_coalesced = explained("reduce_scatter_tensor_coalesced")

    def _carry_out_by(self, device: str, kind: Any, backend: Any) -> None:
        """Have a backend carry out the collectives of a kind of device."""
        for group in (self, self.inner):
            group._register_backend(torch.device(device), kind, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
