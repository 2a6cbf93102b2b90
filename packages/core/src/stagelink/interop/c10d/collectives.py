"""Collectives of a group, which torch's own groups carry out: gloo, on CUDA tensors nccl."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from stagelink.errors import ConnectError
from stagelink.interop.collectives import ExplainedGroup
from stagelink.transport.gloo_groups import THREADS, break_off, gloo_group

__all__ = ["WithCollectives"]

_BREAK_S = 2.0
_LAZY = "TORCH_GLOO_LAZY_INIT"
_YES = frozenset({"1", "t", "true", "y", "yes"})


class WithCollectives(ExplainedGroup):
    """A process group that has its collectives from others: gloo, on CUDA tensors nccl."""

    _breaker: threading.Thread | None = None

    def _add_collectives(
        self, given: Any, store: Store, ranks: Sequence[int], address: str
    ) -> None:
        """Make the groups that carry them out; blocks until all ranks have come.

        Args:
            given: what torch says of the group.
            store: one that only these ranks share for this.
            ranks: what the group's ranks are called.
            address: at which gloo's others reach this rank.

        Raises:
            ConnectError: some have not come within the group's time-out; they are named.
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
        rank, size = given.group_rank, given.group_size
        gloo = gloo_group(
            store,
            rank,
            size,
            address=address,
            timeout=given.timeout,
            threads=THREADS,
            lazy=os.environ.get(_LAZY, "").lower() in _YES,
        )
        # Torch sets a group's time-out there, and messages keep to the same.
        self._options = gloo.options
        self._gloo = gloo
        self.inner = dist.ProcessGroup(store, rank, size)
        self._carry_out_by("cpu", kinds.GLOO, _checked(gloo, given, store))
        # A rank that has sent may leave before the others receive, and would break off gloo's
        # connecting for those that are still at it.
        self.barrier().wait()
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = given.timeout
            store = dist.PrefixStore("cuda", store)
            nccl = dist.ProcessGroupNCCL(store, rank, size, options)
            self._carry_out_by("cuda", kinds.NCCL, _checked(nccl, given, store))

    def _break_collectives(self) -> None:
        """End the collectives that wait in gloo, as those after a death; returns at once."""
        self._breaker = break_off(self._gloo, self.rank(), self.size())

    def _finish_breaking(self) -> None:
        """Wait for what `_break_collectives` has started; it takes a moment."""
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
