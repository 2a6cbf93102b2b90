"""Python calls of this library that a c10d message of 16 KiB takes, between two processes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from tests.interop.c10d_programs import STAGELINK, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from stagelink.testing import RankPool

MESSAGES = 10


def _calls_of(action: Callable[[], object]) -> list[str]:
    """The functions that an action calls on this thread, torch's own left out.

    But those of its compiler count, which is loaded here and has nothing to do.
    """
    found: list[str] = []

    def note(frame: Any, event: str, arg: object) -> None:
        del arg
        path = frame.f_code.co_filename
        if event == "call" and ("stagelink" in path or "_dynamo" in path):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def _count(rank: int, size: int, store: Store) -> dict[str, list[str]]:
    assert pipelining.__name__ in sys.modules  # it brings the compiler along
    assert "torch._dynamo" in sys.modules
    with world(rank, size, store, STAGELINK):
        tensor = torch.ones(4096)

        def send() -> None:
            work = dist.isend(tensor, 1)
            assert work is not None
            work.wait()

        def receive() -> None:
            work = dist.irecv(tensor, 0)
            assert work is not None
            work.wait()

        group: Any = dist.group.WORLD
        box = group._meshes["cpu"].box
        call = (send, receive)[rank]
        call()
        dist.barrier()
        if rank == 0:
            found = [_calls_of(call) for _ in range(MESSAGES)]
        else:
            while len(box._here) < MESSAGES:
                time.sleep(0.001)
            found = [_calls_of(call) for _ in range(MESSAGES)]
        dist.barrier()
    return {("send", "receive of what is here")[rank]: min(found, key=len)}


def test_a_message_takes_few_calls(rank_pool: RankPool) -> None:
    zero, one = rank_pool.run(_count, 2)
    most = {"send": 29, "receive of what is here": 36}
    for what, calls in (zero | one).items():
        assert len(calls) <= most[what], f"{what}: {len(calls)} calls: {', '.join(calls)}"
