"""Finding and loading UCX's library: the system's, or the one of the published wheel.

UCX does things when it is loaded that suit an MPI job, and not a guest in somebody's process: it
catches SIGHUP, writes its log to standard output, and patches the C library's functions for memory
while other threads may be in them. Each can be turned off by an environment variable only, which
is there while the library is loaded and at no other time.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stagelink.transport.interrupts import stops_caller
from stagelink_ucx.functions import Functions

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LibraryError", "load"]

_NAME = "libucp.so.0"
_LEAST = (1, 13)
_EXTRA = "pip install 'stagelink-ucx[cuda12]', or [cuda13]"

_WHILE_LOADING = {
    "UCX_DEBUG_SIGNO": "0",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "fatal",  # to standard output; what goes wrong comes as an exception
    "UCX_MEMTYPE_CACHE": "no",  # of GPUs' memory, by hooks in their libraries
    "UCX_MEM_EVENTS": "no",
    "UCX_VFS_ENABLE": "no",  # a thread, where it is built with it
}
"""Where the user's environment says nothing else."""

_lock = threading.Lock()
_loaded: dict[str, Functions] = {}


class LibraryError(Exception):
    """UCX is not there, or too old."""


def load(file: str | None = None) -> Functions:
    """Load UCX's library, once for a process; it takes a moment, the first time.

    Args:
        file: name or path of ``libucp``; None: the system's, else that of the wheel. (A process
            can have but one of them: the libraries that it needs have equal names in both.)

    Raises:
        LibraryError: there is none, or it is too old.
    """
    errors = []
    with _lock:
        for name in [_NAME, *_of_wheel()] if file is None else [file]:
            try:
                if name not in _loaded:
                    _loaded[name] = _open(name)
            except OSError as error:
                if stops_caller(error):
                    raise
                errors.append(str(error))
            else:
                return _loaded[name]
    raise LibraryError(f"UCX cannot be loaded: {', '.join(errors)}; {_EXTRA}")


def _open(file: str) -> Functions:
    try:
        with _environment():
            functions = Functions(file)
    except AttributeError as error:
        raise LibraryError(f"{file} is no UCX, or one that is too old: {error}") from error
    if functions.version < _LEAST:
        least, found = (".".join(map(str, each)) for each in (_LEAST, functions.version))
        raise LibraryError(f"{file} is UCX {found}, it takes {least}; {_EXTRA}")
    return functions


def _of_wheel() -> list[str]:
    spec = importlib.util.find_spec("libucx")
    folders = (spec and spec.submodule_search_locations) or ()
    files = (Path(folder, "lib", _NAME) for folder in folders)
    return [str(file) for file in files if file.exists()]


@contextmanager
def _environment() -> Iterator[None]:
    # Not by os.environ: what other threads start meanwhile has nothing to do with it.
    missing = [name for name in _WHILE_LOADING if name not in os.environ]
    try:
        for name in missing:
            os.putenv(name, _WHILE_LOADING[name])
        yield
    finally:
        for name in missing:
            os.unsetenv(name)
