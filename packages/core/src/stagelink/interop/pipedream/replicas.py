"""The process groups of PipeDream's replicas: gloo's, which say which rank died."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from stagelink.control.listening import gloo_address_by, store_host
from stagelink.errors import DeadlineError, StagelinkError
from stagelink.interop.collectives import ExplainedGroup, explained
from stagelink.plan.document import Control
from stagelink.transport.gloo_groups import THREADS, break_off, gloo_group
from stagelink.transport.host import server_id

if TYPE_CHECKING:
    from stagelink.exchange.handler import Handler

__all__ = ["BACKEND", "backend_for", "explain_by"]

BACKEND = "stagelink_gloo"
"""What ``torch.distributed.get_backend()`` says of such a group."""

_CAUSE_S = 2.0
_groups: WeakSet[_GlooGroup] = WeakSet()
_comm: Handler | None = None


def explain_by(comm: Handler | None) -> None:
    """Explain errors of all groups by this handler, whose failure breaks off what is in progress.

    None: from now on by none.
    """
    global _comm  # noqa: PLW0603 - as torch's own default group: there is one at a time
    _comm = comm
    if comm is not None:
        comm.on_failure(_break_all_off)


class _GlooGroup(ExplainedGroup):
    """Gloo's group as torch makes it, for CPU and CUDA tensors, with errors explained.

    Args:
        given: what torch says of the group.
    """

    def __init__(self, given: Any) -> None:
        # Torch's stubs know another form only, whose result cannot be subclassed.
        super().__init__(given.group_rank, given.group_size)  # type: ignore[call-arg]
        kind = dist.ProcessGroup.BackendType.GLOO
        self.gloo: Any = gloo_group(
            given.store,
            given.group_rank,
            given.group_size,
            address=_address(given),
            timeout=given.timeout,
            threads=THREADS,
        )
        self.inner = dist.ProcessGroup(given.store, given.group_rank, given.group_size)
        for device in ("cpu", "cuda"):
            self._carry_out_by(device, kind, self.gloo)
        _groups.add(self)

    recv = explained("recv")
    send = explained("send")

    def getBackendName(self) -> str:
        """`BACKEND`."""
        return BACKEND

    def explain(self, error: RuntimeError) -> BaseException:
        """Give what the control plane knows of a failure; waits a moment for it to be told."""
        comm = _comm
        if comm is None:
            return error
        try:
            comm.wait(Future(), "a collective of the replicas", _CAUSE_S)
        except DeadlineError:
            return error
        except StagelinkError as cause:
            return cause
        return error  # unreachable: nothing completes the future


def _address(given: Any) -> str:
    """This host's address in the group; blocks until all members have said on which host they are.

    Torch's own choice is what the host's name resolves to, which on many hosts is loopback.
    """
    mine = server_id()
    given.store.set(f"host/{given.group_rank}", mine)
    keys = [f"host/{member}" for member in range(given.group_size)]
    given.store.wait(keys, given.timeout)
    elsewhere = any(given.store.get(key).decode() != mine for key in keys)
    return gloo_address_by(Control(), store_host(given.store), elsewhere=elsewhere)


def backend_for(backend: str | None) -> str | None:
    """The name to give ``init_process_group`` in place of PipeDream's ``backend``."""
    if backend != "gloo" and (backend is not None or torch.cuda.is_available()):
        return backend  # nccl, mpi: as torch makes them
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, lambda given, _: _GlooGroup(given), extended_api=True, devices=["cpu", "cuda"]
        )
    return BACKEND


def _break_all_off(_: StagelinkError) -> None:
    for group in tuple(_groups):
        break_off(group.gloo, group.rank(), group.size())
