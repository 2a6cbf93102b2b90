"""Pipes, which move messages between two ranks in order, and the timing of one round."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from stagelink.bench.records import ONE_WAY_READ, Contender

IN_FLIGHT = 4


class Timed(NamedTuple):
    """Times of a round on one rank, by a clock that all processes of the machine share.

    Attributes:
        began: when its first message was about to go.
        ended: when its last one was complete.
        singles: seconds of each message, where they were timed one by one here.
    """

    began: float
    ended: float
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
