"""The outcome of one rank of a test, and the error that tells those of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals
from typing import Any

from stagelink.errors import StagelinkError

__all__ = ["Outcome", "RankFailedError"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one rank's function.

    Attributes:
        rank: the rank.
        value: what the function returned.
        error: the traceback's text, when the function raised.
        hung_s: seconds after which the rank was killed, still running; ``stderr`` has its stacks.
        exit_code: of a process that ended before its function did: negative for a signal.
        stdout: what the rank wrote there (processes only).
        stderr: what the rank wrote there (processes only).
    """

    rank: int
    value: Any = None
    error: str | None = None
    hung_s: float | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.hung_s is None and self.exit_code is None

    @property
    def signal(self) -> Signals | None:
        """The signal that ended the process, if one did."""
        if self.hung_s is not None or self.exit_code is None or self.exit_code >= 0:
            return None
        return Signals(-self.exit_code)

    def __str__(self) -> str:
        return "\n".join(filter(None, [self._headline(), self.error, self.stdout, self.stderr]))

    def _headline(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised"
        if self.hung_s is not None:
            return f"rank {self.rank} still ran after {self.hung_s:g} s"
        if self.signal is not None:
            return f"rank {self.rank} was ended by {self.signal.name}"
        if self.exit_code is not None:
            return f"rank {self.rank} ended with exit code {self.exit_code} inside its function"
        return f"rank {self.rank} returned"


class RankFailedError(StagelinkError, RuntimeError):
    """Some ranks of a test did not return; the text has each one's traceback, signal or stacks.

    Args:
        name: of the function that they ran.
        outcomes: of all ranks.
    """

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        parts = [f"{len(failed)} of {len(outcomes)} ranks of {name!r} failed", *map(str, failed)]
        super().__init__("\n\n".join(parts))
