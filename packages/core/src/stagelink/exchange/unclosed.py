"""Handlers that are not closed when the process ends: left then, so no peer takes them for dead.

An interpreter calls what is registered at its exit; a child that multiprocessing has forked skips
that, and calls its own finalizers only.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from multiprocessing.util import Finalize
from typing import Protocol


class Leaver(Protocol):
    """An object that is to be left."""

    def leave(self, error: BaseException | None) -> None:
        """Deliver what was sent, tell the peers and give everything back; never raises.

        The process ends with ``error``, if one is known.
        """


_open: weakref.WeakSet[Leaver] = weakref.WeakSet()
_finalizer: Finalize | None = None


def opened(leaver: Leaver) -> None:
    """Have something left when this process ends before it is `closed`."""
    global _finalizer  # noqa: PLW0603 - each process has one, and a fork must make its own
    _open.add(leaver)
    if _finalizer is None or not _finalizer.still_active():
        _finalizer = Finalize(None, _leave_behind_threads, exitpriority=0)


def closed(leaver: Leaver) -> None:
    """Forget what is left already, or about to be."""
    _open.discard(leaver)


def _leave_all(error: BaseException | None) -> None:
    for leaver in tuple(_open):
        closed(leaver)
        leaver.leave(error)


def _leave_at_exit() -> None:
    # Python keeps what ended its main thread; at a prompt it is only the last that was shown.
    _leave_all(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))


def _leave_behind_threads() -> None:
    """Leave when the threads of a child are through: it waits for them, but only after this."""
    if _open:
        error = sys.exception()
        if isinstance(error, SystemExit) and not error.code:
            error = None
        threading.Thread(target=_join_and_leave, args=(error,), name="stagelink-leave").start()


def _join_and_leave(error: BaseException | None) -> None:
    own = {threading.current_thread(), threading.main_thread()}
    while others := [
        thread for thread in threading.enumerate() if not thread.daemon and thread not in own
    ]:
        others[0].join()
    _leave_all(error)


# After the import of multiprocessing, and so run before its own.
atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=_open.clear)
