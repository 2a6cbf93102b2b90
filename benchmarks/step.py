"""A 1F1B step of two stages beside torch.distributed.pipelining and beside no communication.

Both stages pass their input on and are busy for as long as they are told, half of it in the
forward and half in the backward. What is compared is the time of a step of eight microbatches with
what it would take if messages took none: the walk's count of rounds, times what an action takes a
stage that neither sends nor receives. Rounds of all are taken in turn, in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measuring import median, record, timed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import stagelink
from stagelink.bench.pipes import IN_FLIGHT
from stagelink.bench.raw import copy_once
from stagelink.bench.rounds import pin
from stagelink.testing import RankPool

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler

TRANSPORTS = ("shm", "tcp", "gloo")
MICROBATCHES = 8
ROUNDS = 7
ACTIVATION_BYTES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
COMPUTE_MS = (1, 2, 5, 20, 50)
SMALL = torch.rand(96, 96)


def busy(seconds: float) -> None:
    """Keep a core busy as an operator does, not holding the interpreter."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(SMALL, SMALL)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        """The input itself, later."""
        del weight  # what makes a graph where the input needs no gradient
        ctx.seconds = seconds
        busy(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient itself, later; as a view, which torch takes over without a copy."""
        busy(ctx.seconds)
        return gradients[0].view_as(gradients[0]), None, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """A loss that costs nothing: the first element."""
        ctx.ones = _ones(x.shape)
        return x.view(-1)[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """A gradient that costs nothing."""
        ones: torch.Tensor = ctx.ones
        return ones


ONES: dict[torch.Size, torch.Tensor] = {}


def _ones(shape: torch.Size) -> torch.Tensor:
    if shape not in ONES:
        ONES[shape] = torch.ones(shape)
    return ONES[shape]


def loss_of(output: torch.Tensor, target: object = None) -> torch.Tensor:
    """The first element."""
    found: torch.Tensor = _First.apply(output)  # type: ignore[no-untyped-call]
    return found


class Stage(torch.nn.Module):
    """Busy for half the compute, forward and backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, later."""
        found: torch.Tensor = _Pass.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return found


def plan(transport: str) -> stagelink.Plan:
    """Two stages, one activation."""
    return stagelink.Plan.from_dict(
        {
            "pipeline": {"name": "step", "schedule": "1f1b", "microbatches": MICROBATCHES},
            "stages": [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}],
            "tensors": [{"name": "h", "from": "a", "to": ["b"]}],
            "links": [{"transport": transport}],
        }
    )


def our_step(comm: Handler, module: Stage, inputs: list[torch.Tensor]) -> None:
    """One batch by a session's actions."""
    kept: dict[int, Any] = {}
    with comm.train(MICROBATCHES) as session:
        for action in session.actions:
            m = action.microbatch
            if comm.rank == 0:
                if action.kind is stagelink.Kind.FORWARD:
                    kept[m] = module(inputs[m])
                    session.send("h", kept[m], m)
                else:
                    kept.pop(m).backward(session.recv_grad("h", m))
            elif action.kind is stagelink.Kind.FORWARD:
                x = session.recv("h", m)
                kept[m] = x, loss_of(module(x))
            else:
                x, loss = kept.pop(m)
                loss.backward()
                session.send_grad("h", x.grad, m)


def lonely_step(rank: int, module: Stage, inputs: list[torch.Tensor]) -> None:
    """The same actions on one stage, without messages."""
    gradient = _ones(inputs[0].shape)
    for x in inputs:
        if rank == 0:
            module(x).backward(gradient)
        else:
            loss_of(module(x.detach().requires_grad_())).backward()


def torch_step(schedule: Schedule1F1B, rank: int, batch: torch.Tensor) -> None:
    """One batch by torch's schedule."""
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=torch.zeros(MICROBATCHES), losses=[])


def measure(rank: int, world_size: int, store: Store) -> list[dict[str, Any]]:
    """All rows, on one rank."""
    torch.set_num_threads(1)
    pin(rank)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("raw", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    join = partial(stagelink.connect, rank=rank, world_size=world_size, store=store)
    try:
        with ExitStack() as stack:
            comms = {
                name: stack.enter_context(join(plan(name), run_id=name)) for name in TRANSPORTS
            }
            return [
                row(rank, comms, size, compute_ms)
                for size in ACTIVATION_BYTES
                for compute_ms in COMPUTE_MS
            ]
    finally:
        dist.destroy_process_group()


def row(rank: int, comms: dict[str, Handler], size: int, compute_ms: float) -> dict[str, Any]:
    """One activation size and one amount of compute."""
    module = Stage(compute_ms / 2e3)
    batch = torch.ones(MICROBATCHES, size // 4)
    inputs = [torch.ones(1, size // 4) for _ in range(MICROBATCHES)]
    stage = PipelineStage(
        module, rank, 2, torch.device("cpu"), torch.ones(1, size // 4, requires_grad=rank == 1)
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    steps: dict[str, Callable[[], None]] = {
        f"stagelink_{name}": partial(our_step, comm, module, inputs)
        for name, comm in comms.items()
    }
    steps["torch_gloo"] = partial(torch_step, schedule, rank, batch)
    steps["alone"] = partial(lonely_step, rank, module, inputs)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-1, ROUNDS):
        for name, step in steps.items():
            seconds = timed(step)
            if number >= 0:
                times[name].append(seconds)
    # A stage alone carries out two actions for each microbatch.
    action = median(times.pop("alone")) / (2 * MICROBATCHES)
    ideal = stagelink.verify(plan("shm")).rounds * action
    found = {name: ideal / median(seconds) for name, seconds in times.items()}
    # Each rank copies as many messages in a step as there are microbatches.
    copies = MICROBATCHES * median([copy_once(size, IN_FLIGHT, 8) for _ in range(ROUNDS)])
    return {
        "activation_bytes": size,
        "compute_ms": compute_ms,
        "ideal_ms": ideal * 1e3,
        **found,
        "ideal_with_copies": ideal / (ideal + copies),
    }


def main() -> None:
    """Measure on two fresh processes; figures are shares of the ideal speed."""
    with RankPool() as pool:
        record("step", pool.run(measure, 2, timeout_s=900.0)[0])


if __name__ == "__main__":
    main()
