"""Pipes, which move messages between two ranks in order; rounds of them, timed, as records."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

IN_FLIGHT = 4

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
    """Contender of a measurement."""

    transport: str  # its name; ``raw-gloo`` and ``memcpy`` for what it is held against
    # ``handler`` and ``handler-copy``: by a session, with ``copy=False`` and with the copy that is
    # the default; ``link``: by the link alone, without session, window and small messages inline;
    # ``raw``: not by this library
    layer: str


@dataclass(frozen=True, slots=True)
class Record:
    """One figure."""

    transport: str  # see `Contender`
    layer: str  # see `Contender`
    kind: str  # one of `KINDS`, or `ONE_WAY_READ`
    payload_bytes: int  # of each message
    median_us: float  # microseconds a message
    p99_us: float  # the 99th percentile: of single messages one way, else of rounds
    gib_per_s: float  # at the median; in ``duplex`` of both directions together

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


class Timed(NamedTuple):
    """Times of a round on one rank, by a clock that all processes of the machine share."""

    began: float  # when its first message was about to go
    ended: float  # when its last one was complete
    # seconds of each message, where they were timed one by one here
    singles: tuple[float, ...] = ()


class Pipe(ABC):
    """One end of what is measured."""

    contender: Contender
    rank: int  # 0 or 1

    @abstractmethod
    def round(self, kind: str, size_bytes: int, count: int) -> AbstractContextManager[None]:
        """Enclose a round of ``count`` messages of one kind and size."""

    @abstractmethod
    def send(self) -> None:
        """Send the next message; waits while `IN_FLIGHT` are in flight."""

    @abstractmethod
    def recv(self) -> Any:
        """Wait for the next message; one way, what it gives is for `read`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until everything sent is complete, as far as the sender can know."""


def buffers_of(size_bytes: int) -> list[torch.Tensor]:
    """Messages to send in turn, float32."""
    return [torch.ones(size_bytes // 4) for _ in range(IN_FLIGHT)]


def read(payload: Any) -> None:
    """Read every byte of a message, at the speed of memory: a tensor or an array."""
    torch.as_tensor(payload).detach().view(torch.float32).sum()


def timed(
    pipe: Pipe, kind: str, size_bytes: int, count: int, start_together: Callable[[], object]
) -> Timed:
    """Carry one round out."""
    moves: dict[str, Callable[[Pipe, int], tuple[float, ...]]] = {
        "one_way": partial(_one_way, look=lambda _: None),
        ONE_WAY_READ: partial(_one_way, look=read),
        "stream": _stream,
        "duplex": _duplex,
    }
    with pipe.round(kind, size_bytes, count):
        start_together()
        began = time.perf_counter()
        singles = moves[kind](pipe, count)
        return Timed(began, time.perf_counter(), singles)


def _one_way(pipe: Pipe, count: int, look: Callable[[Any], None]) -> tuple[float, ...]:
    if pipe.rank == 1:
        for _ in range(count):
            look(pipe.recv())
            pipe.send()
        pipe.settle()
        return ()
    singles = []
    for _ in range(count):
        began = time.perf_counter()
        pipe.send()
        look(pipe.recv())
        singles.append((time.perf_counter() - began) / 2)
    pipe.settle()
    return tuple(singles)


def _stream(pipe: Pipe, count: int) -> tuple[float, ...]:
    move = pipe.send if pipe.rank == 0 else pipe.recv
    for _ in range(count):
        move()
    pipe.settle()
    return ()


def _duplex(pipe: Pipe, count: int) -> tuple[float, ...]:
    ahead = IN_FLIGHT - 1 if pipe.rank == 0 else 0
    for number in range(count + ahead):
        if pipe.rank == 1:
            pipe.recv()
        if number < count:
            pipe.send()
        if pipe.rank == 0 and number >= ahead:
            pipe.recv()
    pipe.settle()
    return ()
