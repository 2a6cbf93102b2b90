"""Files that a command writes at its end, when it has worked for minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from typing import Any

__all__ = ["ResultFile", "write_results"]


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
    """Write every file that can be written.

    Args:
        files: paths, each with what writes it.

    Raises:
        ClickException: with a line for each that could not.
    """
    problems = []
    for path, write in files:
        try:
            write(path)
        except OSError as error:
            problems.append(f"{path!r} could not be written: {error.strerror or error}")
    if problems:
        raise click.ClickException("\n".join(problems))
