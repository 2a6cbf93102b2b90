"""Collectives of torch's own groups, whose errors say which rank failed and why.

A gloo operation that loses a peer says "Connection closed by peer" of whichever connection broke,
and one whose peer merely waits for a dead rank says nothing at all. The control plane knows more:
an error is replaced by the failure that it has heard of.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler_here
from torch._C._profiler import _RecordFunctionFast
from torch.distributed import Store
from torch.futures import Future

from stagelink.errors import ConnectError
from stagelink.transport.gloo_groups import THREADS, break_off, gloo_group

_BREAK_S = 2.0
_LAZY = "TORCH_GLOO_LAZY_INIT"
_YES = frozenset({"1", "t", "true", "y", "yes"})

Explain = Callable[[RuntimeError], BaseException]
P = ParamSpec("P")
T = TypeVar("T")


def untraced(call: Callable[P, T]) -> Callable[P, T]:
    """A call that torch.compile leaves out of its graphs, as it does those of gloo, which are C++.

    Without it the call is traced, and fails at the first attribute of the group.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(call)
    def plain(*args: P.args, **options: P.kwargs) -> T:
        # Not `torch.compiler.disable` for every call: it imports the compiler, which takes a
        # second, and then costs as much as a small message's way to the socket.
        if compiler_here() is None:
            return call(*args, **options)
        if not disabled:
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
    """An operation of another group, in progress, with its errors explained."""

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
    _breaker: threading.Thread | None = None

    def __init__(self, given: Any) -> None:
        # Torch's stubs know another form only, whose result cannot be subclassed.
        super().__init__(given.group_rank, given.group_size)  # type: ignore[call-arg]

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

    def _make_gloo(self, given: Any, store: Store, address: str, *, lazy: bool = False) -> None:
        """Make gloo's group, which others reach at an address; blocks until all have come."""
        rank, size = given.group_rank, given.group_size
        self._gloo = gloo_group(
            store, rank, size, address=address, timeout=given.timeout, threads=THREADS, lazy=lazy
        )
        self.inner = dist.ProcessGroup(store, rank, size)

    def _break_off(self) -> None:
        """End the collectives that wait in gloo, as those after a death; returns at once."""
        self._breaker = break_off(self._gloo, self.rank(), self.size())


class WithCollectives(ExplainedGroup):
    """A process group that has its collectives from others: gloo, on CUDA tensors nccl."""

    def _add_collectives(
        self, given: Any, store: Store, ranks: Sequence[int], address: str
    ) -> None:
        """Make the groups that carry them out; blocks until all have come, or names who has not.

        Only these ranks share the store, for this. Gloo's others reach this rank at the address.
        """
        came = dist.PrefixStore("came", store)
        came.set(str(given.group_rank), "")
        try:
            self._make(given, store, address)
        except RuntimeError as error:
            missing = _missing(came, ranks)
            if not missing:
                raise
            me, seconds = ranks[given.group_rank], given.timeout.total_seconds()
            raise ConnectError(
                f"rank {me}: missing: {', '.join(map(str, missing))}: no part in making the group "
                f"of ranks {', '.join(map(str, ranks))} within {seconds:g} s; are they alive, and "
                "do all ranks make their groups in the same order?"
            ) from error

    def _make(self, given: Any, store: Store, address: str) -> None:
        kinds = dist.ProcessGroup.BackendType
        lazy = os.environ.get(_LAZY, "").lower() in _YES
        self._make_gloo(given, store, address, lazy=lazy)
        # Torch sets a group's time-out there, and messages keep to the same.
        self._options = self._gloo.options
        self._carry_out_by("cpu", kinds.GLOO, _checked(self._gloo, given, store))
        # A rank that has sent may leave before the others receive, and would break off gloo's
        # connecting for those that are still at it.
        self.barrier().wait()
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = given.timeout
            store = dist.PrefixStore("cuda", store)
            nccl = dist.ProcessGroupNCCL(store, given.group_rank, given.group_size, options)
            self._carry_out_by("cuda", kinds.NCCL, _checked(nccl, given, store))

    def _finish_breaking(self) -> None:
        """Wait for what `_break_off` has started; it takes a moment."""
        if self._breaker is not None:
            self._breaker.join(_BREAK_S)

    @property
    def _timeout(self) -> timedelta:
        """How long a message may take; what torch's own `_set_pg_timeout` sets is the same."""
        found: timedelta = self._options._timeout
        return found


def _checked(backend: Any, given: Any, store: Store) -> Any:
    """A backend for collectives; where a program is debugged, ranks compare their calls first."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return backend
    return dist.distributed_c10d._create_process_group_wrapper(
        backend, given.group_id, store, given.group_rank, given.group_size, given.timeout
    )


def _missing(came: Store, ranks: Sequence[int]) -> list[int]:
    try:
        return [rank for place, rank in enumerate(ranks) if not came.check([str(place)])]
    except RuntimeError:  # the store is gone: nobody knows
        return []
