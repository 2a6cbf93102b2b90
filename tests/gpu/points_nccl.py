"""NCCL on one GPU: with one rank all of what transport-nccl asks of it; with two, what it says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from stagelink import StagelinkError
from stagelink.deadline import Deadline
from stagelink.testing import run_fresh
from stagelink.transport.contract import Link
from stagelink_nccl import NcclOptions
from stagelink_nccl.groups import NcclGroups
from tests.gpu.answers import Answer, Findings
from tests.gpu.plans import pair
from tests.support.pipelines import carry, joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.transport.contract import Port
    from stagelink_nccl.groups import Group, Work
    from tests.gpu.machines import Machine

__all__ = ["nccl_alone", "nccl_pair"]

Seen = dict[str, str]

_NONE = Answer("skipped", "this build of torch has no NCCL")
_ALONE_S, _SHARED_S = 8.0, 8.0
_LOOK_S = 0.0005
_AT_ONCE = timedelta(seconds=5)
_SHARES_SINCE = (2, 30, 0)
_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
_LINK = Link(0, 1, "nccl", "cuda")
_REFUSAL = "both ranks are on one GPU"


# -- one rank ------------------------------------------------------------------------------------


def nccl_alone(machine: Machine) -> Answer:
    """Groups as the transport makes them, given back and aborted; and a message to oneself."""
    version = machine.nccl_version()
    if version is None:
        return _NONE
    findings = Findings()
    findings.tell("version", ".".join(map(str, version)))
    with run_fresh(groups_alone, 1, machine) as ranks:
        (seen,) = ranks.results(machine.patience_s)
    for what, value in seen.items():
        findings.need(what, value, "works")
    unused = _outcome_of(_unused, machine)
    findings.need("groups of two that are closed unused", unused, "works")
    findings.tell("send to oneself", _outcome_of(_to_itself, machine))
    return findings.answer()


def _outcome_of(function: Callable[[int, int, Store, Machine], str], machine: Machine) -> str:
    """What one rank says, or how it ended: it may well hang, and is not to spoil the rest."""
    with run_fresh(function, 1, machine) as ranks:
        (outcome,) = ranks.outcomes(_ALONE_S)
    if outcome.hung_s is not None:
        return f"hangs for {outcome.hung_s:g} s\n{outcome.stderr}"
    return str(outcome.value) if outcome.ok else str(outcome)


@dataclass(frozen=True)
class _Port:
    """What `NcclGroups.connect` asks of a port."""

    number: int
    opened: Store
    link: Link = _LINK
    rank: int = 0

    def store(self) -> Store:
        return dist.PrefixStore(str(self.number), self.opened)


@contextmanager
def _one_rank() -> Iterator[None]:
    """Whoever makes a group of two gets one of one."""
    real: Any = dist.ProcessGroupNCCL

    class Alone:
        Options = real.Options

        def __new__(cls, store: Store, rank: int, size: int, options: object) -> Any:
            del rank, size
            return real(store, 0, 1, options)

    with patch.object(dist, "ProcessGroupNCCL", Alone):
        yield


def groups_alone(rank: int, world_size: int, store: Store, machine: Machine) -> Seen:
    """What comes of the groups; for a rank process."""
    del world_size
    seen: Seen = {}
    with machine.process(rank):
        made = NcclGroups()
        options = {"broadcast": NcclOptions(), "with limits": NcclOptions(min_ctas=1, max_ctas=4)}
        for number, (name, given) in enumerate(options.items()):
            broken = name == "with limits"
            port = cast("Port", _Port(number, store))
            with _one_rank():
                group = made.connect(port, given, Deadline(machine.patience_s))
            seen[name] = _operated(machine, group)
            group.close(broken=broken)
            what = "after an abort" if broken else "after a shutdown"
            seen[what] = "works" if machine.computes() else "computes wrongly"
    return seen


def _unused(rank: int, world_size: int, store: Store, machine: Machine) -> str:
    """Groups whose other rank never comes, as where a pipeline fails before its first message."""
    del world_size
    with machine.process(rank):
        for broken in (False, True):
            port = cast("Port", _Port(broken, store))
            NcclGroups().connect(port, NcclOptions(), Deadline(1.0)).close(broken=broken)
        return "works" if machine.computes() else "computes wrongly"


def _operated(machine: Machine, group: Group) -> str:
    """Operations on a stream of their own, each looked after until it is done."""
    for number in range(3):
        with machine.side_stream():
            buffer = torch.full((100_000,), number, dtype=torch.uint8, device=machine.device)
            work = group.start(buffer)
            if not _completes(work, machine.patience_s / 2):
                return f"operation {number} is never completed"
            work.wait(_AT_ONCE)
            if not bool((buffer == number).all()):
                return f"operation {number} changed the buffer of its root"
    return "works"


def _completes(work: Work, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def _to_itself(rank: int, world_size: int, store: Store, machine: Machine) -> str:
    with machine.process(rank):
        dist.init_process_group(machine.collectives, store=store, rank=rank, world_size=world_size)
        try:
            return _send_to_oneself(machine)
        except (RuntimeError, ValueError) as error:
            return f"is refused: {error}"
        finally:
            dist.destroy_process_group()


def _send_to_oneself(machine: Machine) -> str:
    sent = torch.arange(1000.0, device=machine.device)
    got = torch.zeros_like(sent)
    posted = [dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, got, 0)]
    for work in dist.batch_isend_irecv(posted):
        work.wait()
    machine.synchronize()
    return "works" if torch.equal(sent, got) else "brings something else"


# -- two ranks -----------------------------------------------------------------------------------


def nccl_pair(machine: Machine) -> Answer:
    """Two ranks on one GPU are refused with the reason, unless NCCL can be told to allow them."""
    version = machine.nccl_version()
    if version is None:
        return _NONE
    findings = Findings()
    with run_fresh(_exchange, 2, machine, False) as ranks:
        texts = ranks.results(machine.patience_s)
    refused = all(_REFUSAL in text for text in texts)
    findings.need("two ranks", _REFUSAL if refused else texts, _REFUSAL)
    if version < _SHARES_SINCE:
        findings.tell(f"with {_SHARES}", "not tried, NCCL is older than 2.30")
        return findings.answer()
    with run_fresh(_exchange, 2, machine, True) as ranks:
        for outcome in ranks.outcomes(_SHARED_S):
            text = outcome.value if outcome.ok else str(outcome)
            findings.tell(f"with {_SHARES}, rank {outcome.rank}", text)
    return findings.answer()


def _exchange(rank: int, world_size: int, store: Store, machine: Machine, shares: bool) -> str:
    if shares:
        os.environ[_SHARES] = "1"  # before NCCL looks
    plan = pair(machine, [machine.nccl])
    values = [torch.full((100_000,), float(n), device=machine.device) for n in range(4)]
    with machine.process(rank):
        try:
            with joined(rank, world_size, store, plan, machine.transports) as comm:
                carry(comm, values, [4])
        except StagelinkError as error:
            return str(error)
    return "carried"
