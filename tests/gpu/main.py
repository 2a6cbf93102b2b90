"""The check on a GPU: point after point, then a table; ``tests/gpu/check`` runs it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.gpu.points import ABOUT, POINTS, TIME_S
from tests.gpu.running import Result, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.gpu.points import Point

__all__ = ["limit_of", "main"]

_NO_GPU = 2
_LEAST_S = 5.0
_COLOURS = {"ok": "green", "differs": "yellow", "skipped": "yellow"}
_WIDTH = 120


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("check", description="Try Stagelink on one GPU.")
    parser.add_argument(
        *("--only", "-o"),
        action="extend",
        nargs="+",
        choices=POINTS,
        metavar="NAME",
        help="points to try, in place of all",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--list", action="store_true", help="only say which points there are")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Try what is asked for; 0 where nothing is wrong, 1 where something is, 2 without a GPU."""
    arguments = _arguments(given)
    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=_WIDTH)
    if arguments.list:
        console.print(_listed())
        return 0
    end = time.monotonic() + TIME_S
    machine = run("machine", ABOUT)
    for fact in machine.rows:
        console.print(f"{fact['what']}: {fact['is']}", markup=False, highlight=False)
    if machine.verdict != "ok":
        console.print(f"Nothing can be tried here: {machine.text}", markup=False)
        return _NO_GPU
    results: list[Result] = []
    chosen = [name for name in POINTS if not arguments.only or name in arguments.only]
    for number, name in enumerate(chosen):
        waiting = [POINTS[other] for other in chosen[number:]]
        results.append(_tried(name, limit_of(waiting, end - time.monotonic())))
        _tell(console, results[-1])
        if arguments.json is not None:
            _write(arguments.json, machine, results)
    console.print(_figures(results), _table(results))
    return int(any(result.verdict not in ("ok", "skipped") for result in results))


def limit_of(waiting: Sequence[Point], left_s: float) -> float:
    """What the first of the points that are still to come may take of the time that is left.

    Its own limit at least, as far as there is so much; what others have not used up to twice that.
    """
    own_s = waiting[0].limit_s
    spare_s = left_s - sum(point.limit_s for point in waiting)
    return min(left_s, own_s + min(own_s, max(0.0, spare_s)))


def _tried(name: str, limit_s: float) -> Result:
    if limit_s < _LEAST_S:
        return Result(name, "skipped", "there was no time left", 0.0)
    return run(name, POINTS[name], limit_s)


def _tell(console: Console, result: Result) -> None:
    head = f"{result.name}: {result.verdict}, {result.seconds:.1f} s"
    console.print(head, style=_COLOURS.get(result.verdict, "red"), markup=False)
    for line in result.text.splitlines():
        console.print(f"    {line}", markup=False, highlight=False)


def _write(file: Path, machine: Result, results: Sequence[Result]) -> None:
    facts = {fact["what"]: fact["is"] for fact in machine.rows}
    document: dict[str, Any] = {"machine": facts, "points": [asdict(one) for one in results]}
    file.write_text(json.dumps(document, indent=1) + "\n")


def _listed() -> Table:
    table = Table("point", "at most", "what it shows", box=None)
    for name, point in POINTS.items():
        table.add_row(name, f"{point.limit_s:g} s", point.what)
    return table


def _table(results: Sequence[Result]) -> Table:
    table = Table("point", "verdict", "seconds", "what it shows")
    for result in results:
        colour = _COLOURS.get(result.verdict, "red")
        table.add_row(
            result.name,
            f"[{colour}]{result.verdict}[/]",
            f"{result.seconds:.1f}",
            escape(POINTS[result.name].what),
        )
    return table


def _figures(results: Sequence[Result]) -> Table:
    table = Table("figure", "bytes", "median µs", "GiB/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in (row for result in results for row in result.rows):
        table.add_row(
            row["name"],
            str(row["payload_bytes"]),
            f"{row['median_us']:.1f}",
            f"{row['gib_per_s']:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
