"""Jobs of rank processes: a function found by its module, a rank that runs it, and how that ends.

Jobs are pickled: they travel from a test to processes that it started itself, never on stagelink's
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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import FileStore

from stagelink.errors import StagelinkError, UsageError

__all__ = ["Event", "Job", "Outcome", "RankFailedError", "Task", "report", "serve"]


@dataclass(frozen=True, slots=True)
class Job:
    """A function and its arguments, for another process to call."""

    module: str
    file: str  # tests' modules need not be importable by name
    function: str
    arguments: bytes  # pickled tuple of what comes after rank, world size and store

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Job:
        """Describe a call.

        Raises:
            UsageError: the function does not stand at the top level of a module's file.
        """
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
class Outcome:
    """End of one rank's function.

    Attributes:
        rank: the rank.
        value: what the function returned.
        error: the traceback's text, when the function raised.
        hung_s: seconds after which the rank was killed, still running; ``stderr`` has its stacks.
        exit_code: of a process that ended before its function did: negative for a signal.
        stdout: what the rank wrote there (processes only).
        stderr: what the rank wrote there (processes only).
    """

    rank: int
    value: Any = None
    error: str | None = None
    hung_s: float | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.hung_s is None and self.exit_code is None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process, if one did."""
        if self.hung_s is not None or self.exit_code is None or self.exit_code >= 0:
            return None
        return signal.Signals(-self.exit_code)

    def __str__(self) -> str:
        return "\n".join(filter(None, [self._headline(), self.error, self.stdout, self.stderr]))

    def _headline(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised"
        if self.hung_s is not None:
            return f"rank {self.rank} still ran after {self.hung_s:g} s"
        if self.signal is not None:
            return f"rank {self.rank} was ended by {self.signal.name}"
        if self.exit_code is not None:
            return f"rank {self.rank} ended with exit code {self.exit_code} inside its function"
        return f"rank {self.rank} returned"


class RankFailedError(StagelinkError, RuntimeError):
    """Some ranks of a test did not return; the text has each one's traceback, signal or stacks.

    Args:
        name: of the function that they ran.
        outcomes: of all ranks.
    """

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        parts = [f"{len(failed)} of {len(outcomes)} ranks of {name!r} failed", *map(str, failed)]
        super().__init__("\n\n".join(parts))


@dataclass(frozen=True, slots=True)
class Event:
    """The rank reported something."""

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
    """Tell the test's process something, from a function that runs on a rank process.

    Args:
        event: a name to wait for with `RankProcesses.wait_for`.
        value: anything that can be pickled.

    Raises:
        UsageError: this process is no rank process.
    """
    _HOME.send(pickle.dumps(Event(event, value)))


def serve(connection: Connection, directory: str) -> None:
    """Run tasks until the pipe's other end closes; stdout and stderr are files in a directory."""
    _own_output(directory)
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
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(Path(directory, name), flags, 0o600)
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
    except BaseException as error:  # also SystemExit and Ctrl-C: the test wants to see them
        failure = "".join(traceback.format_exception(error))
        return pickle.dumps(Outcome(task.rank, error=failure))
