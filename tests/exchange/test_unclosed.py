"""Handlers that nobody has closed: peers hear how the process ended, and get what was sent."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import HashStore

import stagelink
from stagelink.control.failure import State
from stagelink.exchange import unclosed
from tests.exchange.leavers import IN_A_CHILD, IN_THIS_PROCESS, SENT
from tests.support.pipelines import LOOPBACK, document

if TYPE_CHECKING:
    from collections.abc import Mapping

LEFT = "PeerClosedError: rank 1: peer rank 0 left without close: its process ended; it finished "
DROPPED = "PeerClosedError: rank 1: peer rank 0 left without close: its handler was dropped; it "
FAILED = "AbortedError: rank 0 reports: rank 0 failed: "
TOLD = {
    "ends": (0, LEFT),
    "raises": (1, f"{FAILED}ValueError: of the user"),
    "exits": (0, LEFT),
    "exits_in_its_block": (0, "PeerClosedError: rank 1: peer rank 0 "),
    "exits_badly_in_its_block": (3, f"{FAILED}SystemExit: 3"),
    "is_dropped": (0, DROPPED),
    "child_ends": (0, LEFT),
    "child_raises": (1, f"{FAILED}ValueError: of the user"),
    "child_exits_badly": (3, f"{FAILED}SystemExit: 3"),
}
WARNED = {
    f"rank 0: left without close: {why}; open it in a `with` block, or call its close()"
    for why in ("its process ended", "its handler was dropped")
}


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, object]]:
    """What rank 1 heard of each rank 0 that ended."""
    folder = tmp_path_factory.mktemp("leavers")
    command = [sys.executable, "-m", "tests.exchange.leavers", str(folder)]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(run.stderr.splitlines()) >= WARNED, run.stderr
    lines = (line.partition(": ") for line in run.stdout.splitlines())
    return {name: json.loads(text) for name, _, text in lines}


def test_each_way_to_end_is_tried() -> None:
    assert set(TOLD) == {end.__name__.strip("_") for end in (*IN_THIS_PROCESS, *IN_A_CHILD)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", TOLD)
def test_a_peer_hears_how_it_was_left(heard: Mapping[str, dict[str, object]], end: str) -> None:
    code, text = TOLD[end]
    assert str(heard[end]["told"]).startswith(text)
    assert heard[end]["code"] == code
    if code == 0:
        assert heard[end]["got"] == [*range(SENT)]  # what was sent has come


def _end(engine: Any, looked: threading.Event, seen: list[object]) -> None:
    """What the end of a process does with what a thread is still leaving."""
    seen.append(engine in unclosed._open)
    looked.set()
    engine.leave(None)
    seen.append(engine.plane.failure.state is State.CLOSED)


def test_a_process_ends_behind_a_handler_that_was_dropped() -> None:
    store, begun, looked = HashStore(), threading.Event(), threading.Event()
    engines: list[Any] = []
    seen: list[object] = []
    got: list[float] = []

    def connect(rank: int) -> stagelink.Handler:
        plan = stagelink.Plan.from_dict(document(LOOPBACK))
        return stagelink.connect(plan, rank=rank, world_size=2, store=store, run_id="run")

    def send() -> None:
        comm = connect(0)
        engines.append(comm._engine)
        comm._engine.node.on_close.append(begun.set)
        session = comm.evaluate(SENT)
        for microbatch in range(SENT):  # more than the window: it waits for the receiver
            session.isend("h", torch.full((3000,), float(microbatch)), microbatch)

    sender = threading.Thread(target=send)
    sender.start()
    with connect(1) as comm, comm.evaluate(SENT) as session:
        sender.join()
        gc.collect()
        assert begun.wait(20)
        end = threading.Thread(target=_end, args=(engines[0], looked, seen))
        end.start()
        assert looked.wait(20)
        for microbatch in range(SENT):
            tensor = session.recv("h", microbatch)
            assert tensor is not None
            got.append(float(tensor[0]))
    end.join(20)
    assert seen == [True, True]
    assert got == [*range(SENT)]
