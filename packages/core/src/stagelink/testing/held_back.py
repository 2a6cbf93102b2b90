"""A rank whose transport hears of nothing until all its messages are sent.

That is a peer, or a connection to it, which is late, and then there at once: what ``begin`` had no
room for must be asked for again, and ``done`` finds the next message waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.distributed import Store

from stagelink.testing.contract_check import ContractCheck
from stagelink.testing.drivers import echo, some
from stagelink.testing.subject import Subject
from stagelink.testing.wrapping import WrappedPort, WrappedSender, wrapped
from stagelink.transport.contract import Port, Sender, Transport

_OPENING_S = 0.3
"""Hold of actions while links are being opened, which may have to wait for one."""


def hears_nothing_until_all_is_sent(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Messages arrive though the sender's end had no note and no descriptor before the last."""
    held = _Held()
    if rank != 0:
        held.release()
    subject = subject.wrapped(held.wrap)
    count = 2 * subject.capabilities.in_flight + 4
    plan_of = partial(Subject.plan, window=count, deadline_s=subject.patience_s)
    with subject.join(rank, world_size, store, plan_of) as comm, comm.evaluate(count) as session:
        held.until_s = math.inf
        for microbatch in range(count):
            if rank == 0:
                tensor = torch.full((size_bytes,), microbatch, dtype=torch.uint8)
                session.isend("e0", subject.on_device(tensor), microbatch)
        held.release()
        for microbatch in range(count):
            if rank != 0:
                got = some(session.recv("e0", microbatch))
                assert bool((got == microbatch).all()), f"message {microbatch} arrived changed"


def falls_silent(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Check that no action is called on and on where nothing is on its way any more."""
    check = ContractCheck(subject.patience_s)
    with subject.join(rank, world_size, store, check=check) as comm:
        with comm.train(2) as session:
            echo(session, rank, [subject.on_device(torch.ones(5000)) for _ in range(2)])
        comm.reduce([0.0])
        check.verify_idle()
        comm.reduce([0.0])  # nor does a peer that closes give it anything to do


class _Held:
    """What a rank's ends are not told yet."""

    def __init__(self) -> None:
        self.released = False  # whether they are told now
        self.until_s = 0.0  # monotonic moment until which their actions are not called
        self._senders: list[_Sender] = []

    def wrap(self, transport: type[Transport]) -> type[Transport]:
        return wrapped(transport, f"held-{transport.name}", sender=self._sender, port=self._port)

    def release(self) -> None:
        self.released = True
        for sender in self._senders:
            sender.port.call(sender.give_notes)

    def _sender(self, inner: Sender, port: Port) -> Sender:
        sender = _Sender(inner, port)
        sender.gives = self.released
        self.until_s = time.monotonic() + _OPENING_S
        self._senders.append(sender)
        return sender

    def _port(self, port: Port) -> _Port:
        return _Port(self, port)


class _Port(WrappedPort):
    def __init__(self, held: _Held, port: Port) -> None:
        super().__init__(port)
        self._held = held

    def act(self, action: Callable[[], bool]) -> bool:
        if not self._held.released and time.monotonic() < self._held.until_s:
            return True  # again: an event that was there must not be lost
        return action()


class _Sender(WrappedSender):
    """Keeps notes until they may be given; both on the reading thread."""

    gives = False

    def __init__(self, inner: Sender, port: Port) -> None:
        super().__init__(inner, port)
        self._notes: list[tuple[bytes, Sequence[int]]] = []

    def on_note(self, note: bytes, fds: Sequence[int]) -> None:
        if self.gives:
            super().on_note(note, fds)
        else:
            self._notes.append((note, fds))

    def give_notes(self) -> None:
        """Give what has come, and from now on what comes."""
        self.gives = True
        try:
            while self._notes:
                super().on_note(*self._notes.pop(0))
        except Exception as error:
            self.port.fail(error)
