"""A link, and what a transport says of itself, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes, or no with the reason; true where it is yes.

    A yes of `Transport.probe` may have a reason as well: what ``stagelink doctor`` should tell.
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a transport, as declared by its author.

    Attributes:
        devices: kinds of device whose tensors it carries: ``"cpu"``, ``"cuda"``.
        auto_rank: place in the order that ``auto`` tries; the highest comes first. Core's loopback
            has 0, a network transport about 10, one within a server about 20, one within a GPU
            server about 30.
        same_server: needs both ends on one server.
        distinct_processes: needs the ends in two processes.
        same_process: needs both ends in one process.
        in_flight: messages of one link that may have begun and not be done, on either end.
        copies_on_begin: when ``Sender.begin`` returns True, the payload has been read, and the
            caller may overwrite it; otherwise core makes the copy.
        dtypes: names of the only element types it carries; None: every one, as bytes.
    """

    devices: frozenset[str]
    auto_rank: int
    same_server: bool = False
    distinct_processes: bool = False
    same_process: bool = False
    in_flight: int = 1
    copies_on_begin: bool = False
    dtypes: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """An ordered pair of ranks and the transport between them.

    Attributes:
        source: the sending rank.
        target: the receiving rank.
        transport: the transport's name.
        device: kind of device of the tensors on it.
    """

    source: int
    target: int
    transport: str
    device: str

    def __str__(self) -> str:
        return f"{self.source}→{self.target} by {self.transport}"


class Footprint(NamedTuple):
    """Memory that one link may take of a server's beside the tensors that it carries.

    Attributes:
        slots: messages that may be in it at once.
        size_bytes: all of it.
    """

    slots: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Location of one end of a link, for `Transport.can_connect`.

    Attributes:
        rank: its rank.
        server: equal on two ranks exactly when they are on one server.
        process: equal on two ranks exactly when they are threads of one process.
        description: what the rank's own `Transport.describe` said.
    """

    rank: int
    server: str
    process: str
    description: Mapping[str, Any]
