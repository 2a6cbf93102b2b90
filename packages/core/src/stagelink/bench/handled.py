"""Pipes of this library's own: by a handler's sessions, and by the links below them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stagelink.bench.pipes import IN_FLIGHT, Contender, Pipe, buffers_of
from stagelink.control.connection import Frame
from stagelink.deadline import Deadline
from stagelink.exchange.engine import Engine
from stagelink.exchange.handler import Handler
from stagelink.exchange.session import Session
from stagelink.links.arrival import Arrival
from stagelink.links.out_link import SendJob
from stagelink.plan import Plan
from stagelink.transport.header import Direction, Header, MessageKind

WINDOW = 2 * IN_FLIGHT
_PATIENCE_S = 60.0


def pair_plan(transport: str) -> Plan:
    """Two ranks and one edge, whose gradients are the way back."""
    return Plan.from_dict(
        {
            "pipeline": {
                "name": "bench",
                "schedule": "1f1b",
                "microbatches": IN_FLIGHT,
                "window": WINDOW,
            },
            "stages": [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}],
            "tensors": [{"name": "h", "from": "a", "to": ["b"]}],
            "links": [{"transport": transport}],
            "limits": {"deadline_s": _PATIENCE_S, "first_deadline_s": _PATIENCE_S},
        }
    )


class HandlerPipe(Pipe):
    """Activations forward, gradients back; a stream goes by evaluation, which has none."""

    def __init__(self, comm: Handler, transport: str, *, copy: bool) -> None:
        self.contender = Contender(transport, "handler-copy" if copy else "handler")
        self.rank = comm.rank
        self._comm = comm
        self._copy = copy

    @contextmanager
    def round(self, kind: str, size_bytes: int, count: int) -> Iterator[None]:
        """A session."""
        forward = kind == "stream"
        grad = self.rank == 0 and not forward
        self._buffers = [tensor.requires_grad_(grad) for tensor in buffers_of(size_bytes)]
        self._handles: list[Any] = [None] * IN_FLIGHT
        self._sends = self._recvs = 0
        open_session = self._comm.evaluate if forward else self._comm.train
        self._session: Session = open_session(count)
        with self._session:
            yield

    def send(self) -> None:
        """Send one message; without a copy its buffer is waited for first."""
        number, slot = self._sends, self._sends % IN_FLIGHT
        self._sends += 1
        if self._handles[slot] is not None:
            self._handles[slot].wait()
        send = self._session.send if self.rank == 0 else self._session.send_grad
        handle = send("h", self._buffers[slot], number, copy=self._copy)
        self._handles[slot] = None if self._copy else handle

    def recv(self) -> Any:
        """Receive one message, which is not kept."""
        number = self._recvs
        self._recvs += 1
        recv = self._session.recv_grad if self.rank == 0 else self._session.recv
        return recv("h", number)

    def settle(self) -> None:
        """Wait until no buffer is needed any more."""
        for handle in self._handles:
            if handle is not None:
                handle.wait()


class LinkPipe(Pipe):
    """A link and its twin: what is left of a message when nothing is asked of it."""

    def __init__(self, engine: Engine, transport: str) -> None:
        self.contender = Contender(transport, "link")
        self.rank = engine.rank
        peer = 1 - self.rank
        here = Direction.FORWARD if self.rank == 0 else Direction.BACKWARD
        back = Direction.BACKWARD if self.rank == 0 else Direction.FORWARD
        self._arrived: deque[Arrival] = deque()
        self._plane = engine.plane
        self._kind = MessageKind.DATA if self.rank == 0 else MessageKind.GRAD
        self._direction = here
        self._out = engine.node.wiring.out[0, here, peer].link
        self._in = engine.node.wiring.into[0, back, peer].link
        for kind in (MessageKind.DATA, MessageKind.GRAD):
            self._plane.handle(kind, self._on_message, replace=True)

    def _on_message(self, peer: int, frame: Frame) -> None:
        arrival = Arrival(frame.header, peer, self._on_complete)
        self._arrived.append(arrival)
        self._in.announced(arrival, frame.note, frame.take_fds())

    def _on_complete(self, arrival: Arrival) -> None:
        arrival.settled = True
        self._plane.changed()

    @contextmanager
    def round(self, kind: str, size_bytes: int, count: int) -> Iterator[None]:
        """Enclose a round; nothing is opened for it."""
        del kind, count
        self._buffers = [tensor.view(torch.uint8) for tensor in buffers_of(size_bytes)]
        self._header = Header(self._kind, self._direction, payload_bytes=size_bytes)
        self._jobs: list[SendJob | None] = [None] * IN_FLIGHT
        self._sends = 0
        yield

    def send(self) -> None:
        """Send one message."""
        slot = self._sends % IN_FLIGHT
        self._sends += 1
        self._wait_sent(self._jobs[slot])
        job = self._jobs[slot] = SendJob(self._header, self._buffers[slot])
        self._out.submit(job, copy=False)

    def _wait_sent(self, job: SendJob | None) -> None:
        if job is not None:
            self._wait(lambda: job.finished)

    def recv(self) -> Any:
        """Receive one message, which is not kept."""
        while not self._is_here():
            self._wait(self._is_here)
        return self._arrived.popleft().payload

    def _is_here(self) -> bool:
        return bool(self._arrived) and self._arrived[0].settled

    def settle(self) -> None:
        """Wait until no buffer is needed any more."""
        for job in self._jobs:
            self._wait_sent(job)

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not self._plane.wait(ready, Deadline(_PATIENCE_S)):
            raise TimeoutError(f"nothing moved for {_PATIENCE_S:g} s")
