"""A training whose ranks die, as a script for torchrun, and which goes on from its states.

``torchrun --nproc-per-node 2 --max-restarts 2 restarting.py FOLDER 0:1 1:1``: both ranks die once
in epoch 1, which others spend in a computation until the launcher ends them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import stagelink

if TYPE_CHECKING:
    from collections.abc import Collection

EPOCHS = 3
PLAN: dict[str, Any] = {
    "pipeline": {"name": "restarted", "microbatches": 2},
    "stages": [{"name": "first", "ranks": [0]}, {"name": "last", "ranks": [1]}],
    "tensors": [
        {"name": "h", "from": "first", "to": ["last"]},
        {"name": "target", "from": "first", "to": ["last"], "grad": False},
    ],
    "limits": {"connect_deadline_s": 60.0},
}
_LONG_S = 60.0
"""A computation that the launcher is to break off."""


def stages() -> list[torch.nn.Module]:
    """The model's two stages, alike in every process."""
    torch.manual_seed(5)
    return [torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)]


def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """With a state of its own, and without the seconds of imports that torch's optimizers cost."""
    return cast("torch.optim.Optimizer", _Momentum(module))


class _Momentum:
    def __init__(self, module: torch.nn.Module) -> None:
        self.param_groups = [{"params": list(module.parameters())}]
        self._speeds = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None if set_to_none else torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, speed in zip(self.param_groups[0]["params"], self._speeds, strict=True):
            assert parameter.grad is not None
            speed.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.1 * speed)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"speeds": [speed.clone() for speed in self._speeds]}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        self._speeds = [speed.clone() for speed in state["speeds"]]


def batches(epoch: int) -> list[dict[str, torch.Tensor]]:
    """An epoch's batches."""
    generator = torch.Generator().manual_seed(epoch)
    return [
        {
            "input": torch.randn(4, 4, generator=generator),
            "target": torch.randint(0, 3, (4,), generator=generator),
        }
        for _ in range(2)
    ]


def undisturbed() -> list[dict[str, torch.Tensor]]:
    """The weights of both stages after a training in this process."""
    model = torch.nn.Sequential(*stages())
    opt = optimizer(model)
    for epoch in range(EPOCHS):
        for batch in batches(epoch):
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["input"]), batch["target"])
            loss.backward()
            opt.step()
    return [dict(stage.state_dict()) for stage in model]


def work(folder: str, deaths: Collection[tuple[int, int]], store: str | None = None) -> None:
    """One rank's training.

    Args:
        folder: of all ranks, for states, and for what is to be done once.
        deaths: rank and epoch of each.
        store: where ranks meet; None: as the environment says.
    """
    torch.set_num_threads(1)
    place = Path(folder)
    rank = int(os.environ["RANK"])
    module = stages()[rank]
    with stagelink.connect(stagelink.Plan.from_dict(PLAN), store=store) as comm:
        runner = stagelink.PipelineRunner(
            comm, module, loss=torch.nn.functional.cross_entropy, optimizer=optimizer(module)
        )
        done = len(list(place.glob(f"state-{rank}-*.pt")))
        begun = int(comm.reduce([float(done)], "min")[0])  # the last epoch that all have saved
        with (place / f"incarnations-{rank}").open("a") as file:
            file.write(f"{begun} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
        if begun:
            runner.load_state_dict(torch.load(place / f"state-{rank}-{begun - 1}.pt"))
        for epoch in range(begun, EPOCHS):
            if any(epoch == when for _, when in deaths):
                _disturb(
                    module, place / f"disturbed-{rank}-{epoch}", rank, (rank, epoch) in deaths
                )
            runner.train(batches(epoch))
            torch.save(runner.state_dict(), place / f"state-{rank}.new")
            (place / f"state-{rank}.new").rename(place / f"state-{rank}-{epoch}.pt")


def _disturb(module: torch.nn.Module, began: Path, rank: int, dies: bool) -> None:
    """Once, when the last stage begins, and on the first when it has sent what that needs."""
    if began.exists():
        return
    calls = iter(range(3))

    def disturb(*_: object) -> None:
        if next(calls) != 1 - rank:
            return
        began.touch()
        if dies:
            os._exit(13)
        time.sleep(_LONG_S)  # as a computation that looks at no connection

    module.register_forward_pre_hook(disturb)


if __name__ == "__main__":
    given = (death.split(":") for death in sys.argv[2:])
    work(sys.argv[1], [(int(rank), int(epoch)) for rank, epoch in given])
