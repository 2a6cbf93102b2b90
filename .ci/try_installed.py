"""Try the installed packages: commands, one tensor there and back, a transport of others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import stagelink
from stagelink.testing import run_threads

if TYPE_CHECKING:
    from torch.distributed import Store

PLAN = """
[pipeline]
name = "two"
schedule = "1f1b"
microbatches = 2

[[stages]]
name = "first"
ranks = [0]

[[stages]]
name = "last"
ranks = [1]

[[tensors]]
name = "hidden"
from = "first"
to = ["last"]
"""


EXAMPLE = "socketpair"
"""The transport of examples/third_party_transport, found by its entry point."""

SHORT = "declares or probe or nothing_is_lost or breaks_off or close_leaves"
"""The conformance tests that are run against it: pytest, too, finds them by an entry point."""


def train(rank: int, world_size: int, store: Store, plan: stagelink.Plan) -> float:
    """Send ones forward and what came back doubled; the sum of the gradients on rank 0."""
    total = 0.0
    with (
        stagelink.connect(plan, rank=rank, world_size=world_size, store=store) as comm,
        comm.train(microbatches=2) as session,
    ):
        for microbatch in session.mine:
            if rank == 0:
                session.send("hidden", torch.ones(3, requires_grad=True), microbatch)
                gradient = session.recv_grad("hidden", microbatch)
                total += 0.0 if gradient is None else float(gradient.sum())
            else:
                hidden = session.recv("hidden", microbatch)
                doubled = None if hidden is None else 2 * hidden.detach()
                session.send_grad("hidden", doubled, microbatch)
    return total


def main() -> None:
    """Run all; an exception or an exit code other than 0 says that something is wrong."""
    command = Path(sys.executable).with_name("stagelink")
    for argument in ("--version", "doctor"):
        subprocess.run([command, argument], check=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pipeline.toml")
        file.write_text(PLAN)
        subprocess.run([command, "plan", file], check=True)
        totals = run_threads(train, 2, stagelink.Plan.load(file))
        kit = ["pytest", "--pyargs", "stagelink.testing", "-q", "-p", "no:cacheprovider"]
        # Not this repository's settings, which lie above where the wheels are installed.
        kit += ["-c", os.devnull, "--rootdir", folder]
        chosen = ["--stagelink-transport", EXAMPLE, "-k", SHORT]
        subprocess.run([sys.executable, "-I", "-m", *kit, *chosen], cwd=folder, check=True)
    if totals != [12.0, 0.0]:
        sys.exit(f"wrong gradients: {totals}")


if __name__ == "__main__":
    main()
