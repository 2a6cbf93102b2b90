"""Signal handlers' exceptions, told from errors of the code that they interrupt.

Python runs a signal handler in the middle of whatever the main thread does, so its exception comes
out of code that catches exceptions of its own. It is the user's: it is never taken for the error
of a socket or a transport, and leaves the call that waits as it is.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType, FrameType
from typing import Any


def in_main_thread() -> bool:
    """Whether this is the main thread, where signal handlers run.

    By number: `threading.current_thread` makes an entry, which stays, for a thread of a library's.
    """
    return threading.get_ident() == threading.main_thread().ident


def raised_by_signal_handler(error: BaseException) -> bool:
    """Whether an exception that was caught came out of a signal handler written in Python.

    Told by its traceback: somewhere in it a function has been called that is installed as a
    handler, or was given the very frame that it interrupted. Always False on other threads, where
    no handler runs; and in the function where the exception was raised without a handler, so
    ``KeyboardInterrupt`` of Python's own handler is not known here.
    """
    if not in_main_thread():
        return False
    step = error.__traceback__
    installed: frozenset[CodeType] | None = None
    while step is not None and step.tb_next is not None:
        handler = step.tb_next.tb_frame
        if _was_given(handler, step.tb_frame):
            return True
        installed = _installed() if installed is None else installed
        if handler.f_code in installed:
            return True
        step = step.tb_next
    return False


def stops_caller(error: BaseException) -> bool:
    """Whether an exception must leave the waiting call as it is: a handler's, Ctrl-C, an exit."""
    return not isinstance(error, Exception) or raised_by_signal_handler(error)


def _was_given(handler: FrameType, interrupted: FrameType) -> bool:
    code = handler.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _VARARGS)
    values = handler.f_locals
    for name in code.co_varnames[:count]:
        value = values.get(name)
        if value is interrupted:
            return True
        if isinstance(value, tuple) and any(item is interrupted for item in value):
            return True
    return False


_VARARGS = 0x04
"""CO_VARARGS: the function takes ``*args``."""


def _installed() -> frozenset[CodeType]:
    codes = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return frozenset(code for code in codes if code is not None)


def _code_of(handler: Any) -> CodeType | None:
    if not callable(handler):  # the system's own
        return None
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
