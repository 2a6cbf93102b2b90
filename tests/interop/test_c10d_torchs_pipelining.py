"""What runs torch's own tests of pipelining says what became of each, over either backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.interop import c10d_torchs_pipelining as torchs_own

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TESTS = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_cuda import TEST_MULTIGPU
from torch.testing._internal.common_distributed import MultiProcContinuousTest, requires_nccl
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests, parametrize, skip_but_pass_in_sandcastle_if,
)


class StageTest(MultiProcContinuousTest):
    @classmethod
    def backend_str(cls):
        return "nccl"

    @classmethod
    def setUpClass(cls):
        cls.device = torch.device(f"cuda:{cls.rank % torch.cuda.device_count()}")

    @requires_nccl()
    @skip_but_pass_in_sandcastle_if(not TEST_MULTIGPU, "NCCL test requires 2+ GPUs")
    @parametrize("sender", [1])
    def test_sends(self, sender):
        x = torch.full((3,), 7.0, device=self.device)
        if self.rank == sender:
            dist.send(x, 1 - self.rank)
        else:
            y = torch.zeros_like(x)
            dist.recv(y, sender)
            self.assertEqual(x, y)

    @requires_nccl()
    @skip_but_pass_in_sandcastle_if(not TEST_MULTIGPU, "NCCL test requires 2+ GPUs")
    def test_is_gloo(self):
        self.assertEqual(dist.get_backend(), "cpu:gloo")


instantiate_parametrized_tests(StageTest)
"""


def test_each_test_and_each_file_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test/distributed/pipelining/test_stage.py"
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    assert torchs_own.main(str(tmp_path)) == 1
    wrong, right, whole = capsys.readouterr().out.splitlines()
    assert wrong.startswith("test_is_gloo: cpu:gloo passed | cpu:stagelink AssertionError: ")
    assert right == "test_sends_sender_1: cpu:gloo passed | cpu:stagelink passed"
    assert whole == "test_stage.py: tests 2 | cpu:gloo 2 | cpu:stagelink 1"
