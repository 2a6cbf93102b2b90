"""What ``isend`` and ``irecv`` give back: one message on its way, as c10d's ``Work``."""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stagelink.errors import StagelinkError
from stagelink.transport.contract import Deadline
from stagelink.transport.payload import dtype_of, from_bytes, to_bytes

if TYPE_CHECKING:
    from datetime import timedelta

    from stagelink.exchange.arrival import Arrival
    from stagelink.exchange.in_link import InLink
    from stagelink.exchange.out_link import SendJob
    from stagelink.interop.c10d.mesh import Mesh
    from stagelink.transport.header import Header

__all__ = ["RecvWork", "SendWork"]


class _MessageWork(dist.Work):
    """One message; for as many threads as like, and as often.

    Args:
        mesh: what carries it.
        what: what to call it in an error.
        timeout: of the group.
    """

    def __init__(self, mesh: Mesh, what: str, timeout: timedelta) -> None:
        super().__init__()
        self._mesh = mesh
        self._what = what
        self._timeout = timeout
        self._error: Exception | None = None

    @abstractmethod
    def _done(self) -> bool:
        """Whether it is over; never blocks."""

    @abstractmethod
    def _tensors(self) -> list[torch.Tensor]:
        """What it is about."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is over.

        Args:
            timeout: how long; None, or 0: as long as the group's time-out.

        Raises:
            DistBackendError: it took longer, the peer has died or closed, or it does not fit.
        """
        patience = timeout or self._timeout
        try:
            if not self._wait(Deadline(patience.total_seconds())):
                raise dist.DistBackendError(
                    f"{self._what}: not done within {patience.total_seconds():g} s"
                )
        except StagelinkError as error:
            raise dist.DistBackendError(f"{self._what}: {error}") from error
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, deadline: Deadline) -> bool:
        return self._mesh.plane.wait(self._done, deadline)

    def is_completed(self) -> bool:
        """Whether it is over, well or not; never blocks."""
        return self._done() or self._mesh.plane.failure is not None

    def is_success(self) -> bool:
        """Whether it is over and nothing went wrong."""
        return self._done() and self._error is None

    def exception(self) -> Exception | None:
        """What went wrong, or None."""
        return self._error or (None if self._done() else self._mesh.plane.failure)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensor that was sent or received into."""
        return self._tensors()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with `result`; a thread of its own waits for it."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def follow() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._tensors())

        threading.Thread(target=follow, name="stagelink-c10d-future", daemon=True).start()
        return future


class SendWork(_MessageWork):
    """A message to a peer; over when the tensor is the caller's again.

    Args:
        mesh, what, timeout: as above.
        tensor: what is sent.
        job: how it goes; None where it is gone already.
    """

    def __init__(
        self,
        mesh: Mesh,
        what: str,
        timeout: timedelta,
        tensor: torch.Tensor,
        job: SendJob | None,
    ) -> None:
        super().__init__(mesh, what, timeout)
        self._tensor = tensor
        self._job = job

    def _done(self) -> bool:
        return self._job is None or self._job.finished

    def _tensors(self) -> list[torch.Tensor]:
        return [self._tensor]


class RecvWork(_MessageWork):
    """A message from a peer; over when it is in the caller's tensor.

    Args:
        mesh, what, timeout: as above.
        tensor: where it goes.
        source: the peer, by its place in the group.
        link: by which it comes; None where it is this rank's own.
    """

    def __init__(
        self,
        mesh: Mesh,
        what: str,
        timeout: timedelta,
        tensor: torch.Tensor,
        source: int,
        link: InLink | None,
    ) -> None:
        super().__init__(mesh, what, timeout)
        self._tensor = tensor.detach()
        self._source = source
        self._link = link
        self._over = False

    # -- what the mailbox asks

    def buffer_for(self, header: Header) -> torch.Tensor | None:
        """The caller's own tensor, where the message fits it byte by byte."""
        fits = header.payload_bytes == self._tensor.nbytes
        return self._bytes() if fits and self._tensor.is_contiguous() else None

    def take(self, arrival: Arrival) -> None:
        """The message is whole."""
        try:
            self._fill(arrival)
        except Exception as error:  # for `wait` to raise
            self._error = dist.DistBackendError(f"{self._what}: {error}")
        self._over = True

    def _fill(self, arrival: Arrival) -> None:
        size = arrival.header.payload_bytes
        if size != self._tensor.nbytes:
            raise ValueError(
                f"the message has {size} bytes (shape {list(arrival.header.shape)}), the tensor "
                f"{self._tensor.nbytes} (shape {list(self._tensor.shape)})"
            )
        payload = arrival.payload
        if self._link is not None:
            self._link.hand_over(arrival)
        if isinstance(payload, bytes):
            payload = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if size else None
        if payload is None or payload is arrival.buffer or not size:
            return
        if not self._tensor.is_contiguous():
            dtype = dtype_of(self._tensor)
            self._tensor.copy_(from_bytes(payload, dtype, tuple(self._tensor.shape)))
        elif self._tensor.is_cpu:
            ctypes.memmove(self._tensor.data_ptr(), payload.data_ptr(), size)
        else:
            self._bytes().copy_(payload)

    def _bytes(self) -> torch.Tensor:
        return to_bytes(self._tensor)

    # -- what c10d asks

    def _done(self) -> bool:
        return self._over

    def _tensors(self) -> list[torch.Tensor]:
        return [self._tensor]

    def _source_rank(self) -> int:
        return self._source

    def source_rank(self) -> int:
        """The peer, by its place in the group."""
        return self._source

    def is_completed(self) -> bool:
        """As of any work; where a caller is to finish what has come, a worker does."""
        if not self._over and self._link is not None and self._link.drivable:
            self._link.drain()
        return super().is_completed()

    def _wait(self, deadline: Deadline) -> bool:
        link = self._link
        if link is None or not link.finishes_in_caller:
            return super()._wait(deadline)

        def look() -> bool:
            return self._over or link.drivable

        while self._mesh.plane.wait(look, deadline):
            if self._over:
                return True
            link.drive(deadline)
        return False
