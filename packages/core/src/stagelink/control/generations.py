"""The generations of a run: rank 0 leads each, the others join it, and one process has each rank.

Rank 0 makes a generation's name, which nobody can know before, and leaves it where all look; the
others take their places in it. So what an earlier generation left in the store, that of processes
which have died included, is never taken for what this one says.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from stagelink.control.keys import Keys
from stagelink.control.missing import Holder, listed
from stagelink.deadline import Deadline
from stagelink.errors import ConnectError, RankTakenError
from stagelink.transport.board import look_until

__all__ = ["LEADER", "Generations"]

LEADER = 0
"""The rank that leads."""


class Generations:
    """One rank's part in the generations of one run.

    Args:
        keys: of the run.
        run: run id and plan name.
        rank: this rank.
        world_size: how many ranks there are.
        restarts: see `stagelink.control.launch.Launch`.
    """

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

        Raises:
            RankTakenError: another process has this rank.
            ConnectError: rank 0 did not come by the deadline.
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
        """Take this rank's place in the first generation that is not over; its name.

        Raises:
            RankTakenError, ConnectError: as `enter`.
        """
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
        if not holder.is_here and (self._restarts or holder.is_dead):
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
