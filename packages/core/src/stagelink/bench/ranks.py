"""Two ranks on this machine, and rounds of everything in turn, so that noise hits all alike."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm

from stagelink.bench.handled import WINDOW, HandlerPipe, LinkPipe, pair_plan
from stagelink.bench.pipes import IN_FLIGHT, Pipe, Timed, read, timed
from stagelink.bench.raw import COPIERS, Copier, RawPipe, copy_once
from stagelink.bench.records import KINDS, ONE_WAY_READ, Record, Subject
from stagelink.control.launch import Launch, StoreAddress
from stagelink.deadline import Deadline
from stagelink.exchange.connect import join
from stagelink.exchange.handler import Handler
from stagelink.plugins.plugins import Plugins

_KIB = 1024
SIZES_BYTES = (8, 64, 512, *(_KIB * size for size in (4, 64, 256, 1024, 4096, 16384, 65536)))
"""Payloads of a measurement by default."""

_ROUND_BYTES = 64 * 1024 * 1024
_MOST_MESSAGES = 200
_LEAST_MESSAGES = 8
_PATIENCE = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement to be taken.

    Attributes:
        transports: names; each must be able to link two processes of this machine.
        sizes_bytes: payloads, multiples of 4.
        rounds: of each subject, kind and size.
        progress: whether rank 0 shows a bar on stderr.
        kinds: of `KINDS`, and `ONE_WAY_READ`.
        copied: kinds beside which one thread copies: both ranks at once in ``duplex``.
    """

    transports: Sequence[str]
    sizes_bytes: Sequence[int]
    rounds: int
    progress: bool
    kinds: Sequence[str] = KINDS
    copied: Sequence[str] = ("stream",)

    @property
    def buffer_bytes(self) -> int:
        """The least that both ranks have in buffers at the largest size, all at the same time."""
        ways = 2 * 2 * (len(self.transports) + 1)  # there and back, on both, raw ones as well
        return ways * IN_FLIGHT * max(self.sizes_bytes)


class Case(NamedTuple):
    """Subject, kind and size that times belong to."""

    subject: Subject
    kind: str
    size_bytes: int


Times = list[tuple[Case, int, Timed]]
"""Rounds in the order in which both ranks had them: case, messages, and when it was here."""


def measure(job: Job) -> list[Record]:
    """Start two processes, measure, and return a record per subject, kind and size.

    Raises:
        ChildFailedError: a rank failed.
    """
    # Its agent tells at length what a rank says itself.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="stagelink-bench-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id="bench",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="spawn",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        with _ctrl_c_put_off(), _bar_ends(job):
            by_rank = elastic_launch(config, _rank)(job, folder)
    return records_of(by_rank[0], by_rank[1])


@contextmanager
def _ctrl_c_put_off() -> Iterator[None]:
    """A block in which processes are started that see Ctrl-C only once they are in `_rank`.

    It comes to every process of a terminal, and until then each would print where it was, in
    torch's import say. They inherit what this thread blocks; here another takes the signal, which
    Python then handles in this one.
    """
    over = threading.Event()
    taker = threading.Thread(target=over.wait, name="stagelink-bench-ctrl-c", daemon=True)
    taker.start()
    resource_tracker.ensure_running()  # which would unblock it when the first process is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        taker.join()


@contextmanager
def _bar_ends(job: Job) -> Iterator[None]:
    """A block after which stderr is at the beginning of a line, also where a rank was killed."""
    try:
        yield
    except Exception:
        if job.progress:
            sys.stderr.write("\n")
        raise


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


def _rank(job: Job, folder: str) -> Times:
    """All rounds, on one rank."""
    signal.signal(signal.SIGINT, _stop_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pin(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/raw", rank=rank, world_size=2, timeout=_PATIENCE
    )
    try:
        with ExitStack() as stack:
            pipes: list[Pipe] = [RawPipe()]
            for transport in job.transports:
                store = f"file://{folder}/ours"
                pipes += stack.enter_context(pipes_of(transport, rank, store, dist.barrier))
            return list(rounds(job, pipes, rank, dist.barrier))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is the interpreter's own end
        dist.destroy_process_group()


def _stop_once(number: int, frame: object) -> None:
    """Ctrl-C comes from the terminal and from the launcher, which passes on what it got."""
    del number, frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def pin(rank: int) -> None:
    """Give this process, of two, a core of its own, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank]})


@contextmanager
def pipes_of(
    transport: str, rank: int, store: str, wait_for_other: Callable[[], object]
) -> Iterator[list[Pipe]]:
    """A link that no handler uses, and a handler without and with a copy, over a transport."""
    plan = pair_plan(transport)
    where = StoreAddress.parse(store)
    comm = Handler(*join(plan, Launch(rank, 2, f"bench/{transport}", where), Plugins()))
    engine, _ = join(plan, Launch(rank, 2, f"bench/{transport}/link", where), Plugins())
    handled = [HandlerPipe(comm, transport, copy=copy) for copy in (False, True)]
    with comm:
        yield [LinkPipe(engine, transport), *handled]
        wait_for_other()
        engine.node.close(Deadline(plan.limits.close_deadline_s))


def rounds(
    job: Job,
    pipes: Sequence[Pipe],
    rank: int,
    start_together: Callable[[], object],
    copiers: Mapping[Subject, Copier] = COPIERS,
) -> Iterator[tuple[Case, int, Timed]]:
    """Carry out all rounds of some pipes, each kind and size of all in turn, and of copies.

    The job's transports are the caller's affair. ``start_together`` waits until the other rank
    calls it as well.
    """
    moves = [(pipe.subject, partial(timed, pipe)) for pipe in pipes]
    copies = [(subject, partial(_copied, copy, rank)) for subject, copy in copiers.items()]
    work = [(size, kind) for size in job.sizes_bytes for kind in job.kinds]
    tqdm.set_lock(threading.RLock())  # its own is the system's, and a killed rank leaves it behind
    for size, kind in tqdm(work, disable=rank != 0 or not job.progress, unit="kind"):
        count = max(_LEAST_MESSAGES, min(_MOST_MESSAGES, _ROUND_BYTES // size))
        turns = [*moves, *(copies if kind in job.copied else ())]
        for number in range(-1, job.rounds):  # the first is for warming up
            for subject, turn in turns:
                found = turn(kind, size, count, start_together)
                if number >= 0:
                    yield Case(subject, kind, size), count, found


def _copied(
    copy: Copier,
    rank: int,
    kind: str,
    size: int,
    count: int,
    start_together: Callable[[], object],
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
