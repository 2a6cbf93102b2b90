"""Which of several failed ranks was the first: the others often fail because that one did."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from stagelink.errors import AbortedError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["first_failure"]

_CONSEQUENCES = tuple(f"{error.__name__}:" for error in (AbortedError, PeerLostError))


def first_failure(failures: Mapping[int, ProcessFailure]) -> str:
    """The failure that most likely caused the others, in words.

    Times alone do not tell: torch keeps them in whole seconds, and an abort takes milliseconds.

    Args:
        failures: by rank, at least one.
    """
    rank = min(failures, key=lambda rank: (*_order(failures[rank]), rank))
    return f"rank {rank} {_words(failures[rank])}"


def _order(failure: ProcessFailure) -> tuple[int, int]:
    text = _recorded(failure)
    if text is None and failure.exitcode == -signal.SIGTERM:
        return 2, failure.timestamp  # the launcher ends so whoever still runs after a failure
    is_consequence = text is not None and text.startswith(_CONSEQUENCES)
    return (1 if is_consequence else 0), failure.timestamp


def _words(failure: ProcessFailure) -> str:
    text = _recorded(failure)
    if text is not None:
        return f"failed: {text}"
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    return f"ended with exit code {failure.exitcode}"


def _recorded(failure: ProcessFailure) -> str | None:
    """Type and text of the exception that ended the rank, if it left a note of one."""
    # Torch declares a text, and has the note's mapping here where there is a note.
    message: object = failure.message
    return str(message["message"]) if isinstance(message, dict) else None
