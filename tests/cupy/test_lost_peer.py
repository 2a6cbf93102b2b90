"""A rank that is killed at any step: its peer says so, keeps nothing, and frees nothing in use."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from stagelink.errors import PeerLostError
from stagelink.testing import LeakCheck, report, run_fresh
from stagelink.transport.board import Board
from stagelink_cupy.holding import Holding
from stagelink_cupy.passing import Passing
from stagelink_cupy.receiver import CupyReceiver
from stagelink_cupy.region import Region
from stagelink_cupy.sender import CupySender
from tests.cupy.driving import LITTLE, connected, held_bytes, options, value
from tests.cupy.machine import DoubleConfig
from tests.cupy.on_double import on_device

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler
    from tests.cupy.double import CudaDouble

SEEN_S = 10.0


class Step(NamedTuple):
    """Where the victim stops to be killed.

    Attributes:
        owner: of the function that it stops in; or its module, by name.
        name: the function's.
        call: in which call, from 1; with ``open`` counted once the links are open.
        open: whether the links are open.
        paused: whether the receiver's device has stopped before.
    """

    owner: Any
    name: str
    call: int = 1
    open: bool = True
    paused: bool = False


IDLE = "idle"
MEETING = {
    "before the first piece": Step(Region, "copy", open=False),
    "before its handles are told": Step(Board, "put", open=False),
    "before the twin's are opened": Step(Region, "open", open=False),
    "before the second link": Step(Region, "copy", 4, open=False),
}
SENDING = {
    "before a copy": Step(Region, "copy", 3),
    "before the receiver is told": Step(CupySender, "tell", 2),
    "while there is no slot": Step(CupySender, "wait", paused=True),
    "before its last wait": Step(Passing, "finish", 3),
}
PASSING = "stagelink_cupy.passing"
RECEIVING = {
    "before a piece": Step(CupyReceiver, "next", 2),
    "before a copy": Step(Region, "copy", 3),
    "before the sender is told": Step(CupyReceiver, "tell", 2),
    "while its device does not go on": Step(
        "stagelink_cupy.passing", "synchronize", 1, paused=True
    ),
}
STEPS = {0: MEETING | SENDING, 1: MEETING | RECEIVING}
CASES = [
    # With events there is more to open, and all of the rest.
    *((victim, name, True) for victim in (0, 1) for name in MEETING),
    *((0, name, ordered) for name in SENDING for ordered in (False, True)),
    *((1, name, ordered) for name in RECEIVING for ordered in (False, True)),
    *((victim, IDLE, False) for victim in (0, 1)),
]
# There the sender's device waits before its host does.
CASES.remove((0, "while there is no slot", True))


def _stop_at(patch: pytest.MonkeyPatch, step: Step) -> None:
    owner = sys.modules[step.owner] if isinstance(step.owner, str) else step.owner
    function = getattr(owner, step.name)
    calls = iter(range(1, 1_000_000))

    def stop(*args: Any) -> Any:
        if next(calls) == step.call:
            report("there")
            threading.Event().wait()
        return function(*args)

    patch.setattr(owner, step.name, stop)


def _live(
    rank: int, world_size: int, store: Store, victim: int, step: Step | None, given: Any
) -> tuple[str, int]:
    """Run until somebody dies; what was raised, and how much device memory is left."""
    with on_device(DoubleConfig(), rank) as rt, pytest.MonkeyPatch.context() as patch:
        if rank == victim and step is not None and not step.open:
            _stop_at(patch, step)
        text = "nobody died"
        try:
            with connected(rank, world_size, store, given) as comm:
                if rank == victim and step is not None and step.open:
                    _stop_at(patch, step)
                _pass(comm, rt, step)
        except PeerLostError as error:
            text = str(error)
        assert rt.undefined == []
        return text, held_bytes(rt)


def _pass(comm: Handler, rt: CudaDouble, step: Step | None) -> None:
    if step is None:
        report("there")
        comm.reduce([0.0])
    elif step.paused and comm.rank == 1:
        rt.pause()
    with comm.evaluate(100) as session:
        for number in range(100):
            if comm.rank == 0:
                session.send("e0", value(number), number)
            else:
                session.recv("e0", number)


def _one_of_two(rank: int, world_size: int, store: Store, *rest: Any) -> tuple[str, int]:
    check = LeakCheck("threads", "descriptors", "shared mappings")
    result = _live(rank, world_size, store, *rest)
    check.verify()
    return result


@pytest.mark.parametrize(("victim", "name", "device_ordered"), CASES)
def test_killed(victim: int, name: str, device_ordered: bool) -> None:
    step = STEPS[victim].get(name)
    survivor = 1 - victim
    given = options(device_ordered=device_ordered)
    with run_fresh(_one_of_two, 2, victim, step, given) as ranks:
        ranks.wait_for(victim, "there")
        ranks.kill(victim)
        outcome = ranks.outcomes(SEEN_S)[survivor]
    assert outcome.error is None, outcome.error
    text, left = outcome.value
    assert f"rank {victim} died" in text
    if step is None or step.open:
        assert left == LITTLE  # which the victim may have had open


# -- at close ------------------------------------------------------------------------------------


def _close(
    rank: int, world_size: int, store: Store, victim: int, name: str, given: Any
) -> tuple[int, str]:
    check = LeakCheck("threads", "descriptors", "shared mappings")
    with on_device(DoubleConfig(), rank) as rt, pytest.MonkeyPatch.context() as patch:
        comm = connected(rank, world_size, store, given)
        comm.reduce([0.0])
        if rank == victim:
            _stop_at(patch, Step(Holding, name))
        text = ""
        try:
            comm.close(SEEN_S)
        except PeerLostError as error:
            text = str(error)
        assert rt.undefined == []
        left = held_bytes(rt)
    check.verify()
    return left, text


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("name", "left"), [("close", LITTLE), ("give_back", 0)])
def test_killed_while_it_closes(victim: int, name: str, left: int) -> None:
    given = options(device_ordered=True)
    with run_fresh(_close, 2, victim, name, given) as ranks:
        ranks.wait_for(victim, "there")
        ranks.kill(victim)
        outcome = ranks.outcomes(SEEN_S)[1 - victim]
    assert outcome.error is None, outcome.error
    assert outcome.value[0] == left
    told = "leaves its device memory to the end of its process" in outcome.stderr
    assert told == bool(left)
