"""A rank that is killed at any step leaves nothing at its peer, and what it sent stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink.errors import PeerLostError
from stagelink.testing import LeakCheck, report, run_fresh
from stagelink.testing.subject import Subject

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler, Session

MIB = 1024 * 1024
LITTLE = {"link_bytes": 512 * 1024}
"""So that a message of a MiB goes in pieces."""


def value(number: int) -> torch.Tensor:
    return torch.full((MIB,), number, dtype=torch.uint8)


def _lives(comm: Handler, session: Session, step: str) -> None:
    """The survivor's part; ends in PeerLostError."""
    kept = []
    if step == "idle":
        report("ready")
    elif comm.rank == 0:
        for number in range(3):
            session.send("e0", value(number), number)
        report("ready")
    else:
        kept = [session.recv("e0", number) for number in range(2 if step == "pieces" else 3)]
        report("ready")
    try:
        if comm.rank == 0:
            for number in range(3, 100):
                session.send("e0", value(number), number)
        else:
            session.recv("e0", 3)
    finally:
        for number, got in enumerate(kept):
            assert got is not None
            assert torch.equal(got, value(number))


def _dies(comm: Handler, session: Session, step: str) -> None:
    """The victim's part: come to the step, and stay there."""
    kept = []
    if comm.rank == 0 and step != "idle":
        for number in range(3):
            session.send("e0", value(number), number)
    elif step == "held":
        kept = [session.recv("e0", number) for number in range(3)]
    report("there")
    comm.reduce([0.0])
    del kept


def _join(
    rank: int, world_size: int, store: Store, victim: int, step: str, options: dict[str, Any]
) -> str:
    subject = Subject("shm", (), options)
    try:
        with (
            subject.connect(subject.plan(window=8), rank, world_size, store) as comm,
            comm.evaluate(100) as session,
        ):
            (_dies if rank == victim else _lives)(comm, session, step)
    except PeerLostError as error:
        return str(error)
    return "nobody died"


def _one_of_two(
    rank: int, world_size: int, store: Store, victim: int, step: str, options: dict[str, Any]
) -> str:
    check = LeakCheck("threads", "descriptors", "shared mappings")
    text = _join(rank, world_size, store, victim, step, options)
    check.verify()
    return text


@pytest.mark.parametrize("step", ["idle", "unread", "held", "pieces"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killed(victim: int, step: str) -> None:
    survivor = 1 - victim
    options = LITTLE if step == "pieces" else {}
    with run_fresh(_one_of_two, 2, victim, step, options) as ranks:
        ranks.wait_for(victim, "there")
        ranks.wait_for(survivor, "ready")
        ranks.kill(victim)
        outcome = ranks.outcomes(20.0)[survivor]
    assert outcome.error is None, outcome.error
    assert f"rank {victim} died" in outcome.value
