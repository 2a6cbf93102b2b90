"""One rank process as the process that started it sees it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory

from stagelink.errors import ConnectError
from stagelink.ranks.job import Task, serve
from stagelink.transport.host import open_descriptors

START_S = 60.0
"""Seconds for a process to be there; the first one waits until torch is loaded."""

_CONTEXT = multiprocessing.get_context("forkserver")
# pytest, where it runs, because a child imports its parent's main module.
_MAIN = {"pytest"} & sys.modules.keys()
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "stagelink", *_MAIN])


def start_rank_server() -> None:
    """Start the process that rank processes are forked from, unless it is there; returns at once.

    The first rank process does the same. Called before, it keeps the server and its pipes out of
    what `no_leaks` counts; it lives as long as this process. It and what it forks block SIGINT
    until they serve: Ctrl-C comes to every process of a terminal, and each would say where it was.
    """
    resource_tracker.ensure_running()  # unblocks SIGINT where it has to start one
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """One live rank process and its pipe."""

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="stagelink-rank-")
        before = open_descriptors()
        start_rank_server()
        self.connection, theirs = _CONTEXT.Pipe()
        # A daemon, so that one which hangs cannot hold up the end of this process.
        self.process = _CONTEXT.Process(
            target=serve, args=(theirs, self._directory.name), name="stagelink-rank", daemon=True
        )
        self.process.start()
        theirs.close()
        # the file descriptors that it costs the starting process; by looking, since
        # multiprocessing has some that it does not tell of
        self.descriptors = open_descriptors().keys() - before.keys()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.ident or 0

    def wait_ready(self) -> None:
        """Block until the process takes tasks, for `START_S`; `ConnectError` where it does not."""
        if self.connection.poll(START_S):
            try:
                self.connection.recv_bytes()
            except EOFError:
                self.process.join(START_S)
            else:
                return
        raise ConnectError(
            f"a rank process did not start within {START_S:g} s "
            f"(exit code {self.process.exitcode}): {self.output('stderr')}"
        )

    @property
    def idle(self) -> bool:
        """Whether the process, between two tasks, is there and has nothing to say any more."""
        return not self.connection.poll() and self.process.is_alive()

    def begin(self, task: Task) -> None:
        """Have the idle process run a task; returns at once."""
        with suppress(BrokenPipeError):  # it has died: found out when its result is waited for
            self.connection.send_bytes(pickle.dumps(task))

    def output(self, stream: str) -> str:
        """Output that the current task wrote to ``"stdout"`` or ``"stderr"`` so far."""
        file = Path(self._directory.name, stream)
        return file.read_text(errors="replace") if file.exists() else ""

    def dump_and_end(self, grace_s: float = 5.0) -> None:
        """End the process, with the stacks of its threads on its stderr where it still can."""
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process must go on to dump
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        self.process.join(grace_s)
        self._kill()

    def stop(self) -> None:
        """End the process by force; nothing in it is worth a farewell."""
        self._kill()
        self.process.close()
        self.connection.close()
        self._directory.cleanup()

    def _kill(self) -> None:
        self.process.kill()
        self.process.join()


def start_workers(count: int) -> list[Worker]:
    """Start processes and wait until all of them take tasks; if one does not, none is left."""
    workers: list[Worker] = []
    try:
        while len(workers) < count:  # all of them at once, then wait
            workers.append(Worker())
        for worker in workers:
            worker.wait_ready()
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    return workers
