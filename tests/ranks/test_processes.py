"""Ranks as processes: results and failures come home, and warm processes are used again."""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import os
import re
import select
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stagelink.errors import ConnectError, UsageError
from stagelink.ranks.job import Job
from stagelink.ranks.worker import start_workers
from stagelink.testing import (
    RankFailedError,
    RankProcesses,
    no_leaks,
    report,
    run_fresh,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

    from stagelink.testing import Outcome, RankPool


@dataclass(frozen=True)
class Parcel:
    """A class of a test module, which is not importable by name everywhere."""

    rank: int
    text: str


def pid_of(rank: int, world_size: int, store: Store) -> int:
    return os.getpid()


def meet(rank: int, world_size: int, store: Store, text: str) -> Parcel:
    store.set(str(rank), text)
    store.wait([str(other) for other in range(world_size)])
    return Parcel(world_size, store.get(str(world_size - 1 - rank)).decode())


def forward_parcel(rank: int, world_size: int, store: Store, parcel: Parcel) -> Parcel:
    return Parcel(rank, parcel.text)


def count_to(rank: int, world_size: int, store: Store, size: int) -> torch.Tensor:
    return torch.arange(size) + rank


def torch_threads(rank: int, world_size: int, store: Store) -> int:
    return torch.get_num_threads()


def raise_on_one(rank: int, world_size: int, store: Store) -> int:
    if rank == 1:
        sys.stdout.write("seen on stdout")
        sys.stderr.write("seen on stderr")
        raise ZeroDivisionError("nothing to divide")
    return rank


def write_words(rank: int, world_size: int, store: Store, words: str) -> None:
    os.write(2, words.encode())


def leave(rank: int, world_size: int, store: Store, how: int) -> None:
    os._exit(how)


def leave_politely(rank: int, world_size: int, store: Store) -> None:
    sys.exit("enough")


def wait_for_ever(rank: int, world_size: int, store: Store) -> None:
    report("waiting", rank)
    threading.Event().wait()


def hang_in_c(rank: int, world_size: int, store: Store) -> None:
    """Blocks with the interpreter's lock held: nothing in Python can interrupt it."""
    report("waiting")
    ctypes.PyDLL(None).pause()


def end_by_signal(rank: int, world_size: int, store: Store, number: int) -> None:
    os.kill(os.getpid(), number)


def fork_and_die(rank: int, world_size: int, store: Store) -> None:
    """The child keeps the rank's end of the pipe open beyond the rank's death."""
    child = os.fork()
    if child == 0:
        signal.pause()
    report("forked", child)
    os.kill(os.getpid(), signal.SIGKILL)


def close_everything(rank: int, world_size: int, store: Store) -> None:
    os.closerange(3, 1024)
    threading.Event().wait()


def return_a_lock(rank: int, world_size: int, store: Store) -> Any:
    return threading.Lock()


def report_twice(rank: int, world_size: int, store: Store) -> str:
    report("first", 1)
    report("second", torch.ones(2))
    store.wait(["go"])
    return "gone"


def report_rank(rank: int, world_size: int, store: Store) -> int:
    report("rank", rank)
    return rank


def status_of_server(rank: int, world_size: int, store: Store) -> str:
    return Path(f"/proc/{os.getppid()}/status").read_text()


def wait_or_raise(rank: int, world_size: int, store: Store) -> None:
    if rank == 0:
        report("there", rank)
        store.set("reported", "")
        threading.Event().wait()
    store.wait(["reported"])
    raise_on_one(rank, world_size, store)


@pytest.fixture(autouse=True)
def _no_process_left(rank_pool: RankPool) -> Iterator[None]:
    with no_leaks("processes", pool=rank_pool):
        yield


def failure(pool: RankPool, function: Any, world_size: int, *args: Any) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        pool.run(function, world_size, *args)
    return caught.value


def outcome_of(function: Any, *args: Any) -> Outcome:
    with run_fresh(function, 1, *args) as ranks:
        return ranks.outcomes(timeout_s=20)[0]


def test_results_come_by_rank(rank_pool: RankPool) -> None:
    texts = rank_pool.run(meet, 3, "hello")
    assert texts == [Parcel(3, "hello")] * 3


def test_every_run_has_a_fresh_store(rank_pool: RankPool) -> None:
    assert rank_pool.run(meet, 2, "first")[0].text == "first"
    assert rank_pool.run(meet, 2, "second")[0].text == "second"


def test_arguments_of_the_test_modules_classes(rank_pool: RankPool) -> None:
    assert rank_pool.run(forward_parcel, 2, Parcel(9, "x")) == [Parcel(0, "x"), Parcel(1, "x")]


FOREIGN_MODULE = """
from dataclasses import dataclass

@dataclass
class Note:
    text: str

def shout(rank, world_size, store, note):
    return Note(note.text.upper())
"""


@pytest.mark.parametrize("name", ["no_name_leads_here", "colorsys"])  # nothing, something else
def test_a_module_that_no_name_leads_to(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "notes.py"
    file.write_text(FOREIGN_MODULE)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert rank_pool.run(module.shout, 1, module.Note("hi")) == [module.Note("HI")]


def test_tensors_come_by_value_and_of_any_size(rank_pool: RankPool) -> None:
    small, large = rank_pool.run(count_to, 2, 1_000_000)
    assert torch.equal(small + 1, large)


def test_a_rank_runs_one_torch_thread(rank_pool: RankPool) -> None:
    assert rank_pool.run(torch_threads, 1) == [1]


def test_processes_are_used_again(rank_pool: RankPool) -> None:
    first = rank_pool.run(pid_of, 2)
    assert rank_pool.run(pid_of, 2) == first
    assert len({*first, os.getpid()}) == 3


def test_fewer_and_more_ranks_than_before(rank_pool: RankPool) -> None:
    two = rank_pool.run(pid_of, 2)
    assert rank_pool.run(pid_of, 1) == two[:1]
    assert rank_pool.run(pid_of, 3)[:2] == two


def test_an_exception_comes_home_with_its_traceback(rank_pool: RankPool) -> None:
    error = failure(rank_pool, raise_on_one, 2)
    text = str(error)
    assert text.startswith("1 of 2 ranks of 'raise_on_one' failed\n\nrank 1 raised\nTraceback")
    assert 'raise ZeroDivisionError("nothing to divide")' in text
    assert "seen on stdout" in text
    assert "seen on stderr" in text
    assert [outcome.ok for outcome in error.outcomes] == [True, False]


def test_output_of_an_earlier_run_is_not_shown(rank_pool: RankPool) -> None:
    rank_pool.run(write_words, 2, "old words")
    assert "old words" not in str(failure(rank_pool, raise_on_one, 2))


def test_a_failed_run_costs_its_processes_only(rank_pool: RankPool) -> None:
    before = rank_pool.run(pid_of, 3)
    failure(rank_pool, raise_on_one, 2)
    after = rank_pool.run(pid_of, 3)
    assert not set(after) & set(before[:2])
    assert before[2] in after


def test_a_process_that_died_between_runs_is_replaced(rank_pool: RankPool) -> None:
    (pid,) = rank_pool.run(pid_of, 1)
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([process], [], [])
    os.close(process)
    assert rank_pool.run(pid_of, 1) != [pid]


def test_sys_exit_is_a_failure(rank_pool: RankPool) -> None:
    assert "SystemExit: enough" in str(failure(rank_pool, leave_politely, 1))


def test_a_result_that_cannot_be_pickled_is_a_failure(rank_pool: RankPool) -> None:
    assert "cannot pickle '_thread.lock' object" in str(failure(rank_pool, return_a_lock, 1))


def test_a_process_that_leaves_is_reported(rank_pool: RankPool) -> None:
    error = failure(rank_pool, leave, 1, 3)
    assert "rank 0 ended with exit code 3 inside its function" in str(error)
    assert error.outcomes[0].signal is None


def test_even_with_exit_code_0(rank_pool: RankPool) -> None:
    assert "rank 0 ended with exit code 0" in str(failure(rank_pool, leave, 1, 0))


@pytest.mark.parametrize("function", [wait_for_ever, hang_in_c])
def test_a_hang_is_ended_with_the_stacks_of_every_rank(rank_pool: RankPool, function: Any) -> None:
    with pytest.raises(RankFailedError) as caught:
        rank_pool.run(function, 2, timeout_s=0.5)
    text = str(caught.value)
    assert text.count("still ran after 0.5 s") == 2
    assert text.count(f"in {function.__name__}") == 2


def test_a_stopped_rank_shows_its_stacks_too() -> None:
    with run_fresh(wait_for_ever, 1) as ranks:
        ranks.wait_for(0, "waiting")
        ranks.kill(0, signal.SIGSTOP)
        (outcome,) = ranks.outcomes(timeout_s=0.1)
    assert outcome.hung_s == 0.1
    assert "in wait_for_ever" in outcome.stderr


def test_a_signal_to_a_rank_that_has_ended_is_nothing() -> None:
    with run_fresh(end_by_signal, 1, signal.SIGKILL) as ranks:
        assert not ranks.outcomes()[0].ok
        while Path(f"/proc/{ranks.pids[0]}").exists():  # its parent, the fork server, is told
            os.sched_yield()
        ranks.kill(0)


def test_sigkill_is_reported_and_the_others_go_on() -> None:
    with run_fresh(wait_for_ever, 2) as ranks:
        assert [ranks.wait_for(rank, "waiting") for rank in (0, 1)] == [0, 1]
        ranks.kill(1)
        ranks.kill(0, signal.SIGINT)
        interrupted, killed = ranks.outcomes(timeout_s=20)
    assert "rank 1 was ended by SIGKILL" in str(killed)
    assert killed.signal == signal.SIGKILL
    assert "KeyboardInterrupt" in str(interrupted.error)


def test_a_crash_shows_its_stacks() -> None:
    outcome = outcome_of(end_by_signal, signal.SIGSEGV)
    assert outcome.signal == signal.SIGSEGV
    assert "in end_by_signal" in outcome.stderr


def test_a_death_is_seen_although_a_child_holds_the_pipe() -> None:
    with run_fresh(fork_and_die, 1) as ranks:
        child = ranks.wait_for(0, "forked")
        (outcome,) = ranks.outcomes(timeout_s=20)
        os.kill(child, signal.SIGKILL)
    assert outcome.signal == signal.SIGKILL


def test_a_rank_ends_itself_when_nobody_else_does() -> None:
    workers = start_workers(1)
    with RankProcesses[None](Job.of(wait_for_ever, ()), workers, limit_s=1) as ranks:
        assert ranks.outcomes()[0].signal == signal.SIGALRM


def test_a_process_that_is_not_there_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagelink.ranks.worker.START_S", 0)
    with pytest.raises(ConnectError, match="did not start within 0 s"):
        run_fresh(pid_of, 2)


def test_a_process_that_ends_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagelink.ranks.worker.serve", operator.eq)  # returns at once
    with pytest.raises(ConnectError, match=r"did not start .* \(exit code 0\)"):
        run_fresh(pid_of, 1)


def test_a_rank_that_closes_its_pipe_is_ended() -> None:
    outcome = outcome_of(close_everything)
    assert outcome.signal == signal.SIGABRT
    assert "in close_everything" in outcome.stderr


def test_fresh_ranks_are_new_processes() -> None:
    pids: list[int] = []
    for _ in range(2):
        with run_fresh(pid_of, 1) as ranks:
            pids += ranks.pids
            assert list(ranks.pids) == ranks.results()
    assert len(set(pids)) == 2


def test_leaving_the_block_ends_the_ranks() -> None:
    with run_fresh(wait_for_ever, 2) as ranks:
        pids = ranks.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_events_are_waited_for_by_name() -> None:
    with run_fresh(report_twice, 1) as ranks:
        assert torch.equal(ranks.wait_for(0, "second"), torch.ones(2))
        with pytest.raises(TimeoutError, match="rank 0 did not report 'first' within 0"):
            ranks.wait_for(0, "first", timeout_s=0)


def test_waiting_for_an_event_of_a_rank_that_has_ended() -> None:
    with (
        run_fresh(raise_on_one, 2) as ranks,
        pytest.raises(RankFailedError, match="nothing to divide"),
    ):
        ranks.wait_for(1, "never")


def test_what_a_rank_reports_is_seen_as_it_comes_until_all_have_ended() -> None:
    with run_fresh(report_rank, 2) as ranks:
        assert list(ranks.reports(1)) == [1]
        assert ranks.results(timeout_s=0) == [0, 1]


def test_reports_end_with_the_first_failure() -> None:
    with run_fresh(wait_or_raise, 2) as ranks:
        assert list(ranks.reports(0)) == [0]
        waits, raised = ranks.outcomes(timeout_s=0.1)
    assert waits.hung_s == 0.1
    assert raised.raised == "ZeroDivisionError: nothing to divide"


def test_ctrl_c_is_for_ranks_that_serve(rank_pool: RankPool) -> None:
    """Not for what loads torch for them, nor for those that are being started."""
    (status,) = rank_pool.run(status_of_server, 1)
    (mask,) = re.findall(r"SigBlk:\s*(\w+)", status)
    assert int(mask, 16) & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_only_functions_that_another_process_can_find(rank_pool: RankPool) -> None:
    with pytest.raises(UsageError, match="<lambda>' cannot run on a rank process"):
        rank_pool.run(lambda rank, world_size, store: rank, 1)


def test_report_is_for_rank_processes() -> None:
    with pytest.raises(UsageError, match="runs on a rank process"):
        report("here")
