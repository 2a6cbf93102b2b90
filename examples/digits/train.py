"""Train on handwritten digits over four processes, then in one, and compare.

``python train.py`` prints the plan, starts a process for each of its ranks, then trains alone, and
leaves what it found in ``result.json``. All that a rank does for pipelines is in `train_rank`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from model import PLAN, STAGES, Batch, accuracy, batches, build, held_out, optimizer_of
from torch import nn
from torch.nn.functional import cross_entropy

import stagelink
from stagelink.cli import main as stagelink_command

RESULT = Path(__file__).with_name("result.json")
STEPS = 5
ALLOWED_DIFFERENCE = 1e-12


# -- over four processes


def train_rank(epochs: int, folder: Path) -> None:
    """Train on one rank, and leave its findings in the folder."""
    plan = stagelink.Plan.load(PLAN)
    with stagelink.connect(plan) as comm:
        first = comm.stage.name == "features"  # only there are the batches looked at
        module = build(comm.stage.name)
        runner = stagelink.PipelineRunner(
            comm,
            module,
            loss=cross_entropy,
            optimizer=optimizer_of(module),
            metrics={"accuracy": accuracy},
            progress=True,
        )
        for epoch in range(epochs):
            summary = runner.train(batches() if first else None)
            if comm.rank == 0:
                print(f"epoch {epoch + 1}: {summary}")
        results = runner.evaluate(held_out() if first else None)

        found = {
            "stage": comm.stage.name,
            "accuracy": results["accuracy"],
            "weights": few_steps(comm),
            "transports": {
                f"{link.source}→{link.target}": name for link, name in comm.transports.items()
            },
        }
    torch.save(found, folder / f"rank{comm.rank}.pt")


def few_steps(comm: stagelink.Handler) -> dict[str, torch.Tensor]:
    """This stage's weights after a few steps from the start, in double precision."""
    module = build(comm.stage.name, torch.float64)
    runner = stagelink.PipelineRunner(
        comm, module, loss=cross_entropy, optimizer=optimizer_of(module)
    )
    runner.train(batches(torch.float64)[:STEPS])
    return module.state_dict()


# -- in one process


def train_alone(batches: Iterable[Batch], dtype: torch.dtype, epochs: int) -> nn.ModuleList:
    """The same model, the same microbatches, no pipeline."""
    microbatches = stagelink.Plan.load(PLAN).microbatches
    stages = nn.ModuleList(build(name, dtype) for name in STAGES)
    optimizer = optimizer_of(stages)
    for batch in list(batches) * epochs:
        optimizer.zero_grad()
        images = batch["image"].tensor_split(microbatches)
        targets = batch["target"].tensor_split(microbatches)
        for image, target in zip(images, targets, strict=True):
            weight = len(image) / len(batch["image"])
            (cross_entropy(forward(stages, image), target) * weight).backward()
        optimizer.step()
    return stages


def forward(stages: nn.ModuleList, image: torch.Tensor) -> torch.Tensor:
    """All stages, one after another."""
    for stage in stages:
        image = stage(image)
    return image


# -- both


def start(epochs: int) -> None:
    """Print the plan, run the ranks, train alone, compare."""
    began = time.perf_counter()
    stagelink_command(["plan", str(PLAN)], standalone_mode=False)
    with tempfile.TemporaryDirectory() as folder:
        rank = [__file__, f"--epochs={epochs}", f"--folder={folder}"]
        stagelink_command(["run", str(PLAN), *rank], standalone_mode=False)
        ranks = [torch.load(file) for file in sorted(Path(folder).iterdir())]
    print("the same in one process ...")
    result = compare(ranks, epochs) | {"seconds": round(time.perf_counter() - began, 1)}
    text = json.dumps(result, indent=2, ensure_ascii=False)
    RESULT.write_text(f"{text}\n", encoding="utf-8")
    print(text)
    if result["max_difference"] > ALLOWED_DIFFERENCE:
        raise SystemExit("the weights differ from those of one process")


def compare(ranks: list[dict[str, Any]], epochs: int) -> dict[str, Any]:
    """The result: what the ranks found beside what one process finds."""
    stages = train_alone(batches(), torch.float32, epochs)
    exact = train_alone(batches(torch.float64)[:STEPS], torch.float64, 1)
    (test,) = held_out()
    with torch.no_grad():
        alone = accuracy(forward(stages, test["image"]), test["target"])
    weights = {name: stage.state_dict() for name, stage in zip(STAGES, exact, strict=True)}
    differences = [
        (value - weights[rank["stage"]][name]).abs().max().item()
        for rank in ranks
        for name, value in rank["weights"].items()
    ]
    return {
        "accuracy": ranks[0]["accuracy"],
        "single_process_accuracy": alone.item(),
        "max_difference": max(differences),
        "transports": {link: name for rank in ranks for link, name in rank["transports"].items()},
        "ranks": len(ranks),
    }


def main() -> None:
    """Be a rank where a launcher says so, else start them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--short", action="store_const", const=2, dest="epochs", help="2 epochs")
    parser.add_argument("--folder", type=Path, help="where ranks leave what they found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        train_rank(arguments.epochs, arguments.folder)
    else:
        start(arguments.epochs)


if __name__ == "__main__":
    main()
