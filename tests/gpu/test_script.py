"""The script without a GPU, and what it says of points that go wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink.testing import Outcome, RankFailedError
from stagelink.transport.contract import Verdict
from stagelink_cupy import Cupy
from tests.gpu import fakes
from tests.gpu import main as script
from tests.gpu.about import about
from tests.gpu.doubled import DoubleMachine
from tests.gpu.machines import GpuMachine
from tests.gpu.one import answer_of
from tests.gpu.points import POINTS, Point
from tests.gpu.running import Result, run

if TYPE_CHECKING:
    from tests.gpu.answers import Answer, Row

CHECK = Path(__file__).with_name("check")
LONG_S = 50.0


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(CHECK), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=environment or None,
        cwd="/",
    )


def test_it_lists_its_points() -> None:
    done = check("--list")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[1:] if line] == list(POINTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_why() -> None:
    done = check("--only", "memory")
    assert (done.returncode, done.stderr) == (2, "")
    assert f"torch: {torch.__version__}" in done.stdout
    assert "Nothing can be tried here: " in done.stdout
    assert any(text in done.stdout for text in ("CUDA driver", "CuPy is not", "no CUDA"))


def test_a_point_that_does_not_exist() -> None:
    done = check("--only", "momory")
    assert done.returncode == 2
    assert "'momory'" in done.stderr


# -- points that go wrong ------------------------------------------------------------------------


def tried(name: str, limit_s: float = LONG_S) -> Result:
    point = Point(f"tests.gpu.fakes:{name}", limit_s, name, {"FAKE": "figure"}, ranks=False)
    return run(name, point, machine="tests.gpu.fakes:Nothing")


def test_one_that_works() -> None:
    result = tried("works")
    assert (result.name, result.verdict, result.text) == ("works", "ok", "Nothing")
    row = {"name": "figure", "payload_bytes": 1, "median_us": 2.0, "gib_per_s": 3.0}
    assert list(result.rows) == [row]
    assert result.seconds > 0


def test_one_that_differs() -> None:
    result = tried("differs")
    assert (result.verdict, result.text) == ("differs", "the moon: cheese; on the double stone")


def test_one_that_fails() -> None:
    result = tried("fails")
    assert result.verdict == "failed"
    assert result.text.endswith("AssertionError: Nothing is no GPU\n")


def test_one_that_crashes() -> None:
    result = tried("crashes")
    assert result.verdict == "crashed"
    assert result.text.startswith("was ended by SIGSEGV\n")
    assert "in crashes" in result.text


def test_one_that_leaves() -> None:
    result = tried("leaves")
    assert (result.verdict, result.text) == (
        "crashed",
        "ended with exit code 3 and without an answer\n",
    )


def test_one_that_hangs() -> None:
    result = tried("hangs", 6.0)
    assert result.verdict == "hung"
    head, _, stacks = result.text.partition("\n")
    assert head == "still ran after 6 s"
    assert "in hangs" in stacks
    assert '"<string>"' in stacks  # where the process was that it had started
    pid = re.search(r"^\d+$", stacks, re.MULTILINE)
    assert pid is not None
    assert _has_ended(int(pid[0]))


def _has_ended(pid: int) -> bool:
    file = Path(f"/proc/{pid}/stat")
    return not file.exists() or file.read_text().rpartition(")")[2].split()[0] == "Z"


RANK_ENDS = {"hung": {"hung_s": 2.0}, "crashed": {"exit_code": -11}, "failed": {"error": "why"}}


@pytest.mark.parametrize(("verdict", "how"), RANK_ENDS.items())
def test_a_rank_that_goes_wrong(
    verdict: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(machine: fakes.Nothing) -> Answer:
        raise RankFailedError("program", [Outcome(0, **how)])

    monkeypatch.setattr(fakes, "works", raises)
    answer = answer_of("tests.gpu.fakes:works", "tests.gpu.fakes:Nothing")
    assert answer.verdict == verdict
    assert "1 of 1 ranks of 'program' failed" in answer.text


# -- the table -----------------------------------------------------------------------------------

FIGURE: Row = {"name": "a figure", "payload_bytes": 65536, "median_us": 12.34, "gib_per_s": 5.678}


def said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    results: dict[str, Result],
    *arguments: str,
) -> tuple[int, str]:
    asked: list[str] = []

    def fake(name: str, point: Point, limit_s: float | None = None) -> Result:
        del point
        assert limit_s is None or limit_s > 0
        asked.append(name)
        return results.get(name, Result(name, "ok", "", 1.0))

    monkeypatch.setattr(script, "run", fake)
    code = script.main(arguments)
    assert asked[0] == "machine"
    return code, capsys.readouterr().out


def test_a_table_and_a_verdict_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = {
        "machine": Result("machine", "ok", "", 1.0, [{"what": "GPU", "is": "Double"}]),
        "speed": Result("speed", "ok", "fast", 2.0, [FIGURE]),
        "events": Result("events", "differs", "[not] as expected", 3.0),
    }
    file = tmp_path / "results.json"
    code, output = said(monkeypatch, capsys, results, "--json", str(file))
    assert code == 1
    assert output.startswith("GPU: Double\n")
    assert "    [not] as expected\n" in output
    assert all(f"│ {name} " in output for name in POINTS)
    assert "│ a figure │ 65536 │      12.3 │  5.68 │" in output
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["machine"] == {"GPU": "Double"}
    assert [point["name"] for point in document["points"]] == list(POINTS)
    (speed,) = (point for point in document["points"] if point["name"] == "speed")
    assert speed["rows"] == [FIGURE]


def test_only_some(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = said(monkeypatch, capsys, {}, "--only", "gloo", "memory", "--only", "mixed")
    assert code == 0
    assert [name for name in POINTS if f"│ {name} " in output] == ["memory", "gloo", "mixed"]


def test_no_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "TIME_S", 1.0)
    code, output = said(monkeypatch, capsys, {}, "--only", "memory")
    assert (code, "there was no time left" in output) == (0, True)


@pytest.mark.parametrize(
    ("left_s", "limit_s"), [(5.0, 5.0), (20.0, 10.0), (31.0, 11.0), (100.0, 20.0)]
)
def test_a_point_has_what_others_have_not_used(left_s: float, limit_s: float) -> None:
    points = [Point("", seconds, "") for seconds in (10.0, 5.0, 15.0)]
    assert script.limit_of(points, left_s) == limit_s


# -- what the machine is asked -------------------------------------------------------------------


def test_about_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": "Some GPU", "total_memory": 3 << 20})()
    monkeypatch.setattr(Cupy, "probe", lambda _: Verdict(True))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    answer = about(DoubleMachine())
    facts = {row["what"]: row["is"] for row in answer.rows}
    assert answer.verdict == "ok"
    assert facts["GPU"] == "Some GPU, 3 MiB"
    assert facts["NCCL"] == "2.29.0"
    assert facts["CUDA of the driver"] == "13000"


def test_about_a_torch_that_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cupy, "probe", lambda _: Verdict(True))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = about(DoubleMachine())
    assert (answer.verdict, answer.text) == ("skipped", f"torch {torch.__version__} finds no GPU")


def test_what_a_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's functions that this build has no device for, only that they are called."""
    asked: list[Any] = []
    rt = type("Runtime", (), {"setDevice": asked.append})()
    monkeypatch.setattr(Cupy, "runtime", lambda: rt)
    monkeypatch.setattr("torch.cuda.set_device", asked.append)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda._sleep", asked.append)
    monkeypatch.setattr("torch.cuda.ExternalStream", lambda stream, device: (stream, device))
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr("torch.cuda.Stream", lambda: "a new one")
    machine = GpuMachine()
    with machine.process(0) as found:
        assert found is rt
        machine.hold(rt, 17, 0.5)
        machine.release(rt, 17)
        machine.linger()
        with machine.side_stream() as stream:
            assert stream == "a new one"
    assert asked == [0, 1, 0, 1_000_000_000, 100_000_000]


@pytest.mark.parametrize(
    ("segments", "name"),
    [
        ([], "native"),
        ([{}, {"is_expandable": False}], "native"),
        ([{"is_expandable": True}], "expandable segments"),
    ],
)
def test_which_allocator(
    segments: list[dict[str, bool]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: segments)
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "native")
    assert GpuMachine().allocator() == name


def test_an_allocator_that_shows_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.memory_snapshot", None)
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync")
    assert GpuMachine().allocator() == "cudaMallocAsync"
