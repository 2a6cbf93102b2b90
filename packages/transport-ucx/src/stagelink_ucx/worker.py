"""The worker that all links of a rank share: its endpoints, and the messages in flight.

UCX moves nothing but in `Worker.progress`, which core's reader calls when the worker's descriptor
is ready. One lock of ours is around every call, so UCX may be one that was built without its own.
UCX calls nothing of Python's while messages move: they are asked whether they are done. Only an
endpoint's failure is called back, and there what is called runs no bytecode, in the middle of
which a signal handler could raise an exception, to be lost in UCX.

A message refers to its buffer until UCX is through with it, or the worker is destroyed.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from collections import deque
from contextlib import ExitStack
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import partial
from typing import TYPE_CHECKING

from stagelink_ucx.functions import (
    BUSY,
    IN_PROGRESS,
    OK,
    EndpointParams,
    ErrorCallback,
    OperationParams,
    Received,
    WorkerParams,
    status_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stagelink.transport.contract import Deadline, Done, Port
    from stagelink_ucx.context import Context

__all__ = ["Lane", "Worker"]

_SHARE_S = 0.0003
"""How long progress is made at a time: everybody's messages wait for the reading thread."""

_FAREWELL_S = 2.0
"""The most that the end waits for peers that do not take what they were sent."""

_WHOLE_TAG = (1 << 64) - 1
_ON_HOST = OperationParams.on_host()
_PLAIN = OperationParams()
_BY_FORCE = OperationParams.by_force()


class Lane:
    """Messages of one end of a link, which are done in their order.

    Args:
        port: of the end.
        doing: what it does with a message, for errors.
    """

    def __init__(self, port: Port, doing: str) -> None:
        self.port = port
        self.doing = doing
        self.begun: deque[_Operation] = deque()


class _Operation:
    """A message that UCX sends, or receives: then with what it tells of what has come."""

    __slots__ = ("buffer", "done", "handle", "lane", "received", "status")

    def __init__(
        self, lane: Lane, buffer: torch.Tensor, done: Done, received: Received | None = None
    ) -> None:
        self.lane = lane
        self.buffer = buffer
        self.done = done
        self.received = received
        self.handle: int | None = None
        self.status = IN_PROGRESS

    @property
    def error(self) -> str:
        """What went wrong, empty where nothing did; once it is over."""
        came = None if self.received is None else self.received.size_bytes
        return "" if came in {None, self.buffer.numel()} else f"{came} came"


