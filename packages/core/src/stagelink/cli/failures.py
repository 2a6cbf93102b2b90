"""Ends of the ranks that a command started, in words.

Which of several failed ranks was the first: the others often fail because that one did.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import click
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from stagelink.errors import AbortedError, PeerClosedError, PeerLostError

CONSEQUENCES = (AbortedError, PeerClosedError, PeerLostError)
"""Errors that tell of another rank's failure, or of its end before it was done."""

_NAMES = tuple(f"{error.__name__}:" for error in CONSEQUENCES)


@contextmanager
def launching() -> Iterator[None]:
    """A block that starts ranks through torch's elastic launcher and waits for their end.

    Raises:
        ClickException: a rank failed, a signal ended them all, or the nodes did not meet.
    """
    disabled = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ:
        # The agent logs each failure at length, beside what the rank itself and the command say.
        logging.disable(logging.ERROR)
    try:
        yield
    except ChildFailedError as error:
        raise click.ClickException(first_failure(error.failures)) from error
    except SignalException as error:
        raise click.ClickException(f"stopped by {error.sigval.name}; no rank is left") from error
    except (DistError, RendezvousError) as error:
        raise click.ClickException(f"the nodes cannot meet: {error.__cause__ or error}") from error
    finally:
        logging.disable(disabled)


class _Note(NamedTuple):
    """What a rank left: type and text of the exception that ended it, and the traceback."""

    text: str
    trace: str

    @property
    def is_consequence(self) -> bool:
        return self.text.startswith(_NAMES)


def first_failure(failures: Mapping[int, ProcessFailure]) -> str:
    """The failure that most likely caused the others, in words.

    Times alone do not tell: torch keeps them in whole seconds, and an abort takes milliseconds.
    """
    rank = min(failures, key=lambda rank: (*_order(failures[rank]), rank))
    return f"rank {rank} {_words(failures[rank])}"


def _order(failure: ProcessFailure) -> tuple[int, int]:
    note = _note(failure)
    if note is None and failure.exitcode == -signal.SIGTERM:
        return 2, failure.timestamp  # the launcher ends so what still runs after a failure
    return (1 if note and note.is_consequence else 0), failure.timestamp


def _words(failure: ProcessFailure) -> str:
    note = _note(failure)
    if note is not None:
        # Of a consequence the rank itself prints one line: here, nobody has printed the cause.
        return f"failed: {note.trace if note.is_consequence else note.text}"
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    return f"ended with exit code {failure.exitcode}"


def _note(failure: ProcessFailure) -> _Note | None:
    # Torch declares a text, and has a mapping here where the rank left a note.
    message: object = failure.message
    if not isinstance(message, dict):
        return None
    return _Note(str(message["message"]), str(message["extraInfo"]["py_callstack"]).rstrip())
