"""A long run over one transport between two processes: every payload checked, nothing kept.

``python benchmarks/soak.py TRANSPORT MESSAGES GIB CYCLES``: so many small messages, so many GiB of
large ones of changing sizes, so many handlers opened and closed. The first four bytes of a payload
are the checksum of the rest. Memory, descriptors, threads and shared mappings must not grow.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measuring import record

import stagelink
from stagelink.bench.handled import pair_plan
from stagelink.testing import LeakCheck, RankPool

if TYPE_CHECKING:
    from torch.distributed import Store

SMALL_BYTES = (64, 1024, 8192, 20_000)
LARGE_BYTES = (1 << 20, (3 << 20) + 4, 16 << 20, 65_540)
IN_ONE_SESSION = 1000
DIFFERENT = 8


def payloads(sizes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Tensors of these sizes in turn, for ever, each with its checksum in front."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(DIFFERENT):
        body = torch.randint(0, 256, (sizes[number % len(sizes)] - 4,), generator=generator)
        tensor = torch.cat([torch.zeros(4, dtype=torch.uint8), body.to(torch.uint8)])
        tensor[:4].view(torch.int32)[0] = zlib.crc32(tensor[4:].numpy().data) & 0x7FFFFFFF
        made.append(tensor)
    while True:
        yield from made


def check(tensor: torch.Tensor | None) -> int:
    """Bytes of a tensor that arrived as it was sent."""
    if tensor is None:
        raise AssertionError("None arrived")
    body = tensor[4:].numpy().data
    if tensor[:4].view(torch.int32).item() != zlib.crc32(body) & 0x7FFFFFFF:
        raise AssertionError(f"a message of {tensor.numel()} bytes arrived changed")
    return tensor.numel()


def resident_bytes() -> int:
    """Memory of this process alone, without what it shares."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def exchange(comm: stagelink.Handler, sizes: tuple[int, ...], messages: int) -> int:
    """Send messages from rank 0 to rank 1; returns the bytes that were checked."""
    source, found = payloads(sizes), 0
    for begin in range(0, messages, IN_ONE_SESSION):
        with comm.evaluate(min(IN_ONE_SESSION, messages - begin)) as session:
            for number in session.mine:
                if comm.rank == 0:
                    session.send("h", next(source), number)
                else:
                    found += check(session.recv("h", number))
    return found


@dataclass(frozen=True)
class Work:
    """Settings of a run; see above."""

    transport: str
    messages: int
    gib: float
    cycles: int


def soak(rank: int, world_size: int, store: Store, work: Work) -> dict[str, Any]:
    """All of it on one rank."""
    torch.set_num_threads(1)
    plan = pair_plan(work.transport)

    def join(run: str) -> stagelink.Handler:
        return stagelink.connect(plan, rank=rank, world_size=world_size, store=store, run_id=run)

    with join("warm up") as comm:
        exchange(comm, SMALL_BYTES, 100)
        exchange(comm, LARGE_BYTES, 100)
    leaks, began = LeakCheck("threads", "descriptors", "shared mappings"), time.perf_counter()
    before = resident_bytes()
    large = int(work.gib * 2**30 / (sum(LARGE_BYTES) / len(LARGE_BYTES)))
    with join("soak") as comm:
        checked = exchange(comm, SMALL_BYTES, work.messages) + exchange(comm, LARGE_BYTES, large)
        grown = resident_bytes() - before
    for cycle in range(work.cycles):
        with join(f"cycle {cycle}") as comm:
            exchange(comm, (100_000,), 2)
    leaks.verify()
    return {
        "transport": work.transport,
        "rank": rank,
        "small_messages": work.messages,
        "large_messages": large,
        "checked_gib": checked / 2**30,
        "cycles": work.cycles,
        "grown_mib": grown / 2**20,
        "grown_after_cycles_mib": (resident_bytes() - before) / 2**20,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Run on two fresh processes."""
    transport, messages, gib, cycles = sys.argv[1:]
    with RankPool() as pool:
        work = Work(transport, int(messages), float(gib), int(cycles))
        rows = pool.run(soak, 2, work, timeout_s=7200.0)
    record(f"soak_{transport}", rows)


if __name__ == "__main__":
    main()