class Worker:
    """Worker of UCX, thread-safe. Its methods block for nobody, `close` aside.

    Args:
        context: this worker's to close.

    Attributes:
        fd: ready when progress is due, once that has returned False; see `progress`.
        address: for the peers' `connect`.

    Raises:
        ConnectionError: it cannot be made.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ucx = context.ucx
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._endpoints: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._pending: list[_Operation] = []
        self._through: deque[Callable[[], object]] = deque()
        self._telling = threading.Lock()
        self._failed: dict[int, int] = {}
        # A builtin: see above.
        self._on_failure = ErrorCallback(self._failed.__setitem__)
        self._closed = False
        self._process = os.getpid()
        self._address = c_void_p()
        params, handle, fd, size = WorkerParams(), c_void_p(), c_int(), c_size_t()
        ucx = self._ucx
        self._check(ucx.worker_create(context.handle, byref(params), byref(handle)), "its worker")
        try:
            self._check(ucx.worker_fd(handle, byref(fd)), "its event descriptor")
            status = ucx.worker_address(handle, byref(self._address), byref(size))
            self._check(status, "its address")
        except BaseException:
            ucx.worker_destroy(handle)
            raise
        self._handle = handle
        self.fd = fd.value
        self.address = ctypes.string_at(self._address, size.value)

    def _check(self, status: int, what: str) -> None:
        if status != OK:
            raise ConnectionError(f"UCX, {what}: {self._ucx.text(status)}")

    # -- links

    def join(self, lane: Lane) -> None:
        """Take in an end of a link, and watch for it."""
        with self._lock:
            self._lanes.append(lane)
        lane.port.watch(self.fd, self.progress)

    def leave(self, lane: Lane) -> None:
        """Forget an end; of what it has begun nothing is told any more."""
        with self._lock:
            self._lanes.remove(lane)
            lane.begun.clear()

    def connect(self, peer: int, address: bytes) -> None:
        """Make the endpoint to a peer, the first time; it connects with the first message.

        Raises:
            ConnectionError: no wire leads there.
        """
        with self._lock:
            if peer in self._endpoints or self._closed:
                return
            params = EndpointParams(address, self._on_failure, peer + 1)
            endpoint = c_void_p()
            status = self._ucx.connect(self._handle, byref(params), byref(endpoint))
            self._check(status, f"connecting with rank {peer}")
            self._endpoints[peer] = endpoint.value or 0
            self._look_again()

    def connected(self, peer: int) -> bool:
        """Whether there is an endpoint to that peer."""
        return peer in self._endpoints

    def give_up(self, peer: int) -> None:
        """Let what is on its way to that peer be lost; returns at once."""
        self._given_up.add(peer)

    # -- messages

    def send(self, lane: Lane, tag: int, buffer: torch.Tensor, done: Done) -> None:
        """Begin to send a message of at least a byte.

        Raises:
            ConnectionError: it cannot be.
        """
        size_bytes = buffer.numel()
        with self._lock:
            operation = self._begin(lane, buffer, done)
            operation.handle = self._ucx.send(
                self._endpoints[lane.port.peer],
                *(buffer.data_ptr(), size_bytes, tag, byref(_ON_HOST)),
            )
            self._begun(operation)
            self._look_again()
        self._tell()

    def receive(self, lane: Lane, tag: int, buffer: torch.Tensor, done: Done) -> None:
        """Begin to receive a message of at least a byte.

        Raises:
            ConnectionError: it cannot be.
        """
        size_bytes = buffer.numel()
        with self._lock:
            received = Received()
            operation = self._begin(lane, buffer, done, received)
            operation.handle = self._ucx.receive(
                self._handle,
                *(buffer.data_ptr(), size_bytes, tag, _WHOLE_TAG),
                byref(OperationParams.into(received)),
            )
            self._begun(operation)
            # On the reading thread, as progress is: what waits for this receive moves at once.
            if self._ucx.arm(self._handle) != OK and self._move():
                self._ucx.signal(self._handle)
        self._tell()

    def pass_over(self, lane: Lane, buffer: torch.Tensor, done: Done) -> None:
        """Let a message of no bytes be done in its turn."""
        with self._lock:
            operation = _Operation(lane, buffer, done)
            operation.status = OK
            lane.begun.append(operation)
            self._take_done(lane)
        self._tell()

    def _begin(
        self, lane: Lane, buffer: torch.Tensor, done: Done, received: Received | None = None
    ) -> _Operation:
        if self._closed:
            raise ConnectionError(f"{lane.doing}: the worker is closed")
        # Noted first: from its call on UCX has the memory, whatever interrupts us.
        operation = _Operation(lane, buffer, done, received)
        self._pending.append(operation)
        lane.begun.append(operation)
        return operation

    def _begun(self, operation: _Operation) -> None:
        operation.status = status_in(operation.handle)
        if operation.status != IN_PROGRESS:
            operation.handle = None
            self._pending.remove(operation)
            self._take_done(operation.lane)

    def _look_again(self) -> None:
        """Have progress made where what has begun needs it before anything comes in."""
        if self._ucx.arm(self._handle) != OK:
            self._ucx.signal(self._handle)

    # -- progress

    def progress(self) -> bool:
        """Move a share of everything and tell of what is done.

        Returns:
            Whether to call again, though the descriptor may not be ready.
        """
        with self._lock:
            again = not self._closed and self._move()
        self._tell()
        return again

    def _move(self) -> bool:
        again = self._advance()
        self._collect()
        return again

    def _advance(self) -> bool:
        until = time.monotonic() + _SHARE_S
        while True:
            if not self._ucx.progress(self._handle):
                status = self._ucx.arm(self._handle)
                if status != BUSY:
                    break
                # Room in shared memory comes without an event. Who makes it may need this core.
                os.sched_yield()
            if time.monotonic() > until:
                return True
        self._check(status, "its event descriptor")
        return False

    def _collect(self) -> None:
        """With the lock: take what is done out of what is pending, and what has failed."""
        ended = [operation for operation in self._pending if self._is_over(operation)]
        if ended:
            self._pending = [each for each in self._pending if each.status == IN_PROGRESS]
        for operation in ended:
            self._take_done(operation.lane)
        while self._failed:
            self._lose(self._failed.popitem()[0] - 1)

    def _is_over(self, operation: _Operation) -> bool:
        handle = operation.handle
        if handle is None:  # interrupted in the call, and the handler fails
            return False
        operation.status = status_in(handle)
        if operation.status != IN_PROGRESS:  # interrupted behind the call, which has failed
            operation.handle = None
            return True
        if (received := operation.received) is None:
            operation.status = self._ucx.status_of(handle)
        else:
            operation.status = self._ucx.receive_status_of(handle, byref(received))
        if operation.status == IN_PROGRESS:
            return False
        operation.handle = None  # first: nobody may ask what is freed
        self._ucx.free(handle)
        return True

    def _take_done(self, lane: Lane) -> None:
        while lane.begun and lane.begun[0].status != IN_PROGRESS:
            operation = lane.begun.popleft()
            failed = operation.status != OK
            text = f"UCX: {self._ucx.text(operation.status)}" if failed else operation.error
            if text:
                error = ConnectionError(f"{lane.doing} {operation.buffer.numel()} bytes: {text}")
                self._through.append(partial(operation.done.failed, error))
            else:
                self._through.append(operation.done)

    def _lose(self, peer: int) -> None:
        """With the lock: the endpoint has failed."""
        self._given_up.add(peer)
        error = ConnectionError(f"UCX has lost its connection with rank {peer}")
        for lane in self._lanes:
            if lane.port.peer == peer:
                self._through.append(partial(lane.port.fail, error))
                return

    def _tell(self) -> None:
        """Without the lock: tell of what is through, one thread at a time, for the order's sake.

        Who finds another at it leaves it to that one; so does a message that begins in the call.
        """
        while self._through and self._telling.acquire(blocking=False):
            try:
                while self._through:
                    self._through.popleft()()
            finally:
                self._telling.release()

    # -- the end

    def close(self, deadline: Deadline) -> None:
        """Give everything back, by the deadline; once what peers were sent has left this rank.

        In a forked child it does nothing: all that UCX has is shared with the parent.
        """
        with self._lock:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
            with ExitStack() as ends:  # also where progress fails; from the last to the first
                ends.callback(self._pending.clear)
                ends.callback(self._context.close)
                ends.callback(self._ucx.worker_destroy, self._handle)
                ends.callback(self._ucx.release_address, self._handle, self._address)
                ends.callback(self._end_operations, deadline)
                self._let_leave(deadline)

    def _end_operations(self, deadline: Deadline) -> None:
        for operation in self._pending:
            if operation.handle is not None and status_in(operation.handle) == IN_PROGRESS:
                self._ucx.cancel(self._handle, operation.handle)
        closes = [
            self._ucx.close(endpoint, byref(_BY_FORCE)) for endpoint in self._endpoints.values()
        ]
        self._wait_for([*closes, *(each.handle for each in self._pending)], deadline)

    def _let_leave(self, deadline: Deadline) -> None:
        """Wait a while for what UCX has called sent, and may still have in its own buffers."""
        flushes = [
            self._ucx.flush(endpoint, byref(_PLAIN))
            for peer, endpoint in self._endpoints.items()
            if peer not in self._given_up
        ]
        self._wait_for(flushes, deadline)

    def _wait_for(self, operations: list[int | None], deadline: Deadline) -> None:
        """Make progress until these are over, a while at most, and free them."""
        left = [each for each in operations if each and status_in(each) == IN_PROGRESS]
        until = time.monotonic() + min(deadline.remaining_s, _FAREWELL_S)
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while left:
            again = self._advance()
            for each in [one for one in left if self._ucx.status_of(one) != IN_PROGRESS]:
                left.remove(each)  # first: nobody may ask what is freed
                self._ucx.free(each)
            left_s = until - time.monotonic()
            if not left or left_s <= 0:
                break
            if not again:
                poll.poll(math.ceil(1000 * left_s))
        for each in left:
            self._ucx.free(each)
