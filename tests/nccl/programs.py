"""What ranks do in tests of their order: each takes its microbatches as chance has it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from stagelink.errors import StagelinkError
from stagelink_nccl.slot import IssueSlot
from tests.nccl.journal import Journal, journal
from tests.nccl.over_gloo import NcclOverGloo, let_issuers_end
from tests.support.pipelines import Wire, document, joined, tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import Store

    from stagelink import Handler
    from tests.support.pipelines import Document

NCCL = Wire(NcclOverGloo.name, processes=True)

_MICROBATCHES = 8
_ELEMENTS = 2000


def plan(shape: Sequence[int], deadline_s: float = 20.0) -> Document:
    """Stages of so many ranks in a line, which all send to the last as well."""
    last = len(shape) - 1
    tensors = [tensor(f"h{stage}", stage, *sorted({stage + 1, last})) for stage in range(last)]
    limits = {"deadline_s": deadline_s, "first_deadline_s": deadline_s}
    more = {"microbatches": _MICROBATCHES, "window": _MICROBATCHES, "limits": limits}
    return document(NCCL, shape, tensors, **more)


def by_chance(
    rank: int,
    world_size: int,
    store: Store,
    shape: Sequence[int],
    seed: int,
    kind: type[IssueSlot] | None = None,
) -> Journal:
    """Run a session in random order.

    Args:
        kind: a broken kind of slot: the session may then well fail.
    """
    deadline_s = 20.0 if kind is None else 3.0
    with journal(kind or IssueSlot) as entries:
        try:
            given = plan(shape, deadline_s)
            with joined(rank, world_size, store, given, [NcclOverGloo]) as comm:
                _session(comm, random.Random(f"{seed} {rank}"))
        except StagelinkError:
            let_issuers_end()
            if kind is None:
                raise
    return entries


def _session(comm: Handler, chance: random.Random) -> None:
    """Each rank takes its microbatches in an order of its own, forth and back."""
    with comm.train(_MICROBATCHES) as session:
        sends = comm.stage.index < len(comm.plan.stages) - 1
        for number in _shuffled(chance, session.mine):
            for name in _inputs(comm):
                got = session.recv(name, number)
                assert got is not None
                assert bool((got == number).all())
            if sends:
                value = torch.full((_ELEMENTS,), float(number), requires_grad=True)
                session.isend(f"h{comm.stage.index}", value, number)
        for number in _shuffled(chance, session.mine):
            if sends:
                total = session.recv_grad(f"h{comm.stage.index}", number)
                assert total is not None
                assert bool((total < 0).all())
            for name in _inputs(comm):
                session.send_grad(name, torch.full((_ELEMENTS,), -1.0 - number), number)


def _shuffled(chance: random.Random, numbers: Iterable[int]) -> list[int]:
    found = list(numbers)
    chance.shuffle(found)
    return found


def _inputs(comm: Handler) -> list[str]:
    return [edge.tensor.name for edge in comm.plan.inputs(comm.stage.index)]
