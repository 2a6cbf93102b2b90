"""The sender's book of slots: few, used again, never starved by a receiver that keeps them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stagelink.transport.slots import Slot, SlotRing

KIB = 1024
MIB = 1024 * KIB


def ring(most: int = 6, bound_bytes: int = 64 * MIB) -> SlotRing[int]:
    return SlotRing(int, most=most, bound_bytes=bound_bytes)


def taken(book: SlotRing[int], size_bytes: int) -> Slot[int]:
    slot = book.take(size_bytes)
    assert slot is not None
    return slot


def test_the_slot_that_came_home_last_goes_first() -> None:
    book = ring()
    slots = [taken(book, MIB) for _ in range(3)]
    for slot in slots:
        book.give_back(slot.number)
    assert taken(book, MIB) is slots[2]
    assert taken(book, MIB) is slots[1]
    assert book.count == 3


def test_one_is_made_only_when_all_that_fit_are_out() -> None:
    book = ring()
    for _ in range(100):
        book.give_back(taken(book, MIB).number)
    assert book.count == 1


def test_the_smallest_that_fits_is_taken() -> None:
    book = ring()
    slots = [taken(book, size) for size in (4 * MIB, MIB, 2 * MIB)]
    for slot in slots:
        book.give_back(slot.number)
    assert taken(book, 1_500_000) is slots[2]


def test_a_large_slot_is_not_spent_on_a_small_message_while_others_can_be_made() -> None:
    book = ring(most=4)
    large = taken(book, 8 * MIB)
    book.give_back(large.number)
    small = [taken(book, KIB) for _ in range(3)]
    assert large not in small
    assert taken(book, KIB) is large


def test_slots_that_are_too_small_make_room() -> None:
    book = ring(most=4)
    small = [taken(book, MIB) for _ in range(4)]
    assert book.take(2 * MIB) is None
    for slot in small:
        book.give_back(slot.number)
    large = taken(book, 2 * MIB)
    assert (book.count, large.number) == (4, small[0].number)
    with pytest.raises(ValueError, match=f"slot {small[1].number} was returned and was not out"):
        book.give_back(small[1].number)


def test_nothing_is_given_up_for_what_would_not_fit_then_either() -> None:
    book = ring(most=100, bound_bytes=16 * MIB)
    out = [taken(book, 2 * MIB) for _ in range(7)]
    small = [taken(book, 512 * KIB) for _ in range(4)]
    assert len(out) == 7
    for slot in small[:2]:
        book.give_back(slot.number)
    assert book.take(2 * MIB) is None
    assert (book.count, book.given_up()) == (11, [])


def test_what_was_given_up_is_told_once() -> None:
    book = ring(most=4)
    small = [taken(book, MIB) for _ in range(4)]
    for slot in small:
        book.give_back(slot.number)
    taken(book, 2 * MIB)
    assert book.given_up() == [small[0].number]
    assert book.given_up() == []


def test_there_are_no_more_than_told_and_at_least_four() -> None:
    book = ring(most=1)
    for _ in range(4):
        taken(book, MIB)
    assert book.take(MIB) is None


def test_there_are_never_more_than_a_process_can_well_map() -> None:
    book = ring(most=100_000)
    book.grow(200_000)
    slots = [taken(book, KIB) for _ in range(1024)]
    assert book.take(KIB) is None
    assert [book.may_keep(slot) for slot in slots] == [True] * 1022 + [False] * 2
    assert book.most_bytes(KIB) == 4 * MIB


def test_memory_stays_within_its_bound() -> None:
    book = ring(most=100, bound_bytes=16 * MIB)
    assert book.largest_bytes == 2 * MIB
    count = 0
    while book.take(2 * MIB) is not None:
        count += 1
    assert count == 8


def test_one_that_is_not_usable_any_more_is_given_up() -> None:
    book = ring()
    slot = taken(book, MIB)
    book.give_back(slot.number, usable=False)
    assert book.count == 0
    other = taken(book, MIB)
    assert other is not slot
    assert other.number == slot.number


def test_all_but_two_may_be_kept() -> None:
    book = ring(most=5)
    slots = [taken(book, MIB) for _ in range(5)]
    assert [book.may_keep(slot) for slot in slots] == [True] * 3 + [False] * 2
    book.give_back(slots[0].number)
    assert book.may_keep(taken(book, MIB))


def test_room_for_two_of_the_largest_is_not_kept() -> None:
    book = ring(most=100, bound_bytes=16 * MIB)
    slots = [taken(book, 2 * MIB) for _ in range(8)]
    assert [book.may_keep(slot) for slot in slots] == [True] * 6 + [False] * 2


@pytest.mark.parametrize("size", [1, 4096, 4097, 100_000, MIB, MIB + 1, 8 * MIB])
def test_a_slot_is_at_most_a_quarter_larger_than_its_message(size: int) -> None:
    capacity = ring().capacity_for(size)
    assert size <= capacity <= max(4096, size + size // 4 + 1, size + 4096)


class Exchange(RuleBasedStateMachine):
    """Whatever a receiver keeps, a message of any size finds a slot once the others are home."""

    def __init__(self) -> None:
        super().__init__()
        self.book = ring(most=7, bound_bytes=4 * MIB)
        self.kept: list[Slot[int]] = []
        self.read: list[Slot[int]] = []

    @rule(size=st.integers(1, 512 * KIB))
    def send(self, size: int) -> None:
        slot = self.book.take(size)
        if slot is None:
            return
        assert slot.capacity_bytes >= size
        assert slot.number not in {other.number for other in self.kept + self.read}
        (self.kept if self.book.may_keep(slot) else self.read).append(slot)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def copy_out(self, data: st.DataObject) -> None:
        self._home(self.read, data)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), usable=st.booleans())
    def let_go(self, data: st.DataObject, usable: bool) -> None:
        self._home(self.kept, data, usable=usable)

    def _home(self, slots: list[Slot[int]], data: st.DataObject, *, usable: bool = True) -> None:
        slot = slots.pop(data.draw(st.integers(0, len(slots) - 1)))
        self.book.give_back(slot.number, usable=usable)

    @rule()
    def never_starve(self) -> None:
        while self.read:
            self.book.give_back(self.read.pop().number)
        for slot in [taken(self.book, self.book.largest_bytes) for _ in range(2)]:
            self.book.give_back(slot.number)

    @invariant()
    def stays_within_its_bounds(self) -> None:
        assert self.book.count <= self.book.most
        assert sum(slot.capacity_bytes for slot in self.kept + self.read) <= 4 * MIB


TestExchange = Exchange.TestCase
TestExchange.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
