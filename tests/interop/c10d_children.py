"""Ranks that are children of multiprocessing and end with what they sent still on its way.

``python -m tests.interop.c10d_children METHOD…`` prints what each of them saw.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import stagelink.interop.c10d

if TYPE_CHECKING:
    from collections.abc import Callable

del stagelink
COUNT, LARGE = 4, 1_000_000


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _message(number: int, length: int) -> torch.Tensor:
    return torch.arange(float(length)) + number


def _sends_once() -> None:
    dist.send(_message(0, 3), 1)


def _leaves_works_alone() -> None:
    """Nobody waits for these, and most have not left when the function returns."""
    for number in range(COUNT):
        dist.isend(_message(number, LARGE), 1)


def _sends_from_a_thread() -> None:
    """The thread sends only after multiprocessing has begun to end the process."""
    ending = threading.Event()
    Finalize(None, ending.set, exitpriority=1)

    def late() -> None:
        assert ending.wait(20)
        for number in range(COUNT):
            dist.isend(_message(number, LARGE), 1)

    threading.Thread(target=late).start()


def _fails() -> None:
    dist.isend(_message(0, LARGE), 1)
    sys.exit(3)


def _ends_without_a_word() -> None:
    """As `os._exit` in a forked child does: nothing of Python's is run."""
    dist.send(_message(0, 3), 1)
    os._exit(0)


CASES: dict[str, tuple[Callable[[], None], int, int]] = {
    program.__name__: (program, count, length)
    for program, count, length in (
        (_sends_once, 1, 3),
        (_leaves_works_alone, COUNT, LARGE),
        (_sends_from_a_thread, COUNT, LARGE),
        (_fails, 1, LARGE),
        (_ends_without_a_word, 1, 3),
    )
}


def _rank(rank: int, store: str, case: str) -> None:
    dist.init_process_group(
        "cpu:stagelink",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    program, count, length = CASES[case]
    if rank == 0:
        program()
        return
    for number in range(count):
        got = torch.zeros(length)
        dist.recv(got, 0)
        assert torch.equal(got, _message(number, length))
    try:
        dist.recv(got, 0)
    except dist.DistBackendError as error:
        _say(f"{case} {str(error).rsplit('rank 0 ', 1)[1].split()[0].strip(':;')}")


def main(methods: list[str]) -> None:
    """Run every case with a rank 0 started by the first method, and one of them by the others."""
    fork = multiprocessing.get_context("fork")
    for method in methods:
        contexts: tuple[Any, Any] = (multiprocessing.get_context(method), fork)
        for case in CASES if method == methods[0] else ("_leaves_works_alone",):
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder, "store"))
                ranks = [
                    context.Process(target=_rank, args=(rank, store, case))
                    for rank, context in enumerate(contexts)
                ]
                for process in ranks:
                    process.start()
                for process in ranks:
                    process.join(60)
            _say(f"{method}: exit codes {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(sys.argv[1:])
