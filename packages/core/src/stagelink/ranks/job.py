"""Jobs of rank processes: a function found by its module, and a rank that runs it.

Jobs are pickled: they travel from a process to others that it started itself, never on stagelink's
wire.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import math
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import FileStore

from stagelink.errors import UsageError
from stagelink.ranks.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Job:
    """A function and its arguments, for another process to call."""

    module: str
    file: str  # tests' modules need not be importable by name
    function: str
    arguments: bytes  # pickled tuple of what comes after rank, world size and store

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Job:
        """Describe a call of a function at the top level of a module's file; else `UsageError`."""
        name = function.__qualname__
        file = getattr(sys.modules.get(function.__module__), "__file__", None)
        if "<" in name or file is None:
            raise UsageError(
                f"{name!r} cannot run on a rank process: it must stand at the top level of a "
                "module that has a file"
            )
        return cls(function.__module__, os.path.abspath(file), name, pickle.dumps(arguments))

    def load(self) -> Callable[..., Any]:
        """Find the function in this process; imports its module."""
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            module = None
        if module is None or os.path.abspath(getattr(module, "__file__", None) or "") != self.file:
            module = _import_file(self.module, self.file)
        found: Callable[..., Any] = attrgetter(self.function)(module)
        return found


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's part of a job."""

    job: Job
    rank: int
    world_size: int
    store: str  # path of the file of the function's third argument
    limit_s: float  # after so many seconds the process ends itself

    def run(self) -> Any:
        """Call the function as this rank."""
        function = self.job.load()  # first: the arguments may be of classes of its module
        arguments = pickle.loads(self.job.arguments)
        store = FileStore(self.store, self.world_size)
        return function(self.rank, self.world_size, store, *arguments)


def _import_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # arguments may be pickled instances of its classes
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a rank to the process that started it."""

    name: str
    value: Any = None


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
    """Tell the process that started this one something, from a function that it runs as a rank.

    Args:
        event: a name to wait for with `RankProcesses.wait_for`.
        value: anything that can be pickled.

    Raises:
        UsageError: this process is no rank process.
    """
    _HOME.send(pickle.dumps(Report(event, value)))


def serve(connection: Connection, directory: str) -> None:
    """Run tasks until the pipe's other end closes; stdout and stderr are files in a directory."""
    _own_output(directory)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `start_rank_server`
    torch.set_num_threads(1)
    _HOME.connection = connection
    _HOME.send(b"")
    while (task := _next_task(connection)) is not None:
        for output in (1, 2):
            os.ftruncate(output, 0)
        # Ends this process by the kernel's hand if the one that started it is no longer there to.
        signal.alarm(math.ceil(task.limit_s))
        reply = _attempt(task)
        signal.alarm(0)
        sys.stdout.flush()
        _HOME.send(reply)


def _own_output(directory: str) -> None:
    """Write to files in a directory of the process that started this one."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            file = os.open(Path(directory, name), flags, 0o600)
        except FileNotFoundError:  # that one was interrupted in the start, and has gone
            sys.exit()
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.enable()  # stacks on SIGABRT, SIGSEGV and the like, to the new stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _next_task(connection: Connection) -> Task | None:
    try:
        task: Task = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError, KeyboardInterrupt):  # nobody is there, or Ctrl-C in the terminal
        return None
    return task


def _attempt(task: Task) -> bytes:
    """Run the task; its outcome, pickled. A result that cannot be pickled is a failure, too."""
    try:
        return pickle.dumps(Outcome(task.rank, value=task.run()))
    except BaseException as error:  # also SystemExit and Ctrl-C: the starter wants to see them
        return pickle.dumps(Outcome.raised_by(task.rank, error))
