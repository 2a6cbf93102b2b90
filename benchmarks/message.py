"""CPU time of a message and of a session, in the thread that asks for them.

Both ranks of a pipeline are driven by one thread, over ``loopback``, so nothing is waited for that
is not here: what is left is the library's own path. What a session costs a batch is told by two
processes on one core, whose waiting callers do not spin: batches of eight tiny microbatches in
1F1B's order, each in a session of its own, beside the same in one session; summed over both ranks.
``time.thread_time`` does not count what others take of a busy machine, nor what the library's
reading threads do; ``time.process_time`` counts these too. ``--against CHECKOUT`` measures another
checkout in turn, round by round, so that both stand in one table; ``--calls`` counts calls of
Python functions instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
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
MICROBATCHES = 8
ROUNDS = 40
PAUSE_S = 0.005
STEPS = ("send 64 B", "recv 64 B, here", "both", "send, recv in turn", "session of 8")
BATCHES = ("a batch in its own session", "in a common one", "a session beyond its messages")


def plan(transport: str = "loopback", spin_us: int = 0, **more: Any) -> Any:
    """Two stages, one tensor."""
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "message", "microbatches": MICROBATCHES, **more},
            "stages": [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}],
            "tensors": [{"name": "h", "from": "a", "to": ["b"]}],
            "links": [{"transport": transport}],
            "control": {"spin_us": spin_us},
        }
    )


@contextmanager
def two_ranks() -> Iterator[tuple[Any, Any]]:
    """Both handlers; they join and close on two threads."""
    store = HashStore()
    comms: dict[int, Any] = {}

    def join(rank: int) -> None:
        comms[rank] = stagelink.connect(
            plan(window=MESSAGES), rank=rank, world_size=2, store=store, run_id="message"
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
        with one.train(MICROBATCHES), other.train(MICROBATCHES):
            pass
    return (clock() - began) / SESSIONS / 2


def batches(comm: Any, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a batch on this rank: in a session of its own, and in one for all of them."""
    with comm.train(MICROBATCHES) as session:
        actions = [(act.kind is stagelink.Kind.FORWARD, act.microbatch) for act in session.actions]
        _carry_out(comm.rank, session, actions, 0)
    comm.reduce([0.0])
    began = clock()
    for _ in range(SESSIONS):
        with comm.train(MICROBATCHES) as session:
            _carry_out(comm.rank, session, actions, 0)
    apart = clock() - began
    comm.reduce([0.0])
    with comm.train(MICROBATCHES * SESSIONS) as session:
        began = clock()
        for batch in range(SESSIONS):
            _carry_out(comm.rank, session, actions, batch * MICROBATCHES)
        together = clock() - began
    return apart / SESSIONS, together / SESSIONS


def _carry_out(rank: int, session: Any, actions: list[tuple[bool, int]], first: int) -> None:
    tensor = torch.ones(16, requires_grad=rank == 0)
    for is_forward, number in actions:
        microbatch = first + number
        if rank == 0 and is_forward:
            session.send("h", tensor, microbatch)
        elif rank == 0:
            session.recv_grad("h", microbatch)
        elif is_forward:
            session.recv("h", microbatch)
        else:
            session.send_grad("h", tensor, microbatch)


def of_both_ranks(comm: Any) -> dict[str, dict[str, float]]:
    """Microseconds of each of `BATCHES`, by clock; the other rank calls it as well."""
    found = {}
    for clock in (time.thread_time, time.process_time):
        gc.collect()
        apart, together = comm.reduce(batches(comm, clock))
        values = apart, together, apart - together
        found[clock.__name__] = {
            step: value * 1e6 for step, value in zip(BATCHES, values, strict=True)
        }
    return found


@contextmanager
def two_processes() -> Iterator[Any]:
    """Rank 0's handler; rank 1 is a process that calls `of_both_ranks` as often as this one."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        other = subprocess.Popen([sys.executable, __file__, "--other", store])
        with join_other(0, store) as comm:
            yield comm
            comm.reduce([0.0], "max")
        other.wait()


def join_other(rank: int, store: str) -> Any:
    """Join the pipeline of two processes; inline messages, whatever the link."""
    return stagelink.connect(plan("shm"), rank=rank, world_size=2, store=store, run_id="pair")


def other(store: str) -> None:
    """Be rank 1 of `two_processes`, on the same core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with join_other(1, store) as comm:
        while comm.reduce([0.0], "max") != [0.0]:
            of_both_ranks(comm)


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
    with two_processes() as comm, two_ranks() as (one, other):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for _ in sys.stdin:
            if counts:
                found = calls(one, other)
            else:
                found = one_round(one, other)
                comm.reduce([1.0], "max")
                for clock, steps in of_both_ranks(comm).items():
                    found[clock] |= steps
            print(json.dumps(found), flush=True)


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
    parser.add_argument("--other", metavar="STORE", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.other:
        other(given.other)
        return
    if given.child:
        child(counts=given.calls)
        return
    checkouts = {path.resolve().name: path for path in given.against} | {"here": HERE.parent}
    rounds = 1 if given.calls else given.rounds
    name = "message_calls" if given.calls else "message"
    record(name, rows(checkouts, counts=given.calls, rounds=rounds))


if __name__ == "__main__":
    main()
