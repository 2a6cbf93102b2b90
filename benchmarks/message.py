"""CPU time of a message and of a session, in the thread that asks for them.

Both ranks of a pipeline are driven by one thread, over ``loopback``, so nothing is waited for that
is not here: what is left is the library's own path. ``time.thread_time`` does not count what
others take of a busy machine, nor what the library's reading threads do; ``time.process_time``
counts these too. ``--against CHECKOUT`` measures another checkout in turn, round by round, so that
both stand in one table; ``--calls`` counts calls of Python functions instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measuring import median, record
from torch.distributed import HashStore

import stagelink

HERE = Path(__file__).resolve().parent
MESSAGES = 100
SESSIONS = 25
ROUNDS = 40
PAUSE_S = 0.005
STEPS = ("send 64 B", "recv 64 B, here", "both", "send, recv in turn", "session of 8")


def plan() -> Any:
    """Two stages, one tensor."""
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "message", "microbatches": 8, "window": MESSAGES},
            "stages": [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}],
            "tensors": [{"name": "h", "from": "a", "to": ["b"]}],
            "links": [{"transport": "loopback"}],
        }
    )


@contextmanager
def two_ranks() -> Iterator[tuple[Any, Any]]:
    """Both handlers; they join and close on two threads."""
    store = HashStore()
    comms: dict[int, Any] = {}

    def join(rank: int) -> None:
        comms[rank] = stagelink.connect(
            plan(), rank=rank, world_size=2, store=store, run_id="message"
        )

    def close(rank: int) -> None:
        comms[rank].close()

    _on_two_threads(join)
    yield comms[0], comms[1]
    _on_two_threads(close)


def _on_two_threads(action: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=action, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def messages(one: Any, other: Any, clock: Callable[[], float]) -> list[float]:
    """Seconds of one message: send; recv, after the reading threads have read all."""
    tensor = torch.ones(16)
    with one.evaluate(MESSAGES) as sender, other.evaluate(MESSAGES) as receiver:
        began = clock()
        for microbatch in range(MESSAGES):
            sender.send("h", tensor, microbatch)
        sent = clock()
        handle = receiver.irecv("h", MESSAGES - 1)
        while not handle.done():
            time.sleep(PAUSE_S)
        time.sleep(PAUSE_S)
        here = clock()
        for microbatch in range(MESSAGES):
            receiver.recv("h", microbatch)
        received = clock()
        time.sleep(PAUSE_S)
    return [(sent - began) / MESSAGES, (received - here) / MESSAGES]


def turns(one: Any, other: Any, clock: Callable[[], float]) -> float:
    """Seconds of a send and of its recv at once, which may have to read it."""
    tensor = torch.ones(16)
    with one.evaluate(MESSAGES) as sender, other.evaluate(MESSAGES) as receiver:
        began = clock()
        for microbatch in range(MESSAGES):
            sender.send("h", tensor, microbatch)
            receiver.recv("h", microbatch)
        return (clock() - began) / MESSAGES


def sessions(one: Any, other: Any, clock: Callable[[], float]) -> float:
    """Seconds of one session of eight microbatches on one rank, opened and left."""
    began = clock()
    for _ in range(SESSIONS):
        with one.train(8), other.train(8):
            pass
    return (clock() - began) / SESSIONS / 2


def one_round(one: Any, other: Any) -> dict[str, dict[str, float]]:
    """Microseconds of each of `STEPS`, by clock."""
    found = {}
    for clock in (time.thread_time, time.process_time):
        gc.collect()
        send, recv = messages(one, other, clock)
        both = send + recv
        values = send, recv, both, turns(one, other, clock), sessions(one, other, clock)
        found[clock.__name__] = {
            step: value * 1e6 for step, value in zip(STEPS, values, strict=True)
        }
    return found


class Calls:
    """Counts calls of Python functions on this thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Count, as `sys.setprofile` has it."""
        del frame, arg
        self.count += event == "call"

    def of(self, action: Callable[[], Any]) -> int:
        """Calls of an action, its own left out."""
        self.count = 0
        sys.setprofile(self)
        try:
            action()
        finally:
            sys.setprofile(None)
        return self.count - 1


def calls(one: Any, other: Any) -> dict[str, dict[str, float]]:
    """Calls of one send, of a recv of what is here, and of one that waits and reads."""
    counter, tensor, found = Calls(), torch.ones(16), {}
    with one.evaluate(MESSAGES) as sender, other.evaluate(MESSAGES) as receiver:
        for microbatch in range(8):  # nothing is found for the first time after these
            sender.send("h", tensor, microbatch)
            receiver.recv("h", microbatch)
        found["send"] = counter.of(lambda: sender.send("h", tensor, 8))
        handle = receiver.irecv("h", 8)
        while not handle.done():
            time.sleep(0.01)
        found["recv, here"] = counter.of(lambda: receiver.recv("h", 8))
        found["recv, waiting"] = min(
            _waiting(counter, sender, receiver, tensor, microbatch) for microbatch in range(9, 40)
        )
    return {"calls": {name: float(count) for name, count in found.items()}}


def _waiting(
    counter: Calls, sender: Any, receiver: Any, tensor: torch.Tensor, microbatch: int
) -> int:
    receiver.irecv("h", microbatch).done()
    sender.send("h", tensor, microbatch)
    return counter.of(lambda: receiver.recv("h", microbatch))


def child(*, counts: bool) -> None:
    """Answer each line of the standard input with one round's figures, all on one core.

    Where threads of one interpreter run on several, they wait for each other's caches, and a
    figure is one of two by chance.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with two_ranks() as (one, other):
        for _ in sys.stdin:
            print(json.dumps(calls(one, other) if counts else one_round(one, other)), flush=True)


class Child:
    """A process that measures one checkout's code, a round whenever it is asked for one."""

    def __init__(self, checkout: Path, *, counts: bool) -> None:
        paths = [str(path) for path in sorted(checkout.glob("packages/*/src"))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", *(["--calls"] if counts else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

        self._lines = iter(self._process.stdout or ())

    def round(self) -> dict[str, dict[str, float]]:
        """Figures of one round, by clock and step."""
        print(file=self._process.stdin, flush=True)
        answer: dict[str, dict[str, float]] = json.loads(next(self._lines))
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def rows(checkouts: dict[str, Path], *, counts: bool, rounds: int) -> list[dict[str, Any]]:
    """Medians of all rounds, a row for each clock and step, a column for each checkout."""
    children = {name: Child(path, counts=counts) for name, path in checkouts.items()}
    for one in children.values():
        one.round()  # to warm up
    found = [{name: one.round() for name, one in children.items()} for _ in range(rounds)]
    for one in children.values():
        one.close()
    first = next(iter(found[0].values()))
    return [
        {
            "clock": clock,
            "what": step,
            **{name: median([turn[name][clock][step] for turn in found]) for name in children},
        }
        for clock, steps in first.items()
        for step in steps
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this checkout, and those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="CHECKOUT")
    parser.add_argument("--calls", action="store_true", help="count calls of Python functions")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(counts=given.calls)
        return
    checkouts = {path.resolve().name: path for path in given.against} | {"here": HERE.parent}
    rounds = 1 if given.calls else given.rounds
    name = "message_calls" if given.calls else "message"
    record(name, rows(checkouts, counts=given.calls, rounds=rounds))


if __name__ == "__main__":
    main()
