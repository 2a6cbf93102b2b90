"""Whatever the encoding of its output, a command says what it has to say, without a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from stagelink.bench.pipes import KINDS, Contender, Record
from stagelink.cli import bench, main
from stagelink.cli.output import printable

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from tests.cli.conftest import Write
    from tests.support.site import Site

ENCODINGS = ("ascii", "latin-1", "cp1252", "utf-8")
FAST = '[[links]]\ntransport = ["absent", "fast"]\n'


def invoke(encoding: str, *arguments: object) -> Result:
    """The command's result with stdout and stderr of that encoding; decoding it is strict."""
    runner = CliRunner(charset=encoding, env={"COLUMNS": "200", "FORCE_COLOR": None})
    result = runner.invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for written in (result.stdout_bytes, result.stderr_bytes):
        written.decode(encoding)
    return result


def arrow(encoding: str) -> str:
    return "→" if encoding == "utf-8" else "->"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_plan(encoding: str, write: Write, site: Site) -> None:
    site.transport("fast", "probe = classmethod(lambda cls, options: Verdict(True, 'größer ➜'))")
    path = write((2, 1), FAST, name="größe ➜")
    result = invoke(encoding, "plan", path)
    assert result.exit_code == 0
    said = " ".join(result.stdout.replace("|", " ").split())  # between columns, where ASCII is
    assert f" a {arrow(encoding)} b 0{arrow(encoding)}2, 1{arrow(encoding)}2 ab fast " in said
    want = {"utf-8": "größe ➜", "ascii": "gr\\xf6\\xdfe \\u279c"}
    assert said.startswith(want.get(encoding, "größe \\u279c"))
    table = result.stdout[result.stdout.index("Links") :].splitlines()
    head, row = table[1], next(line for line in table if " b " in line)
    assert head.index("transport") == row.index("fast")
    assert json.loads(invoke(encoding, "plan", "--json", path).stdout)["verified"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_errors(encoding: str, write: Write, tmp_path: Path) -> None:
    path = write((1, 1))
    back = '[[tensors]]\nname = "ü"\nfrom = "b"\nto = "a"\n'
    path.write_text(path.read_text() + back, encoding="utf-8")
    for asked in (("plan", path), ("plan", "--json", path), ("run", path, __file__)):
        result = invoke(encoding, *asked)
        assert result.exit_code == 1
        assert f"a cycle: 'b' {arrow(encoding)} 'a'" in result.stderr
    missing = invoke(encoding, "plan", tmp_path / "weg → ➜.toml")
    assert missing.exit_code == 2
    assert f"weg {arrow(encoding)} " in missing.stderr
    unknown = invoke(encoding, "plän→")
    assert (unknown.exit_code, f"n{arrow(encoding)}" in unknown.stderr) == (2, True)
    nowhere = invoke(encoding, "bench", "--json", tmp_path / "→" / "a.json")
    assert (nowhere.exit_code, "there is no directory" in nowhere.stderr) == (2, True)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_doctor(encoding: str, site: Site) -> None:
    site.transport("fast", "probe = classmethod(lambda cls, options: Verdict(False, 'a→b ➜'))")
    result = invoke(encoding, "doctor")
    assert result.exit_code == 0
    assert f"unusable: a{arrow(encoding)}b " in " ".join(result.stdout.split())
    assert json.loads(invoke(encoding, "doctor", "--json").stdout)["transports"]
    assert invoke(encoding, "--help").exit_code == 0


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bench(encoding: str, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(job: object) -> list[Record]:
        del job
        return [Record.of(Contender("shm → ü", "link"), kind, 64, [1e-6]) for kind in KINDS]

    monkeypatch.setattr(bench, "measure", measure)
    site.transport("fast", "probe = classmethod(lambda cls, options: Verdict(False, 'a→b'))")
    result = invoke(encoding, "bench", "--json", tmp_path / "records.json")
    assert result.exit_code == 0
    assert f"shm {arrow(encoding)} " in result.stdout
    assert f"cannot use it: a{arrow(encoding)}b\n" in result.stderr
    (record, *_) = json.loads((tmp_path / "records.json").read_text(encoding="utf-8"))
    assert record["transport"] == "shm → ü"


def test_notes_of_run(write: Write, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagelink.cli.run._launch", lambda args: None)
    monkeypatch.setenv("STAGELINK_PLAN", "")
    site.transport("fast")
    path = write((1, 1), '[[links]]\ndevice = "cpu"\ntransport = "fast"\n')
    path.write_text(path.read_text() + '[transports."weg→"]\n', encoding="utf-8")
    result = invoke("ascii", "run", path, __file__)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: transports.weg-> is not used here")


def test_a_look_alike_or_a_number_stands_for_a_character() -> None:
    assert printable("a→b… é", "ascii") == "a->b... \\xe9"
    assert printable("a→b… é", "latin-1") == "a->b... é"
    assert printable("a→b… é", "cp1252") == "a->b… é"
    assert printable("a→b \udcff", "utf-8") == "a→b \\udcff"


# -- in a process of its own


def start(*arguments: object, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "stagelink", *map(str, arguments)]
    return subprocess.run(command, check=False, stderr=subprocess.PIPE, **more)


def test_pythonioencoding(write: Write) -> None:
    path = write((2, 1), '[[links]]\ntransport = "gloo"\n')
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    done = start("plan", path, env=environment, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\na -> b     | 0->2, 1->2 | ab      | gloo      |" in done.stdout


COMMANDS = (("plan",), ("plan", "--json"), ("doctor",))


def ended_by(
    stdout: BinaryIO, write: Write, monkeypatch: pytest.MonkeyPatch, *command: str
) -> object:
    """The exit code of a command whose output goes there."""
    path = [str(write((1, 1)))] if command[0] == "plan" else []
    with io.TextIOWrapper(stdout, encoding="utf-8") as text, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", text)
        with pytest.raises(SystemExit) as ended:
            main([*command, *path])
    return ended.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nobody_reads_the_output(
    command: tuple[str, ...],
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in ``stagelink plan FILE | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    unread = open(writer, "wb", buffering=0)  # noqa: SIM115 - `ended_by` closes it
    assert ended_by(unread, write, monkeypatch, *command) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_output_cannot_be_written(
    command: tuple[str, ...],
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - `ended_by` closes it
    assert ended_by(full, write, monkeypatch, *command) == 1
    said = "Error: the output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said


# -- files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text, None),
        (lambda text: b"\xef\xbb\xbf" + text, None),
        (lambda text: text.replace(b"\n", b"\r\n"), None),
        (lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"), None),
        (lambda text: text.decode().encode("latin-1"), "line 2 is not UTF-8 text"),
        (lambda text: text.decode().encode("utf-16"), "line 1 is not UTF-8 text"),
        (lambda text: text.replace(b"\n", b"\r"), "not TOML: "),
        (lambda text: text + b"\0", "not TOML: "),
    ],
    ids=["as it is", "mark", "crlf", "both", "latin-1", "utf-16", "cr", "nul"],
)
def test_a_plan_s_file(change: Any, said: str | None, write: Write, site: Site) -> None:
    site.transport("fast")
    path = write((1, 1), FAST, name="plan")
    path.write_bytes(change(path.read_bytes().replace(b'"plan"', '"größe"'.encode())))
    result = invoke("ascii", "plan", path)
    if said is None:
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("gr\\xf6\\xdfe: schedule")
    else:
        assert result.exit_code == 1
        assert said in result.stderr


@pytest.mark.parametrize("name", ["größe", "weg \udcff"], ids=ascii)
def test_a_file_s_own_name(name: str, tmp_path: Path, site: Site) -> None:
    """PipeDream's files have no other; a name may hold bytes that are no text."""
    site.transport("fast")
    path = tmp_path / f"{name}.json"
    path.write_bytes(
        b'\xef\xbb\xbf{"module_to_stage_map": [0], "stage_to_rank_map": {"0": [0]}}\r\n'
    )
    target = tmp_path / "written.toml"
    result = invoke("utf-8", "plan", path, "--write-toml", target)
    assert (result.exit_code, result.stderr) == (0, "")
    shown = name.replace("\udcff", "?")
    assert result.stdout.startswith(f"{shown}: schedule pipedream")
    assert f'name = "{shown}"' in target.read_text(encoding="utf-8")


def test_the_version_in_any_encoding() -> None:
    for encoding in ENCODINGS:
        assert invoke(encoding, "--version").stdout == f"stagelink {version('stagelink')}\n"
