"""What rank processes run in the tests of transport-cupy: a pair of ranks on doubles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.distributed import PrefixStore

from stagelink.testing.subject import Subject
from stagelink_cupy.notes import Piece
from stagelink_cupy.passing import End, Passing
from stagelink_cupy.receiver import CupyReceiver
from stagelink_cupy.region import SLOTS, Region
from stagelink_cupy.sender import CupySender
from tests.cupy.machine import DoubleConfig
from tests.cupy.on_double import CupyOnDouble, on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from stagelink import Handler
    from stagelink.transport.contract import Announce, Done, Message
    from tests.cupy.double import CudaDouble

LITTLE = 2 * 1024 * 1024
SLOT_BYTES = LITTLE // SLOTS
MESSAGES = 24
_SLOW_S, _QUICK_S = 0.004, 0.0002

Options = dict[str, Any]


def options(*, device_ordered: bool) -> Options:
    return {"region_bytes": LITTLE, "device_ordered": device_ordered}


def connected(rank: int, world_size: int, store: Store, given: Options) -> Handler:
    subject = Subject(CupyOnDouble.name, (CupyOnDouble,), given)
    return subject.connect(subject.plan(window=8), rank, world_size, store)


def held_bytes(rt: CudaDouble, device: int = 0) -> int:
    """How much memory of a GPU this process has allocated."""
    rt.setDevice(device)
    free, total = rt.memGetInfo()
    return total - free


def held_events(rt: CudaDouble) -> int:
    """How many events this process shares with another, or has opened of it."""
    return sum(
        bool(event.flags & rt.eventInterprocess) or event.memory is not rt._events._memory
        for event in rt._event_handles.values()
    )


def value(number: int) -> torch.Tensor:
    """Some messages take one slot, some three."""
    size = 2 * SLOT_BYTES + 1000 if number % 3 == 0 else 1000
    return torch.full((size,), number + 1, dtype=torch.uint8)


def exchange(comm: Handler) -> int:
    """Pass messages from rank 0 to rank 1; how many came out wrong."""
    wrong = 0
    with comm.evaluate(MESSAGES) as session:
        for number in range(MESSAGES):
            if comm.rank == 0:
                session.send("e0", value(number), number)
            else:
                got = session.recv("e0", number)
                assert got is not None
                wrong += not torch.equal(got, value(number))
    return wrong


# -- rules, and how each is broken ---------------------------------------------------------------


def _do_not_wait(patch: pytest.MonkeyPatch) -> None:
    copy = Region.copy

    def without_wait(self: Region, *args: int) -> None:
        events, self._opened_events = self._opened_events, []
        copy(self, *args)
        self._opened_events = events

    patch.setattr(Region, "copy", without_wait)


def _copy_when_told(patch: pytest.MonkeyPatch) -> None:
    """Have no copy queued long before the receiver is told of it; all rules are kept."""

    def begin(self: CupySender, message: Message, announce: Announce, done: Done) -> bool:
        announce()
        self._finisher.submit(Passing(self, message.payload).finish, done)
        return True

    patch.setattr(CupySender, "begin", begin)


def _tell_before_record(patch: pytest.MonkeyPatch, end: type[End]) -> None:
    copy, tell = Region.copy, end.tell

    def without_record(self: Region, *args: int) -> None:
        events, self._events = self._events, []
        copy(self, *args)
        self._events = events

    def early(self: End, piece: Piece) -> None:
        tell(self, piece)
        region = self.region
        region._rt.streamSynchronize(region._stream)  # a process may be held up anywhere
        region._rt.eventRecord(region._events[piece.slot], region._stream)

    _copy_when_told(patch)
    patch.setattr(Region, "copy", without_record)
    patch.setattr(end, "tell", early)


def _tell_before_done(patch: pytest.MonkeyPatch) -> None:
    _copy_when_told(patch)
    patch.setattr(Region, "device_ordered", True)


def _do_not_wait_for_slots(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    def take_any(self: CupySender, left_bytes: int) -> Piece:
        return Piece(next(numbers) % SLOTS, min(left_bytes, self.region.slot_bytes))

    patch.setattr(CupySender, "next", take_any)
    patch.setattr(CupySender, "on_note", lambda *_: None)


class Rule(NamedTuple):
    """A rule of order.

    Attributes:
        rank: whose it is to keep.
        slow: the rank whose device is late where it shows.
        device_ordered: the option under which there is such a rule.
        broken: have this process break it from now on.
    """

    rank: int
    slow: int
    device_ordered: bool
    broken: Callable[[pytest.MonkeyPatch], None]


RULES = {
    "wait until ready": Rule(1, 0, True, _do_not_wait),
    "note after record": Rule(0, 0, True, partial(_tell_before_record, end=CupySender)),
    "wait until free": Rule(0, 1, True, _do_not_wait),
    "credit after record": Rule(1, 1, True, partial(_tell_before_record, end=CupyReceiver)),
    "wait for credit": Rule(0, 1, True, _do_not_wait_for_slots),
    "note after copy": Rule(0, 0, False, _tell_before_done),
    "credit after copy": Rule(1, 1, False, _tell_before_done),
    "wait for credit, too": Rule(0, 1, False, _do_not_wait_for_slots),
}


def exchange_by_rules(
    rank: int,
    world_size: int,
    store: Store,
    seeds: Sequence[int],
    slow: int,
    broken: str | None,
    given: Options,
) -> list[int]:
    """How many messages of each seed came out wrong, with one rule broken or none."""
    wrong = []
    for seed in seeds:
        config = DoubleConfig(seed=seed, delay_s=_SLOW_S if rank == slow else _QUICK_S)
        with on_device(config, rank) as rt:
            with (
                pytest.MonkeyPatch.context() as patch,
                connected(rank, world_size, PrefixStore(str(seed), store), given) as comm,
            ):
                if broken is not None and RULES[broken].rank == rank:
                    RULES[broken].broken(patch)
                wrong.append(exchange(comm))
            if broken is None:
                assert rt.undefined == []
                assert (held_bytes(rt), held_events(rt)) == (0, 0)
    return wrong
