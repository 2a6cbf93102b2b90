"""The benchmark measures what it says; whether anything is quick is not for a test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from stagelink.bench import plot
from stagelink.bench.pipes import KINDS, Contender, Record
from stagelink.cli import bench
from stagelink.ranks.outcome import Outcome, RankFailedError

if TYPE_CHECKING:
    from stagelink.bench import Measurement
    from tests.cli.conftest import Invoke

SIZES = (64, 40_000)


class Measure:
    """Stands for what takes minutes: keeps what it is given, and raises what it is told to."""

    def __init__(self) -> None:
        self.given: list[Measurement] = []
        self.error: Exception | None = None

    def __call__(self, measurement: Measurement) -> list[Record]:
        self.given.append(measurement)
        if self.error is not None:
            raise self.error
        return [Record.of(Contender("shm", "link"), kind, 64, [1e-6]) for kind in KINDS]


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
    assert {"gloo", "shm"} <= set(measure.given[0].transports)


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
    [given] = measure.given
    assert (given.transports, given.sizes_bytes) == (["shm", "gloo"], [64, 8])


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
    assert measure.given == []


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


def _bench(*given: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stagelink", "bench", "--transport=shm", *given]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _children(pid: int) -> dict[int, str]:
    """Process ids and command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):
            if f"\nPPid:\t{pid}\n" in (folder / "status").read_text():
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


def _servers(pid: int) -> list[int]:
    return [child for child, line in _children(pid).items() if "forkserver" in line]


def _ranks_at_work(launched: subprocess.Popen[str]) -> list[int]:
    assert launched.stderr is not None
    shown = ""
    while "kind/s" not in shown:
        shown += launched.stderr.read(1)
    (server,) = _servers(launched.pid)
    return sorted(_children(server))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_one_line(number: signal.Signals) -> None:
    with _bench() as launched:
        ranks = _ranks_at_work(launched)
        assert len(ranks) == 2
        if number == signal.SIGINT:
            os.killpg(launched.pid, number)  # as a terminal does
        else:
            launched.send_signal(number)
        output, errors = launched.communicate()
    assert (launched.returncode, output) == (1, "")
    assert errors.endswith(f"\nError: stopped by {number.name}; no rank is left\n")
    assert "Traceback" not in errors
    assert "torch" not in errors
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_a_rank_that_crashes_is_named_below_its_stacks_and_the_bar() -> None:
    with _bench() as launched:
        os.kill(_ranks_at_work(launched)[1], signal.SIGSEGV)
        output, errors = launched.communicate()
    assert (launched.returncode, output) == (1, "")
    assert "\nFatal Python error: Segmentation fault\n" in errors
    assert re.search(r"\nError: rank [01] was killed by SIGSEGV\n$", errors)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([Outcome(0, error="", raised="PeerLostError: rank 1"), Outcome(1, exit_code=3)], "ended"),
        ([Outcome(0, error="", raised="RuntimeError: gone"), Outcome(1, exit_code=3)], "ended"),
        ([Outcome(0, hung_s=5.0), Outcome(1, exit_code=3)], "ended with exit code 3"),
        ([Outcome(0), Outcome(1, error="trace", raised="ValueError: x")], "failed: ValueError: x"),
    ],
)
def test_the_rank_that_the_other_failed_because_of_is_told(
    invoke: Invoke, measure: Measure, ends: list[Outcome], text: str
) -> None:
    measure.error = RankFailedError("x", ends)
    result = invoke("bench", "--transport=shm")
    assert result.exit_code == 1
    assert f"Error: rank 1 {text}" in result.stderr


def test_a_rank_that_is_still_being_started_does_not_see_ctrl_c() -> None:
    with _bench() as launched:
        while not _servers(launched.pid):
            os.sched_yield()
        os.killpg(launched.pid, signal.SIGINT)
        output, errors = launched.communicate()
    assert (launched.returncode, output) == (1, "")
    assert errors == "Error: stopped by SIGINT; no rank is left\n"


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
    record = Record.of(Contender("shm", "link"), "duplex", 2**20, seconds)
    assert record.median_us == pytest.approx(100.5)
    assert record.p99_us == pytest.approx(199)
    assert record.gib_per_s == pytest.approx(2 / 1024 / 100.5e-6)
    assert Record.of(Contender("shm", "link"), "stream", 8, [2.0]).p99_us == pytest.approx(2e6)
