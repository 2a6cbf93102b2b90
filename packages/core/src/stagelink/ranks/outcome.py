"""Outcomes of the functions of ranks, on processes and on threads: results and failures."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from stagelink.errors import StagelinkError


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one rank's function.

    Attributes:
        rank: the rank.
        value: what the function returned.
        error: the traceback's text, when the function raised.
        raised: type and text of the exception, the end of ``error``.
        hung_s: seconds after which the rank was killed, still running; ``stderr`` has its stacks.
        exit_code: of a process that ended before its function did: negative for a signal.
        stdout: what the rank wrote there (processes only).
        stderr: what the rank wrote there (processes only).
    """

    rank: int
    value: Any = None
    error: str | None = None
    raised: str = ""
    hung_s: float | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""

    @classmethod
    def raised_by(cls, rank: int, error: BaseException) -> Self:
        """Make the outcome of a function that raised."""
        lines = traceback.format_exception(error)
        return cls(rank, error="".join(lines), raised=f"{type(error).__name__}: {error}")

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.hung_s is None and self.exit_code is None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process, if one did."""
        if self.hung_s is None and self.exit_code is not None:
            with suppress(ValueError):  # an exit code, or a real-time signal, which has no name
                return signal.Signals(-self.exit_code)
        return None

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
    """Some ranks did not return; the text has each one's traceback, signal or stacks."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        parts = [f"{len(failed)} of {len(outcomes)} ranks of {name!r} failed", *map(str, failed)]
        super().__init__("\n\n".join(parts))
