"""How long messages take between two processes on one GPU, beside a copy within one of them."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from stagelink.testing import run_fresh
from tests.gpu.answers import Answer, Row
from tests.gpu.plans import pair, ways
from tests.support.pipelines import joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler
    from tests.gpu.machines import Machine
    from tests.support.pipelines import Document

__all__ = ["speed"]

_WINDOW = 8
_REGION_BYTES = 64 * 1024 * 1024  # as where nobody says
_ROUND_BYTES = 256 * 1024 * 1024
_LEAST, _MOST = 8, 50
_WARM_UP = 2


def speed(machine: Machine) -> Answer:
    """Ordered by the host and by the device, one message at a time and one after another."""
    rows: list[Row] = []
    for how, options in ways(machine, _REGION_BYTES).items():
        plan = pair(machine, [machine.cupy], options, window=_WINDOW)
        with run_fresh(_timed, 2, machine, plan, how) as ranks:
            here, there = ranks.results(machine.patience_s)
        rows += [*here, *there]
    with run_fresh(_copies, 1, machine) as ranks:
        rows += ranks.results(machine.patience_s)[0]
    rows.sort(key=lambda row: (row["payload_bytes"], row["name"]))
    largest = [row for row in rows if row["payload_bytes"] == machine.sizes_bytes[-1]]
    text = "\n".join(f"{row['name']}: {row['gib_per_s']:.1f} GiB/s" for row in largest)
    return Answer("ok", f"at {machine.sizes_bytes[-1]} bytes:\n{text}", rows)


def _row(name: str, payload_bytes: int, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "name": name,
        "payload_bytes": payload_bytes,
        "median_us": median * 1e6,
        "gib_per_s": payload_bytes / median / 2**30,
    }


def _count(size_bytes: int) -> int:
    return max(_LEAST, min(_MOST, _ROUND_BYTES // size_bytes))


def _timed(
    rank: int, world_size: int, store: Store, machine: Machine, plan: Document, name: str
) -> list[Row]:
    """Rank 0 knows how long there and back takes, rank 1 how long a row of messages."""
    rows: list[Row] = []
    with (
        machine.process(rank),
        joined(rank, world_size, store, plan, machine.transports) as comm,
    ):
        for size in machine.sizes_bytes:
            singles = _there_and_back(comm, machine, size)
            rounds = [_in_a_row(comm, machine, size) for _ in range(machine.rounds + 1)]
            if rank == 0:
                rows.append(_row(f"{name}, one way", size, singles[_WARM_UP:]))
            else:
                rows.append(_row(f"{name}, in a row", size, rounds[1:]))
    return rows


def _there_and_back(comm: Handler, machine: Machine, size_bytes: int) -> list[float]:
    """Seconds one way of each message, whose gradient comes back."""
    seconds = []
    count = _count(size_bytes) + _WARM_UP
    value = torch.ones(size_bytes // 4, device=machine.device, requires_grad=comm.rank == 0)
    machine.synchronize()
    with comm.train(count) as session:
        for number in range(count):
            if comm.rank == 1:
                got = session.recv("h", number)
                session.send_grad("h", None if got is None else got.detach(), number, copy=False)
                continue
            began = time.perf_counter()
            session.send("h", value, number, copy=False)
            session.recv_grad("h", number)
            machine.synchronize()
            seconds.append((time.perf_counter() - began) / 2)
    return seconds


def _in_a_row(comm: Handler, machine: Machine, size_bytes: int) -> float:
    """Seconds a message, as the receiver sees them."""
    count = _count(size_bytes)
    value = torch.ones(size_bytes // 4, device=machine.device)
    machine.synchronize()
    with comm.evaluate(count) as session:
        comm.reduce([0.0])
        began = time.perf_counter()
        for number in range(count):
            if comm.rank == 0:
                session.send("h", value, number, copy=False)
            else:
                session.recv("h", number)
        machine.synchronize()
        return (time.perf_counter() - began) / count


def _copies(rank: int, world_size: int, store: Store, machine: Machine) -> list[Row]:
    """Copies from one tensor to another by this process alone."""
    del world_size, store
    rows: list[Row] = []
    with machine.process(rank):
        for size in machine.sizes_bytes:
            source, target = torch.ones(2, size // 4, device=machine.device)
            count = _count(size)
            singles, rounds = [], []
            for _ in range(machine.rounds + 1):
                singles.append(_copied(machine, target, source, 1))
                rounds.append(_copied(machine, target, source, count))
            rows.append(_row("plain copy, one way", size, singles[1:]))
            rows.append(_row("plain copy, in a row", size, rounds[1:]))
    return rows


def _copied(machine: Machine, target: torch.Tensor, source: torch.Tensor, count: int) -> float:
    machine.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        target.copy_(source)
    machine.synchronize()
    return (time.perf_counter() - began) / count
