"""A step of two replicas of a stage of 100 MB beside the same step by torch's DDP.

The stage is the whole model, so what is compared is what the replicas do with their gradients: all
microbatches but the last are accumulated, under DDP with ``no_sync``. Steps of both are taken in
turn, in the same two processes, each on a core of its own; the weights must come out alike.
``--against CHECKOUT`` measures another checkout in turn, in processes of its own, so that both
stand in one table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measuring import median, record, timed
from torch.nn.parallel import DistributedDataParallel

import stagelink
from stagelink.bench.rounds import pin
from stagelink.testing import RankPool

if TYPE_CHECKING:
    from torch.distributed import Store

HERE = Path(__file__).resolve().parent
REPLICAS = 2
ITEMS = 16
"""Samples of a microbatch."""

STEPS = 3
TURNS = 3
ROUNDS = 4
PATIENCE = timedelta(seconds=120)
KINDS = {
    "25 layers, 1 microbatch": (1024, 25, 1),
    "4 layers, 2 microbatches": (2560, 4, 2),
}
"""Width, depth, and microbatches of a replica; about 100 MB of weights each."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plan(microbatches: int) -> stagelink.Plan:
    """One stage of two replicas."""
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "replicas", "microbatches": REPLICAS * microbatches},
            "stages": [{"name": "all", "ranks": [*range(REPLICAS)]}],
        }
    )


def model(width: int, depth: int) -> torch.nn.Module:
    """Linear layers, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over items, which nobody has to ask other ranks about."""
    return (output - target).square().mean()


def by_ddp(
    module: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    microbatches: int,
) -> None:
    """Carry out some steps, each of this rank's microbatches of the batch."""
    parts = [batch[name].tensor_split(REPLICAS * microbatches) for name in ("x", "target")]
    mine = [*zip(*parts, strict=True)][dist.get_rank() :: REPLICAS]
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for number, (x, target) in enumerate(mine, 1):
            with nullcontext() if number == microbatches else module.no_sync():
                (loss_of(module(x), target) / microbatches).backward()
        optimizer.step()


def measure(rank: int, world_size: int, store: Store) -> dict[str, list[list[float]]]:
    """Measure one round on one rank, by kind; see `one_kind`."""
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("ddp", store),
        rank=rank,
        world_size=world_size,
        timeout=PATIENCE,
    )
    try:
        return {
            kind: one_kind(rank, dist.PrefixStore(kind, store), *sizes)
            for kind, sizes in KINDS.items()
        }
    finally:
        dist.destroy_process_group()


def one_kind(
    rank: int, store: Store, width: int, depth: int, microbatches: int
) -> list[list[float]]:
    """Seconds and CPU seconds of a step, ours and then DDP's, for each turn."""
    items = REPLICAS * microbatches * ITEMS
    batch = {"x": torch.rand(items, width), "target": torch.rand(items, width)}
    ours, theirs = model(width, depth), model(width, depth)
    ddp = DistributedDataParallel(theirs)
    with stagelink.connect(
        plan(microbatches), rank=rank, world_size=REPLICAS, store=store, run_id="replicas"
    ) as comm:
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
        runner = stagelink.PipelineRunner(comm, ours, loss=loss_of, optimizer=optimizer)
        steps: tuple[Callable[[], Any], ...] = (
            partial(runner.train, [batch] * STEPS),
            partial(by_ddp, ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), batch, microbatches),
        )
        times = [[one for step in steps for one in _taken(step)] for _ in range(1 + TURNS)]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    return times[1:]


def _taken(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one of the steps, and CPU seconds of both ranks."""
    began = time.process_time()
    seconds = timed(step)
    used = torch.tensor(time.process_time() - began)
    dist.all_reduce(used)
    return seconds / STEPS, float(used) / STEPS


def child() -> None:
    """Answer each line of the standard input with one round's figures."""
    with RankPool() as pool:
        for _ in sys.stdin:
            print(json.dumps(pool.run(measure, REPLICAS, timeout_s=600.0)[0]), flush=True)


class Child:
    """A process that measures one checkout's code, a round whenever it is asked for one."""

    def __init__(self, checkout: Path) -> None:
        paths = [str(path) for path in sorted(checkout.glob("packages/*/src"))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        self._lines = iter(self._process.stdout or ())

    def round(self) -> dict[str, list[list[float]]]:
        """Seconds of one round, by kind; see `one_kind`."""
        print(file=self._process.stdin, flush=True)
        answer: dict[str, list[list[float]]] = json.loads(next(self._lines))
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def rows(checkouts: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Medians over all turns, a row for each kind and checkout."""
    children = {name: Child(path) for name, path in checkouts.items()}
    found = [{name: one.round() for name, one in children.items()} for _ in range(rounds)]
    for one in children.values():
        one.close()
    return [
        _row(kind, name, [one for turn in found for one in turn[name][kind]])
        for kind in KINDS
        for name in children
    ]


def _row(kind: str, name: str, turns: Sequence[Sequence[float]]) -> dict[str, Any]:
    ours, our_cpu, theirs, their_cpu = zip(*turns, strict=True)
    return {
        "stage": kind,
        "code": name,
        "stagelink_ms": 1e3 * median(ours),
        "ddp_ms": 1e3 * median(theirs),
        "stagelink_to_ddp": median([a / b for a, b in zip(ours, theirs, strict=True)]),
        "cpu_to_ddp": median([a / b for a, b in zip(our_cpu, their_cpu, strict=True)]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this checkout, and those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child()
        return
    checkouts = {path.resolve().name: path for path in given.against} | {"here": HERE.parent}
    record("replicas", rows(checkouts, given.rounds))


if __name__ == "__main__":
    main()
