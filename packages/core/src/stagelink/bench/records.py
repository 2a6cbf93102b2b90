"""Times as figures: a record per contender, kind and size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("one_way", "stream", "duplex")
"""What is measured.

``one_way``: half a round trip of one message, nothing else in flight. ``stream``: one message
after another, the memory of at most four of them in use at the sender; what has been copied on
its way, by a window or into a slot, is not counted. ``duplex``: the same both ways, one message
each.
"""

ONE_WAY_READ = "one_way_read"
"""As ``one_way``, and the receiver reads every byte before it answers, or stops the clock.

A view of shared memory has not been read by its receiver's core, where a copy has been written.
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """Contender of a measurement.

    Attributes:
        transport: its name; ``raw-gloo`` and ``memcpy`` for what it is held against.
        layer: ``handler`` and ``handler-copy``: by a session, with ``copy=False`` and with the
            copy that is the default; ``link``: by the link alone, without session, window and
            small messages inline; ``raw``: not by this library.
    """

    transport: str
    layer: str


@dataclass(frozen=True, slots=True)
class Record:
    """One figure.

    Attributes:
        transport: see `Contender`.
        layer: see `Contender`.
        kind: one of `KINDS`, or `ONE_WAY_READ`.
        payload_bytes: of each message.
        median_us: microseconds a message.
        p99_us: the 99th percentile: of single messages one way, else of rounds.
        gib_per_s: at the median; in ``duplex`` of both directions together.
    """

    transport: str
    layer: str
    kind: str
    payload_bytes: int
    median_us: float
    p99_us: float
    gib_per_s: float

    @classmethod
    def of(
        cls, contender: Contender, kind: str, payload_bytes: int, seconds: Sequence[float]
    ) -> Record:
        """The figure of some times, seconds a message."""
        median = statistics.median(seconds)
        # The least value that 99 % of the values do not exceed.
        p99 = sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        directions = 2 if kind == "duplex" else 1
        return cls(
            contender.transport,
            contender.layer,
            kind,
            payload_bytes,
            median * 1e6,
            p99 * 1e6,
            directions * payload_bytes / median / 2**30,
        )
