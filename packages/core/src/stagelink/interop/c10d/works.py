"""Works that ``isend`` and ``irecv`` return: one message in flight, as c10d's ``Work``."""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from stagelink.control.chain import Awaited
from stagelink.deadline import Deadline
from stagelink.errors import ClosedError, MessageError, RefusedError, StagelinkError
from stagelink.interop.c10d.errors import seconds_of
from stagelink.interop.c10d.mailbox import MatchingKey
from stagelink.interop.c10d.mesh import Mesh
from stagelink.interop.collectives import recorded, untraced
from stagelink.links.arrival import Arrival
from stagelink.links.in_link import InLink
from stagelink.links.out_link import SendJob
from stagelink.plan.dtypes import DType
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.modes import outside_modes
from stagelink.transport.payload import from_bytes, has_memory, to_bytes
from stagelink.transport.streams import StreamEvent


class Given(NamedTuple):
    """Tensor that a caller wants a message in."""

    tensor: torch.Tensor  # as the caller gave it
    memory: torch.Tensor  # the tensor that is written; see `stagelink.transport.payload.target_of`
    dtype: DType  # its element type on the wire
    in_order: bool  # whether its memory is its elements in logical order


class _MessageWork(dist.Work):
    """One message; for as many threads as like, and as often."""

    _SPAN: ClassVar[str]
    """Name of `wait` in a profiler's trace."""

    _DOES: ClassVar[str]
    """What it does, for errors."""

    def __init__(
        self, mesh: Mesh, timeout_s: float, tensor: torch.Tensor, key: MatchingKey
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._tensor = tensor
        self._key = key
        self._error: Exception | None = None

    @classmethod
    def named(cls, place: int, tag: int) -> str:
        """What errors call such a message."""
        return f"{cls._DOES} rank {place} with tag {tag}"

    @property
    def _what(self) -> str:
        return self.named(self._key.peer, self._key.tag)

    @abstractmethod
    def _done(self) -> bool:
        """Whether it is over; never blocks."""

    @abstractmethod
    def _check_peer(self) -> None:
        """Raise if it can never be over."""

    @untraced
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until it is over.

        Args:
            timeout: how long; None, or 0: as long as the group's time-out. Seconds, too.

        Raises:
            DistBackendError: it took longer, the peer has died or closed, or it does not fit.
                After a time-out nothing is lost: it can be waited for again.
            TypeError: ``timeout`` is none.
        """
        default_s = self._timeout_s
        seconds = default_s if timeout is None else seconds_of(timeout, default_s)
        try:
            with recorded(self._SPAN, self._tensor):
                over = self._done() or self._wait(Deadline(seconds))
            if not over:
                awaited = self._awaited()
                why = self._mesh.plane.chain.explain(awaited) if awaited else ""
                raise dist.DistBackendError(
                    f"{self._what}: not done within {seconds:g} s{self._why()}{why}"
                )
        except StagelinkError as error:
            if stops_caller(error):
                raise
            raise self._mesh.error(self._what, error) from error
        if self._error is not None:
            # As a new one: the same, raised again and again, would keep every caller's frames.
            raise type(self._error)(str(self._error)) from self._error.__cause__
        self._hand_to_caller()
        return True

    def _hand_to_caller(self) -> None:
        """It is over: on a device with streams the caller's goes on after it."""

    def _wait(self, deadline: Deadline) -> bool:
        return self._mesh.plane.wait(self._look, deadline, self._awaited())

    def _awaited(self) -> Awaited | None:
        """Who this waits for."""
        return None

    def _why(self) -> str:
        """Why it may be that it is not over, for an error; or nothing."""
        return ""

    def _look(self) -> bool:
        if not self._done():
            self._check_peer()
        return self._done()

    @untraced
    def is_completed(self) -> bool:
        """Whether it is over, well or not; never blocks."""
        return self._done() or self.exception() is not None

    @untraced
    def is_success(self) -> bool:
        """Whether it is over and nothing went wrong."""
        return self._done() and self._error is None

    @untraced
    def exception(self) -> Exception | None:
        """What went wrong, or None."""
        if not self._done():
            try:
                self._mesh.plane.check()
                self._look()
            except StagelinkError as error:
                if stops_caller(error):
                    raise
                return self._mesh.error(self._what, error)
        return self._error

    @untraced
    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    @untraced
    def result(self) -> list[torch.Tensor]:
        """The tensor that was sent or received into, after `wait`."""
        self.wait()
        return [self._tensor]

    @untraced
    def get_future(self) -> torch.futures.Future[Any]:
        """A future with `result`; a thread of its own waits for it."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def follow() -> None:
            try:
                result = self.result()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._done():
            follow()
        else:
            threading.Thread(target=follow, name="stagelink-c10d-future", daemon=True).start()
        return future


class SendWork(_MessageWork):
    """A message to a peer; over when the tensor is the caller's again, at once without a job."""

    _SPAN, _DOES = "stagelink:send", "send to"

    def __init__(
        self,
        mesh: Mesh,
        timeout_s: float,
        tensor: torch.Tensor,
        key: MatchingKey,
        job: SendJob | None,
    ) -> None:
        super().__init__(mesh, timeout_s, tensor, key)
        self._job = job

    def _done(self) -> bool:
        return self._job is None or self._job.finished

    def _awaited(self) -> Awaited | None:
        return Awaited(self._key.peer, lambda: self._what)

    def _why(self) -> str:
        if not self._mesh.outbox.holds(self._key):
            return ""
        return ", and not asked for: it finds no room in what may wait there (c10d.eager_bytes)"

    def _check_peer(self) -> None:
        key, goodbyes = self._key, self._mesh.plane.goodbyes
        if self._mesh.outbox.holds(key):
            goodbyes.check_here(key.peer, "a receive there")
        else:
            goodbyes.check_reached(key.peer, "room for a message")


class RecvWork(_MessageWork):
    """A message from a peer; over when it is in the caller's tensor. This rank's has no link."""

    _SPAN, _DOES = "stagelink:recv", "receive from"

    def __init__(
        self,
        mesh: Mesh,
        timeout_s: float,
        given: Given,
        source: int,
        key: MatchingKey,
        link: InLink | None,
    ) -> None:
        super().__init__(mesh, timeout_s, given.tensor, key)
        self._given = given
        self._source = source
        self._link = link
        self._after = None if link is None else link.stream.record_caller()
        self._event: StreamEvent | None = None
        self._over = False

    # -- what the mailbox asks

    def meet(self, arrival: Arrival) -> None:
        """Lend the caller's own tensor, where the message fits it byte by byte."""
        memory = self._given.memory
        fits = arrival.header.payload_bytes == memory.nbytes and has_memory(memory)
        if fits and self._given.in_order:
            arrival.after = self._after
            arrival.buffer = to_bytes(memory, in_order=True)

    def take(self, arrival: Arrival) -> None:
        """The message is whole."""
        try:
            with outside_modes():  # of whichever thread finished the message
                self._fill(arrival)
        except Exception as error:  # for `wait` to raise
            if stops_caller(error):
                raise
            self._error = self._mesh.error(self._what, error)
        self._over = True

    def give_up(self) -> None:
        """The group was destroyed."""
        closed = ClosedError("the group was destroyed before the message came")
        self._error, self._over = self._mesh.error(self._what, closed), True

    def _fill(self, arrival: Arrival) -> None:
        if arrival.refusal is not None:
            self._mesh.drop_elsewhere(self._key)
            raise RefusedError(arrival.refusal)
        memory = self._given.memory
        size, payload = arrival.header.payload_bytes, arrival.payload
        if size != memory.nbytes:
            raise ValueError(
                f"the message has {size} bytes (shape {list(arrival.header.shape)}), the tensor "
                f"{memory.nbytes} (shape {list(memory.shape)})"
            )
        self._event = arrival.event
        if payload is None or payload is arrival.buffer or not size:
            return
        if not has_memory(memory):
            raise MessageError("the tensor's memory was freed before the message came")
        if self._given.in_order and memory.is_cpu:
            # Also from bytes as they came.
            there = payload if isinstance(payload, bytes) else payload.data_ptr()
            ctypes.memmove(memory.data_ptr(), there, size)
            return
        if isinstance(payload, bytes):
            payload = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if self._link is None:
            self._copy(payload)
            return
        stream = self._link.stream
        with stream.entered(self._after):
            self._copy(payload)
            self._event = stream.record()

    def _copy(self, payload: torch.Tensor) -> None:
        _, memory, dtype, in_order = self._given
        if not in_order:
            with torch.inference_mode(memory.is_inference()):
                memory.copy_(from_bytes(payload, dtype, tuple(memory.shape)))
        else:
            to_bytes(memory, in_order=True).copy_(payload)

    # -- what c10d asks

    def _done(self) -> bool:
        return self._over

    def _check_peer(self) -> None:
        link, plane = self._link, self._mesh.plane
        peer = self._key.peer
        if link is None or peer not in plane.gone:
            return
        if link.given_up or self._mesh.box.awaits(self._key):
            plane.goodbyes.check_here(peer, "a message")

    @untraced
    def source_rank(self) -> int:
        """The peer, by its place in the group."""
        return self._source

    _source_rank = source_rank

    def _hand_to_caller(self) -> None:
        if self._link is not None and self._event is not None:
            self._link.stream.hand_to_caller(self._given.memory, self._event)

    @untraced
    def is_completed(self) -> bool:
        """Whether the work is complete, and the payload is there."""
        return super().is_completed() and (self._event is None or self._event.reached)

    def _awaited(self) -> Awaited | None:
        if self._link is None:
            return None
        return Awaited(self._link.link.source, lambda: self._what)
