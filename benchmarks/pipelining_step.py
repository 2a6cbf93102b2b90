"""A step of torch.distributed.pipelining's Schedule1F1B over ``cpu:stagelink`` and over gloo.

The program is the same but for its process group. Stages are elementwise, so that a step is bound
by communication, or multiply matrices, so that it is bound by compute; ``alone`` is what the same
stage takes for its share of a step without a message. Steps of all are taken in turn, in one run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measuring import median, record, timed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import stagelink.interop.c10d
from stagelink.bench.rounds import pin
from stagelink.testing import RankPool

if TYPE_CHECKING:
    from torch.distributed import Store

RANKS = 2
MICROBATCHES = 8
ROUNDS = 15
KIB = 1 << 10
SMALL_ELEMENTS = 256 * KIB
STEPS_OF_SMALL = 4
"""How many steps are timed at once, of activations of up to 1 MiB: a step takes 2 ms then."""

PATIENCE = timedelta(seconds=120)

del stagelink


class Elementwise(torch.nn.Module):
    """One multiplication for each element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a result as large as the input."""
        return x * self.weight


class Compute(torch.nn.Module):
    """Multiplications of matrices, of the width of the activation."""

    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(depth))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a result as large as the input."""
        found: torch.Tensor = self.layers(x)
        return found


CASES: list[tuple[str, Callable[[int], torch.nn.Module], tuple[int, int]]] = [
    *(("elementwise", Elementwise, (1, KIB * size)) for size in (4, 16, 256, 1024, 4096)),
    ("compute", Compute, (1024, 256)),
    ("compute", Compute, (4096, 256)),
]
"""What a stage is, and the shape of a microbatch: 16 and 64 KiB, 1, 4, 16, 1 and 4 MiB."""


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that reads every element."""
    del target
    return output.mean()


def run_step(
    schedule: Schedule1F1B, rank: int, module: torch.nn.Module, batch: torch.Tensor
) -> None:
    """One batch."""
    module.zero_grad()
    if rank == 0:
        schedule.step(batch, return_outputs=False)
    else:
        schedule.step(target=torch.zeros(len(batch)), losses=[], return_outputs=False)


def run_alone(rank: int, module: torch.nn.Module, batch: torch.Tensor) -> None:
    """Run one stage on a batch, without messages."""
    module.zero_grad()
    for x in batch.chunk(MICROBATCHES):
        if rank == 0:
            output = module(x)
            output.backward(x)
        else:
            loss_of(module(x.detach().requires_grad_()), x).backward()


def again(step: Callable[[], None], repeats: int) -> None:
    """Several steps, one after the other."""
    for _ in range(repeats):
        step()


def measure(rank: int, world_size: int, store: Store) -> list[dict[str, Any]]:
    """All rows, on one rank."""
    torch.set_num_threads(1)
    pin(rank)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE
    )
    groups = {name: dist.new_group(backend=name) for name in ("stagelink", "gloo")}
    try:
        return [row(rank, groups, *case) for case in CASES]
    finally:
        dist.destroy_process_group()


def row(
    rank: int,
    groups: dict[str, dist.ProcessGroup],
    kind: str,
    make: Callable[[int], torch.nn.Module],
    shape: tuple[int, int],
) -> dict[str, Any]:
    """One kind of stage and one size."""
    batch = torch.rand(MICROBATCHES * shape[0], shape[1])
    steps: dict[str, Callable[[], None]] = {}
    modules = {}
    for name, group in groups.items():
        torch.manual_seed(rank)
        module = modules[name] = make(shape[1])
        stage = PipelineStage(module, rank, RANKS, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        steps[name] = partial(run_step, schedule, rank, module, batch)
    steps["alone"] = partial(run_alone, rank, make(shape[1]), batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    repeats = STEPS_OF_SMALL if prod(shape) <= SMALL_ELEMENTS else 1
    for number in range(-2, ROUNDS):
        for name, step in steps.items():
            seconds = timed(partial(again, step, repeats))
            if number >= 0:
                times[name].append(seconds / repeats)
    _compare(*modules.values())
    found = {name: 1e3 * median(seconds) for name, seconds in times.items()}
    ratios = [
        ours / theirs for ours, theirs in zip(times["stagelink"], times["gloo"], strict=True)
    ]
    return {
        "stage": kind,
        "activation_bytes": 4 * shape[0] * shape[1],
        **{f"{name}_ms": value for name, value in found.items()},
        "stagelink_to_gloo": median(ratios),
        "alone_to_gloo": found["alone"] / found["gloo"],
    }


def _compare(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """The same gradients came out of both."""
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if mine.grad is None or other.grad is None or not torch.equal(mine.grad, other.grad):
            raise AssertionError("a step over stagelink is not the step over gloo")


def main() -> None:
    """Measure on two fresh processes."""
    with RankPool() as pool:
        record("pipelining_step", pool.run(measure, RANKS, timeout_s=900.0)[0])


if __name__ == "__main__":
    main()
