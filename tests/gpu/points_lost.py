"""A peer that is killed in the middle of a message: the other says so, and keeps its GPU."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from stagelink import PeerLostError
from stagelink.testing import report, run_fresh
from tests.gpu.answers import Answer, Findings
from tests.gpu.plans import pair, ways
from tests.support.pipelines import joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler
    from stagelink.testing import RankProcesses
    from tests.gpu.machines import Machine
    from tests.support.pipelines import Document

__all__ = ["lost_peer"]

_SOON_S = 10.0
_RANKS = {0: "receiver", 1: "sender"}
"""Who survives the death of a rank."""


def lost_peer(machine: Machine) -> Answer:
    """Sender or receiver, ordered by host or device."""
    findings = Findings()
    with ExitStack() as stack:
        runs = {
            (how, victim): stack.enter_context(
                run_fresh(_stream, 2, machine, pair(machine, [machine.cupy], options))
            )
            for how, options in ways(machine).items()
            for victim in _RANKS
        }
        for (how, victim), ranks in runs.items():
            _kill(findings, f"{how}, the {_RANKS[victim]} survives", ranks, victim, machine)
    return findings.answer()


def _kill(
    findings: Findings,
    what: str,
    ranks: RankProcesses[tuple[str, str]],
    victim: int,
    machine: Machine,
) -> None:
    ranks.wait_for(victim, "going", machine.patience_s)
    ranks.kill(victim)
    began = time.monotonic()
    outcome = ranks.outcomes(_SOON_S)[1 - victim]
    seconds = time.monotonic() - began
    if not outcome.ok:
        findings.need(what, str(outcome), "PeerLostError")
        return
    raised, usable = outcome.value
    findings.need(what, raised, "PeerLostError")
    findings.tell("seconds until it had said so and closed", f"{seconds:.2f}")
    findings.need("its GPU afterwards", usable, "works")


def _stream(
    rank: int, world_size: int, store: Store, machine: Machine, plan: Document
) -> tuple[str, str]:
    """Large messages until somebody dies."""
    with machine.process(rank):
        raised = "nothing"
        try:
            with joined(rank, world_size, store, plan, machine.transports) as comm:
                _pass_for_ever(comm, machine)
        except PeerLostError as error:
            raised = type(error).__name__
        return raised, "works" if machine.computes() else "computes wrongly"


def _pass_for_ever(comm: Handler, machine: Machine) -> None:
    value = torch.ones(machine.large_bytes, dtype=torch.uint8, device=machine.device)
    for turn in itertools.count():
        with comm.evaluate(4) as session:
            for number in range(4):
                if comm.rank == 0:
                    session.send("h", value, number, copy=False)
                else:
                    session.recv("h", number)
        if turn == 1:
            report("going")
