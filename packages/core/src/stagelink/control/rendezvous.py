"""How ranks find each other: claims, addresses, the job's token and the abort key in a c10d store.

The store is needed while connecting, and while a pair of ranks opens its links, at whatever time
it does; afterwards only the abort key and the leaving of ranks are kept in it, and nothing that
moves tensors touches it. Keys carry run id, restart count, plan name and generation, so that a
second `stagelink.connect` on the same store meets no key of the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, TCPStore

from stagelink.control.listening import store_host
from stagelink.errors import ConnectError, PlanError, RankTakenError

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.transport.contract import Deadline

__all__ = ["Launch", "Rendezvous", "open_store"]

_PAUSE_S = (0.002, 0.05)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Launch:
    """Who this process is in its job.

    Attributes:
        rank: its rank.
        world_size: how many ranks there are.
        run_id: name of the run; two runs on one store need two names.
        store: an open store, or where to find one (``tcp://host:port``, ``file:///path``).
    """

    rank: Any
    world_size: Any
    run_id: str
    store: Store | str

    @classmethod
    def resolve(
        cls,
        rank: int | None,
        world_size: int | None,
        store: Store | str | None,
        run_id: str | None,
        environ: Mapping[str, str] = os.environ,
    ) -> Launch:
        """Arguments where given, else what torchrun put into the environment, which is only read.

        Raises:
            PlanError: something is in neither place, or the environment's value is no number.
        """
        return cls(
            rank=_number(environ, "RANK", "rank") if rank is None else rank,
            world_size=(
                _number(environ, "WORLD_SIZE", "world_size") if world_size is None else world_size
            ),
            run_id=_run_id(environ) if run_id is None else run_id,
            store=_address(environ) if store is None else store,
        )


def _number(environ: Mapping[str, str], key: str, argument: str) -> int:
    text = environ.get(key)
    if text is None:
        raise PlanError(
            f"connect: no {argument}: pass {argument}=…, or start the ranks with 'stagelink run' "
            f"or torchrun, which set {key}"
        )
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"connect: {key}={text!r} in the environment is no whole number") from None


def _run_id(environ: Mapping[str, str]) -> str:
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{environ.get('TORCHELASTIC_RUN_ID', '')}.{restart}"


def _address(environ: Mapping[str, str]) -> str:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None or port is None:
        raise PlanError(
            "connect: no store: pass store= (a c10d store, 'tcp://host:port' or 'file:///path'), "
            "or start the ranks with 'stagelink run' or torchrun, which set MASTER_ADDR and "
            "MASTER_PORT"
        )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'agent' if agent else 'tcp'}://{host}:{port}"


def open_store(where: Store | str, rank: int, world_size: int, deadline: Deadline) -> Store:
    """The store at an address; rank 0 hosts a ``tcp`` one. An open store is passed through.

    Raises:
        PlanError: the address has a form that is not known.
        ConnectError: the port is in use (rank 0), or nobody answers there (the others).
    """
    if not isinstance(where, str):
        return where
    parts = urlsplit(where)
    if parts.scheme == "file" and parts.path:
        return FileStore(parts.path, world_size)
    if parts.scheme not in ("tcp", "agent") or not parts.hostname or not parts.port:
        raise PlanError(
            f"connect: store {where!r} is no address; known forms: tcp://host:port, file:///path"
        )
    hosts = parts.scheme == "tcp" and rank == 0
    host, port = parts.hostname, parts.port
    patience = timedelta(seconds=max(deadline.remaining_s, 0.001))

    def make() -> Store:
        return TCPStore(host, port, None, hosts, patience, wait_for_workers=False)

    try:
        # In a thread of its own, since torch's constructor cannot be interrupted.
        return _in_thread(make, deadline)
    except (RuntimeError, TimeoutError) as error:
        raise ConnectError(
            _store_failure(host, port, deadline, hosts=hosts, error=error)
        ) from error


def _store_failure(
    host: str, port: int, deadline: Deadline, *, hosts: bool, error: Exception
) -> str:
    if hosts:
        return (
            f"rank 0 cannot host the store at {host}:{port} ({str(error).splitlines()[0]}); "
            "another job may hold the port: choose another one"
        )
    return (
        f"no answer from the store at {host}:{port} within {deadline.seconds:g} s; "
        "is rank 0 up there?"
    )


def _in_thread(make: Callable[[], _T], deadline: Deadline) -> _T:
    outcome: list[_T] = []
    failure: list[Exception] = []

    def work() -> None:
        try:
            outcome.append(make())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="stagelink-store", daemon=True)
    thread.start()
    thread.join(deadline.remaining_s)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]


def _own_client(store: PrefixStore) -> PrefixStore:
    clone: PrefixStore = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone


class Rendezvous:
    """One rank's view of the keys of one generation of one pipeline.

    Args:
        store: the job's store.
        run: run id and plan name.
        rank: this rank.
        world_size: how many ranks there are.

    Attributes:
        store_host: host of the store, as this rank calls it; None where the store has none.

    Raises:
        RankTakenError: another process holds this rank in this run.
    """

    def __init__(self, store: Store, run: str, rank: int, world_size: int) -> None:
        self.store_host = store_host(store)
        self._root = PrefixStore(f"stagelink/{run}", store)
        self._rank = rank
        self._world_size = world_size
        # Every rank counts the generations that it has left, so all agree on the next one's
        # number.
        self.generation = self._root.add(f"left/{rank}", 0)
        self._keys = self._of_generation(self._root)
        self._claim(run)

    def _of_generation(self, store: Store) -> PrefixStore:
        return PrefixStore(f"{self.generation}", store)

    def _claim(self, run: str) -> None:
        mine = f"{socket.gethostname()} process {os.getpid()} {secrets.token_hex(8)}"
        holder = self._keys.compare_set(f"claim/{self._rank}", "", mine).decode()
        if holder != mine:
            raise RankTakenError(
                f"rank {self._rank} of run {run!r} is taken by {holder.rsplit(' ', 1)[0]}; "
                "start each rank once, and give a run that reuses a store another run_id"
            )

    def token(self) -> str:
        """The job's secret, made by whoever asks first."""
        return self._keys.compare_set("token", "", secrets.token_hex(16)).decode()

    def publish(self, kind: str, address: Mapping[str, Any]) -> None:
        """Tell the others where this rank listens for a kind of connection."""
        self._keys.set(f"{kind}/{self._rank}", json.dumps(address))

    def read(self, kind: str, ranks: list[int], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """What the given ranks published; waits for them, in steps that a signal can interrupt.

        Raises:
            ConnectError: some have not come by the deadline (named), or a rank has failed
                meanwhile.
        """
        found: dict[int, dict[str, Any]] = {}
        pause = _PAUSE_S[0]
        while True:
            for rank in ranks:
                if rank not in found and self._keys.check([f"{kind}/{rank}"]):
                    found[rank] = json.loads(self._keys.get(f"{kind}/{rank}"))
            if len(found) == len(ranks):
                return found
            self._check_connecting([rank for rank in ranks if rank not in found], deadline)
            time.sleep(min(pause, deadline.remaining_s))
            pause = min(2 * pause, _PAUSE_S[1])

    def _check_connecting(self, missing: list[int], deadline: Deadline) -> None:
        if failure := self.failure():
            raise ConnectError(
                f"rank {self._rank}: another rank failed while connecting: {failure}"
            )
        if deadline.passed:
            raise ConnectError(
                f"rank {self._rank}: no answer from rank {', '.join(map(str, missing))} within "
                f"{deadline.seconds:g} s; are all ranks started, with the same store, run id and "
                "plan name?"
            )

    def client(self) -> Rendezvous:
        """The same keys by a store client of its own, for another thread.

        A store's client is locked while one thread waits in it.
        """
        twin = object.__new__(Rendezvous)
        twin.__dict__.update(self.__dict__)
        twin._root = _own_client(self._root)
        twin._keys = twin._of_generation(twin._root)
        return twin

    def pair_store(self, name: str) -> Store:
        """A store client of its own under a prefix for one pair of ranks."""
        return PrefixStore(f"pair/{name}", self._of_generation(_own_client(self._root)))

    def tell_failure(self, text: str) -> None:
        """Leave the cause of a failure for ranks that no connection reaches; the first stays."""
        self._keys.compare_set("abort", "", text)

    def failure(self) -> str | None:
        """What `tell_failure` was given by any rank, or None."""
        return self._keys.get("abort").decode() if self._keys.check(["abort"]) else None

    def leave(self) -> None:
        """This rank is done with this generation."""
        with contextlib.suppress(RuntimeError):  # the host may be gone, and with it the store
            self._root.add(f"left/{self._rank}", 1)

    def wait_left(self, deadline: Deadline) -> None:
        """Wait until all others have left, or the deadline; for the rank that hosts the store."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        while others and not deadline.passed:
            others = [r for r in others if self._root.add(f"left/{r}", 0) <= self.generation]
            if others:
                time.sleep(min(_PAUSE_S[1], deadline.remaining_s))
