"""How the ranks of PipeDream's runtime meet: the store, the default process group, the maps."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from stagelink.control.rendezvous import Rendezvous, open_store
from stagelink.errors import PlanError, UsageError
from stagelink.interop.pipedream.line import Account
from stagelink.interop.pipedream.replicas import backend_for, explain_by
from stagelink.plan.launch import launch_problems
from stagelink.transport.contract import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

__all__ = ["Meeting"]

_CONNECT_S = 600.0


class Meeting:
    """What the ranks of one job have in common before they are connected.

    Making one blocks until all ranks have made theirs. Nothing is written to the environment.

    Args:
        master_addr: where rank 0 is, or a store's address in the form ``file:///path``.
        master_port: a free port there; rank 0 holds it.
        rank: this rank.
        world_size: how many there are.
        backend: of the default process group, as torch takes it.

    Attributes:
        store: the job's store, for those that connect.

    Raises:
        PlanError: rank and world size do not fit each other.
        UsageError: the default process group exists already.
        ConnectError: rank 0 cannot hold the port, or does not answer there.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, backend: str | None
    ) -> None:
        problems = list(launch_problems(rank, world_size, world_size))
        if problems:
            raise PlanError("\n".join(problems))
        if dist.is_initialized():
            raise UsageError(
                f"rank {rank}: the default process group exists already; PipeDream's handler "
                "makes it, so nothing else may have done so before"
            )
        self._rank, self._world_size = rank, world_size
        address = _address(master_addr, master_port)
        self.store: Store = open_store(address, rank, world_size, Deadline(_CONNECT_S))
        self._keys = dist.PrefixStore("pipedream", self.store)
        dist.init_process_group(
            backend_for(backend),
            store=dist.PrefixStore("default group", self.store),
            rank=rank,
            world_size=world_size,
        )
        self._group = dist.group.WORLD
        self._told: int | None = None

    def exchange(self, account: Account) -> list[Account]:
        """Tell this rank's maps and wait for those of all others.

        Raises:
            ConnectError: some have not come; they are named.
            RankTakenError: another process has this rank.
        """
        rendezvous = Rendezvous(self._keys, "maps", self._rank, self._world_size)
        rendezvous.publish("account", account.to_json())
        deadline = Deadline(_CONNECT_S)
        found = rendezvous.read("account", [*range(self._world_size)], deadline)
        return [Account.from_json(found[rank]) for rank in range(self._world_size)]

    def tell_warm_up(self, warm_up: int) -> None:
        """Leave word of this rank's warm-up for a rank that looks for the reason of a hang."""
        if warm_up != self._told:
            self._told = warm_up
            with contextlib.suppress(RuntimeError):  # rank 0 may be gone, and with it the store
                self._keys.set(f"warm-up/{self._rank}", str(warm_up))

    def warm_up(self, stages: Sequence[Sequence[int]]) -> list[int | None]:
        """The warm-up that ranks of each stage left word of; None where none did."""
        found: list[int | None] = []
        for ranks in stages:
            said = [self._look(rank) for rank in ranks]
            found.append(next((value for value in said if value is not None), None))
        return found

    def _look(self, rank: int) -> int | None:
        key = f"warm-up/{rank}"
        with contextlib.suppress(RuntimeError):
            if self._keys.check([key]):
                return int(self._keys.get(key))
        return None

    def leave(self, seconds: float, *, destroy_group: bool) -> None:
        """Give everything back; rank 0 waits so long for the others, since it holds the store.

        Args:
            seconds: to wait.
            destroy_group: whether the default process group goes as well, if it is still ours.
        """
        explain_by(None)
        if destroy_group and dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
        others = [f"left/{rank}" for rank in range(self._world_size) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            self._keys.set(f"left/{self._rank}", "")
            if self._rank == 0 and others:
                self._keys.wait(others, timedelta(seconds=seconds))


def _address(master_addr: str, master_port: int) -> str:
    if "://" in master_addr:
        return master_addr
    host = f"[{master_addr}]" if ":" in master_addr else master_addr
    return f"tcp://{host}:{master_port}"
