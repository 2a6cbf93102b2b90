"""A point in a process of its own, which may fail, crash or hang without harm to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.gpu.answers import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.gpu.answers import Row, Verdict
    from tests.gpu.points import Point

__all__ = ["GPU", "Result", "run"]

GPU = "tests.gpu.machines:GpuMachine"
_GRACE_S = 3.0
_LOOK_S = 0.01
_LAST_LINES = 60


@dataclass(frozen=True)
class Result:
    """What became of a point.

    Attributes:
        name: its name.
        verdict: see `tests.gpu.answers.Verdict`.
        text: what was seen; of what went wrong all that is known.
        seconds: it took.
        rows: figures.
    """

    name: str
    verdict: Verdict
    text: str
    seconds: float
    rows: Sequence[Row] = ()


def run(name: str, point: Point, limit_s: float | None = None, machine: str = GPU) -> Result:
    """Start it, wait for it, and leave no process of it behind.

    Args:
        name: of the point.
        point: the point.
        limit_s: seconds, in place of its own.
        machine: module and name of the machine's class.
    """
    limit_s = point.limit_s if limit_s is None else limit_s
    began = time.monotonic()
    with TemporaryDirectory(prefix="stagelink-gpu-", ignore_cleanup_errors=True) as folder:
        answer = _answer(point, limit_s, machine, Path(folder))
    seconds = time.monotonic() - began
    return Result(name, answer.verdict, answer.text, seconds, answer.rows)


def _answer(point: Point, limit_s: float, machine: str, folder: Path) -> Answer:
    file, output = folder / "answer.json", folder / "output"
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.gpu.one"]
    what = [point.function, machine, str(file), *(["ranks"] if point.ranks else [])]
    with output.open("wb") as out:
        process = subprocess.Popen(
            [*command, *what],
            env=_environment(point, folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # a group of its own, with all processes that it starts
        )
        hangs = _ended(process, limit_s)
    if hangs:
        text = f"still ran after {limit_s:g} s\n{_words(folder, output)}"
        return Answer("hung", text)
    if not file.exists():
        how = _how_it_ended(process.returncode)
        return Answer("crashed", f"{how}\n{_words(folder, output)}")
    found: dict[str, Any] = json.loads(file.read_text())
    return Answer(**found)


def _environment(point: Point, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        **point.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for a GPU is not to use it: ranks fork
        "TMPDIR": str(folder),  # where ranks write what they have to say
    }


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """End all of its processes; whether they had to be ended."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGABRT)  # all of them write where they are
        end = time.monotonic() + _GRACE_S
        while _signal(process, 0) and time.monotonic() < end:
            process.poll()
            time.sleep(_LOOK_S)
        return True
    finally:
        _signal(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it may be stuck in the driver even so
            process.wait(_GRACE_S)
    return False


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether any of its processes is there to get it."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} and without an answer"


def _words(folder: Path, output: Path) -> str:
    """The last words of the point, and those of its ranks."""
    files = [output, *sorted(folder.glob("stagelink-rank-*/stderr"))]
    parts = []
    for file in files:
        with suppress(FileNotFoundError):  # a rank gave its folder back meanwhile
            lines = file.read_text(errors="replace").splitlines()
            parts.append("\n".join(lines[-_LAST_LINES:]))
    return "\n\n".join(filter(None, parts))
