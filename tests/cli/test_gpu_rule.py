"""A rule for machines with GPUs, on one without: what works is taken, and it is said why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from stagelink.cli import main

if TYPE_CHECKING:
    from pathlib import Path

PLAN = """
[pipeline]
name = "two"
microbatches = 4

[[stages]]
name = "first"
ranks = [0]
device = "{device}"

[[stages]]
name = "last"
ranks = [1]
device = "{device}"

[[tensors]]
name = "hidden"
from = "first"
to = ["last"]

[[links]]
transport = ["nccl", "cupy", "shm", "gloo"]
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("device", "taken", "passed_over"),
    [("cpu", "shm", ["nccl", "cupy"]), ("cuda", "gloo", ["nccl", "cupy", "shm"])],
)
def test_what_works_is_taken(
    device: str, taken: str, passed_over: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "pipeline.toml"
    config.write_text(PLAN.format(device=device))
    result = CliRunner().invoke(main, ["plan", "--json", str(config)])
    assert result.exit_code == 0, result.output
    (link,) = json.loads(result.stdout)["links"]
    assert link["transport"] == taken
    reasons = " ".join(link["reasons"])
    assert all(f"not {name!r}: " in reasons for name in passed_over)
    assert "no NCCL" in reasons
    assert "no CUDA driver" in reasons or "CuPy is not installed" in reasons


def test_doctor_says_why() -> None:
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)["transports"]
    reasons = {one["name"]: one["reason"] for one in found}
    assert {"nccl", "cupy"} <= reasons.keys()
    if not torch.cuda.is_available():
        assert "NCCL" in reasons["nccl"]
        assert "CUDA" in reasons["cupy"] or "CuPy" in reasons["cupy"]
