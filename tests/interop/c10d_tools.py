"""Programs that use torch's own tools on a group: the compiler, profilers, checks, its store."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.interop.c10d_features import refused
from tests.interop.c10d_programs import STAGELINK, world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

Calls = list[tuple[str, list[list[int]], list[Any]]]

# -- the compiler


def _sends_and_receives(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = torch.empty_like(x)
    if rank == 0:
        dist.send(x * 2, 1, tag=3)
        dist.recv(y, 1, tag=3)
    else:
        dist.recv(y, 0, tag=3)
        dist.send(x * 2, 0, tag=3)
    return y + 1


def _both_at_once(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = torch.empty_like(x)
    works: list[Any] = [dist.isend(x * 2, 1 - rank), dist.irecv(y, 1 - rank)]
    for work in reversed(works):
        work.wait()
    if not (works[1].is_completed() and works[1].is_success() and works[1].exception() is None):
        return y
    received: torch.Tensor = works[1].result()[0]
    return received + int(works[1].source_rank()) + rank


def _in_a_batch(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = torch.empty_like(x)
    batch = [dist.P2POp(dist.isend, x * 3, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return y + 1


def _broadcasts(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = x * 2
    dist.broadcast(y, 1)
    return y + rank


def _reduces(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    return y + rank


def _gathers(x: torch.Tensor, rank: int) -> torch.Tensor:
    every = [torch.empty_like(x) for _ in range(2)]
    work = dist.all_gather(every, x * 2, async_op=True)
    assert work is not None
    work.wait()
    return torch.cat(every)


COMPILED: Sequence[Callable[[torch.Tensor, int], torch.Tensor]] = (
    _sends_and_receives,
    _both_at_once,
    _in_a_batch,
    _broadcasts,
    _reduces,
    _gathers,
)


def compiled(rank: int, size: int, store: Store) -> None:
    """A call is a break of the graph, and has the value that it has without a compiler."""
    x = torch.arange(4.0) + rank
    with world(rank, size, store):
        for call in COMPILED:
            expected = call(x, rank)
            assert torch.equal(torch.compile(call, backend="eager")(x, rank), expected), call
    torch.compiler.reset()


# -- profilers


def _exchange(rank: int) -> None:
    peer = 1 - rank
    for tag, width in ((3, 5), (0, 40_000)):
        x, y = torch.ones(4, width), torch.empty(4, width)
        work = dist.isend(x, peer, tag=tag)
        dist.recv(y, peer, tag=tag)
        assert work is not None
        work.wait()


def profiled(rank: int, size: int, store: Store) -> Calls:
    """Spans of sends and receives in the trace, with their shapes and what was given."""
    with world(rank, size, store):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            _exchange(rank)
        with torch.autograd.profiler.profile(record_shapes=True) as older:
            _exchange(rank)
    ours = [
        (event.name, event.input_shapes, event.concrete_inputs)
        for event in trace.events() or ()
        if event.name.startswith(("c10d::send", "c10d::recv", "stagelink:"))
    ]
    names = [name for name, *_ in ours]
    assert [event.name for event in older.function_events if event.name in names] == names
    return ours


# -- what a group tells, checks and is told


def asked(rank: int, size: int, store: Store) -> None:
    """Torch's own ways to ask a group for its store, and to set its time-out."""
    soon = timedelta(seconds=0.1)
    with world(rank, size, store):
        subgroup: Any = dist.new_group([0, 1])
        groups: list[Any] = [dist.group.WORLD, subgroup]
        for group in groups:
            of_the_group: Any = group.get_group_store()
            of_the_group.set(f"told/{rank}", str(rank))
            assert of_the_group.get(f"told/{1 - rank}") == str(1 - rank).encode()
            other: Any = dist.distributed_c10d._get_process_group_store(group)
            assert other.get(f"told/{1 - rank}") == str(1 - rank).encode()
        dist.distributed_c10d._set_pg_timeout(soon, subgroup)
        with refused(r"not done within 0\.1 s"):
            dist.recv(torch.zeros(3), 1 - rank, group=subgroup)
        dist.barrier()
        del subgroup, group, groups


def checked(rank: int, size: int, store: Store) -> None:
    """Where a program is debugged, a collective that ranks call differently is told."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with world(rank, size, store, STAGELINK):
            group: Any = dist.group.WORLD
            group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
            with pytest.raises(RuntimeError, match="mismatch between collectives on ranks"):
                dist.all_reduce(torch.ones(2 + rank))
            _exchange(rank)
            dist.barrier()
            del group
    finally:
        dist.set_debug_level(before)


def monitored(rank: int, size: int, store: Store) -> str:
    """Who is not in a barrier is named, in the ways that `from-c10d.md` gives."""
    with world(rank, size, store):
        gloo: Any = dist.new_group(backend="gloo")
        dist.monitored_barrier(gloo)
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()
        said = ""
        if rank == 0:
            group: Any = dist.group.WORLD
            with pytest.raises(RuntimeError) as found:
                group.monitored_barrier(timedelta(seconds=0.2))
            said = str(found.value)
            del group
        _exchange(rank)
        del gloo
        return said
