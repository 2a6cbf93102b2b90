"""The generations of a run: rank 0 leads each, the others join it, and one process has each rank.

All of that is said by keys of the job's store. Rank 0 makes a generation's name, which nobody can
know before, and leaves it where all look; the others take their places in it. So what an earlier
generation left in the store, that of processes which have died included, is never taken for what
this one says.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch.distributed import PrefixStore

from stagelink.control.store import StoreClient
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, RankTakenError
from stagelink.transport.board import look_until
from stagelink.transport.host import process_id

_T = TypeVar("_T")
LEADER = 0
"""The rank that leads."""

_LEAST_S = 0.5
"""For a call whose deadline is about to pass: a store that answers does so at once, and what is
looked at last, and an error's text, are to be had."""


class Keys:
    """The keys of one prefix. Every method but `submit` blocks until the store has answered.

    All raise `ConnectError` where it does not by the deadline, or has been given up.
    """

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def ask(self, work: Callable[[PrefixStore], _T], deadline: Deadline) -> _T:
        """Call ``work`` with a store that has only these keys, on the client's thread."""
        patience = deadline if deadline.remaining_s > _LEAST_S else Deadline(_LEAST_S)
        return self.client.call(lambda store: work(PrefixStore(self.prefix, store)), patience)

    def submit(self, work: Callable[[PrefixStore], None]) -> threading.Event | None:
        """Ask without waiting; see `StoreClient.submit`."""
        return self.client.submit(lambda store: work(PrefixStore(self.prefix, store)))

    def get(self, key: str, deadline: Deadline) -> str | None:
        """The value of a key; None where it has none."""
        return self.get_some([key], deadline).get(0)

    def set(self, key: str, value: str, deadline: Deadline) -> None:
        """Give a key a value."""
        self.ask(lambda keys: keys.set(key, value), deadline)

    def swap(self, key: str, before: str, value: str, deadline: Deadline) -> str:
        """Give a key a value if it has the one that is expected, or none; what it has then."""
        return self.ask(lambda keys: keys.compare_set(key, before, value), deadline).decode()

    def absent(self, names: Sequence[str], deadline: Deadline) -> list[int]:
        """The places in a list of keys of those that have no value."""

        def look(keys: PrefixStore) -> list[int]:
            if keys.check(list(names)):  # one call, and most often all
                return []
            return [place for place, key in enumerate(names) if not keys.check([key])]

        return self.ask(look, deadline)

    def get_some(self, names: Sequence[str], deadline: Deadline) -> dict[int, str]:
        """The values of those keys that have one, by their places in the list."""

        def look(keys: PrefixStore) -> dict[int, str]:
            return {
                place: keys.get(key).decode()
                for place, key in enumerate(names)
                if keys.check([key])
            }

        return self.ask(look, deadline)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a rank's place; the nonce tells what one process does twice apart."""

    name: str
    process: str
    nonce: str

    @classmethod
    def here(cls, nonce: str) -> Holder:
        """This process."""
        return cls(f"{socket.gethostname()} process {os.getpid()}", process_id(), nonce)

    def to_json(self) -> str:
        """Encode as a text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Holder:
        """Decode the text of `to_json`."""
        return cls(**json.loads(text))

    @property
    def is_dead(self) -> bool:
        """Whether it is known to have died: a process of this host that is there no more."""
        place, _, number = self.process.rpartition("/")
        if place != process_id().rpartition("/")[0]:
            return False
        try:
            with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0] in {"Z", "X"}
        except FileNotFoundError:
            return os.path.isdir("/proc/self")
        except OSError:
            return False


def listed(ranks: Iterable[int]) -> str:
    """Ranks for an error's text."""
    return ", ".join(map(str, ranks))


class Generations:
    """One rank's part in the generations of one run; see `Rendezvous` for the arguments."""

    def __init__(
        self, keys: Keys, run: str, rank: int, world_size: int, *, restarts: bool
    ) -> None:
        self._keys = keys
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._restarts = restarts
        self._holder = Holder.here(secrets.token_hex(8))

    def enter(self, deadline: Deadline) -> str:
        """Take this rank's place; rank 0 at once, the others when it has. The generation's name.

        `RankTakenError` where another process has it, `ConnectError` where rank 0 does not come.
        """
        if self._rank == LEADER:
            return self._lead(deadline)
        self._keys.set(f"here/{self._rank}", self._holder.to_json(), deadline)
        return self.follow(deadline)

    def _lead(self, deadline: Deadline) -> str:
        name = secrets.token_hex(16)
        mine = json.dumps([name, self._holder.to_json()])
        held = ""
        while (found := self._keys.swap("lead", held, mine, deadline)) != mine:
            before, holder = json.loads(found)
            self._check_free(before, Holder.from_json(holder), deadline)
            held = found
        return name

    def follow(self, deadline: Deadline) -> str:
        """Take this rank's place, as by `enter`, in the first generation that is not over."""
        found = over = ""  # over for this rank: another is to follow

        def joined() -> bool:
            nonlocal found, over
            found, _ = self.now(deadline)
            if found in {"", over}:
                return False
            if not self._join(found, deadline):
                over = found
            return found != over

        if not look_until(joined, deadline):
            raise self._nobody_leads(over, deadline)
        return found

    def _join(self, lead: str, deadline: Deadline) -> bool:
        """Take this rank's place in a generation; False where that is over."""
        if not self._keys.absent([f"{lead}/left/{LEADER}"], deadline):
            return False
        mine = self._holder.to_json()
        held = self._keys.swap(f"{lead}/join/{self._rank}", "", mine, deadline)
        if held == mine:
            return True
        self._check_free(lead, Holder.from_json(held), deadline)
        return False

    def now(self, deadline: Deadline) -> tuple[str, Holder | None]:
        """The name of the generation that is led now, and the process that leads it."""
        found = self._keys.get("lead", deadline)
        if found is None:
            return "", None
        name, holder = json.loads(found)
        return name, Holder.from_json(holder)

    def _check_free(self, generation: str, holder: Holder, deadline: Deadline) -> None:
        """Make sure that the process which has this rank's place has left, or has died."""
        if not self._keys.absent([f"{generation}/left/{self._rank}"], deadline):
            return
        if holder.process != process_id() and (self._restarts or holder.is_dead):
            return
        raise RankTakenError(
            f"rank {self._rank} of run {self._run!r} is taken by {holder.name}; "
            "start each rank once, and give a run that reuses a store another run_id"
        )

    def _nobody_leads(self, old: str, deadline: Deadline) -> ConnectError:
        others = [rank for rank in range(1, self._world_size) if rank != self._rank]
        absent = self._keys.absent([f"here/{rank}" for rank in others], deadline)
        gave_up = self._keys.get(f"{old}/abort", deadline) if old else None
        more = f" Rank 0 was here and gave up: {json.loads(gave_up)['text']}" if gave_up else ""
        return self.not_here([LEADER, *(others[place] for place in absent)], deadline, more)

    def not_here(self, missing: Sequence[int], deadline: Deadline, more: str = "") -> ConnectError:
        """An error that names ranks which did not come."""
        return ConnectError(
            f"rank {self._rank}: missing: {listed(missing)}, not here within "
            f"{deadline.seconds:g} s. Was each of them started, with the same store "
            f"({self._keys.client.where}), run id and plan name (here {self._run!r})? Did it end "
            f"with an error of its own before it could connect?{more}"
        )
