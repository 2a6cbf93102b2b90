"""Costs of the handler itself: a small message without a wire, and threads per rank.

The message goes from one rank to another in one thread, so nothing is waited for: what is left is
the path through session, window, frame and inbox. It is told beside a bare function call of this
interpreter in the same run, since the machine's speed drifts.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from measuring import median, record

import stagelink
from stagelink.testing import RankPool, run_threads

if TYPE_CHECKING:
    from torch.distributed import Store

MESSAGES = 100
ROUNDS = 60


def plan(transport: str, replicas: tuple[int, ...]) -> stagelink.Plan:
    """A line of stages."""
    ranks = iter(range(sum(replicas)))
    stages = [
        {"name": f"s{i}", "ranks": [next(ranks) for _ in range(count)]}
        for i, count in enumerate(replicas)
    ]
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "bench", "microbatches": 8, "window": MESSAGES},
            "stages": stages,
            "tensors": [
                {"name": f"h{i}", "from": f"s{i}", "to": [f"s{i + 1}"]}
                for i in range(len(replicas) - 1)
            ],
            "links": [{"transport": transport}],
        }
    )


def one_message() -> list[dict[str, Any]]:
    """Microseconds for send and recv of 64 bytes, both ranks driven by one thread."""
    comms: dict[int, stagelink.Handler] = {}
    joined = threading.Barrier(2)

    def join(rank: int, world_size: int, store: Store) -> None:
        comms[rank] = stagelink.connect(
            plan("loopback", (1, 1)), rank=rank, world_size=world_size, store=store, run_id=""
        )
        joined.wait()
        if rank == 0:
            measured.extend(_rounds(comms[0], comms[1]))
        joined.wait()
        comms[rank].close()

    measured: list[tuple[float, float]] = []
    run_threads(join, 2, timeout_s=120.0)
    sends, recvs = ([step[i] for step in measured] for i in (0, 1))
    call_us = _call_us()
    return [
        {
            "what": what,
            "median_us": median(times),
            "least_us": min(times),
            "calls": median(times) / call_us,
        }
        for what, times in (
            ("send 64 B", sends),
            ("recv 64 B", recvs),
            ("both", [a + b for a, b in measured]),
        )
    ]


def _rounds(one: stagelink.Handler, other: stagelink.Handler) -> list[tuple[float, float]]:
    tensor = torch.ones(16)
    found = []
    for _ in range(ROUNDS):
        with one.evaluate(MESSAGES) as sender, other.evaluate(MESSAGES) as receiver:
            began = time.perf_counter()
            for microbatch in range(MESSAGES):
                sender.send("h0", tensor, microbatch)
            sent = time.perf_counter()
            for microbatch in range(MESSAGES):
                receiver.recv("h0", microbatch)
            ended = time.perf_counter()
        found.append(((sent - began) / MESSAGES * 1e6, (ended - sent) / MESSAGES * 1e6))
    return found


def _call_us() -> float:
    def nothing() -> None:
        pass

    began = time.perf_counter()
    for _ in range(1_000_000):
        nothing()
    return time.perf_counter() - began


def count_threads(rank: int, world_size: int, store: Store) -> dict[str, Any]:
    """Threads of the library on this rank after a training session over gloo, all links in use."""
    shape = (2, 2, 1)
    with stagelink.connect(
        plan("gloo", shape), rank=rank, world_size=world_size, store=store, run_id=""
    ) as comm:
        here = comm.stage.index
        with comm.train(4) if here == 0 else comm.train() as session:
            for action in session.actions:
                _step(session, str(action)[0], here, len(shape), action.microbatch)
        names = [thread.name for thread in threading.enumerate()]
        ours = [name for name in names if name.startswith("stagelink")]
        return {"rank": rank, "links": len(comm.transports), "threads": len(ours)}


def _step(session: stagelink.Session, kind: str, here: int, stages: int, microbatch: int) -> None:
    before, after = f"h{here - 1}", f"h{here}"
    if kind == "F":
        if here > 0:
            session.recv(before, microbatch)
        if here < stages - 1:
            session.send(after, torch.ones(50_000, requires_grad=True), microbatch)
    else:
        if here < stages - 1:
            session.recv_grad(after, microbatch)
        if here > 0:
            session.send_grad(before, torch.ones(50_000), microbatch)


def main() -> None:
    """Measure both."""
    record("handler", one_message())
    with RankPool() as pool:
        record("threads", pool.run(count_threads, 5, timeout_s=120.0))


if __name__ == "__main__":
    main()
