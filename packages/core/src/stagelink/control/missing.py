"""Missing ranks while ranks connect: the one for whose sake all wait, in words.

A rank that waits for others leaves word of that in the store. So a rank whose wait runs out of
time need not blame the one that it waits for itself, which may wait for a third.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stagelink.errors import ConnectError
from stagelink.transport.host import process_id

__all__ = ["Holder", "late_ranks", "listed"]


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a rank's place.

    Attributes:
        name: for errors.
        process: see `stagelink.transport.host.process_id`.
        nonce: tells what one process does twice apart.
    """

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
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self.process == process_id()

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


def late_ranks(
    rank: int,
    awaited: Mapping[int, str],
    waits: Mapping[int, Mapping[str, Any]],
    holders: Callable[[int], Holder | None],
    seconds: float,
) -> ConnectError:
    """An error that names those for whose sake a wait while connecting ran out of time.

    Args:
        rank: the one whose wait it was.
        awaited: what it waited for, by the rank that it was to come from.
        waits: of each rank that has left word of it: what it waits for (``step``), and from
            which ``ranks``.
        holders: tells the process of a rank; None where it has not come.
        seconds: that it waited.
    """
    seen: dict[int, str] = {}
    front = dict(awaited)
    while front:
        late, step = front.popitem()
        seen[late] = step
        said = waits.get(late, {"step": "", "ranks": []})
        front |= {other: said["step"] for other in said["ranks"] if other not in {rank, *seen}}
    found = {late: holders(late) for late in seen}
    dead = [late for late, holder in found.items() if holder is not None and holder.is_dead]
    # Others may wait for the dead; else those who wait for nobody hold up those who do.
    missing = sorted(dead or [late for late in seen if late not in waits] or seen)
    reasons = "; ".join(
        f"{_state(late, found[late])}; no {seen[late]} from it" for late in missing
    )
    return ConnectError(f"rank {rank}: missing: {listed(missing)} within {seconds:g} s: {reasons}")


def _state(rank: int, holder: Holder | None) -> str:
    if holder is None:
        return f"rank {rank} did not come"
    if holder.is_dead:
        return f"rank {rank} came ({holder.name}) and has died"
    return (
        f"rank {rank} came ({holder.name}) and does not go on (is it stopped, or does it hang? "
        "its stack or its output tells)"
    )
