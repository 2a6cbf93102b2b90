"""The command ``stagelink``: what a plan means, what this machine can do, and the start of a run.

Exit codes: 0 where all is well; 1 where a plan was refused or a run failed; 2 where the command
line itself is wrong. A mistake in a plan ends in a text that says where, never in a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from stagelink.cli.bench import bench_command
from stagelink.cli.doctor import doctor_command
from stagelink.cli.output import make_printable
from stagelink.cli.plan import plan_command
from stagelink.cli.run import run_command
from stagelink.errors import StagelinkError

__all__ = ["main"]


class _Group(click.Group):
    """Commands whose errors of this library end in their text."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        make_printable()
        with _errors_on_stderr():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_on_stderr():
            try:
                return super().invoke(ctx)
            except StagelinkError as error:
                raise click.ClickException(str(error)) from error


@contextmanager
def _errors_on_stderr() -> Iterator[None]:
    """A block whose errors click shows on stderr as it is: to an ASCII one it writes UTF-8."""
    try:
        yield
    except click.ClickException as error:
        error.show = partial(error.show, file=sys.stderr)  # type: ignore[method-assign]
        raise


@click.group(cls=_Group)
@click.version_option(package_name="stagelink", message="%(package)s %(version)s")
def main() -> None:
    """Move tensors between the stages of a pipeline-parallel model."""


main.add_command(plan_command)
main.add_command(doctor_command)
main.add_command(run_command)
main.add_command(bench_command)
