"""CPU time of a message between two processes, in the threads that send and receive it, by size.

A microbatch goes to the other rank and its gradient comes back, so each rank sends one message and
waits for one, and reads what it waits for itself: all the work of a message is done by these two
threads. They block where they wait (``control.spin_us = 0``), so what is counted is work: the
library's, and what a thread pays to be woken. Each size goes inline, up to 64 KiB, and by the
wire; a copy of as many bytes in memory stands beside. ``--against CHECKOUT`` measures another
checkout in turn, round by round.

``beyond`` is what a message by the wire takes without its one copy, as a multiple of what 64 bytes
take inline.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import median, record

import stagelink

HERE = Path(__file__).resolve().parent
KIB = 1024
SIZES_BYTES = (64, 1 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB)
MOST_INLINE_BYTES = 64 * KIB
SMALL_BYTES = 64
MESSAGES = 100
WARM = 10
WINDOW = 4
BUFFERS = 8
ROUNDS = 20
WAYS = ("inline", "wire")

Figures = dict[str, dict[str, float]]
"""Microseconds of ``send``, ``recv`` and ``copy``, by way and size."""


def plan(transport: str, inline_bytes: int) -> Any:
    """Two stages, one tensor."""
    options = {"gloo": {"interface": "lo"}} if transport == "gloo" else {}
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "sizes", "microbatches": 8, "window": WINDOW},
            "stages": [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}],
            "tensors": [{"name": "h", "from": "a", "to": ["b"]}],
            "links": [{"transport": transport}],
            "transports": options,
            "control": {"inline_bytes": inline_bytes, "spin_us": 0},
        }
    )


class Turns:
    """Times of one rank's messages of one size: medians, so that one that was disturbed is none.

    Args:
        size_bytes: of a message; a copy of as many bytes is made in each turn.
    """

    def __init__(self, size_bytes: int) -> None:
        self._times: dict[str, list[float]] = {what: [] for what in ("send", "recv", "copy")}
        self._size_bytes = size_bytes
        memory = [torch.ones(size_bytes, dtype=torch.uint8) for _ in range(1 + BUFFERS)]
        self._source, *self._targets = (each.data_ptr() for each in memory)
        self._memory = memory

    def add(self, *times: float) -> None:
        """Note a turn, and make its copy: as cold as the message's own."""
        target = self._targets[len(self._times["copy"]) % BUFFERS]
        began = time.thread_time()
        ctypes.memmove(target, self._source, self._size_bytes)
        copied = time.thread_time() - began
        for what, seconds in zip(self._times, (*times, copied), strict=True):
            self._times[what].append(seconds)

    @property
    def figures(self) -> dict[str, float]:
        """Microseconds."""
        return {what: median(times[WARM:]) * 1e6 for what, times in self._times.items()}


def _first(session: Any, tensor: torch.Tensor, turns: Turns) -> None:
    for microbatch in range(WARM + MESSAGES):
        began = time.thread_time()
        session.send("h", tensor, microbatch)
        sent = time.thread_time()
        session.recv_grad("h", microbatch)  # which is let go of here: that is counted, too
        turns.add(sent - began, time.thread_time() - sent)


def _second(session: Any, gradient: torch.Tensor, turns: Turns) -> None:
    for microbatch in range(WARM + MESSAGES):
        began = time.thread_time()
        session.recv("h", microbatch)
        received = time.thread_time()
        session.send_grad("h", gradient, microbatch)
        turns.add(time.thread_time() - received, received - began)


def one_round(comms: dict[str, Any], sizes: Sequence[int]) -> Figures:
    """Microseconds of each way and size on this rank."""
    found: Figures = {}
    for size in sizes:
        tensor = torch.ones(size // 4)
        for way, comm in comms.items():
            if way == "inline" and size > MOST_INLINE_BYTES:
                continue
            turns = Turns(size)
            gc.collect()
            with comm.train(WARM + MESSAGES) as session:
                if comm.rank == 0:
                    _first(session, tensor.requires_grad_(), turns)
                else:
                    _second(session, tensor.detach(), turns)
            found[f"{way} {size}"] = turns.figures
    return found


def child(rank: int, store: str, transport: str, sizes: Sequence[int]) -> None:
    """Be one of two ranks: answer each line of the standard input with a round's figures."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    with ExitStack() as open_ones:
        comms = {}
        for way, inline_bytes in zip(WAYS, (MOST_INLINE_BYTES, 0), strict=True):
            comms[way] = open_ones.enter_context(
                stagelink.connect(
                    plan(transport, inline_bytes),
                    rank=rank,
                    world_size=2,
                    store=f"file://{store}/{way}",
                    run_id=way,
                )
            )
        for _ in sys.stdin:
            print(json.dumps(one_round(comms, sizes)), flush=True)


class Pair:
    """Two processes that measure one checkout's code, a round whenever they are asked for one."""

    def __init__(self, checkout: Path, store: str, transport: str, sizes: Sequence[int]) -> None:
        paths = [str(path) for path in sorted(checkout.glob("packages/*/src"))]
        job = json.dumps([store, transport, list(sizes)])
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--job", job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        self._lines = [iter(process.stdout or ()) for process in self._processes]

    def round(self) -> Figures:
        """Figures of one round, the mean of both ranks: each sends one and receives one."""
        for process in self._processes:
            print(file=process.stdin, flush=True)
        one, other = (json.loads(next(lines)) for lines in self._lines)
        return {
            case: {what: (value + other[case][what]) / 2 for what, value in figures.items()}
            for case, figures in one.items()
        }

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.communicate()


def rows(found: Sequence[dict[str, Figures]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each way, size and checkout: medians of all rounds."""
    table = []
    for case in found[0][names[0]]:
        way, size = case.split()
        for name in names:
            turns = [turn[name] for turn in found]
            both = [turn[case]["send"] + turn[case]["recv"] for turn in turns]
            beyond = [
                (mine - turn[case]["copy"]) / (inline["send"] + inline["recv"])
                for mine, turn in zip(both, turns, strict=True)
                for inline in (turn[f"inline {SMALL_BYTES}"],)
            ]
            table.append(
                {
                    "way": way,
                    "payload_bytes": int(size),
                    "checkout": name,
                    **{
                        what: median([turn[case][what] for turn in turns])
                        for what in ("send", "recv", "copy")
                    },
                    "both": median(both),
                    "beyond": median(beyond),
                }
            )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this checkout, and those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="CHECKOUT")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--size", type=int, action="append", help="bytes; may be given repeatedly")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        child(given.rank, *json.loads(given.job))
        return
    sizes = sorted({SMALL_BYTES, *(given.size or SIZES_BYTES)})
    checkouts = {path.resolve().name: path for path in given.against} | {"here": HERE.parent}
    with TemporaryDirectory() as folder:
        pairs = {}
        for name, path in checkouts.items():
            store = Path(folder) / name
            store.mkdir()
            pairs[name] = Pair(path, str(store), given.transport, sizes)
        for pair in pairs.values():
            pair.round()  # to warm up
        found = [{name: pair.round() for name, pair in pairs.items()} for _ in range(given.rounds)]
        for pair in pairs.values():
            pair.close()
    record("sizes", rows(found, list(checkouts)))


if __name__ == "__main__":
    main()
