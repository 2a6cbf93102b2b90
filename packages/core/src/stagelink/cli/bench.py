"""``stagelink bench``: what links cost on this machine, beside torch's own send and recv."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from stagelink.bench import SIZES_BYTES, Job, measure, pair_plan
from stagelink.cli.assumed import assume
from stagelink.cli.failures import first_failure
from stagelink.cli.output import new_table, plugins_print_to_stderr, print_parts
from stagelink.schedule import verify
from stagelink.transport.plugins import Plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table
    from rich.text import Text

    from stagelink.bench import Record

__all__ = ["bench_command"]

_KIB = 1024
_TITLES = {
    "one_way": "One way, half a round trip",
    "stream": "Stream, 4 buffers at the sender",
    "duplex": "Both ways at once, 4 buffers each",
}


@click.command("bench")
@click.option(
    "--transport",
    "names",
    multiple=True,
    metavar="NAME",
    help="Measure this one; may be given several times. Left out: all that can be used here.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.IntRange(min=4),
    metavar="BYTES",
    help="Of a payload, a multiple of 4; may be given several times. Left out: 8 B to 64 MiB.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=9,
    show_default=True,
    help="Of each measurement, one after another with the others'.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Write the records.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Draw time and speed over size (.png, .svg, .pdf; needs matplotlib).",
)
def bench_command(
    names: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    json_file: str | None,
    picture: str | None,
) -> None:
    """Measure links between two processes on this machine.

    Of each transport: the time of a message one way, in a stream out of four buffers, and both
    ways at once; by a session with copy=False (handler) and as usual (handler-copy), and by
    the link alone (link). Beside them torch's own send and recv over gloo (raw-gloo), and what one
    thread copies in memory (memcpy). All are measured in turn: their ratios are what counts.
    """
    for size in sizes:
        if size % 4:
            raise click.BadParameter(f"{size} is no multiple of 4", param_hint="--size")
    draw = _drawing() if picture is not None else None
    with plugins_print_to_stderr():
        chosen = list(_usable(names))
    job = Job(chosen, sizes or SIZES_BYTES, rounds, progress=True)
    try:
        records = measure(job)
    except ChildFailedError as error:
        raise click.ClickException(first_failure(error.failures)) from error
    if json_file is not None:
        Path(json_file).write_text(json.dumps([asdict(one) for one in records], indent=1) + "\n")
    if draw is not None and picture is not None:
        draw(records, picture)
    print_parts(_tables(records))


def _usable(names: Sequence[str]) -> Iterator[str]:
    """The transports to measure; one that was asked for must do, another is told of."""
    for name in names or sorted(Plugins().known):
        plan = pair_plan(name)
        outcome = assume(plan, verify(plan)).links[0].outcome
        if outcome.transport is not None:
            yield name
        elif names:
            raise click.ClickException("\n".join(outcome.reasons))
        else:
            click.echo(f"not measured: {_reason(outcome.reasons[0])}", err=True)


def _reason(error: str) -> str:
    """The line of a refusal that says why, without what to do about it."""
    lines = error.splitlines()
    return lines[min(1, len(lines) - 1)].strip(" -")


def _drawing() -> Callable[[Sequence[Record], str], None]:
    try:
        from stagelink.bench.plot import draw  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs matplotlib ({error}): pip install 'stagelink[bench]'"
        ) from error
    return draw


def _tables(records: Sequence[Record]) -> Iterator[Text | Table]:
    for kind, title in _TITLES.items():
        of_kind = [record for record in records if record.kind == kind]
        table = new_table(title, "payload", "transport", "layer", "median µs", "p99 µs", "GiB/s")
        last = None
        for record in of_kind:
            size = "" if record.payload_bytes == last else _size(record.payload_bytes)
            last = record.payload_bytes
            table.add_row(
                size,
                record.transport,
                record.layer,
                f"{record.median_us:.1f}",
                f"{record.p99_us:.1f}",
                f"{record.gib_per_s:.3g}",
            )
        yield table


def _size(size_bytes: int) -> str:
    for unit, name in ((_KIB**2, "MiB"), (_KIB, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"
