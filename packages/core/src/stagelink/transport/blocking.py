"""Waiting on behalf of a wire that can only block: a thread per end, and a device's work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from stagelink.deadline import Deadline
from stagelink.transport.contract import Done
from stagelink.transport.port import Port
from stagelink.transport.streams import StreamEvent

_Wait = Callable[[], "torch.Tensor | None"]

_SHORTEST_LOOK_S = 10e-6
_LONGEST_LOOK_S = 1e-3


class Finisher:
    """One thread that waits for a link's messages, in their order, for a wire that can only block.

    Each end that needs one makes its own. The thread starts with the first message.

    Args:
        port: of the end.
    """

    def __init__(self, port: Port) -> None:
        verb = "send" if port.rank == port.link.source else "recv"
        link = port.link
        self._name = f"stagelink-{verb}-{link.source}-{link.target}-{link.transport}"
        self._stream = port.stream
        self._queue: queue.SimpleQueue[tuple[_Wait, Done] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, wait: _Wait, done: Done) -> None:
        """Have a message waited for, behind those submitted before; returns at once.

        Args:
            wait: called on the thread, with the link's stream current; blocks until the message is
                complete, or abort. What it returns is given to ``done``, what it raises to
                ``done.failed``; after that nothing is waited for any more.
            done: the message's.
        """
        self._queue.put((wait, done))
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, deadline: Deadline) -> None:
        """End the thread and wait for it until the deadline; what is still queued is dropped.

        For the end's ``close``. Its ``abort`` has made what is being waited for return.
        """
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        if self._thread is not None and self._thread.is_alive():  # a signal may prevent its start
            self._thread.join(deadline.remaining_s)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None or self._closed or not self._finish(*item):
                return
            del item  # nor does the thread keep a message's memory until the next

    def _finish(self, wait: _Wait, done: Done) -> bool:
        try:
            with self._stream.entered():
                payload = wait()
        except BaseException as error:  # SystemExit as well: else the message would just stay
            done.failed(error)
            return False
        done(payload)
        return True


def synchronize(moment: StreamEvent | None, port: Port, deadline: Deadline | None = None) -> None:
    """Wait until a moment is reached; unlike the device's own waits this ends on abort.

    Raises:
        TimeoutError: the deadline, if there is one, passed.
        StagelinkError: the handler failed or was closed.
    """
    look_s = _SHORTEST_LOOK_S
    while moment is not None and not moment.reached:
        if deadline is not None and deadline.passed:
            raise TimeoutError(
                f"{port.link}: the device did not finish within {deadline.seconds:g} s"
            )
        port.pause(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)
