"""Two ranks on this machine, and rounds of everything in turn, so that noise hits all alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store
from tqdm import tqdm

from stagelink.bench.handled import WINDOW, HandlerPipe, LinkPipe, pair_plan
from stagelink.bench.pipes import (
    IN_FLIGHT,
    KINDS,
    ONE_WAY_READ,
    Contender,
    Pipe,
    Record,
    Timed,
    read,
    timed,
)
from stagelink.bench.raw import COPIERS, Copier, RawPipe, copy_once
from stagelink.control.launch import Launch
from stagelink.deadline import Deadline
from stagelink.exchange.connect import join
from stagelink.exchange.handler import Handler
from stagelink.plugins.plugins import Plugins
from stagelink.ranks.job import report
from stagelink.ranks.processes import run_fresh

_KIB = 1024
SIZES_BYTES = (8, 64, 512, *(_KIB * size for size in (4, 64, 256, 1024, 4096, 16384, 65536)))
"""Payloads of a measurement by default."""

_ROUND_BYTES = 64 * 1024 * 1024
_MOST_MESSAGES = 200
_LEAST_MESSAGES = 8
_PATIENCE = timedelta(seconds=300)
_LIMIT_S = 30 * 86400.0  # no test: it may take as long as what is asked for does
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement to be taken, in parts: of each size each kind."""

    transports: Sequence[str]  # names; each must be able to link two processes of this machine
    sizes_bytes: Sequence[int]  # payloads, multiples of 4
    rounds: int  # of each contender in each part
    kinds: Sequence[str] = KINDS  # of `KINDS`, and `ONE_WAY_READ`
    # kinds beside which one thread copies: both ranks at once in ``duplex``
    copied: Sequence[str] = ("stream",)

    @property
    def parts(self) -> list[tuple[int, str]]:
        """Sizes and kinds in the order in which they are measured."""
        return [(size, kind) for size in self.sizes_bytes for kind in self.kinds]

    @property
    def buffer_bytes(self) -> int:
        """The least that both ranks have in buffers at the largest size, all at the same time."""
        ways = 2 * 2 * (len(self.transports) + 1)  # there and back, on both, raw ones as well
        return ways * IN_FLIGHT * max(self.sizes_bytes)


class Case(NamedTuple):
    """Contender, kind and size that times belong to."""

    contender: Contender
    kind: str
    size_bytes: int


Times = list[tuple[Case, int, Timed]]
"""Rounds in the order in which both ranks had them: case, messages, and when it was here."""


def measure(measurement: Measurement) -> list[Record]:
    """Start two ranks, measure, and return a record per contender, kind and size.

    A bar on stderr shows how far it is; what the ranks wrote there follows at the end.
    """
    with run_fresh(_rank, 2, measurement, limit_s=_LIMIT_S) as ranks:
        with tqdm(total=len(measurement.parts), unit="kind", delay=1) as bar:
            bar.delay = 0  # not shown before: the block ends its line, whatever a signal raises
            bar.refresh()
            for _ in ranks.reports(0):
                bar.update()
        for outcome in ranks.outcomes(_GRACE_S):
            if outcome.hung_s is None:
                sys.stderr.write(outcome.stderr)
        return records_of(*ranks.results())


def records_of(here: Times, there: Times) -> list[Record]:
    """Make records of what both ranks saw of the same rounds."""
    seconds: dict[Case, list[float]] = {}
    for (case, count, mine), (_, _, theirs) in zip(here, there, strict=True):
        found = seconds.setdefault(case, [])
        if mine.singles:
            found += mine.singles
        else:
            began, ended = min(mine.began, theirs.began), max(mine.ended, theirs.ended)
            found.append((ended - began) / count)
    return [Record.of(*case, times) for case, times in seconds.items()]


def _rank(rank: int, world_size: int, store: Store, measurement: Measurement) -> Times:
    """All rounds, on one rank; rank 0 reports each part."""
    pin(rank)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("raw", store),
        rank=rank,
        world_size=world_size,
        timeout=_PATIENCE,
    )
    try:
        with ExitStack() as stack:
            pipes: list[Pipe] = [RawPipe()]
            for transport in measurement.transports:
                pipes += stack.enter_context(pipes_of(transport, rank, store, dist.barrier))
            times: Times = []
            for part in rounds(measurement, pipes, rank, dist.barrier):
                times += part
                if rank == 0:
                    report("part")
            return times
    finally:
        dist.destroy_process_group()


def pin(rank: int) -> None:
    """Give this process, of two, a core of its own, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank]})


@contextmanager
def pipes_of(
    transport: str, rank: int, store: Store, wait_for_other: Callable[[], object]
) -> Iterator[list[Pipe]]:
    """A link that no handler uses, and a handler without and with a copy, over a transport."""
    plan = pair_plan(transport)
    comm = Handler(*join(plan, Launch(rank, 2, f"bench/{transport}", store), Plugins()))
    engine, _ = join(plan, Launch(rank, 2, f"bench/{transport}/link", store), Plugins())
    handled = [HandlerPipe(comm, transport, copy=copy) for copy in (False, True)]
    with comm:
        yield [LinkPipe(engine, transport), *handled]
        wait_for_other()
        engine.node.close(Deadline(plan.limits.close_deadline_s))


def rounds(
    measurement: Measurement,
    pipes: Sequence[Pipe],
    rank: int,
    start_together: Callable[[], object],
    copiers: Mapping[Contender, Copier] = COPIERS,
) -> Iterator[Times]:
    """Carry out all rounds of some pipes, and of copies; yields those of each part.

    The measurement's transports are the caller's affair. ``start_together`` waits until the other
    rank calls it as well.
    """
    moves = [(pipe.contender, partial(timed, pipe)) for pipe in pipes]
    copies = [(contender, partial(_copied, copy, rank)) for contender, copy in copiers.items()]
    for size, kind in measurement.parts:
        count = max(_LEAST_MESSAGES, min(_MOST_MESSAGES, _ROUND_BYTES // size))
        turns = [*moves, *(copies if kind in measurement.copied else ())]
        times: Times = []
        for number in range(-1, measurement.rounds):  # the first is for warming up
            for contender, turn in turns:
                found = turn(kind, size, count, start_together)
                if number >= 0:
                    times.append((Case(contender, kind, size), count, found))
        yield times


def _copied(
    copy: Copier, rank: int, kind: str, size: int, count: int, start_together: Callable[[], object]
) -> Timed:
    """The copies of one round, while the other rank rests, or does the same in ``duplex``."""
    start_together()
    seconds: tuple[float, ...] = ()
    if rank == 0 or kind == "duplex":
        and_read = partial(_copy_and_read, copy) if kind == ONE_WAY_READ else copy
        seconds = (copy_once(size, WINDOW + 2, count, and_read),)
    start_together()
    return Timed(0.0, 0.0, seconds)


def _copy_and_read(copy: Copier, target: torch.Tensor, source: torch.Tensor) -> None:
    copy(target, source)
    read(target)
