"""A rank that is killed at any step: the other says so, and leaves nothing behind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from stagelink.errors import PeerLostError
from stagelink.testing import LeakCheck, report, run_fresh
from stagelink_nccl.link import NcclReceiver, _LinkTask
from tests.nccl.over_gloo import NcclOverGloo
from tests.nccl.programs import NCCL
from tests.support.pipelines import document, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from stagelink import Handler

ELEMENTS = 1_000_000
RANKS = (0, 1)

STEPS: dict[str, tuple[type, str, bool]] = {
    "buffer": (NcclReceiver, "_receive_into", True),
    "matched": (_LinkTask, "offer", True),
    "asked": (_LinkTask, "on_note", True),
    "granted": (_LinkTask, "_do", True),
    "issued": (_LinkTask, "_do", False),
}
"""Where the victim stands still: in which method, and whether before it does anything."""


def _stand_still(method: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
    def stands(*args: Any) -> None:
        if not first:
            method(*args)
        report("there")
        threading.Event().wait()

    return stands


def _pass_on(comm: Handler) -> None:
    """The first stage sends, the second answers."""
    with comm.train(4) as session:
        for microbatch in session.mine:
            if comm.stage.index == 0:
                session.send("h", torch.zeros(ELEMENTS, requires_grad=True), microbatch)
            else:
                session.recv("h", microbatch)
        if comm.stage.index == 1:
            session.send_grad("h", torch.zeros(ELEMENTS), 0)
        else:
            session.recv_grad("h", 0)
        comm.reduce([0.0])


def _one_of_two(rank: int, world_size: int, store: Store, victim: int, step: str) -> str:
    check = LeakCheck("threads", "descriptors", "shared mappings")
    text = _join(rank, world_size, store, victim, step)
    check.verify()
    return text


def _join(rank: int, world_size: int, store: Store, victim: int, step: str) -> str:
    plan = document(NCCL)
    try:
        with joined(rank, world_size, store, plan, [NcclOverGloo]) as comm:
            if rank == victim:
                where, name, first = STEPS[step]
                with patch.object(where, name, _stand_still(getattr(where, name), first=first)):
                    _pass_on(comm)
            else:
                _pass_on(comm)
    except PeerLostError as error:
        return str(error)
    return "nobody died"


@pytest.mark.parametrize(
    ("victim", "step"),
    [
        *((victim, step) for victim in RANKS for step in ("granted", "issued", "asked")),
        (1, "buffer"),  # the first message's receiver
        (0, "matched"),  # the leader
    ],
)
def test_killed(victim: int, step: str) -> None:
    with run_fresh(_one_of_two, 2, victim, step) as ranks:
        ranks.wait_for(victim, "there")
        ranks.kill(victim)
        outcome = ranks.outcomes(20.0)[1 - victim]
    assert outcome.error is None, outcome.error
    assert f"rank {victim} died" in outcome.value
