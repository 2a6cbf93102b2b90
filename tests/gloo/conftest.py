"""Two ranks in one process, connected by gloo, for a test to drive from one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stagelink.testing import run_threads
from tests.gloo.twin import Twin, lo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

Twins = tuple[Twin, Twin]


@pytest.fixture
def connect() -> Iterator[Callable[..., Twins]]:
    """Makes ranks 0 and 1, each with a transport of its own; closes what is still open.

    Rank 0 reads what rank 1 sends; rank 1 as well, unless it is told not to.
    """
    opened: list[Twins] = []

    def make(*, reading: bool = True) -> Twins:
        def rank(me: int, world_size: int, store: Store) -> Twin:
            return Twin(lo(), me, 1 - me, store, reading=reading or me == 0)

        zero, one = run_threads(rank, 2)
        opened.append((zero, one))
        return zero, one

    yield make
    for pair in opened:
        close(pair)


def close(twins: Twins) -> None:
    """Close both; each waits for the other."""
    run_threads(lambda me, *_: twins[me].close(), 2)


@pytest.fixture
def twins(connect: Callable[..., Twins]) -> Twins:
    return connect()
