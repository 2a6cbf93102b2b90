"""``stagelink run`` starts a plan's ranks through torchrun, and tells how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from stagelink.cli import rank

if TYPE_CHECKING:
    from argparse import Namespace

    from tests.cli.conftest import Invoke, Write
    from tests.support.site import Site

GLOO = '[[links]]\ntransport = "gloo"\n[transports.gloo]\ninterface = "lo"\n'


class Torchrun:
    """Stands for torchrun: keeps what it was given, and raises what it is told to."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.calls: list[Namespace] = []
        self.error: BaseException | None = None

    def __call__(self, args: Namespace) -> None:
        self.calls.append(args)
        self.log_dir_existed = bool(args.log_dir) and Path(args.log_dir).is_dir()
        if self.error is not None:
            raise self.error


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torchrun:
    script = tmp_path / "train.py"
    script.write_text("")
    stub = Torchrun(script)
    monkeypatch.setattr(torchrun, "run", stub)
    # The command is the whole process's in earnest; here it must leave no trace.
    monkeypatch.setenv("LOGLEVEL", "WARNING")
    monkeypatch.setenv("STAGELINK_PLAN", "")
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    return stub


# What torchrun is given


def test_a_plan_s_ranks_are_started_on_one_node(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    result = invoke("run", write((2, 1)), launcher.script, "--epochs", "3", "-v")
    assert (result.exit_code, result.output) == (0, "")
    [args] = launcher.calls
    assert (args.nnodes, args.nproc_per_node) == ("1:1", "3")
    assert args.training_script == rank.__file__
    assert args.training_script_args == [str(launcher.script), "--epochs", "3", "-v"]


def test_the_script_is_told_where_the_plan_is(
    invoke: Invoke,
    write: Write,
    launcher: Torchrun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write((1, 1))
    monkeypatch.chdir(path.parent)
    assert invoke("run", path.name, launcher.script).exit_code == 0
    assert os.environ["STAGELINK_PLAN"] == str(path)


def test_flags_before_the_plan_are_torchrun_s(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    flags = ["--nnodes", 2, "--node-rank=1", "--rdzv-endpoint", "host:1", "--max_restarts", "4"]
    assert (
        invoke("run", *flags, "-t", "3", write((2, 2)), launcher.script, "--nnodes").exit_code == 0
    )
    [args] = launcher.calls
    assert (args.nnodes, args.node_rank, args.rdzv_endpoint) == ("2", 1, "host:1")
    assert (args.max_restarts, args.tee) == (4, "3")
    assert args.training_script_args == [str(launcher.script), "--nnodes"]


def test_nodes_share_the_ranks(invoke: Invoke, write: Write, launcher: Torchrun) -> None:
    assert invoke("run", "--nnodes", 2, write((2, 2)), launcher.script).exit_code == 0
    assert (
        invoke("run", "--nnodes=2", "--nproc-per-node=3", write((2, 2)), launcher.script).exit_code
        == 0
    )
    assert [args.nproc_per_node for args in launcher.calls] == ["2", "3"]


def test_torchrun_s_own_variable_is_heeded(
    invoke: Invoke,
    write: Write,
    launcher: Torchrun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "7")
    result = invoke("run", write((2, 2)), launcher.script)
    assert result.exit_code == 2
    assert "--nproc-per-node is 7, and the plan has 4 ranks" in result.stderr


def test_a_module_is_run_as_one(invoke: Invoke, write: Write, launcher: Torchrun) -> None:
    assert invoke("run", "-m", write((1, 1)), "some.module", "x").exit_code == 0
    [args] = launcher.calls
    assert args.module is False
    assert args.training_script_args == ["-m", "some.module", "x"]


def test_other_programs_are_run_as_they_are(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    assert invoke("run", "--no-python", write((1, 1)), "program", "x").exit_code == 0
    assert invoke("run", "--run-path", write((1, 1)), launcher.script).exit_code == 0
    program, path = launcher.calls
    assert (program.training_script, program.training_script_args) == ("program", ["x"])
    assert (path.training_script, path.training_script_args) == (str(launcher.script), [])


def test_no_folder_is_left_behind(invoke: Invoke, write: Write, launcher: Torchrun) -> None:
    invoke("run", write((1, 1)), launcher.script)
    assert launcher.log_dir_existed
    assert not Path(launcher.calls[0].log_dir).exists()


@pytest.mark.parametrize("flag", ["--tee", "--redirects"])
def test_logs_that_were_asked_for_stay_where_torchrun_puts_them(
    invoke: Invoke, write: Write, launcher: Torchrun, flag: str
) -> None:
    invoke("run", flag, "3", write((1, 1)), launcher.script)
    invoke("run", flag, "3", "--log-dir", "logs", write((1, 1)), launcher.script)
    assert [args.log_dir for args in launcher.calls] == [None, "logs"]


# What is refused before anything starts


def test_a_plan_that_would_hang_is_refused(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    result = invoke("run", write((2, 1), window=1), launcher.script)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "Error: deadlock: the ranks wait for each other in a cycle: rank 0 "
    )
    assert launcher.calls == []


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([], [], "Missing argument 'SCRIPT'"),
        ([], ["gone.py"], "'gone.py' does not exist"),
        ([], ["--nnodes", "2", "SCRIPT"], "'--nnodes' comes after CONFIG"),
        (["--nnodes", "1:2"], ["SCRIPT"], "--nnodes is '1:2': the plan has 3 ranks"),
        (["--nnodes", "0"], ["SCRIPT"], "--nnodes is '0'"),
        (["--nnodes", "two"], ["SCRIPT"], "'two'"),
        (["--nnodes", "1:2:3"], ["SCRIPT"], "1:2:3"),
        (["--nnodes", "2"], ["SCRIPT"], "2 nodes cannot share the plan's 3 ranks evenly"),
        (["--nproc-per-node", "2"], ["SCRIPT"], "--nproc-per-node is 2, and the plan has 3 ranks"),
        (["--nproc-per-node", "some"], ["SCRIPT"], "some"),
        (["--max-restarts", "many"], ["SCRIPT"], "--max-restarts"),
        (["--master-port", "abc"], ["SCRIPT"], "--master-port"),
        (["--master-port", "99999"], ["SCRIPT"], "--master-port=99999: a port is from 1 to 65535"),
        (["--master-port=-1"], ["SCRIPT"], "--master-port=-1: a port is from 1 to 65535"),
        (["--master-addr", "h:1"], ["SCRIPT"], "--master-addr='h:1': a host's name or IP address"),
        (["--master-addr="], ["SCRIPT"], "--master-addr='': that is no host name"),
        (["--rdzv-endpoint", "h:x"], ["SCRIPT"], "--rdzv-endpoint='h:x': the port is not a whole"),
        (["--rdzv-endpoint", "h:70000"], ["SCRIPT"], "='h:70000': a port is from 1 to 65535"),
        (["--rdzv-endpoint", "a b:1"], ["SCRIPT"], "='a b:1': that is no host name"),
        (["--unheard-of"], ["SCRIPT"], "--unheard-of"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    invoke: Invoke,
    write: Write,
    launcher: Torchrun,
    before: list[str],
    after: list[str],
    text: str,
) -> None:
    rest = [launcher.script if word == "SCRIPT" else word for word in after]
    result = invoke("run", *before, write((2, 1)), *rest)
    assert result.exit_code == 2
    assert text in result.stderr
    assert launcher.calls == []


def test_a_plan_that_is_not_there(invoke: Invoke, launcher: Torchrun) -> None:
    result = invoke("run", "gone.toml", launcher.script)
    assert result.exit_code == 2
    assert "'gone.toml' does not exist" in result.stderr
    assert invoke("run").exit_code == 2


FAST = '[[links]]\ntransport = "fast"\n'
NOWHERE = '[[links]]\ntransport = "fasst"\n'


def test_wrong_options_are_refused_as_plan_refuses_them(
    invoke: Invoke, write: Write, launcher: Torchrun, site: Site
) -> None:
    site.transport("fast")
    path = write((1, 1), FAST + "[transports.fast]\nspeed = 9\n")
    result = invoke("run", path, launcher.script)
    assert (result.exit_code, result.stderr) == (1, invoke("plan", path).stderr)
    assert "transports.fast.speed" in result.stderr
    path = write((1, 1), FAST + "[transports.fast]\nspeed = 9\n", servers=[[0], [1]])
    assert invoke("run", "--nnodes=2", path, launcher.script).exit_code == 1
    assert launcher.calls == []


def test_a_link_whose_only_transport_is_nowhere_here_is_refused(
    invoke: Invoke, write: Write, launcher: Torchrun, site: Site
) -> None:
    site.transport("fast")
    result = invoke("run", write((1, 1), NOWHERE), launcher.script)
    assert result.exit_code == 1
    assert "unknown transport 'fasst' (did you mean 'fast'?)" in result.stderr
    assert launcher.calls == []


def test_what_another_machine_may_have_is_not_refused(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    path = write((1, 1), NOWHERE)
    assert invoke("run", "--nnodes=2", path, launcher.script).exit_code == 0
    assert invoke("run", "--no-python", path, launcher.script).exit_code == 0
    path = write((1, 1), NOWHERE, servers=[[0], [1]])
    assert invoke("run", path, launcher.script).exit_code == 0
    path = write((1, 1), '[[links]]\ntransport = ["fasst", "loopback"]\n')
    assert invoke("run", path, launcher.script).exit_code == 0
    assert len(launcher.calls) == 4


def test_a_rule_for_links_between_servers_is_not_asked_about_one(
    invoke: Invoke, write: Write, launcher: Torchrun, site: Site
) -> None:
    site.transport("fast")
    rules = NOWHERE.replace("[[links]]", "[[links]]\nsame_server = false") + FAST
    assert invoke("run", write((1, 1), rules), launcher.script).exit_code == 0


def test_options_of_a_transport_that_nobody_has_are_noted(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    path = write((1, 1), "[transports.shmm]\n")
    result = invoke("run", path, launcher.script)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("note: transports.shmm is not used here: ")
    assert result.stderr.endswith("(did you mean 'shm'?)\n")


def test_what_plugins_print_is_no_output(
    invoke: Invoke, write: Write, launcher: Torchrun, site: Site
) -> None:
    site.transport("fast", before="print('hello from the plugin')")
    result = invoke("run", write((1, 1), FAST), launcher.script)
    assert (result.exit_code, result.stdout) == (0, "")


# How a run ended


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            ChildFailedError("x", {1: ProcessFailure(1, 99, -signal.SIGKILL, "none")}),
            1,
            "Error: rank 1 was killed by SIGKILL\n",
        ),
        (SignalException("x", signal.SIGINT), 1, "Error: stopped by SIGINT; no rank is left\n"),
        (DistNetworkError("no route"), 1, "Error: the nodes cannot meet: no route\n"),
        (RendezvousError("closed"), 1, "Error: the nodes cannot meet: closed\n"),
        (ValueError("no such backend"), 2, "Error: no such backend\n"),
        (AssertionError("max_restarts must be >= 0"), 2, "Error: max_restarts must be >= 0\n"),
        (KeyboardInterrupt(), 1, "Aborted!\n"),
    ],
)
def test_a_failure_is_told_in_its_own_words(
    invoke: Invoke,
    write: Write,
    launcher: Torchrun,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    launcher.error = error
    result = invoke("run", write((1, 1)), launcher.script)
    assert result.exit_code == code
    assert result.stderr.endswith(text)
    assert result.stdout == ""


def test_the_cause_of_a_failed_rendezvous_is_told(
    invoke: Invoke, write: Write, launcher: Torchrun
) -> None:
    launcher.error = RendezvousError("see inner exception")
    launcher.error.__cause__ = ConnectionError("nobody there")
    result = invoke("run", write((1, 1)), launcher.script)
    assert result.stderr == "Error: the nodes cannot meet: nobody there\n"


# In earnest

TRAIN = """
import os, sys, torch, stagelink

plan = stagelink.Plan.load(os.environ["STAGELINK_PLAN"])
with stagelink.connect(plan) as comm, comm.train(microbatches=2) as session:
    for microbatch in session.mine:
        if comm.rank == 0:
            session.send("ab", torch.ones(2, requires_grad=True), microbatch)
            assert session.recv_grad("ab", microbatch).tolist() == [3.0, 3.0]
        else:
            hidden = session.recv("ab", microbatch)
            if "fail" in sys.argv:
                raise ValueError("rank 1 cannot go on \u2192")
            session.send_grad("ab", 3 * hidden.detach(), microbatch)
os.write(1, f"rank {comm.rank} is through\\n".encode())
"""


def command(plan: Path, source: str, *arguments: str) -> list[str]:
    script = plan.with_name("train.py")
    script.write_text(source)
    return [sys.executable, "-m", "stagelink", "run", str(plan), str(script), *arguments]


def run(plan: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(plan, source, *arguments), capture_output=True, check=False, text=True
    )


def test_two_ranks_train(write: Write) -> None:
    done = run(write((1, 1), GLOO), TRAIN)
    assert done.stderr == ""
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["rank 0 is through", "rank 1 is through"]


def test_the_rank_that_failed_is_told_last_and_no_torchrun_report(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stderr has few characters, too."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run(write((1, 1), GLOO), TRAIN, "fail")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("Traceback") == 1
    assert "rank 1: Traceback" in done.stderr
    assert "ValueError: rank 1 cannot go on \\u2192\n" in done.stderr
    assert done.stderr.endswith("Error: rank 1 failed: ValueError: rank 1 cannot go on ->\n")
    assert "torch/distributed" not in done.stderr


def test_ctrl_c_ends_all_ranks(write: Write) -> None:
    # In one piece: the ranks share what they write to.
    wait = "import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nsignal.pause()\n"
    with subprocess.Popen(
        command(write((1, 1)), wait), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launched:
        assert launched.stdout is not None
        pids = [int(launched.stdout.readline()) for _ in range(2)]
        launched.send_signal(signal.SIGINT)
        _, errors = launched.communicate()
    assert launched.returncode == 1
    assert errors == "Error: stopped by SIGINT; no rank is left\n"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
