"""Work of a rank process: run a task, send its outcome home, wait for the next."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from stagelink.errors import UsageError
from stagelink.testing.jobs import Task

__all__ = ["Event", "Failed", "Returned", "report", "serve"]


@dataclass(frozen=True, slots=True)
class Event:
    """The rank reported something."""

    name: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Returned:
    """The rank's function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank's function raised; ``error`` is the traceback's text."""

    error: str


class _Home:
    """Connection of a rank process to the one that started it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connection: Connection | None = None

    def send(self, message: bytes) -> None:
        if self.connection is None:
            raise UsageError("report() is for a function that runs on a rank process")
        with self._lock:
            self.connection.send_bytes(message)


_HOME = _Home()


def report(event: str, value: Any = None) -> None:
    """Tell the test's process something, from a function that runs on a rank process.

    Args:
        event: a name to wait for with `RankProcesses.wait_for`.
        value: anything that can be pickled.

    Raises:
        UsageError: this process is no rank process.
    """
    _HOME.send(pickle.dumps(Event(event, value)))


def serve(connection: Connection, directory: str) -> None:
    """Run tasks until the other end of the pipe is closed.

    Args:
        connection: tasks come in, messages go out.
        directory: where the files for stdout and stderr are made.
    """
    _own_output(directory)
    torch.set_num_threads(1)
    _HOME.connection = connection
    _HOME.send(b"")
    while (task := _next_task(connection)) is not None:
        _clear_output()
        # Ends this process by the kernel's hand if the one that started it is no longer there to.
        signal.alarm(math.ceil(task.limit_s))
        reply = _attempt(task)
        signal.alarm(0)
        sys.stdout.flush()
        _HOME.send(reply)


def _own_output(directory: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(Path(directory, name), flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.enable()  # stacks on SIGABRT, SIGSEGV and the like, to the new stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _clear_output() -> None:
    for descriptor in (1, 2):
        os.ftruncate(descriptor, 0)


def _next_task(connection: Connection) -> Task | None:
    try:
        task: Task = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError, KeyboardInterrupt):  # nobody is there, or Ctrl-C in the terminal
        return None
    return task


def _attempt(task: Task) -> bytes:
    """Run the task; its end as a message. A result that cannot be pickled is a failure, too."""
    try:
        return pickle.dumps(Returned(task.run()))
    except BaseException as error:  # also SystemExit and Ctrl-C: the test wants to see them
        return pickle.dumps(Failed("".join(traceback.format_exception(error))))
