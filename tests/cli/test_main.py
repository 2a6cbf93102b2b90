"""The command itself: version, help, and ``python -m stagelink``."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Invoke


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"stagelink {version('stagelink')}\n"


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagelink", "--version"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == f"stagelink {version('stagelink')}\n"


@pytest.mark.parametrize("command", ["plan", "doctor", "run"])
def test_each_command_has_a_help(invoke: Invoke, command: str) -> None:
    assert command in invoke("--help").stdout
    assert invoke(command, "--help").stdout.startswith(f"Usage: main {command} ")


@pytest.mark.parametrize("arguments", [["plam"], ["--fast"]])
def test_a_wrong_command_line(invoke: Invoke, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
