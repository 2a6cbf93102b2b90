"""However messages cross, operations run one at a time in both processes, and all of them run."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink_nccl import slot as slots
from stagelink_nccl.slot import IssueSlot, SlotUser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Pair = tuple[int, int]


class Machine:
    """Processes with a slot each, links between them, and messages that take their time.

    Args:
        pairs: the processes of each link; the first leads it.
        kind: of slot.

    Attributes:
        links: the leading end of each link.
        faults: what must not happen and did.
        ran: how many operations are through.
    """

    def __init__(self, pairs: Sequence[Pair], kind: type[IssueSlot] = IssueSlot) -> None:
        self.slots = {process: kind() for pair in pairs for process in pair}
        self.faults: list[str] = []
        self.ran = 0
        self._wires: dict[Pair, deque[Callable[[], None]]] = {}
        self._running: list[End] = []
        self.links = [self._link(*pair) for pair in pairs]

    def _link(self, leader: int, other: int) -> End:
        one, two = End(self, leader), End(self, other)
        one.twin, two.twin = two, one
        return one

    def post(self, way: Pair, message: Callable[[], None]) -> None:
        self._wires.setdefault(way, deque()).append(message)

    def begin(self, end: End) -> None:
        if any(other.process == end.process for other in self._running):
            self.faults.append(f"process {end.process} runs two operations")
        for one in (end, end.twin):
            if self.slots[one.process].holder is not one:
                self.faults.append(f"{end} runs without the slot of {one}")
        end.begun += 1
        self._running.append(end)

    def settle(self, chance: random.Random) -> None:
        """Deliver messages and end operations in random order, until nothing moves."""
        while steps := [*self._deliveries(), *self._endings()]:
            chance.choice(steps)()

    def _deliveries(self) -> list[Callable[[], None]]:
        return [partial(self._deliver, wire) for wire in self._wires.values() if wire]

    @staticmethod
    def _deliver(wire: deque[Callable[[], None]]) -> None:
        wire.popleft()()

    def _endings(self) -> list[Callable[[], None]]:
        # An operation ends on one side as soon as the other has issued it, too.
        return [partial(self._end, end) for end in self._running if end.begun <= end.twin.begun]

    def _end(self, end: End) -> None:
        self._running.remove(end)
        self.ran += end in self.links
        self.slots[end.process].done(end)


class End(SlotUser):
    twin: End

    def __init__(self, machine: Machine, process: int) -> None:
        self.process = process
        self.begun = 0
        self._machine = machine

    def __str__(self) -> str:
        return f"the end at {self.process} of {self.process}-{self.twin.process}"

    def _tell(self, message: Callable[[IssueSlot], None]) -> None:
        way = (self.process, self.twin.process)
        self._machine.post(way, lambda: message(self._machine.slots[self.twin.process]))

    def ask(self, *, insists: bool) -> None:
        self._tell(lambda slot: slot.asked(self.twin, insists=insists))

    def answer(self, *, granted: bool) -> None:
        self._tell(lambda slot: slot.answered(self.twin, granted=granted))

    def run(self) -> None:
        self._machine.begin(self)


def rush(machine: Machine, operations: Sequence[int], seed: int) -> None:
    """Have all operations matched at once, and see what comes of it."""
    for link in operations:
        leader = machine.links[link % len(machine.links)]
        machine.slots[leader.process].offer(leader)
    machine.settle(random.Random(seed))


def all_pairs(processes: int) -> list[Pair]:
    """Each pair twice: once for each direction."""
    return [pair for pair in combinations(range(processes), 2) for _ in range(2)]


@given(
    st.integers(2, 6),
    st.lists(st.integers(0, 99), min_size=1, max_size=60),
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 16]),
)
def test_all_run_one_at_a_time(
    processes: int, operations: list[int], seed: int, patience: int
) -> None:
    machine = Machine(all_pairs(processes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "PATIENCE", patience)
        rush(machine, operations, seed)
    assert machine.faults == []
    assert machine.ran == len(operations)
    assert all(slot.holder is None for slot in machine.slots.values())


def _stuck(pairs: Sequence[Pair], kind: type[IssueSlot] = IssueSlot) -> bool:
    """Whether something goes wrong in one of some runs, where everybody insists at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "PATIENCE", 0)
        for seed in range(50):
            machine = Machine(pairs, kind)
            rush(machine, list(range(3 * len(pairs))), seed)
            if machine.faults or machine.ran < 3 * len(pairs):
                return True
    return False


