"""Jobs of rank processes: a function found by its module, arguments, a rank.

Jobs are pickled: they travel from a test to processes that it started itself, never on stagelink's
wire.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from torch.distributed import FileStore

from stagelink.errors import UsageError

__all__ = ["Job", "Task"]


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
