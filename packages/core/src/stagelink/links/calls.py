"""Calling a transport: its exceptions as errors of this library's, its close on a thread."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

import torch

from stagelink.deadline import Deadline
from stagelink.errors import StagelinkError, TransportError
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.streams import Stream

logger = logging.getLogger("stagelink")

GRACE_S = 0.2
"""What a step of closing gets when those before it have used up the time."""


def give_back(
    what: str, close: Callable[[Deadline], None], deadline: Deadline, stream: Stream | None = None
) -> None:
    """Call a ``close`` of a transport's, on a thread that is left behind where it does not return.

    A moment is left for it where the deadline has passed. The stream is current on the thread;
    without one the caller's device is. Raises where it does not return, or raises; see `mapped`.
    """
    errors: list[BaseException] = []
    here = _device_here() if stream is None else stream.entered
    taken, done = threading.Lock(), threading.Event()

    def call() -> None:
        if not taken.acquire(blocking=False):
            return
        try:
            with here():
                close(deadline)
        except BaseException as error:  # for the one who waits
            errors.append(error)
        done.set()

    try:
        # Below `threading`, whose `start` waits for a sign of a thread that may never begin: where
        # memory is short, or the interpreter ends, it is called here.
        _thread.start_new_thread(call, ())
        done.wait(GRACE_S)
    except (RuntimeError, MemoryError) as error:
        logger.debug("closing %s: no thread for it: %s", what, error)
    call()
    if not done.wait(max(deadline.remaining_s, GRACE_S) + GRACE_S):
        raise TransportError(f"closing {what}: it has not returned by its deadline")
    if errors:
        raise_mapped(f"closing {what}", errors[0])


def _device_here() -> Callable[[], AbstractContextManager[object]]:
    """The caller's CUDA device as a context for another thread, where CUDA is in use."""
    if not torch.cuda.is_initialized():
        return nullcontext
    return partial(torch.cuda.device, torch.cuda.current_device())


def raise_mapped(what: str, error: BaseException) -> NoReturn:
    """Raise `mapped`; but as it is what a signal handler raised while the transport worked."""
    if isinstance(error, StagelinkError) or stops_caller(error):
        raise error
    raise mapped(what, error) from error


def mapped(what: str, error: BaseException) -> StagelinkError:
    """A transport's exception as an error of this library's, with the exception as its cause."""
    if isinstance(error, StagelinkError):
        return error
    mapped = TransportError(f"{what}: {type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
