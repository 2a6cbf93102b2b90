"""Rendezvous of PipeDream's ranks: the store, the default process group, the maps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store

from stagelink.control.launch import StoreAddress
from stagelink.control.meeting import gloo_address_by
from stagelink.control.opening import open_store
from stagelink.control.rendezvous import Rendezvous
from stagelink.control.store import store_host
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, DeadlineError, StagelinkError, UsageError
from stagelink.exchange.handler import Handler
from stagelink.interop.collectives import ExplainedGroup, explained
from stagelink.interop.pipedream.topology import Declaration
from stagelink.plan.document import Control
from stagelink.plan.problems import check_launch
from stagelink.transport.host import server_id
from stagelink.transport.interrupts import stops_caller

_AFTER_FAILURE_S = 1.0


class Meeting:
    """Exchange among the ranks of one job before they are connected.

    Making one blocks until all ranks have made theirs. Nothing is written to the environment. The
    arguments are those of `CommunicationHandler`, and seconds for the others to come.

    Raises:
        PlanError, UsageError, ConnectError: as `CommunicationHandler`.
        RankTakenError: another process has this rank.
    """

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        backend: str | None,
        connect_deadline_s: float,
    ) -> None:
        check_launch(rank, world_size, world_size)
        if dist.is_initialized():
            raise UsageError(
                f"rank {rank}: the default process group exists already; PipeDream's handler "
                "makes it, so nothing else may have done so before"
            )
        self._rank, self._world_size = rank, world_size
        self._patience_s = connect_deadline_s
        address = _address(master_addr, master_port)
        deadline = Deadline(connect_deadline_s)
        self._client = open_store(address, rank, world_size, deadline)
        self._rendezvous = Rendezvous(
            self._client, "pipedream", rank, world_size, patience_s=connect_deadline_s
        )
        try:
            self._rendezvous.enter(deadline)
            # For those that connect.
            self.store: Store = self._rendezvous.pair_store("handler")
            self._make_group(backend, deadline)
        except BaseException:
            self._rendezvous.leave(Deadline(_AFTER_FAILURE_S), hosts_store=rank == 0)
            raise
        self._group = dist.group.WORLD
        self._told: int | None = None

    def _make_group(self, backend: str | None, deadline: Deadline) -> None:
        """The default process group, with torch's own time limit for what comes later."""
        store = self._rendezvous.pair_store("default group")

        def make(_: Store) -> Exception | None:
            try:
                dist.init_process_group(
                    backend_for(backend), store=store, rank=self._rank, world_size=self._world_size
                )
            except Exception as error:  # raised below: it is no answer of the store's
                return error
            return None

        try:
            # On the client's thread: torch would wait for half an hour, and not hear a signal.
            error = self._client.call(make, deadline)
        except ConnectError as late:
            if stops_caller(late):
                raise
            raise ConnectError(
                f"rank {self._rank}: the default process group was not made, though all ranks "
                f"had come: {late}"
            ) from late
        if error is not None:
            raise error

    def exchange(self, declaration: Declaration) -> list[Declaration]:
        """Tell this rank's maps and wait for those of all others; who has not come is named."""
        deadline = Deadline(self._patience_s)
        self._rendezvous.publish("declaration", asdict(declaration))
        found = self._rendezvous.read("declaration", [*range(self._world_size)], deadline)
        return [Declaration.from_json(found[rank]) for rank in range(self._world_size)]

    def tell_warm_up(self, warm_up: int) -> None:
        """Leave word of this rank's warm-up for a rank that looks for the reason of a hang."""
        if warm_up != self._told:
            self._told = warm_up
            self._rendezvous.tell("warm-up", warm_up)

    def warm_up(self, stages: Sequence[Sequence[int]]) -> list[int | None]:
        """The warm-up that ranks of each stage left word of; None where none did."""
        said = self._rendezvous.told("warm-up", Deadline(_AFTER_FAILURE_S))
        return [next((said[rank] for rank in ranks if rank in said), None) for ranks in stages]

    def leave(self, seconds: float, *, destroy_group: bool) -> None:
        """Give everything back, the default process group too if it is to go and is still ours.

        Rank 0 waits so long for the others, since it holds the store.
        """
        explain_by(None)
        if destroy_group and dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
        self._rendezvous.leave(Deadline(seconds), hosts_store=self._rank == 0)


def _address(master_addr: object, master_port: object) -> StoreAddress:
    given = f"master_addr={master_addr!r}"
    if isinstance(master_addr, str) and "://" in master_addr:
        return StoreAddress.parse(master_addr, "master_addr")
    return StoreAddress.of(master_addr, master_port, given, f"master_port={master_port!r}")


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
    """Gloo's group as torch makes it, for CPU and CUDA tensors, with errors explained."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._make_gloo(given, given.store, _host_address(given))
        for device in ("cpu", "cuda"):
            self._carry_out_by(device, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        _groups.add(self)

    recv = explained("recv")
    send = explained("send")

    def getBackendName(self) -> str:
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


def _host_address(given: Any) -> str:
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
        group._break_off()
