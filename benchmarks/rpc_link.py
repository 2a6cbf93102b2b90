"""Torch RPC (TensorPipe) between two processes, with the sizes of ``stagelink bench``.

One way is half of a call that gives its tensor back; a stream is calls that give nothing back,
four of them in flight.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import record
from torch.distributed import Store, rpc

from stagelink.bench import SIZES_BYTES
from stagelink.bench.pipes import IN_FLIGHT, Contender, Record, buffers_of
from stagelink.bench.rounds import pin
from stagelink.testing import RankPool

SUBJECT = Contender("torch-rpc", "raw")
ROUNDS = 9


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Give it back."""
    return tensor


def take(tensor: torch.Tensor) -> None:
    """Give nothing back."""
    del tensor


def one_way(size_bytes: int, count: int) -> list[float]:
    """Seconds of half a call each."""
    tensor = buffers_of(size_bytes)[0]
    found = []
    for _ in range(count):
        began = time.perf_counter()
        rpc.rpc_sync("1", echo, (tensor,))
        found.append((time.perf_counter() - began) / 2)
    return found


def stream(size_bytes: int, count: int) -> float:
    """Seconds a message."""
    buffers = buffers_of(size_bytes)
    calls: list[Any] = [None] * IN_FLIGHT
    began = time.perf_counter()
    for number in range(count):
        slot = number % IN_FLIGHT
        if calls[slot] is not None:
            calls[slot].wait()
        calls[slot] = rpc.rpc_async("1", take, (buffers[slot],))
    for call in calls:
        call.wait()
    return (time.perf_counter() - began) / count


def measure(rank: int, world_size: int, store: Store, folder: str) -> list[Record]:
    """All records, on rank 0; RPC has a store of its own."""
    del store
    pin(rank)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(str(rank), rank=rank, world_size=world_size, rpc_backend_options=options)
    rows = []
    if rank == 0:
        for size in SIZES_BYTES:
            count = max(8, min(200, (64 << 20) // size))
            one_way(size, 8)
            singles = [each for _ in range(ROUNDS) for each in one_way(size, count)]
            rows.append(Record.of(SUBJECT, "one_way", size, singles))
            streamed = [stream(size, count) for _ in range(ROUNDS)]
            rows.append(Record.of(SUBJECT, "stream", size, streamed))
    rpc.shutdown()
    return rows


def main() -> None:
    """Measure on two fresh processes."""
    with TemporaryDirectory() as folder, RankPool() as pool:
        rows = pool.run(measure, 2, folder, timeout_s=900.0)[0]
    record("rpc_link", [asdict(one) for one in rows])


if __name__ == "__main__":
    main()
