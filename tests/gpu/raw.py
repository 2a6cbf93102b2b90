"""Two processes that use CUDA's functions by hand, with a pipe between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from tests.cupy.ring import pipe

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch.distributed import Store

    from tests.gpu.machines import Machine

__all__ = ["SIZE", "End", "end_of", "status_text"]

SIZE = 2 * 1024 * 1024
"""Of every piece of memory: CUDA exports whole blocks of so much."""

_NOT_READY = 600
_LOOK_S = 0.002


def status_text(status: int) -> str:
    """What a query says."""
    return {0: "done", _NOT_READY: "not ready"}.get(status, f"status {status}")


class End:
    """One of the two.

    Args:
        machine: what it runs on.
        rt: the module with CUDA's functions.
        other: the pipe.

    Attributes:
        machine: as given.
        rt: as given.
        other: as given.
        stream: one to use.
        scratch: memory of its own.
    """

    def __init__(self, machine: Machine, rt: Any, other: Connection) -> None:
        self.machine = machine
        self.rt = rt
        self.other = other
        self.stream = self.new_stream()
        self._quiet = self.new_stream()
        self.scratch = rt.malloc(SIZE)

    def new_stream(self) -> int:
        """A stream that waits for no other."""
        stream: int = self.rt.streamCreateWithFlags(self.rt.streamNonBlocking)
        return stream

    def new_event(self) -> int:
        """An event that can be exported."""
        flags = self.rt.eventInterprocess | self.rt.eventDisableTiming
        event: int = self.rt.eventCreateWithFlags(flags)
        return event

    def new_memory(self, value: int) -> int:
        """Memory of `SIZE` that holds a value."""
        memory: int = self.rt.malloc(SIZE)
        self.fill(memory, value)
        return memory

    def fill(self, memory: int, value: int) -> None:
        """Write a value, and wait for it."""
        self.rt.memsetAsync(memory, value, SIZE, self._quiet)
        self.rt.streamSynchronize(self._quiet)

    def copy(self, target: int, source: int, stream: int) -> None:
        """Queue a copy within the GPU."""
        self.rt.memcpyAsync(target, source, SIZE, self.rt.memcpyDeviceToDevice, stream)

    def look(self, memory: int) -> str:
        """What is there now."""
        seen = torch.zeros(SIZE, dtype=torch.uint8)
        self.rt.memcpy(seen.data_ptr(), memory, SIZE, self.rt.memcpyDeviceToHost)
        values = seen.unique().tolist()
        return f"all {values[0]}" if len(values) == 1 else f"{len(values)} different values"

    def event_state(self, event: int) -> str:
        """What a query of an event says at once."""
        return status_text(self.rt.eventQuery(event))

    def stream_state(self, stream: int) -> str:
        """What a query of a stream says at once."""
        return status_text(self.rt.streamQuery(stream))

    def settled(self, state: Callable[[], str], seconds: float | None = None) -> str:
        """What a query says in the end: asked again as long as it is not ready."""
        limit_s = self.machine.settle_s if seconds is None else seconds
        end = time.monotonic() + limit_s
        while (seen := state()) == "not ready" and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return seen

    def attempt(self, call: Callable[[], object]) -> str:
        """Whether a call works, or the error that it raises."""
        try:
            call()
        except self.rt.CUDARuntimeError as error:
            return str(error).partition(":")[0]
        return "works"

    def attempt_in_thread(self, call: Callable[[], object]) -> str:
        """The same for a call that may hang; should it keep the interpreter, all of this does."""
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(self.attempt(call)), daemon=True)
        thread.start()
        thread.join(self.machine.settle_s)
        return seen[0] if seen else "hangs"

    def read(self, memory: int) -> str:
        """What a copy brings that is made on a stream of its own."""
        stream = self.new_stream()
        started = self.attempt(lambda: self.copy(self.scratch, memory, stream))
        if started != "works":
            return started
        state = self.settled(lambda: self.stream_state(stream))
        return self.look(self.scratch) if state == "done" else state

    def usable(self) -> str:
        """Whether the context does work: CUDA's functions and torch."""
        stream = self.new_stream()
        started = self.attempt(lambda: self.rt.memsetAsync(self.scratch, 42, SIZE, stream))
        if started != "works":
            return started
        state = self.settled(lambda: self.stream_state(stream))
        if state != "done":
            return state
        right = self.look(self.scratch) == "all 42" and self.machine.computes()
        return "works" if right else "computes wrongly"

    def wait_for_death(self) -> None:
        """Block until the other process is no more."""
        with suppress(EOFError, ConnectionError):
            self.other.recv()


@contextmanager
def end_of(machine: Machine, rank: int, store: Store) -> Iterator[End]:
    """Meet the other process."""
    with machine.process(rank) as rt, pipe(rank, store) as other:
        yield End(machine, rt, other)
