"""The benchmark measures what it says; whether anything is quick is not for a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from stagelink.bench import plot, ranks
from stagelink.bench.records import KINDS, Record, Subject
from stagelink.cli import bench

if TYPE_CHECKING:
    from stagelink.bench import Job
    from tests.cli.conftest import Invoke

SIZES = (64, 40_000)


class Measure:
    """Stands for what takes minutes: keeps the jobs, and raises what it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.error: Exception | None = None

    def __call__(self, job: Job) -> list[Record]:
        self.jobs.append(job)
        if self.error is not None:
            raise self.error
        return [Record.of(Subject("shm", "link"), kind, 64, [1e-6]) for kind in KINDS]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    stub = Measure()
    monkeypatch.setattr(bench, "measure", stub)
    return stub


def test_every_transport_layer_kind_and_size_is_measured(tmp_path: Path) -> None:
    result, picture = tmp_path / "records.json", tmp_path / "picture.svg"
    command = [
        "-m",
        "stagelink",
        "bench",
        "--transport",
        "shm",
        "--rounds",
        "1",
        "--json",
        "records.json",
        "--plot",
    ]
    sizes = [f"--size={size}" for size in SIZES]
    done = subprocess.run(
        [sys.executable, *command, "picture.svg", *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    keys = {(r["transport"], r["layer"], r["kind"], r["payload_bytes"]) for r in found}
    layers = [("raw-gloo", "raw")]
    layers += [("shm", layer) for layer in ("link", "handler", "handler-copy")]
    expected = {(*who, kind, size) for who in layers for kind in KINDS for size in SIZES}
    expected |= {("memcpy", "raw", "stream", size) for size in SIZES}
    assert keys == expected
    assert len(found) == len(expected)
    assert all(0 < r["median_us"] <= r["p99_us"] for r in found)
    assert all(r["gib_per_s"] > 0 for r in found)
    assert picture.read_text().startswith("<?xml")
    for words in ("One way", "Stream", "Both ways", "handler-copy", "memcpy"):
        assert words in done.stdout


def test_one_that_cannot_is_refused_if_it_is_asked_for(invoke: Invoke) -> None:
    result = invoke("bench", "--transport", "loopback")
    assert result.exit_code == 1
    assert result.stderr == "Error: 'loopback': needs both ranks in one process\n"


def test_what_cannot_is_told_of_if_nobody_asks_for_it(invoke: Invoke, measure: Measure) -> None:
    result = invoke("bench")
    assert result.exit_code == 0
    assert "not measured: 'loopback': needs both ranks in one process\n" in result.stderr
    assert {"gloo", "shm"} <= set(measure.jobs[0].transports)


@pytest.mark.parametrize("name", ["shmm", "mpi", "auto", ""])
def test_one_that_does_not_exist(invoke: Invoke, name: str) -> None:
    result = invoke("bench", "--transport", name)
    assert result.exit_code == 1
    assert f"Error: unknown transport {name!r}" in result.stderr
    assert "; this process has " in result.stderr
    assert "'gloo', 'loopback', " in result.stderr


def test_a_thing_named_twice_is_measured_once(invoke: Invoke, measure: Measure) -> None:
    twice = ["--transport=shm", "--transport=gloo", "--transport=shm", "--size=64", "--size=8"]
    assert invoke("bench", *twice, "--size=64").exit_code == 0
    [job] = measure.jobs
    assert (job.transports, job.sizes_bytes) == (["shm", "gloo"], [64, 8])


def test_what_does_not_fit_into_memory_is_refused(
    invoke: Invoke, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four each way, on each of two ranks, and the same for what it is held against.
    monkeypatch.setattr(bench, "memory_bytes", lambda: 4 * 2 * 2 * 2 * 4000)
    assert invoke("bench", "--transport=shm", "--size=4000").exit_code == 0
    result = invoke("bench", "--transport=shm", "--size=8", "--size=4004")
    assert result.exit_code == 2
    text = "4004 is too much: the buffers would take 128.1 kB, and this machine has 128.0 kB"
    assert f"--size: {text}" in result.stderr
    monkeypatch.setattr(bench, "memory_bytes", lambda: None)
    assert invoke("bench", "--transport=shm", "--size=400000000000").exit_code == 0


# Files


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json", "nowhere/x.json"], "'nowhere/x.json': there is no directory 'nowhere'"),
        (["--json", ""], "the name of a file is empty"),
        (["--json", "."], "is a directory"),
        (["--plot", "x.txt"], "'x.txt' does not end in .png or .svg or .pdf"),
        (["--plot", "noext"], "'noext' does not end in .png or .svg or .pdf"),
        (["--plot", ".png"], "'.png' does not end in .png or .svg or .pdf"),
        (["--plot", "nowhere/x.png"], "there is no directory 'nowhere'"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    invoke: Invoke, measure: Measure, arguments: list[str], text: str
) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert measure.jobs == []


def test_a_directory_that_is_not_writable(
    invoke: Invoke, measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    result = invoke("bench", "--json", tmp_path / "x.json")
    assert result.exit_code == 2
    assert f"directory {str(tmp_path)!r} is not writable" in result.stderr
    (tmp_path / "x.json").write_text("old")
    assert invoke("bench", "--transport=shm", "--json", tmp_path / "x.json").exit_code == 0


def test_a_file_that_fails_at_the_end_loses_nothing_else(
    invoke: Invoke, measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Matplotlib itself keeps the files of its fonts open.
    monkeypatch.setattr(plot, "draw", lambda records, path: Path(path).write_text("drawn"))
    picture = tmp_path / "picture.PNG"
    result = invoke("bench", "--transport=shm", "--json", "/dev/full", "--plot", picture)
    assert result.exit_code == 1
    assert "'/dev/full' could not be written: No space left on device" in result.stderr
    assert "One way" in result.stdout
    assert picture.read_text() == "drawn"


# How it ends


def test_a_signal_is_told_by_its_name(invoke: Invoke, measure: Measure) -> None:
    measure.error = SignalException("x", signal.SIGTERM)
    result = invoke("bench", "--transport=shm")
    assert result.exit_code == 1
    assert result.stderr == "Error: stopped by SIGTERM; no rank is left\n"


def test_ctrl_c_ends_it_in_one_line() -> None:
    command = [sys.executable, "-m", "stagelink", "bench", "--transport=shm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launched:
        assert launched.stderr is not None
        shown = ""
        while "kind/s" not in shown:
            shown += launched.stderr.read(1)
        os.killpg(launched.pid, signal.SIGINT)  # as a terminal does
        output, errors = launched.communicate()
    assert (launched.returncode, output) == (1, "")
    assert errors.endswith("\nError: stopped by SIGINT; no rank is left\n")
    assert "Traceback" not in errors
    assert "torch" not in errors


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(2000):  # as the launcher does: Python looks for signals in between
        time.sleep(0.01)


def test_a_rank_that_is_still_being_started_does_not_see_ctrl_c() -> None:
    asks = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    command = [sys.executable, "-c", asks]
    with ranks._ctrl_c_put_off():
        assert subprocess.check_output(command, text=True) == "True\n"
        with pytest.raises(KeyboardInterrupt):
            _press_ctrl_c()
    assert subprocess.check_output(command, text=True) == "False\n"


@pytest.mark.parametrize("arguments", [["--size", "6"], ["--size", "0"], ["--rounds", "0"]])
def test_a_wrong_command_line(invoke: Invoke, arguments: list[str]) -> None:
    assert invoke("bench", *arguments).exit_code == 2


def test_to_draw_needs_what_draws(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stagelink.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("bench", "--plot", "picture.png")
    assert result.exit_code == 1
    assert "pip install 'stagelink[bench]'" in result.stderr


def test_a_record_of_times() -> None:
    seconds = [n / 1e6 for n in range(1, 201)]
    record = Record.of(Subject("shm", "link"), "duplex", 2**20, seconds)
    assert record.median_us == pytest.approx(100.5)
    assert record.p99_us == pytest.approx(199)
    assert record.gib_per_s == pytest.approx(2 / 1024 / 100.5e-6)
    assert Record.of(Subject("shm", "link"), "stream", 8, [2.0]).p99_us == pytest.approx(2e6)
