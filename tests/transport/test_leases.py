"""Slots go home when the last view of them has died, and not before."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, cast

import pytest
import torch

from stagelink.transport.buffers import lease
from stagelink.transport.slots import SlotReturns, returned_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagelink.transport.contract import Port


class Ports:
    """Keeps notes, and calls what is asked for when it is told to."""

    def __init__(self) -> None:
        self.home: list[tuple[int, bool]] = []
        self.calls: list[Callable[[], None]] = []

    def note(self, note: bytes, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.home += returned_slots(note)

    def call(self, action: Callable[[], None]) -> None:
        self.calls.append(action)

    def read(self) -> None:
        while self.calls:
            self.calls.pop()()


@pytest.fixture
def ports() -> Ports:
    return Ports()


@pytest.fixture
def returns(ports: Ports) -> SlotReturns:
    return SlotReturns(cast("Port", ports))


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


def test_a_slot_goes_home_with_its_last_view(returns: SlotReturns, ports: Ports) -> None:
    first = returns.lend(3, memory(), 100)
    second = returns.lend(4, memory(), 100)
    part = first[10:20]
    del first
    assert not ports.calls
    del part, second
    assert len(ports.calls) == 1  # one call for both
    ports.read()
    assert sorted(ports.home) == [(3, True), (4, True)]


def test_a_graph_keeps_it_until_its_backward(returns: SlotReturns, ports: Ports) -> None:
    weight = torch.ones(25, requires_grad=True)
    loss = (returns.lend(0, memory(), 100).view(torch.float32) * weight).sum()
    gc.collect()
    assert not ports.calls
    loss.backward()
    ports.read()
    assert ports.home == [(0, True)]


def test_those_that_were_read_go_home_together_at_the_next_read(
    returns: SlotReturns, ports: Ports
) -> None:
    returns.release(9)
    returns.release(4)
    assert ports.home == []
    assert len(ports.calls) == 1
    ports.read()
    assert ports.home == [(9, True), (4, True)]


def test_it_can_be_lent_again_when_it_is_home(returns: SlotReturns, ports: Ports) -> None:
    slot = memory()
    tensor = returns.lend(1, slot, 10)
    with pytest.raises(ValueError, match="slot 1 came again before it was returned"):
        returns.lend(1, slot, 10)
    del tensor
    ports.read()
    returns.lend(1, slot, 10)


def test_what_a_fork_inherits_is_not_used_again(returns: SlotReturns, ports: Ports) -> None:
    before = returns.lend(0, memory(), 10)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    after = returns.lend(1, memory(), 10)
    del before, after
    ports.read()
    assert sorted(ports.home) == [(0, False), (1, True)]
    returns.lend(0, memory(), 10)  # another slot of that number
    ports.read()
    assert ports.home[2:] == [(0, True)]


def test_after_the_close_nobody_is_told(returns: SlotReturns, ports: Ports) -> None:
    tensor = returns.lend(0, memory(), 10)
    returns.close()
    del tensor
    returns.release(1)
    assert (ports.calls, ports.home) == ([], [])


def test_a_note_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a note of 5 bytes"):
        list(returned_slots(b"12345"))
