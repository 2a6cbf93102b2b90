"""What is issued is such that NCCL can carry it; and a build that breaks a rule is found out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from stagelink_nccl.issuer import Issuer
from stagelink_nccl.slot import IssueSlot
from tests.nccl.journal import Entry, Operation, faults
from tests.nccl.programs import by_chance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool
    from stagelink_nccl.issuer import Task
    from stagelink_nccl.slot import SlotUser
    from tests.nccl.journal import Journal

SHAPES = [(1, 1), (2, 1), (1, 3), (2, 2, 2), (1, 2, 1, 1)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_order_of_any_shape(shape: tuple[int, ...], seed: int, rank_pool: RankPool) -> None:
    journals = rank_pool.run(by_chance, sum(shape), shape, seed)
    assert faults(journals) == []
    assert sum(map(len, journals)) >= 2 * 2 * 8  # both ends, forth and back


class Generous(IssueSlot):
    """Grants what it has not got."""

    def asked(self, link: SlotUser, *, insists: bool) -> None:
        link.answer(granted=True)
        link.run()


class Hasty(IssueSlot):
    """Lets go when the operation is issued, not when it is done."""

    def answered(self, link: SlotUser, *, granted: bool) -> None:
        super().answered(link, granted=granted)
        if granted:
            self.done(link)


def on_a_thread_of_its_own(issuer: Issuer, task: Task) -> None:
    threading.Thread(target=_issue, args=(issuer, task)).start()


def _issue(issuer: Issuer, task: Task) -> None:
    then = task.issue()
    with issuer.lock:
        issuer.slot.done(task)
    then()


def broken(rank: int, world_size: int, store: Store, shape: Sequence[int], how: str) -> Journal:
    """A run of a build that breaks a rule."""
    if how == "threads":
        with patch.object(Issuer, "wake", on_a_thread_of_its_own):
            return by_chance(rank, world_size, store, shape, 0)
    kind = {"generous": Generous, "hasty": Hasty}[how]
    return by_chance(rank, world_size, store, shape, 0, kind)


@pytest.mark.parametrize("how", ["threads", "generous", "hasty"])
def test_a_build_that_breaks_a_rule(how: str, rank_pool: RankPool) -> None:
    found = faults(rank_pool.run(broken, 3, (2, 1), how))
    fault = "threads" if how == "threads" else "without the slot"
    assert any(fault in one for one in found), found


def _entries(*operations: tuple[int, int, int]) -> Journal:
    """Issued one after the other, with everything that is asked for."""
    return [
        Entry(Operation(*operation), "issuer", 10.0 * when, 10.0 * when + 1, 10.0 * when + 2)
        for when, operation in enumerate(operations)
    ]


def test_three_ranks_that_agree_pair_by_pair_and_make_a_cycle() -> None:
    """Tickets of the lower rank alone would allow it."""
    ab, ac, bc = (0, 1, 0), (0, 2, 0), (1, 2, 0)
    cycle = [_entries(ab, ac), _entries(bc, ab), _entries(ac, bc)]
    assert any("cycle" in fault for fault in faults(cycle))
    line = [_entries(ab, ac), _entries(ab, bc), _entries(ac, bc)]
    assert not any("cycle" in fault for fault in faults(line))


def test_an_operation_that_one_rank_did_not_issue() -> None:
    assert faults([_entries((0, 1, 0)), []]) == ["0→1#0 was issued on [0] only"]
