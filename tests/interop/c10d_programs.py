"""What ranks run in the tests of the c10d backend: programs that know only torch.distributed."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import stagelink.interop.c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store

STAGELINK = "cpu:stagelink"
PATIENCE = timedelta(seconds=20)
WIDTH, BATCH, MICROBATCHES, STEPS = 16, 24, 8, 3

del stagelink


@contextmanager
def world(
    rank: int, size: int, store: Store, backend: str = STAGELINK, options: Any = None
) -> Iterator[None]:
    """The default group of a program."""
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, pg_options=options
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_world(
    rank: int, size: int, store: Store, program: Callable[..., Any], backend: str, *args: Any
) -> Any:
    """Run a program in its default group."""
    with world(rank, size, store, backend):
        return program(rank, size, *args)


# -- torch's own pipelining


class Block(torch.nn.Module):
    """One stage."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.second = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.second(torch.relu(self.first(x))))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, DTensor):
        output = output.to_local()
    return ((output - target) ** 2).mean()


def pipelining(rank: int, size: int, schedule: str, stages_each: int) -> list[torch.Tensor]:
    """Train by one of torch's schedules; the weights of this rank's stages."""
    count = size * stages_each
    numbers = _numbers(schedule, rank, size, stages_each)
    modules = [Block(number) for number in numbers]
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    made = get_schedule_class(schedule)
    several = stages_each > 1
    runner: Any = made(stages if several else stages[0], MICROBATCHES, loss_fn=loss_of)
    _steps(runner, modules, first=0 in numbers, last=count - 1 in numbers)
    return [parameter.detach() for module in modules for parameter in module.parameters()]


def _steps(runner: Any, modules: Sequence[torch.nn.Module], *, first: bool, last: bool) -> None:
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
        target = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
        given = (x,) if first else ()
        if last:
            runner.step(*given, target=target, losses=[])
        else:
            runner.step(*given)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _numbers(schedule: str, rank: int, size: int, stages_each: int) -> list[int]:
    if schedule == "ZBVZeroBubble":  # there and back
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(stages_each)]


# -- torch's own pipelining, of stages that are tensor-parallel


class Split(torch.nn.Module):
    """A stage whose layers are spread over ranks; its end is a collective's result."""

    def __init__(self, number: int, mesh: Any, *, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        down = RowwiseParallel(use_local_output=not whole)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": down})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def tensor_parallel(
    rank: int, size: int, schedule: str, stages_each: int, whole: bool
) -> tuple[list[torch.Tensor], set[str]]:
    """Train stages of two ranks each; local weights, and the types of what the stages sent.

    Args:
        schedule: torch's name of it.
        stages_each: stages of each rank.
        whole: whether stages hand on DTensors, and not the local parts of them.
    """
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pp", "tp"))
    place, count = mesh["pp"].get_local_rank(), size // 2 * stages_each
    numbers = _numbers(schedule, place, size // 2, stages_each)
    modules: list[torch.nn.Module] = [Split(number, mesh["tp"], whole=whole) for number in numbers]
    sent: set[str] = set()
    for module in modules:
        module.register_forward_hook(lambda _m, _g, out: sent.add(type(out).__name__))
    stages = [
        PipelineStage(
            module,
            number,
            count,
            torch.device("cpu"),
            group=mesh["pp"].get_group(),
            get_mesh=lambda _names, _layout: mesh["tp"],
        )
        for number, module in zip(numbers, modules, strict=True)
    ]
    made = get_schedule_class(schedule)
    runner: Any = made(stages if stages_each > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    _steps(runner, modules, first=0 in numbers, last=count - 1 in numbers)
    weights: list[Any] = [weight for module in modules for weight in module.parameters()]
    return [weight.to_local().detach() for weight in weights], sent
