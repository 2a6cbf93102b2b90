"""Output of the commands: where they print, and in what form."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class ResultFile(click.Path):
    """A file to write later; what can be wrong with it is looked for now.

    Args:
        endings: those that its name may have, with their dots; none given: any.
    """

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, writable=True)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path as it was given."""
        path = str(super().convert(value, param, ctx))
        folder = os.path.dirname(path) or os.curdir
        if not path:
            self.fail("the name of a file is empty", param, ctx)
        if self._endings and os.path.splitext(path)[1].lower() not in self._endings:
            self.fail(f"{path!r} does not end in {' or '.join(self._endings)}", param, ctx)
        if not os.path.isdir(folder):
            self.fail(f"{path!r}: there is no directory {folder!r}", param, ctx)
        if not os.path.exists(path) and not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{path!r}: directory {folder!r} is not writable", param, ctx)
        return path


def write_results(files: Iterable[tuple[str, Callable[[str], object]]]) -> None:
    """Write every file that can be; `ClickException` with a line for each that cannot."""
    problems = []
    for path, write in files:
        try:
            write(path)
        except OSError as error:
            problems.append(f"{path!r} could not be written: {error.strerror or error}")
    if problems:
        raise click.ClickException("\n".join(problems))


_PLAIN = "stagelink.plain"
_LOOKALIKES = str.maketrans({"→": "->", "…": "...", "·": "*", "µ": "u"})


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Error handler of encoders: a look-alike where there is one, else the character's number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_LOOKALIKES)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_PLAIN, _replace)


def printable(text: str, encoding: str) -> str:
    """The text in characters that an encoding has."""
    return text.encode(encoding, _PLAIN).decode(encoding)


def make_printable() -> None:
    """Have stdout and stderr take every character, whatever their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)


plan_file = click.Path(exists=True, dir_okay=False)
"""The type of an argument that names a plan: a file that exists."""


def print_parts(parts: Iterable[Text | Table]) -> None:
    """Print texts and tables on stdout, with a blank line between two of them."""
    # Names and reasons may look like markup, and are printed as they are.
    console = _Console(markup=False, highlight=False, emoji=False)
    with _writing():
        for number, part in enumerate(parts):
            if number:
                console.print()
            # To break a text's lines is for the terminal: a search of the output finds it whole.
            console.print(part, soft_wrap=isinstance(part, Text))


class _Console(Console):
    """Measures texts as they will be printed, so that columns stay in line."""

    def render_str(self, text: str, **more: Any) -> Text:
        return super().render_str(printable(text, self.encoding), **more)

    def on_broken_pipe(self) -> None:
        """Leave it to `_writing`, as any other error of the output."""
        raise  # noqa: PLE0704 - called where the error is caught


def new_table(title: str, *columns: str) -> Table:
    """An empty table in the style of all of them."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_json(values: object) -> None:
    """Print one JSON value on stdout; what JSON has no word for becomes its text."""
    with _writing():
        click.echo(json.dumps(values, indent=2, default=str))


@contextmanager
def _writing() -> Iterator[None]:
    """A block that prints on stdout; where that cannot take it, the process still ends in order.

    Raises:
        ClickException: it is full, or broken in another way.
        Exit: nobody reads it any more.
    """
    try:
        yield
    except OSError as error:
        # What is left in its buffer would be tried again at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if error.errno == errno.EPIPE:
            raise click.exceptions.Exit(1) from error
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from error


def print_note(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, file=sys.stderr)


def plugins_print_to_stderr() -> AbstractContextManager[object]:
    """A block in which plugins are loaded and asked: what they print stays out of the result."""
    return redirect_stdout(sys.stderr)
