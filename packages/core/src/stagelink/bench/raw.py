"""What links are held against: torch's own send and recv over gloo, and a copy in one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from stagelink.bench.pipes import IN_FLIGHT, Pipe, buffers_of
from stagelink.bench.records import Subject

__all__ = ["MEMCPY", "RawPipe", "copy_once"]

MEMCPY = Subject("memcpy", "raw")


class RawPipe(Pipe):
    """The default process group: send and recv one by one, isend and irecv in a stream."""

    subject = Subject("raw-gloo", "raw")

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    @contextmanager
    def round(self, kind: str, size_bytes: int, count: int) -> Iterator[None]:
        """Buffers are used again and again; receives are posted ahead."""
        self._blocking = kind == "one_way"
        self._out, self._in = buffers_of(size_bytes), buffers_of(size_bytes)
        self._sent: list[Any] = [None] * IN_FLIGHT
        self._posted: list[Any] = [None] * IN_FLIGHT
        self._sends = self._recvs = self._posts = 0
        self._to_post = count if kind == "duplex" or self.rank == 1 else 0
        if not self._blocking:
            for _ in range(IN_FLIGHT):
                self._post()
        yield

    def _post(self) -> None:
        if self._posts < self._to_post:
            slot = self._posts % IN_FLIGHT
            self._posted[slot] = dist.irecv(self._in[slot], 1 - self.rank)
            self._posts += 1

    def send(self) -> None:
        """One message."""
        slot = self._sends % IN_FLIGHT
        self._sends += 1
        if self._blocking:
            dist.send(self._out[slot], 1 - self.rank)
            return
        if self._sent[slot] is not None:
            self._sent[slot].wait()
        self._sent[slot] = dist.isend(self._out[slot], 1 - self.rank)

    def recv(self) -> None:
        """One message."""
        slot = self._recvs % IN_FLIGHT
        self._recvs += 1
        if self._blocking:
            dist.recv(self._in[slot], 1 - self.rank)
            return
        self._posted[slot].wait()
        self._post()

    def settle(self) -> None:
        """Wait for the sends."""
        for work in self._sent:
            if work is not None:
                work.wait()
        self._sent = [None] * IN_FLIGHT


def copy_once(size_bytes: int, slots: int, count: int) -> float:
    """Seconds of one of ``count`` copies, by one thread into so many buffers in turn."""
    sources = buffers_of(size_bytes)
    targets = [torch.ones_like(sources[0]) for _ in range(slots)]
    began = time.perf_counter()
    for number in range(count):
        targets[number % slots].copy_(sources[number % IN_FLIGHT])
    return (time.perf_counter() - began) / count
