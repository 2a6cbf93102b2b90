"""The benchmark measures what it says; whether anything is quick is not for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stagelink.bench.records import KINDS, Record, Subject

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Invoke

SIZES = (64, 40_000)


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
    assert "needs both ranks in one process" in result.stderr


def test_one_that_does_not_exist(invoke: Invoke) -> None:
    result = invoke("bench", "--transport", "shmm")
    assert result.exit_code == 1
    assert "'shmm'" in result.stderr


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
