"""``stagelink bench``: what links cost on this machine, beside torch's own send and recv."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from stagelink.bench import SIZES_BYTES, Measurement, Record, measure, pair_plan
from stagelink.cli.assumed import assume
from stagelink.cli.failures import launching
from stagelink.cli.output import (
    ResultFile,
    new_table,
    plugins_print_to_stderr,
    print_note,
    print_parts,
    write_results,
)
from stagelink.errors import PluginError
from stagelink.plugins.plugins import Plugins
from stagelink.schedule import verify
from stagelink.transport.host import memory_bytes

_KIB = 1024
_Write = Callable[["Sequence[Record]", str], None]
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
    "--json", "json_file", type=ResultFile(), metavar="FILE", help="Write the records, see above."
)
@click.option(
    "--plot",
    "picture",
    type=ResultFile(".png", ".svg", ".pdf"),
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
    """Measure links between two processes on this machine, in about five minutes by default.

    Of each transport: the time of a message one way, in a stream out of four buffers, and both
    ways at once; by a session with copy=False (handler) and as usual (handler-copy), and by
    the link alone (link). Beside them torch's own send and recv over gloo (raw-gloo), and what one
    thread copies in memory (memcpy). All are measured in turn: their ratios are what counts.

    The records are a JSON list of objects: transport (raw-gloo and memcpy among them); layer,
    which is link, handler, handler-copy or, where it is not this library's, raw; kind, which is
    one_way, stream or duplex (both ways at once); payload_bytes, of each message; median_us and
    p99_us, microseconds a message; gib_per_s, at the median, in duplex of both ways together. One
    way the 99th percentile is over single messages, in stream and duplex over the means of rounds:
    of few rounds it is the slowest.
    """
    outputs: list[tuple[str, _Write]] = []
    if json_file is not None:
        outputs.append((json_file, _write_json))
    if picture is not None:
        outputs.append((picture, _drawing()))
    measurement = _measurement(names, sizes, rounds)
    with launching():
        records = measure(measurement)
    print_parts(_tables(records))
    write_results((path, partial(write, records)) for path, write in outputs)


def _measurement(names: Sequence[str], sizes: Sequence[int], rounds: int) -> Measurement:
    """What to measure, if that can be done here; what was named twice is measured once."""
    for size in sizes:
        if size % 4:
            raise click.BadParameter(f"{size} is no multiple of 4", param_hint="--size")
    with plugins_print_to_stderr():
        chosen = list(_usable(dict.fromkeys(names)))
    found = Measurement(chosen, list(dict.fromkeys(sizes or SIZES_BYTES)), rounds)
    memory = memory_bytes()
    if memory is not None and found.buffer_bytes > memory:
        raise click.BadParameter(
            f"{max(found.sizes_bytes)} is too much: the buffers would take "
            f"{decimal(found.buffer_bytes)}, and this machine has {decimal(memory)}",
            param_hint="--size",
        )
    return found


def _usable(names: Iterable[str]) -> Iterator[str]:
    """The transports to measure; one that was asked for must do, another is told of."""
    plugins = Plugins()
    for name in names or plugins.known:
        problem = _problem(plugins, name)
        if problem is None:
            yield name
        elif names:
            raise click.ClickException(problem)
        else:
            print_note(f"not measured: {problem}")


def _problem(plugins: Plugins, name: str) -> str | None:
    """Why a transport cannot link two processes of this machine; None where it can."""
    try:
        plugins.load(name)
    except PluginError as error:
        return str(error)
    plan = pair_plan(name)
    link = assume(plan, verify(plan)).links[0]
    if link.transport is not None:
        return None
    # The line of a refusal that says why, without what to do about it.
    *_, reason = link.reasons[0].splitlines()[:2]
    return reason.strip(" -")


def _write_json(records: Sequence[Record], path: str) -> None:
    text = json.dumps([asdict(one) for one in records], indent=1)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def _drawing() -> _Write:
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
