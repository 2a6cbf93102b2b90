"""The same training without the runner: the handler, driven by hand.

``python by_hand.py`` starts a process for each rank of the plan. Every rank has the batches here;
what each stage takes and gives is in `TAKES_AND_GIVES`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from model import PLAN, Batch, batches, build, optimizer_of
from torch.nn.functional import cross_entropy

import stagelink
from stagelink.cli import main as stagelink_command
from stagelink.schedule import Kind

MICROBATCHES = 8
TAKES_AND_GIVES = {
    "features": (None, "maps"),
    "patterns": ("maps", "code"),
    "classifier": ("code", None),
}


def train_batch(comm: stagelink.Handler, module: torch.nn.Module, batch: Batch) -> float:
    """Add one batch's gradients to ``grad``; returns this rank's share of the loss."""
    takes, gives = TAKES_AND_GIVES[comm.stage.name]
    parts = {name: tensor.tensor_split(MICROBATCHES) for name, tensor in batch.items()}
    kept: dict[int, tuple[Any, Any]] = {}
    total = 0.0
    with comm.train(MICROBATCHES) as session:
        for action in session.actions:  # in the order that the plan's schedule has proved to run
            m = action.microbatch
            if action.kind is Kind.FORWARD:
                x: Any = session.recv(takes, m) if takes else parts["image"][m]
                y = module(x)
                if gives:
                    session.send(gives, y, m)
                else:  # the last stage: a microbatch weighs its items over the batch's
                    target: Any = session.recv("target", m)
                    y = cross_entropy(y, target) * (len(target) / len(batch["target"]))
                    total += y.item()
                if not takes:  # the first stage also sends what only the last one needs
                    session.send("target", parts["target"][m], m)
                kept[m] = x, y
            else:
                x, y = kept.pop(m)
                y.backward(session.recv_grad(gives, m) if gives else None)
                if takes:
                    session.send_grad(takes, x.grad, m)
    return total


def train_rank(epochs: int = 3) -> None:
    """Train on one rank; the gradients of replicas are added by a group of torch's own."""
    dist.init_process_group("gloo")
    plan = stagelink.Plan.load(PLAN)
    groups = {stage.name: dist.new_group(list(stage.ranks)) for stage in plan.stages}
    with stagelink.connect(plan) as comm:
        module = build(comm.stage.name)
        optimizer = optimizer_of(module)
        for epoch in range(epochs):
            loss = 0.0
            for batch in batches():
                optimizer.zero_grad()
                loss += train_batch(comm, module, batch)
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad, group=groups[comm.stage.name])
                optimizer.step()
            (sum_of_losses,) = comm.reduce([loss])
            if comm.rank == 0:
                print(f"epoch {epoch + 1}: loss {sum_of_losses / len(batches()):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_rank()
    else:
        stagelink_command(["run", str(PLAN), __file__])
