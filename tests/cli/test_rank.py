"""A rank's process runs the script as Python would, and leaves a note when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.cli import rank

if TYPE_CHECKING:
    from pathlib import Path

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start("script.py", "arg")``: run it in this process; the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "note.json"))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["rank.py", *arguments])
        try:
            rank.main()
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    return run


def note(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "note.json").read_text())["message"]
    return found


def write(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return path


TELL = "import json, sys; print(json.dumps([__name__, __file__, sys.argv, sys.path[0]]))\n"


def test_a_script_sees_what_python_would_show_it(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, TELL, "sub/script.py")
    assert start("sub/script.py", "--flag", "x") == 0
    seen = json.loads(capsys.readouterr().out)
    path = tmp_path / "sub" / "script.py"
    assert seen == ["__main__", str(path), [str(path), "--flag", "x"], str(path.parent)]


def test_a_module_sees_what_python_would_show_it(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, TELL, "told_module.py")
    assert start("-m", "told_module", "x") == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen == ["__main__", str(path), [str(path), "x"], str(tmp_path)]


def test_the_script_s_folder_is_not_searched_if_python_was_told_so(tmp_path: Path) -> None:
    write(tmp_path, TELL)
    seen, plain = (
        json.loads(
            subprocess.check_output([sys.executable, "-P", *own, "script.py"], cwd=tmp_path)
        )
        for own in ([rank.__file__], [])
    )
    assert seen[-1] == plain[-1]


def test_an_exit_code_is_the_script_s(start: Start, tmp_path: Path) -> None:
    write(tmp_path, "import sys; sys.exit(5)")
    assert start("script.py") == 5
    assert not (tmp_path / "note.json").exists()


def test_an_error_is_noted_and_printed_from_the_script_s_first_line_on(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "def work():\n    raise ValueError('boom')\n\nwork()\n")
    assert start("script.py") == 1
    assert note(tmp_path)["message"] == "ValueError: boom"
    assert "rank.py" not in note(tmp_path)["extraInfo"]["py_callstack"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rank 3: Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/script.py", line 4, in <module>'
    assert lines[-1] == "ValueError: boom"


def test_a_script_that_is_no_python_says_where(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "x = 1\nif\n")
    assert start("script.py") == 1
    error = capsys.readouterr().err
    assert f'File "{tmp_path}/script.py", line 2' in error
    assert "rank.py" not in error


@pytest.mark.parametrize("name", ["AbortedError", "PeerClosedError", "PeerLostError"])
def test_the_failure_of_another_rank_takes_one_line(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(tmp_path, f"from stagelink.errors import {name}\nraise {name}('rank 0 failed')\n")
    assert start("script.py") == 1
    assert note(tmp_path)["message"] == f"{name}: rank 0 failed"
    assert capsys.readouterr().err == f"rank 3: {name}: rank 0 failed\n"


def test_ctrl_c_is_left_to_the_launcher_to_tell(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "raise KeyboardInterrupt")
    assert start("script.py") == 130
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "note.json").exists()


def test_nothing_is_imported_before_the_script(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print('torch' in sys.modules, 'stagelink' in sys.modules)")
    seen = subprocess.check_output([sys.executable, rank.__file__, "script.py"], cwd=tmp_path)
    assert seen.decode() == f"False False{os.linesep}"
