"""Ends of the ranks that a command started, in words.

Which of several failed ranks was the first: the others often fail because that one did.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import click
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from stagelink.errors import AbortedError, PeerClosedError, PeerLostError
from stagelink.ranks.outcome import Outcome, RankFailedError

CONSEQUENCES = (AbortedError, PeerClosedError, PeerLostError)
"""Errors that tell of another rank's failure, or of its end before it was done."""

_NAMES = tuple(f"{error.__name__}:" for error in CONSEQUENCES)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def launching() -> Iterator[None]:
    """A block that starts ranks and waits for their end; it ends for a signal as torch's does.

    Raises:
        ClickException: a rank failed, a signal ended them all, or the nodes did not meet.
    """
    disabled = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ:
        # The agent logs each failure at length, beside what the rank itself and the command say.
        logging.disable(logging.ERROR)
    handlers = {number: signal.signal(number, _stop) for number in _ENDING}
    try:
        yield
    except ChildFailedError as error:
        raise click.ClickException(first_failure(error.failures)) from error
    except RankFailedError as error:
        # What is not this library's link raises at a peer's death as it raises at anything else.
        died_first = sorted(error.outcomes, key=lambda outcome: outcome.error is not None)
        raise click.ClickException(_cause(died_first)) from error
    except SignalException as error:
        raise click.ClickException(f"stopped by {error.sigval.name}; no rank is left") from error
    except (DistError, RendezvousError) as error:
        raise click.ClickException(f"the nodes cannot meet: {error.__cause__ or error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(disabled)


def _stop(number: int, frame: object) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def first_failure(failures: Mapping[int, ProcessFailure]) -> str:
    """The failure that most likely caused the others, in words.

    Times alone do not tell: torch keeps them in whole seconds, and an abort takes milliseconds.
    """
    by_time = sorted(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    return _cause([_outcome(rank, failure) for rank, failure in by_time])


def _outcome(rank: int, failure: ProcessFailure) -> Outcome:
    # Torch declares a text, and has a mapping here where the rank left a note.
    message: object = failure.message
    if not isinstance(message, dict):
        return Outcome(rank, exit_code=failure.exitcode)
    trace = str(message["extraInfo"]["py_callstack"]).rstrip()
    return Outcome(rank, error=trace, raised=str(message["message"]))


def _cause(outcomes: Iterable[Outcome]) -> str:
    """The first of the most telling ends."""
    first = min((outcome for outcome in outcomes if not outcome.ok), key=_distance)
    return f"rank {first.rank} {_words(first)}"


def _distance(outcome: Outcome) -> int:
    """How far an end may be from the cause."""
    if outcome.hung_s is not None or outcome.signal is signal.SIGTERM:
        return 2  # launchers end so what still runs after a failure
    return int(outcome.raised.startswith(_NAMES))


def _words(outcome: Outcome) -> str:
    if outcome.error is not None:
        # Of a consequence the rank itself prints one line: here, nobody has printed the cause.
        return f"failed: {outcome.error if _distance(outcome) else outcome.raised}"
    if outcome.signal is not None:
        return f"was killed by {outcome.signal.name}"
    return f"ended with exit code {outcome.exit_code}"
