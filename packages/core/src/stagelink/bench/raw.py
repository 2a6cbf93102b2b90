"""Baselines of links: torch's own send and recv over gloo, and a copy in one thread."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from stagelink.bench.pipes import IN_FLIGHT, ONE_WAY_READ, Contender, Pipe, buffers_of

Copier = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies to its first argument what is in its second."""

COPIERS: dict[Contender, Copier] = {Contender("memcpy", "raw"): torch.Tensor.copy_}
"""Copiers of one thread, by default."""


class PostedPipe(Pipe):
    """Blocking sends and receives one way; else posted ones, into buffers that are used again."""

    def buffers(self, size_bytes: int) -> Sequence[Any]:
        """Messages to send in turn, or to receive into."""
        return buffers_of(size_bytes)

    @abstractmethod
    def post_send(self, buffer: Any) -> Any:
        """Start to send; what it gives is for `wait`."""

    @abstractmethod
    def post_recv(self, buffer: Any) -> Any:
        """Start to receive; what it gives is for `wait`."""

    @abstractmethod
    def send_now(self, buffer: Any) -> None:
        """Send, and block until that is done."""

    @abstractmethod
    def recv_now(self, buffer: Any) -> None:
        """Receive, and block until that is done."""

    @abstractmethod
    def wait(self, posted: Any) -> None:
        """Block until something posted is done."""

    @contextmanager
    def round(self, kind: str, size_bytes: int, count: int) -> Iterator[None]:
        """Post receives ahead in a stream."""
        self._blocking = kind in ("one_way", ONE_WAY_READ)
        self._out, self._in = self.buffers(size_bytes), self.buffers(size_bytes)
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
            self._posted[slot] = self.post_recv(self._in[slot])
            self._posts += 1

    def send(self) -> None:
        """Send one message."""
        slot = self._sends % IN_FLIGHT
        self._sends += 1
        if self._blocking:
            self.send_now(self._out[slot])
            return
        if self._sent[slot] is not None:
            self.wait(self._sent[slot])
        self._sent[slot] = self.post_send(self._out[slot])

    def recv(self) -> Any:
        """Receive one message."""
        slot = self._recvs % IN_FLIGHT
        self._recvs += 1
        if self._blocking:
            self.recv_now(self._in[slot])
        else:
            self.wait(self._posted[slot])
            self._post()
        return self._in[slot]

    def settle(self) -> None:
        """Wait for the sends."""
        for posted in self._sent:
            if posted is not None:
                self.wait(posted)
        self._sent = [None] * IN_FLIGHT


class RawPipe(PostedPipe):
    """The default process group."""

    contender = Contender("raw-gloo", "raw")

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def post_send(self, buffer: Any) -> Any:
        """Call isend."""
        return dist.isend(buffer, 1 - self.rank)

    def post_recv(self, buffer: Any) -> Any:
        """Call irecv."""
        return dist.irecv(buffer, 1 - self.rank)

    def send_now(self, buffer: Any) -> None:
        """Call send."""
        dist.send(buffer, 1 - self.rank)

    def recv_now(self, buffer: Any) -> None:
        """Call recv."""
        dist.recv(buffer, 1 - self.rank)

    def wait(self, posted: Any) -> None:
        """Wait for the work."""
        posted.wait()


def copy_once(size_bytes: int, slots: int, count: int, copy: Copier = torch.Tensor.copy_) -> float:
    """Seconds of one of ``count`` copies, by one thread into so many buffers in turn."""
    sources = buffers_of(size_bytes)
    targets = [torch.ones_like(sources[0]) for _ in range(slots)]
    began = time.perf_counter()
    for number in range(count):
        copy(targets[number % slots], sources[number % IN_FLIGHT])
    return (time.perf_counter() - began) / count
