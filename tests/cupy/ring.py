"""A ring of slots in device memory between two processes, by the rules of CUDA or against one.

As small as can be: the chunk of a message is one byte, repeated. The sender says by a note on a
pipe which slot it is in, the receiver says in the same way which slot is free again; that the
bytes are there, and have been read, is left to events.
"""

from __future__ import annotations

import secrets
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING

import torch

from tests.cupy.codes import Status
from tests.cupy.double import CudaDouble
from tests.cupy.machine import DoubleConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from torch.distributed import Store

__all__ = ["RULES", "pass_messages", "pass_over", "pipe"]

RULES = (
    "wait until ready",
    "note after record",
    "wait until free",
    "credit after record",
    "wait for credit",
)

_MESSAGES, _SLOTS, _CHUNK_BYTES = 60, 3, 512
_FLAGS = CudaDouble.eventInterprocess | CudaDouble.eventDisableTiming


def pipe(rank: int, store: Store) -> Connection:
    """A connection between ranks 0 and 1."""
    if rank == 0:
        address = f"\0stagelink-{secrets.token_hex(8)}"  # in no directory
        with Listener(address, "AF_UNIX") as listener:
            store.set("pipe", address)
            return listener.accept()
    return Client(store.get("pipe").decode(), "AF_UNIX")


class _End:
    """What both ends have: memory of three slots, and an event per slot and direction."""

    def __init__(self, rt: CudaDouble, other: Connection, broken: str | None) -> None:
        self.rt = rt
        self.other = other
        self._broken = broken
        self.stream = rt.streamCreateWithFlags(rt.streamNonBlocking)
        self.mine = [rt.eventCreateWithFlags(_FLAGS) for _ in range(_SLOTS)]
        other.send([rt.ipcGetEventHandle(event) for event in self.mine])
        self.theirs = [rt.ipcOpenEventHandle(handle) for handle in other.recv()]

    def keeps(self, rule: str) -> bool:
        return rule != self._broken

    def copy(self, target: int, source: int) -> None:
        self.rt.memcpyAsync(
            *(target, source, _CHUNK_BYTES), self.rt.memcpyDeviceToDevice, self.stream
        )

    def finish_slot(self, slot: int, rule: str) -> None:
        """Record the slot's event and tell the other, or the other way round."""
        if not self.keeps(rule):
            self.other.send(slot)
            self.rt.streamSynchronize(self.stream)  # a process may be held up anywhere
        self.rt.eventRecord(self.mine[slot], self.stream)
        if self.keeps(rule):
            self.other.send(slot)


def _send(end: _End) -> int:
    """All messages; the number of wrong ones is the receiver's to know."""
    rt, credits_ = end.rt, [True] * _SLOTS
    memory = rt.malloc(_SLOTS * _CHUNK_BYTES)
    end.other.send(rt.ipcGetMemHandle(memory))
    payloads = torch.arange(_MESSAGES, dtype=torch.uint8).repeat_interleave(_CHUNK_BYTES)
    for number in range(_MESSAGES):
        slot = number % _SLOTS
        while end.keeps("wait for credit") and not credits_[slot]:
            credits_[end.other.recv()] = True
        credits_[slot] = False
        if end.keeps("wait until free"):
            rt.streamWaitEvent(end.stream, end.theirs[slot])
        end.copy(memory + slot * _CHUNK_BYTES, payloads.data_ptr() + number * _CHUNK_BYTES)
        end.finish_slot(slot, "note after record")
    while end.other.recv() is not None:
        pass
    rt.streamSynchronize(end.stream)  # the receiver has seen everything: nothing holds this up
    rt.free(memory)
    return 0


def _receive(end: _End) -> int:
    """All messages; how many of them were wrong."""
    rt = end.rt
    memory = rt.ipcOpenMemHandle(end.other.recv())
    got = torch.full((_MESSAGES, _CHUNK_BYTES), 255, dtype=torch.uint8)
    for row in got:
        slot = end.other.recv()
        if end.keeps("wait until ready"):
            rt.streamWaitEvent(end.stream, end.theirs[slot])
        end.copy(row.data_ptr(), memory + slot * _CHUNK_BYTES)
        end.finish_slot(slot, "credit after record")
    while rt.streamQuery(end.stream) == Status.cudaErrorNotReady:
        if end.other.poll(0.001):  # nothing more is to come: the sender is dead
            raise EOFError
    rt.ipcCloseMemHandle(memory)
    end.other.send(None)
    expected = torch.arange(_MESSAGES, dtype=torch.uint8)[:, None]
    return int((got != expected).any(dim=1).sum())


def pass_over(other: Connection, rank: int, seed: int, broken: str | None) -> int:
    """Sixty messages, with one rule broken or none; the receiver returns how many were wrong.

    Raises:
        OSError: the other process is dead; or EOFError.
        CUDARuntimeError: it was when its handles were opened.
    """
    with CudaDouble(DoubleConfig(seed=seed), rank) as rt:
        wrong = (_send, _receive)[rank](_End(rt, other, broken))
        assert rt.undefined == []
    return wrong


def pass_messages(
    rank: int, world_size: int, store: Store, seeds: Sequence[int], broken: str | None
) -> list[int]:
    """Messages as in `pass_over`, for each seed."""
    with pipe(rank, store) as other:
        return [pass_over(other, rank, seed, broken) for seed in seeds]
