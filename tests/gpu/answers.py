"""What a point of the check on a GPU comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Answer", "Findings", "Row", "Verdict"]

Verdict = Literal["ok", "differs", "failed", "hung", "crashed", "skipped"]
"""``differs``: CUDA does otherwise than its double says. ``hung`` and ``crashed``: a process did.
``skipped``: this machine has not what it takes.
"""

Row = Mapping[str, Any]
"""One figure, or one fact of the machine."""


@dataclass(frozen=True)
class Answer:
    """What a point says.

    Attributes:
        verdict: see `Verdict`.
        text: what was seen, a line for each thing.
        rows: figures.
    """

    verdict: Verdict
    text: str
    rows: Sequence[Row] = ()


class Findings:
    """What was seen, thing by thing; in the end an answer."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._differs = False
        self._fails = False

    def tell(self, what: str, seen: object) -> None:
        """Something that may be one way or the other."""
        self._lines.append(f"{what}: {seen}")

    def see(self, what: str, seen: object, on_double: object) -> None:
        """Something that the double shows as well."""
        if seen == on_double:
            self.tell(what, seen)
        else:
            self._differs = True
            self.tell(what, f"{seen}; on the double {on_double}")

    def see_all(self, seen: Mapping[str, object], on_double: Mapping[str, object]) -> None:
        """As `see`, each by its name; what was not seen is told as well."""
        for what, expected in on_double.items():
            self.see(what, seen.get(what, "not tried"), expected)

    def need(self, what: str, seen: object, needed: object) -> None:
        """Something that a transport cannot do without."""
        if seen == needed:
            self.tell(what, seen)
        else:
            self._fails = True
            self.tell(what, f"{seen}; needed is {needed}")

    def answer(self, rows: Sequence[Row] = ()) -> Answer:
        """All of it."""
        verdict: Verdict = "failed" if self._fails else "differs" if self._differs else "ok"
        return Answer(verdict, "\n".join(self._lines), rows)
