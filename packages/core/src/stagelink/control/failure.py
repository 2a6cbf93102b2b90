"""What failed a handler: set once, raised again in every caller, told to every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagelink.errors import StagelinkError

__all__ = ["Failure"]


class Failure:
    """The first failure of a handler; later ones change nothing. Used under the plane's lock.

    Attributes:
        error: what every later call raises; None while nothing has failed.
        cause: what other ranks are told: the ``rank`` where it began and its ``text``.
        reported: whether a caller has been told.
    """

    def __init__(self) -> None:
        self.error: StagelinkError | None = None
        self.cause: dict[str, Any] = {}
        self.reported = False

    def set(self, error: StagelinkError, rank: int, text: str) -> bool:
        """Keep a failure; False if there was one already."""
        if self.error is not None:
            return False
        self.error = error
        self.cause = {"rank": rank, "text": text}
        return True

    def check(self) -> None:
        """Raise the failure, if there is one, with its own cause.

        As a new object: one that is raised from two threads would mix their tracebacks.
        """
        error = self.error
        if error is None:
            return
        fresh = type(error).__new__(type(error), *error.args)
        fresh.args = error.args
        fresh.__dict__.update(error.__dict__)
        raise fresh from error.__cause__
