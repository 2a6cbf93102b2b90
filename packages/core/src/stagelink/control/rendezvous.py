"""Rendezvous of ranks in a c10d store: places, addresses, the job's token and the abort key.

The store is needed while connecting, and while a pair of ranks opens its links, at whatever time
it does; afterwards only the abort key and the leaving of ranks are kept in it, and nothing that
moves tensors touches it. Every call of it is bounded, see `stagelink.control.store`.

Ranks that meet are one generation, see `stagelink.control.generations`; it is complete when rank 0
has seen them all there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store

from stagelink.control.generations import LEADER, Generations, Holder, Keys, listed
from stagelink.control.store import StoreClient
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError
from stagelink.transport.board import look_until
from stagelink.transport.interrupts import stops_caller

_TELL_S = 0.06
"""How long a rank has waited for addresses when it leaves word of that."""


class Rendezvous:
    """One rank's view of the keys of one generation of one pipeline.

    Making one asks nothing of the store; `enter` comes first. Used from any thread.

    Args:
        client: of the job's store; owned from now on.
        run: run id and plan name.
        restarts: see `stagelink.control.launch.Launch`.
        patience_s: for calls that nobody gave a deadline.
    """

    def __init__(
        self,
        client: StoreClient,
        run: str,
        rank: int,
        world_size: int,
        *,
        restarts: bool = False,
        patience_s: float = 120.0,
    ) -> None:
        # its name, the same on every rank, and the job's secret; empty before `claim`
        self.generation = ""
        self.store_host = client.host  # as this rank calls it; None where the store has none
        self._keys = Keys(client, f"stagelink/{run}")
        self._rank = rank
        self._world_size = world_size
        self._generations = Generations(self._keys, run, rank, world_size, restarts=restarts)
        self._patience_s = patience_s

    def _key(self, key: str) -> str:
        return f"{self.generation}/{key}"

    def _each(self, kind: str, ranks: Iterable[int]) -> list[str]:
        return [self._key(f"{kind}/{rank}") for rank in ranks]

    # -- coming together

    def enter(self, deadline: Deadline) -> None:
        """Take this rank's place, and wait until every rank has taken its own.

        Raises `RankTakenError` where another process has this rank, and `ConnectError` where some
        ranks do not come by the deadline, named, or another rank gives up.
        """
        self.claim(deadline)
        self.gather(deadline)

    def claim(self, deadline: Deadline) -> None:
        """First step of `enter`: take this rank's place, rank 0 at once, others when it has."""
        self.generation = self._generations.enter(deadline)

    def gather(self, deadline: Deadline) -> None:
        """Second step of `enter`: wait until every rank has taken its place."""
        if not look_until(
            lambda: self._complete(deadline) or self._check_going_on(deadline), deadline
        ):
            raise self._incomplete(deadline)

    def _complete(self, deadline: Deadline) -> bool:
        if self._rank != LEADER:
            if self._generations.now(deadline)[0] != self.generation:
                self.generation = self._generations.follow(deadline)
            return not self._keys.absent([self._key("complete")], deadline)
        others = range(1, self._world_size)
        if self._keys.absent(self._each("join", others), deadline):
            return False
        self._keys.set(self._key("complete"), "", deadline)
        return True

    def _check_going_on(self, deadline: Deadline) -> bool:
        """False while no rank has failed, ConnectError where one has; for use in a look."""
        if cause := self.failure(deadline):
            raise ConnectError(
                f"rank {self._rank}: rank {cause['rank']} failed while connecting: {cause['text']}"
            )
        return False

    # -- who is missing

    def _incomplete(self, deadline: Deadline) -> ConnectError:
        absent = self._keys.absent(self._each("join", range(1, self._world_size)), deadline)
        if absent:
            return self._generations.not_here([place + 1 for place in absent], deadline)
        return self.late("word that all are here", [LEADER], deadline)

    def tell_wait(self, step: str, ranks: Sequence[int]) -> None:
        """Leave word of whom this rank waits for, for ranks that wait for this one."""
        self.tell("waits", {"step": step, "ranks": list(ranks)})

    def late(self, step: str, ranks: Iterable[int], deadline: Deadline) -> ConnectError:
        """An error that names those for whose sake a wait while connecting ran out of time.

        They need not be those that this rank waits for, which may wait for a third, and have left
        word of that. A step of each of some ranks was waited for, until the deadline passed.
        """
        waits = self.told("waits", deadline)
        front, seen = dict.fromkeys(ranks, step), dict[int, str]()
        while front:
            late, awaited = front.popitem()
            seen[late] = awaited
            said = waits.get(late, {"step": "", "ranks": []})
            others = set(said["ranks"]).difference(seen, [self._rank])
            front |= dict.fromkeys(others, said["step"])
        found = {late: self._who(late, deadline) for late in seen}
        dead = [late for late, holder in found.items() if holder is not None and holder.is_dead]
        # Others may wait for the dead; else those who wait for nobody hold up those who do.
        missing = sorted(dead or [late for late in seen if late not in waits] or seen)
        reasons = [f"{_state(late, found[late])}; no {seen[late]} from it" for late in missing]
        return ConnectError(
            f"rank {self._rank}: missing: {listed(missing)} within {deadline.seconds:g} s: "
            f"{'; '.join(reasons)}"
        )

    def _who(self, rank: int, deadline: Deadline) -> Holder | None:
        if rank == LEADER:
            return self._generations.now(deadline)[1]
        text = self._keys.get(self._key(f"join/{rank}"), deadline)
        return Holder.from_json(text) if text else None

    # -- what a generation has in common

    def publish(self, kind: str, address: Mapping[str, Any]) -> None:
        """Tell the others where this rank listens for a kind of connection."""
        key = self._key(f"{kind}/{self._rank}")
        self._keys.set(key, json.dumps(address), Deadline(self._patience_s))

    def read(self, kind: str, ranks: list[int], deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Read what ranks published; waits for them, in steps that a signal can interrupt.

        `ConnectError` where some have not by the deadline (named), or a rank fails meanwhile.
        """
        names, step = self._each(kind, ranks), f"address ({kind})"
        absent: list[int] = []
        told: list[int] = []
        soon = Deadline(_TELL_S)

        def complete() -> bool:
            nonlocal absent, told
            absent = [ranks[place] for place in self._keys.absent(names, deadline)]
            if not absent or self._check_going_on(deadline):
                return True
            if soon.passed and told != absent:
                self.tell_wait(step, absent)
                told = absent
            return False

        if not look_until(complete, deadline):
            raise self.late(step, absent, deadline)
        found = self._keys.get_some(names, deadline)
        return {ranks[place]: json.loads(text) for place, text in found.items()}

    def tell(self, kind: str, value: Any) -> None:
        """Leave word for other ranks' `told`; returns at once, and says nothing of errors."""
        key, text = self._key(f"{kind}/{self._rank}"), json.dumps(value)
        self._keys.submit(lambda keys: keys.set(key, text))

    def told(self, kind: str, deadline: Deadline) -> dict[int, Any]:
        """Read what ranks have left word of, by rank; nothing where the store is gone."""
        try:
            found = self._keys.get_some(self._each(kind, range(self._world_size)), deadline)
        except ConnectError as error:
            if stops_caller(error):
                raise
            return {}
        return {rank: json.loads(text) for rank, text in found.items()}

    def pair_store(self, name: str) -> Store:
        """A store client of its own, for a pair of ranks; given up with this place, see `cut`."""
        prefix = f"{self._keys.prefix}/{self._key(f'pair/{name}')}"
        return self._keys.client.lend(prefix, Deadline(self._patience_s))

    def tell_failure(self, text: str) -> threading.Event | None:
        """Leave a failure's cause in JSON for ranks that no connection reaches; the first stays.

        Returns at once: an event that is set when it is there; None where it cannot be.
        """
        if not self.generation:
            return None
        key = self._key("abort")

        def tell(keys: PrefixStore) -> None:
            keys.compare_set(key, "", text)

        return self._keys.submit(tell)

    def failure(self, deadline: Deadline) -> dict[str, Any] | None:
        """The ``rank`` and ``text`` of a failure that `tell_failure` was given by any rank."""
        text = self._keys.get(self._key("abort"), deadline)
        return None if text is None else json.loads(text)

    def find_failure(self, found: Callable[[dict[str, Any]], None]) -> threading.Event | None:
        """Have a failure looked for, and told on another thread; returns at once."""
        key = self._key("abort")

        def look(keys: PrefixStore) -> None:
            if keys.check([key]):
                found(json.loads(keys.get(key)))

        return self._keys.submit(look)

    # -- leaving

    def leave(self, deadline: Deadline, *, hosts_store: bool = False) -> None:
        """This rank is done with this generation, and gives up its client; in bounded time.

        A rank that hosts the store waits until all others have left too, or the deadline.
        """
        patience_s = 0.0
        try:
            if self.generation:
                self._keys.set(self._key(f"left/{self._rank}"), "", deadline)
                if hosts_store:
                    others = self._each("left", range(self._world_size))
                    look_until(lambda: not self._keys.absent(others, deadline), deadline)
            patience_s = deadline.remaining_s
        except ConnectError as error:  # the store is gone, and with it who might look
            if stops_caller(error):
                raise
        finally:
            self._keys.client.close(patience_s)

    def cut(self) -> None:
        """Free callers that wait in a store that `pair_store` gave; returns at once."""
        self._keys.client.cut_lent()


def _state(rank: int, holder: Holder | None) -> str:
    if holder is None:
        return f"rank {rank} did not come"
    if holder.is_dead:
        return f"rank {rank} came ({holder.name}) and has died"
    return (
        f"rank {rank} came ({holder.name}) and does not go on (is it stopped, or does it hang? "
        "its stack or its output tells)"
    )
