"""The command ``stagelink``: what a plan means, what this machine can do, and the start of a run.

Exit codes: 0 where all is well; 1 where a plan was refused or a run failed; 2 where the command
line itself is wrong. A mistake in a plan ends in a text that says where, never in a traceback.
"""

from __future__ import annotations

from typing import Any

import click

from stagelink.cli.bench import bench_command
from stagelink.cli.doctor import doctor_command
from stagelink.cli.plan import plan_command
from stagelink.cli.run import run_command
from stagelink.errors import StagelinkError

__all__ = ["main"]


class _Group(click.Group):
    """Commands whose errors of this library end in their text."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except StagelinkError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
@click.version_option(package_name="stagelink", message="%(package)s %(version)s")
def main() -> None:
    """Move tensors between the stages of a pipeline-parallel model."""


main.add_command(plan_command)
main.add_command(doctor_command)
main.add_command(run_command)
main.add_command(bench_command)
