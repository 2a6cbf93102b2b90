"""Ranks as threads of this process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from stagelink.testing import RankFailedError, run_threads

if TYPE_CHECKING:
    from torch.distributed import Store


def test_results_come_by_rank() -> None:
    def meet(rank: int, world_size: int, store: Store, text: str) -> str:
        store.set(str(rank), f"{text} {rank}")
        return store.get(str(world_size - 1 - rank)).decode()

    assert run_threads(meet, 3, "from") == ["from 2", "from 1", "from 0"]


def test_a_rank_is_named_in_its_threads_name() -> None:
    assert run_threads(lambda *_: threading.current_thread().name, 2) == ["rank 0", "rank 1"]


def test_an_exception_comes_home_as_the_cause() -> None:
    def fail(rank: int, world_size: int, store: Store) -> None:
        if rank:
            raise ZeroDivisionError("nothing to divide")

    with pytest.raises(RankFailedError, match=r"1 of 2 ranks of .*\s*rank 1 raised") as caught:
        run_threads(fail, 2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in fail" in str(caught.value)


def test_a_hang_shows_the_stack() -> None:
    gate = threading.Event()

    def wait_at_gate(rank: int, world_size: int, store: Store) -> None:
        if rank:
            gate.wait()

    try:
        with pytest.raises(RankFailedError, match=r"rank 1 still ran after 0\.1 s") as caught:
            run_threads(wait_at_gate, 2, timeout_s=0.1)
    finally:
        gate.set()
    assert "gate.wait()" in str(caught.value)
