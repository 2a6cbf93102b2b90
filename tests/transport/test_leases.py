"""Slots are returned when the last view of them has died, and not before."""

from __future__ import annotations

import gc
import mmap
import os
from typing import TYPE_CHECKING, cast

import pytest
import torch

from stagelink.transport.buffers import lease
from stagelink.transport.slots import SlotBoard, SlotReturns, returned_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Port


class Ports:
    """Counts empty notes, and calls what is asked for when it is told to."""

    def __init__(self) -> None:
        self.answers = 0
        self.calls: list[Callable[[], None]] = []

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        assert (note, fds) == (b"", ())
        self.answers += 1

    def call(self, action: Callable[[], None]) -> None:
        self.calls.append(action)

    def read(self) -> int:
        """Do what is to be done, and tell how many answers there have been."""
        while self.calls:
            self.calls.pop()()
        return self.answers


@pytest.fixture
def ports() -> Ports:
    return Ports()


@pytest.fixture
def board() -> SlotBoard:
    """A board as both ends have it, each in its process."""
    return SlotBoard(torch.frombuffer(mmap.mmap(-1, SlotBoard.BYTES), dtype=torch.uint8))


@pytest.fixture
def returns(ports: Ports, board: SlotBoard) -> SlotReturns:
    returns = SlotReturns(cast("Port", ports))
    returns.board = board
    return returns


def memory(size_bytes: int = 1 << 16) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def test_a_lease_is_a_view_with_a_storage_of_its_size() -> None:
    whole = memory()
    ended: list[int] = []
    view = lease(whole, 1000, lambda: ended.append(1))
    view.fill_(3)
    assert whole[:1001].tolist() == [3] * 1000 + [0]
    assert view.untyped_storage().nbytes() == 1000
    floats = view.view(torch.float32)
    del view, whole
    gc.collect()
    assert not ended
    assert floats.view(torch.uint8)[0] == 3  # the memory is kept
    del floats
    assert ended == [1]


def test_a_slot_is_returned_with_its_last_view(
    returns: SlotReturns, board: SlotBoard, ports: Ports
) -> None:
    first = returns.lend(3, memory(), 100)
    second = returns.lend(4, memory(), 100)
    part = first[10:20]
    del first
    assert [*board.collect()] == []
    del part, second
    assert sorted(board.collect()) == [(3, True), (4, True)]
    assert [*board.collect()] == []  # once
    assert (ports.calls, ports.answers) == ([], 0)  # nobody has asked


def test_a_graph_keeps_it_until_its_backward(returns: SlotReturns, board: SlotBoard) -> None:
    weight = torch.ones(25, requires_grad=True)
    loss = (returns.lend(0, memory(), 100).view(torch.float32) * weight).sum()
    gc.collect()
    assert [*board.collect()] == []
    loss.backward()
    assert [*board.collect()] == [(0, True)]


def test_a_sender_that_asks_is_told_when_one_is_returned(
    returns: SlotReturns, ports: Ports
) -> None:
    tensor = returns.lend(3, memory(), 100)
    returns.ask()
    assert (ports.calls, ports.answers) == ([], 0)
    del tensor  # perhaps in the middle of anything: it is told on the thread that reads next
    assert (len(ports.calls), ports.answers) == (1, 0)
    assert ports.read() == 1
    returns.release(4)
    assert ports.read() == 1  # once


def test_what_was_returned_before_it_asked_is_told_at_once_and_not_again(
    returns: SlotReturns, ports: Ports
) -> None:
    returns.release(9)
    returns.release(4)
    assert ports.read() == 0
    returns.ask()
    assert ports.read() == 1
    returns.ask()  # it has looked, and found none
    assert ports.read() == 1
    returns.release(9)
    assert ports.read() == 2


def test_it_can_be_lent_again_when_it_is_returned(returns: SlotReturns) -> None:
    slot = memory()
    tensor = returns.lend(1, slot, 10)
    with pytest.raises(ValueError, match="slot 1 came again before it was returned"):
        returns.lend(1, slot, 10)
    del tensor
    returns.lend(1, slot, 10)


def test_what_a_fork_inherits_is_not_used_again(returns: SlotReturns, board: SlotBoard) -> None:
    before = returns.lend(0, memory(), 10)
    child = os.fork()
    if child == 0:
        del before
        returns.release(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [*board.collect()] == []  # what the child lets go of is the parent's still
    after = returns.lend(1, memory(), 10)
    del before, after
    assert sorted(board.collect()) == [(0, False), (1, True)]
    returns.lend(0, memory(), 10)  # another slot of that number
    assert [*board.collect()] == [(0, True)]


def test_after_the_close_nobody_is_told(
    returns: SlotReturns, board: SlotBoard, ports: Ports
) -> None:
    tensor = returns.lend(0, memory(), 10)
    returns.ask()
    returns.close()
    del tensor
    returns.release(1)
    assert ([*board.collect()], ports.calls, ports.read()) == ([], [], 0)


def test_a_note_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a note of 5 bytes"):
        list(returned_slots(b"12345"))
