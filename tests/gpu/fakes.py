"""Points that go wrong in every way, for the test of what is said of them; light, so quick."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.gpu.answers import Answer, Findings

_CHILD = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"


class Nothing:
    """In a machine's place."""


def works(machine: Nothing) -> Answer:
    row = {"name": os.environ["FAKE"], "payload_bytes": 1, "median_us": 2.0, "gib_per_s": 3.0}
    return Answer("ok", type(machine).__name__, [row])


def differs(machine: Nothing) -> Answer:
    del machine
    findings = Findings()
    findings.see("the moon", "cheese", "stone")
    return findings.answer()


def fails(machine: Nothing) -> Answer:
    raise AssertionError(f"{type(machine).__name__} is no GPU")


def crashes(machine: Nothing) -> Answer:
    del machine
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def leaves(machine: Nothing) -> Answer:
    del machine
    os._exit(3)


def hangs(machine: Nothing) -> Answer:
    """And so does a process that it has started, which writes where ranks do."""
    del machine
    folder = Path(os.environ["TMPDIR"], "stagelink-rank-1")
    folder.mkdir()
    with (folder / "stderr").open("wb") as output:
        command = [sys.executable, "-X", "faulthandler", "-c", _CHILD]
        subprocess.Popen(command, stdout=output, stderr=output)
    threading.Event().wait()
    raise AssertionError
