"""The pytest plugin: it tests installed transports, and is not felt by who only has it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

IN_ONE_PROCESS = "declares or many_edges or killed_peer"


class Inner:
    """Pytest inside pytest, in a folder with no configuration of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.code = pytest.ExitCode.OK
        self.out = ""
        self.err = ""

    def run(self, *arguments: str) -> str:
        options = ["-s", f"--rootdir={self.folder}", f"--confcutdir={self.folder}"]
        for plugin in ("pytest_stagelink", "no:cacheprovider", "no:faulthandler"):
            options += ["-p", plugin]
        ini = self.folder / "pytest.ini"
        ini.write_text("[pytest]\n")
        self.code = pytest.ExitCode(pytest.main([*options, "-c", str(ini), *arguments]))
        self.out, self.err = self._capsys.readouterr()
        return self.out

    def write(self, name: str, source: str) -> str:
        file = self.folder / f"{name}.py"
        file.write_text(source)
        return str(file)


@pytest.fixture
def inner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Inner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return Inner(tmp_path, capsys)


def test_its_import_loads_neither_torch_nor_stagelink() -> None:
    script = "import sys, pytest_stagelink; print({'torch', 'stagelink'} & {*sys.modules})"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_other_tests_run_as_if_it_was_not_there(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\ndef test_theirs(request):\n"
        "    assert 'torch' not in sys.modules\n"
        "    assert request.fixturenames == ['request']\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "pytest_stagelink", "-W", "error"]
    run = subprocess.run(
        [*command, "--strict-markers"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "stagelink:" not in run.stdout


def test_its_fixtures_in_somebody_s_tests(inner: Inner) -> None:
    file = inner.write(
        "test_with_ranks",
        "import os, pytest\n"
        "def pid(rank, world_size, store):\n    return os.getpid()\n"
        "def test_ranks(rank_pool, leak_check):\n"
        "    assert os.getpid() not in rank_pool.run(pid, 2)\n"
        "opened = []\n"
        "def test_leak(leak_check):\n    opened.append(os.open('/dev/null', os.O_RDONLY))\n"
        "@pytest.mark.stagelink_conformance\ndef test_mark():\n    os.close(opened.pop())\n",
    )
    out = inner.run("--strict-markers", file)
    assert "3 passed, 1 error" in out, out
    assert "/dev/null" in out


def test_the_conformance_tests_are_left_out_in_one_clear_line(inner: Inner) -> None:
    out = inner.run("--pyargs", "stagelink.testing")
    assert inner.code == pytest.ExitCode.NO_TESTS_COLLECTED
    (line,) = [line for line in out.splitlines() if line.startswith("stagelink: ")]
    assert "conformance tests left out, since no transport is named: add `--stagelink-" in line
    assert "loopback" in line


def test_they_run_against_each_transport_that_is_named(inner: Inner) -> None:
    out = inner.run(
        "--pyargs", "stagelink.testing", "-v", "-rs", "-k", IN_ONE_PROCESS,
        "--stagelink-transport=loopback", "--stagelink-transport=gloo",
        "--stagelink-option=gloo.interface=no-such",
        "-m", "stagelink_conformance",
    )  # fmt: skip
    assert inner.code == pytest.ExitCode.OK, out
    assert "testing loopback, gloo {'interface': 'no-such'}" in out
    assert "test_many_edges_share_a_link[loopback] PASSED" in out
    assert "ranks of 'loopback' are threads of one process" in out
    assert "test_declares_what_the_contract_asks_for[gloo] PASSED" in out
    assert (
        "'gloo' cannot be used here: [transports.gloo] interface = 'no-such': there is no" in out
    )


def test_an_option_s_value_is_toml(inner: Inner) -> None:
    shm = ("--stagelink-transport=shm", "--stagelink-option=link_bytes=524288")
    assert "testing shm {'link_bytes': 524288}" in inner.run(
        "--pyargs", "stagelink.testing", "--collect-only", *shm
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--stagelink-transport=glooo"], "unknown transport 'glooo' (did you mean 'gloo'?)"),
        (["--stagelink-option=a=1"], "--stagelink-transport: none is"),
        (["--stagelink-transport=gloo", "--stagelink-option=a"], "'a': write KEY=VALUE"),
        (
            ["--stagelink-transport=gloo", "--stagelink-option=shm.a=1"],
            "write NAME.KEY=VALUE with one of the transports named by --stagelink-transport: gloo",
        ),
        (
            ["--stagelink-transport=gloo", "--stagelink-option=interfase=lo"],
            "--stagelink-transport gloo: transports.gloo.interfase: unknown option 'interfase'",
        ),
        (["--stagelink-transprot=gloo"], "unrecognized arguments: --stagelink-transprot=gloo"),
    ],
)
def test_what_cannot_be_tested_is_refused_at_the_start(
    inner: Inner, arguments: list[str], problem: str
) -> None:
    inner.run("--pyargs", "stagelink.testing", *arguments)
    assert inner.code == pytest.ExitCode.USAGE_ERROR
    assert problem in inner.err


def test_options_that_a_class_gives_are_refused_at_the_start(inner: Inner) -> None:
    file = inner.write(
        "test_mine",
        "from stagelink.testing.conformance import TransportConformance\n"
        "class TestMine(TransportConformance):\n"
        "    transport, options = 'gloo', {'interfase': 'lo', 'interface': 7}\n",
    )
    out = inner.run(file)
    assert inner.code == pytest.ExitCode.USAGE_ERROR
    assert " passed" not in out
    assert " failed" not in out
    (line,) = [line for line in inner.err.splitlines() if line]
    assert line.startswith("ERROR: TestMine: transports.gloo.")
    assert "unknown option 'interfase'" in line
    assert "transports.gloo.interface: Input should be a valid string, not 7" in line


def test_options_of_a_class_that_is_deselected_are_nobody_s_concern(inner: Inner) -> None:
    file = inner.write(
        "test_other",
        "from stagelink.testing.conformance import TransportConformance\n"
        "class TestMine(TransportConformance):\n"
        "    transport, options = 'gloo', {'interfase': 'lo'}\n"
        "def test_mine():\n    pass\n",
    )
    assert "1 passed" in inner.run(file, "-k", "test_mine and not TestMine")


def test_a_transport_of_a_class_that_is_not_installed_fails_that_class_alone(
    inner: Inner,
) -> None:
    file = inner.write(
        "test_absent",
        "from stagelink.testing.conformance import TransportConformance\n"
        "class TestMine(TransportConformance):\n    transport = 'glooo'\n"
        "def test_mine():\n    pass\n",
    )
    out = inner.run(file, "-k", "declares or test_mine and not killed and not TestMine")
    assert "1 failed, 1 passed" in out
    assert "unknown transport 'glooo' (did you mean 'gloo'?)" in out


def test_without_pytest_the_kit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "stagelink.testing.conformance", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"need pytest: .*'stagelink\[testing\]'"):
        importlib.import_module("stagelink.testing.conformance")


def test_without_hypothesis_one_test_is_skipped_with_the_remedy(
    inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Restored afterwards; the plugin hides it when pytest has looked at all of its own.
    monkeypatch.setitem(sys.modules, "hypothesis", sys.modules["hypothesis"])
    inner.write(
        "hides_hypothesis",
        "import sys\ndef pytest_runtest_setup():\n    sys.modules['hypothesis'] = None\n",
    )
    monkeypatch.syspath_prepend(inner.folder)
    loopback = ["-p", "hides_hypothesis", "--stagelink-transport=loopback"]
    loopback += ["-p", "no:hypothesispytest"]
    out = inner.run("--pyargs", "stagelink.testing", "-rs", "-k", "loopback_does", *loopback)
    assert "1 skipped" in out, out
    assert "needs hypothesis: pip install 'stagelink[testing]'" in out
