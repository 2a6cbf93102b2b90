"""A gloo link beside raw torch send/recv, in one run: round trips and one-way streams.

Two processes hold a pipeline of two stages and, beside it, a plain gloo process group. Rounds of
both are taken in turn, so that what the machine does meanwhile hits both alike; the figures are
ratios of medians, below 1 where stagelink takes less time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measuring import median, record

import stagelink
from stagelink.testing import RankPool

if TYPE_CHECKING:
    from torch.distributed import Store

ROUND_TRIP_BYTES = (8, 64, 512, 4096)
STREAM_BYTES = (1 << 20, 4 << 20, 16 << 20)
ROUNDS = 15
ROUND_TRIPS = 300
STREAMED_BYTES = 256 << 20
IN_FLIGHT = 4


def plan() -> stagelink.Plan:
    """Two stages and one edge over gloo."""
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "bench", "schedule": "1f1b", "microbatches": 4, "window": 8},
            "stages": [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}],
            "tensors": [{"name": "h", "from": "a", "to": ["b"]}],
            "links": [{"transport": "gloo"}],
            "transports": {"gloo": {"interface": "lo"}},
        }
    )


def timed(step: Callable[[], None]) -> float:
    """Seconds of one round, both ranks starting it together."""
    dist.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def raw_round_trips(rank: int, tensor: torch.Tensor) -> None:
    """Blocking send and recv, there and back."""
    for _ in range(ROUND_TRIPS):
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)


def our_round_trips(comm: stagelink.Handler, tensor: torch.Tensor) -> None:
    """An activation forward, its gradient back."""
    with comm.train(ROUND_TRIPS) as session:
        for microbatch in session.mine:
            if comm.rank == 0:
                session.send("h", tensor, microbatch)
                session.recv_grad("h", microbatch)
            else:
                session.recv("h", microbatch)
                session.send_grad("h", tensor.detach(), microbatch)


def raw_stream(rank: int, buffers: list[torch.Tensor], count: int) -> None:
    """Isend and irecv with four in flight, into buffers that are used again."""
    works: list[Any] = [None] * IN_FLIGHT
    for number in range(count):
        slot = number % IN_FLIGHT
        if works[slot] is not None:
            works[slot].wait()
        move = dist.isend if rank == 0 else dist.irecv
        works[slot] = move(buffers[slot], 1 - rank)
    for work in works:
        work.wait()
    if rank == 0:
        dist.recv(torch.empty(1), 1)
    else:
        dist.send(torch.ones(1), 0)


def our_stream(
    comm: stagelink.Handler, buffers: list[torch.Tensor], count: int, *, copy: bool
) -> None:
    """One message after the other; without copies a buffer waits for its message."""
    with comm.evaluate(count) as session:
        handles: list[Any] = [None] * IN_FLIGHT
        for number in range(count):
            slot = number % IN_FLIGHT
            if comm.rank == 1:
                session.recv("h", number)
                continue
            if not copy and handles[slot] is not None:
                handles[slot].wait()
            handles[slot] = session.send("h", buffers[slot], number, copy=copy)
        for handle in handles if comm.rank == 0 else ():
            handle.wait()


def measure(rank: int, world_size: int, store: Store) -> list[dict[str, Any]]:
    """All rounds on one rank."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("raw", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    try:
        with stagelink.connect(
            plan(), rank=rank, world_size=world_size, store=store, run_id="bench"
        ) as comm:
            return [*round_trips(rank, comm), *streams(rank, comm)]
    finally:
        dist.destroy_process_group()


def round_trips(rank: int, comm: stagelink.Handler) -> list[dict[str, Any]]:
    """Rows for small messages."""
    rows = []
    for size_bytes in ROUND_TRIP_BYTES:
        tensor = torch.ones(size_bytes // 4, requires_grad=True)
        plain = tensor.detach().clone()
        raw, ours = [], []
        for _ in range(ROUNDS):
            raw.append(timed(partial(raw_round_trips, rank, plain)) / ROUND_TRIPS)
            ours.append(timed(partial(our_round_trips, comm, tensor)) / ROUND_TRIPS)
        rows.append(row("round trip", size_bytes, "", raw, ours))
    return rows


def streams(rank: int, comm: stagelink.Handler) -> list[dict[str, Any]]:
    """Rows for large messages."""
    rows = []
    for size_bytes in STREAM_BYTES:
        count = STREAMED_BYTES // size_bytes
        buffers = [torch.ones(size_bytes // 4) for _ in range(IN_FLIGHT)]
        for copy in (False, True):
            raw, ours = [], []
            for _ in range(ROUNDS):
                raw.append(timed(partial(raw_stream, rank, buffers, count)) / count)
                step = partial(our_stream, comm, buffers, count, copy=copy)
                ours.append(timed(step) / count)
            rows.append(row("stream", size_bytes, f"copy={copy}", raw, ours))
    return rows


def row(
    kind: str, size_bytes: int, how: str, raw: list[float], ours: list[float]
) -> dict[str, Any]:
    """One line of the table."""
    return {
        "kind": kind,
        "payload_bytes": size_bytes,
        "how": how,
        "raw_us": median(raw) * 1e6,
        "stagelink_us": median(ours) * 1e6,
        "time_ratio": median(ours) / median(raw),
        "speed_ratio": median(raw) / median(ours),
    }


def main() -> None:
    """Measure on two fresh processes."""
    with RankPool() as pool:
        record("gloo_link", pool.run(measure, 2, timeout_s=600.0)[0])


if __name__ == "__main__":
    main()
