"""Processes that end without a close, each in its own way; for `test_unclosed`.

``python -m tests.exchange.leavers FOLDER``: this process is rank 1 of one pipeline after the
other, and a fork of it rank 0, which ends as the pipeline is called. What rank 1 was told stands
in a line ``NAME: …``; what rank 0 logs is its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch
from torch.distributed import FileStore

import stagelink
from tests.support.pipelines import GLOO, SHM, document

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pipelines import Wire

SENT = 4
"""More than the window has places for."""

kept: list[object] = []


def connect(rank: int, path: str, wire: Wire) -> stagelink.Handler:
    return stagelink.connect(
        stagelink.Plan.from_dict(document(wire)),
        rank=rank,
        world_size=2,
        store=FileStore(path, 2),
        run_id="run",
    )


def begin(path: str, wire: Wire) -> stagelink.Handler:
    """A handler that has sent, some of it to wait for places."""
    comm = connect(0, path, wire)
    session = comm.evaluate(SENT + 1)
    for microbatch in range(SENT):
        session.isend("h", torch.full((3000,), float(microbatch)), microbatch)
    kept.append(session)
    return comm


def ends(comm: stagelink.Handler) -> None:
    kept.append(comm)


def raises(comm: stagelink.Handler) -> None:
    kept.append(comm)
    raise ValueError("of the user")


def exits(comm: stagelink.Handler) -> None:
    kept.append(comm)
    sys.exit()


def exits_in_its_block(comm: stagelink.Handler) -> None:
    with comm:
        sys.exit(0)


def exits_badly_in_its_block(comm: stagelink.Handler) -> None:
    with comm:
        sys.exit(3)


def is_dropped(comm: stagelink.Handler) -> None:
    told = threading.Event()
    comm._plane.goodbyes.on_ended(lambda peer: told.set())
    kept.clear()
    del comm
    gc.collect()
    told.wait(20)


def _child_ends(path: str, wire: Wire) -> None:
    kept.append(begin(path, wire))


def _child_raises(path: str, wire: Wire) -> None:
    _child_ends(path, wire)
    raise ValueError("of the user")


def _child_exits_badly(path: str, wire: Wire) -> None:
    _child_ends(path, wire)
    sys.exit(3)


IN_THIS_PROCESS: list[Callable[[stagelink.Handler], None]] = [
    ends,
    raises,
    exits,
    exits_in_its_block,
    exits_badly_in_its_block,
    is_dropped,
]
IN_A_CHILD: list[Callable[[str, Wire], None]] = [_child_ends, _child_raises, _child_exits_badly]


def listen(path: str, wire: Wire) -> dict[str, object]:
    """Be rank 1: receive until an error says how rank 0 has left."""
    got: list[float] = []
    began = time.monotonic()
    try:
        with connect(1, path, wire) as comm, comm.evaluate(SENT + 1) as session:
            began = time.monotonic()
            for microbatch in range(SENT + 1):
                tensor = session.recv("h", microbatch)
                assert tensor is not None
                got.append(tensor[0].item())
    except stagelink.StagelinkError as error:
        seconds = time.monotonic() - began
        return {"got": got, "told": f"{type(error).__name__}: {error}", "seconds": seconds}
    return {"got": got}


def main(folder: str) -> None:
    wires = itertools.cycle([SHM, GLOO])
    for end in IN_THIS_PROCESS:
        path, wire = os.path.join(folder, end.__name__), next(wires)
        pid = os.fork()
        if not pid:
            end(begin(path, wire))
            return  # and on to the interpreter's end
        heard = listen(path, wire)
        tell(end.__name__, heard, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for end_child in IN_A_CHILD:
        path, wire = os.path.join(folder, end_child.__name__), next(wires)
        child = multiprocessing.get_context("fork").Process(target=end_child, args=(path, wire))
        child.start()
        heard = listen(path, wire)
        child.join()
        tell(end_child.__name__.strip("_"), heard, child.exitcode)


def tell(name: str, heard: dict[str, object], code: int | None) -> None:
    sys.stdout.write(f"{name}: {json.dumps({**heard, 'code': code})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
