"""One rank process, seen from both ends of its pipe.

The process waits for a task, runs its function, sends home what came of it, and waits again.
Tasks and results are pickled: they travel between a test and processes that it started itself,
never on stagelink's wire.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import math
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import FileStore

from stagelink.errors import ConnectError, UsageError
from stagelink.testing.leaks import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import ModuleType

__all__ = ["Event", "Failed", "Job", "Returned", "Task", "Worker", "report", "start_rank_server"]

START_S = 60.0
"""Seconds for a process to be there; the first one waits until torch is loaded."""

_CONTEXT = multiprocessing.get_context("forkserver")
# pytest, because a child imports its parent's main module. What is not installed is skipped.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "stagelink", "pytest"])


@dataclass(frozen=True, slots=True)
class Job:
    """A function and its arguments, for another process to call.

    Attributes:
        module: the name of the module that the function stands in.
        file: that module's file: tests' modules need not be importable by name.
        function: its qualified name.
        arguments: pickled tuple of what comes after rank, world size and store.
    """

    module: str
    file: str
    function: str
    arguments: bytes

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
        module = _imported(self.module, self.file) or _import_file(self.module, self.file)
        found: Callable[..., Any] = attrgetter(self.function)(module)
        return found


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's part of a job.

    Attributes:
        job: what to call.
        rank: its first argument.
        world_size: its second argument.
        store: path of the file of its third argument.
        limit_s: seconds after which the process ends itself.
    """

    job: Job
    rank: int
    world_size: int
    store: str
    limit_s: float

    def run(self) -> Any:
        """Call the function as this rank."""
        function = self.job.load()  # first: the arguments may be of classes of its module
        arguments = pickle.loads(self.job.arguments)
        store = FileStore(self.store, self.world_size)
        return function(self.rank, self.world_size, store, *arguments)


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
    """The way from a rank process to the one that started it."""

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


def start_rank_server() -> None:
    """Start the process that rank processes are forked from, unless it is there; returns at once.

    The first rank process does the same. Called before, it keeps the server and its pipes out of
    what `no_leaks` counts; it lives as long as this process.
    """
    forkserver.ensure_running()


class Worker:
    """The starting process's end: one live rank process and its pipe.

    Attributes:
        descriptors: the file descriptors that it costs the starting process.
    """

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="stagelink-rank-")
        before = open_descriptors()
        self.connection, theirs = _CONTEXT.Pipe()
        # A daemon, so that one which hangs cannot hold up the end of the test's process.
        self.process = _CONTEXT.Process(
            target=_serve, args=(theirs, self._directory.name), name="stagelink-rank", daemon=True
        )
        self.process.start()
        theirs.close()
        # By looking, since multiprocessing has some that it does not tell of.
        self.descriptors = open_descriptors().keys() - before.keys()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.ident or 0

    def wait_ready(self) -> None:
        """Block until the process takes tasks.

        Raises:
            ConnectError: it ended instead, or was not there after `START_S`.
        """
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

    def begin(self, task: Task) -> None:
        """Have the idle process run a task; returns at once."""
        self.connection.send_bytes(pickle.dumps(task))

    def output(self, stream: str) -> str:
        """What the current task wrote to ``"stdout"`` or ``"stderr"`` so far."""
        file = Path(self._directory.name, stream)
        return file.read_text(errors="replace") if file.exists() else ""

    def dump_and_end(self, grace_s: float = 5.0) -> None:
        """End the process, with the stacks of its threads on its stderr where it still can."""
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process must go on to dump
            if self.process.is_alive():
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


def _serve(connection: Connection, directory: str) -> None:
    """The process's main function: run tasks until the other end of the pipe is closed."""
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


def _imported(name: str, file: str) -> ModuleType | None:
    """The module if it can be imported by name and is really that file."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return module if os.path.abspath(getattr(module, "__file__", None) or "") == file else None


def _import_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # arguments may be pickled instances of its classes
    spec.loader.exec_module(module)
    return module