def test_leaders_in_a_circle_are_caught() -> None:
    """Had the lower rank not always the lead, those who insist would wait for each other."""
    assert not _stuck([(0, 1), (1, 2), (0, 2)])
    assert _stuck([(0, 1), (1, 2), (2, 0)])


class Generous(IssueSlot):
    """Grants what it has not got."""

    def asked(self, link: SlotUser, *, insists: bool) -> None:
        self._grant(link)


class Hasty(IssueSlot):
    """Lets go before the operation is done."""

    def answered(self, link: SlotUser, *, granted: bool) -> None:
        super().answered(link, granted=granted)
        if granted:
            self.done(link)


class Deaf(IssueSlot):
    """Forgets who waits."""

    def asked(self, link: SlotUser, *, insists: bool) -> None:
        if self.holder is None:
            super().asked(link, insists=insists)


@pytest.mark.parametrize("kind", [Generous, Hasty, Deaf])
def test_broken_slots_are_caught(kind: type[IssueSlot]) -> None:
    assert _stuck(all_pairs(3), kind)


class Noted(SlotUser):
    """Writes down what it is told to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def ask(self, *, insists: bool) -> None:
        self._log.append(f"{self._name} {'insists' if insists else 'asks'}")

    def answer(self, *, granted: bool) -> None:
        self._log.append(f"{self._name} {'granted' if granted else 'refused'}")

    def run(self) -> None:
        self._log.append(f"{self._name} runs")


def test_who_is_refused_lets_the_next_link_ask() -> None:
    log: list[str] = []
    slot, one, two = IssueSlot(), Noted("one", log), Noted("two", log)
    slot.offer(one)
    slot.offer(two)
    slot.answered(one, granted=False)
    slot.answered(two, granted=True)
    slot.done(two)
    assert log == ["one asks", "two asks", "two runs", "one asks"]


def test_who_was_refused_often_insists_and_is_waited_for() -> None:
    log: list[str] = []
    slot, one = IssueSlot(), Noted("one", log)
    slot.offer(one)
    for _ in range(slots.PATIENCE):
        slot.answered(one, granted=False)
    slot.answered(one, granted=True)
    assert log == ["one asks"] * slots.PATIENCE + ["one insists", "one runs"]


def test_while_it_holds_it_refuses_and_keeps_in_mind_who_insists() -> None:
    log: list[str] = []
    slot, own, low, lower = IssueSlot(), Noted("own", log), Noted("low", log), Noted("lower", log)
    slot.offer(own)
    slot.asked(low, insists=False)
    slot.asked(lower, insists=True)
    slot.answered(own, granted=False)
    slot.done(lower)
    assert log == [
        "own asks",
        "low refused",
        "lower granted",
        "lower runs",
        "own asks",
    ]


def test_what_is_forgotten_is_not_granted() -> None:
    machine = Machine([(0, 1), (0, 2)])
    gone, other = machine.links
    slot = machine.slots[0]
    slot.offer(gone)
    assert slot.holder is gone
    slot.forget(gone)  # its other rank has closed
    slot.offer(other)
    machine.settle(random.Random(0))
    assert machine.ran == 1
    assert slot.holder is None


def test_after_the_stop_nothing_begins() -> None:
    machine = Machine([(0, 1)])
    for slot in machine.slots.values():
        slot.stop()
    rush(machine, [0], 0)
    assert machine.ran == 0
