"""Train a transformer on bytes without ever emptying the pipeline, then flushed, and compare.

``python compare.py`` starts the ranks of the plan twice, with the schedules ``pipedream`` and
``1f1b``, shows how the loss falls, and leaves what came of it in ``result.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path

import torch
from transformer import BATCH, PLAN, batches, build, held_out, loss_of

import stagelink
from stagelink.cli import main as stagelink_command

RESULT = Path(__file__).with_name("result.json")
SCHEDULES = ("pipedream", "1f1b")


def train_rank(schedule: str, steps: int, folder: Path) -> None:
    """Train on one rank; rank 0 leaves the losses in the folder."""
    plan = dataclasses.replace(stagelink.Plan.load(PLAN), schedule=schedule)
    with stagelink.connect(plan) as comm:
        first = comm.stage.name == "bottom"  # only there are the batches looked at
        module = build(comm.stage.name)
        runner = stagelink.PipelineRunner(
            comm,
            module,
            loss=loss_of,
            optimizer=optimizer_of(module, plan),
            progress=True,
        )
        before = runner.evaluate(held_out() if first else None)["loss"]
        summary = runner.train(batches(steps) if first else None)
        after = runner.evaluate(held_out() if first else None)["loss"]
        if comm.rank == 0:
            print(f"{schedule}: {summary}")
            found = {
                "loss_before": before,
                "loss": after,
                "items_per_second": summary.items / summary.seconds,
            }
            (folder / f"{schedule}.json").write_text(json.dumps(found), encoding="utf-8")


def optimizer_of(module: torch.nn.Module, plan: stagelink.Plan) -> torch.optim.Optimizer:
    """Gradient descent; a step per microbatch takes as much less as there are more of them."""
    steps_per_batch = plan.microbatches if plan.asynchronous else 1
    return torch.optim.SGD(module.parameters(), lr=0.4 / steps_per_batch, momentum=0.5)


def start(steps: int) -> None:
    """Run both schedules and compare."""
    stagelink_command(["plan", str(PLAN)], standalone_mode=False)
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            rank = [__file__, f"--steps={steps}", f"--folder={folder}", f"--schedule={schedule}"]
            stagelink_command(["run", str(PLAN), *rank], standalone_mode=False)
        result = {
            schedule: json.loads((Path(folder) / f"{schedule}.json").read_text(encoding="utf-8"))
            for schedule in SCHEDULES
        }
    text = json.dumps(result | {"steps": steps, "batch": BATCH}, indent=2)
    RESULT.write_text(f"{text}\n", encoding="utf-8")
    print(text)
    stuck = [name for name, found in result.items() if found["loss"] > 0.8 * found["loss_before"]]
    if stuck:
        raise SystemExit(f"the loss did not fall with {', '.join(stuck)}")


def main() -> None:
    """Be a rank where a launcher says so, else start them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="batches")
    parser.add_argument("--short", action="store_const", const=40, dest="steps", help="40 batches")
    parser.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0])
    parser.add_argument("--folder", type=Path, help="where rank 0 leaves what it found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        train_rank(arguments.schedule, arguments.steps, arguments.folder)
    else:
        start(arguments.steps)


if __name__ == "__main__":
    main()
