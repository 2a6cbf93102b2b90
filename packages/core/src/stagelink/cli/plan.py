"""``stagelink plan``: what a configuration means, before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import tomli_w

from stagelink.cli.assumed import Assumed, AssumedLink, assume
from stagelink.cli.output import plan_file, plugins_print_to_stderr, print_json, print_parts
from stagelink.cli.plan_tables import grid_texts, grid_values, plan_tables
from stagelink.plan import Plan
from stagelink.plan.files import is_json, read_mapping, read_text
from stagelink.schedule import (
    Action,
    Grid,
    Verification,
    free_warm_up,
    grid,
    parse_actions,
    verify,
)


@dataclass(frozen=True, slots=True)
class _Report:
    plan: Plan
    result: Verification
    assumed: Assumed
    problem: str | None
    actions: Mapping[int, Sequence[Action]] | None

    def grid(self) -> Grid:
        return grid(self.plan, self.result, self.actions)


@click.command("plan")
@click.argument("config", type=plan_file)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    metavar="N",
    help="Microbatches per batch, instead of the file's number.",
)
@click.option(
    "--write-toml",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the plan as TOML to a new file as well, from PipeDream's JSON say.",
)
@click.option(
    "--actions",
    type=plan_file,
    metavar="FILE",
    help="Lists of actions instead of the schedule's: lines of a rank and its actions, as in "
    "0: F0 F1 B0 B1.",
)
@click.option(
    "--grid", "with_grid", is_flag=True, help="Print what each rank does in which time slot."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan_command(
    config: str,
    microbatches: int | None,
    write_toml: str | None,
    actions: str | None,
    *,
    with_grid: bool,
    as_json: bool,
) -> None:
    """Say what the plan in CONFIG means, and whether it can run.

    Prints the stages, every link with its transport and why others were passed over, receive
    memory, and the verdict on the schedule. Transports are judged by this machine alone: its
    answers stand for all ranks, each taken to be a process of its own, on one server unless the
    plan lists servers.

    Exits with 1 if the schedule would deadlock or a link has no transport.
    """
    plan = Plan.load(config, microbatches=microbatches)
    if write_toml is not None:
        _write_toml(config, write_toml)
    own = None
    if actions is not None:
        own = parse_actions(plan, read_text(actions, "list"), where=actions)
    with plugins_print_to_stderr():
        report = _look_at(plan, config, own)
    if as_json:
        more = {"grid": grid_values(report.grid())} if with_grid else {}
        print_json({**_as_json(report), **more})
    else:
        *parts, last = plan_tables(
            plan, report.result, report.assumed, report.problem, report.actions
        )
        width = shutil.get_terminal_size().columns
        grid = grid_texts(plan, report.grid(), width) if with_grid else ()
        print_parts([*parts, *grid, last])
    if report.problem is not None:
        raise click.exceptions.Exit(1)


def _write_toml(config: str, target: str) -> None:
    # As the file has it: a number of microbatches from the command line is for this look only.
    text = tomli_w.dumps(read_mapping(config))
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.BadParameter(
            f"{target!r} is there already; name a new file, or remove it",
            param_hint="--write-toml",
        ) from None
    except OSError as error:
        raise click.FileError(target, error.strerror) from error


def _look_at(plan: Plan, config: str, actions: Mapping[int, Sequence[Action]] | None) -> _Report:
    result = verify(plan, None if actions is None else plan.microbatches, actions)
    assumed = assume(plan, result)
    by_hand = any(stage.warm_up is not None for stage in plan.stages)
    remedy = _depth_map(plan) if result.problem and by_hand and is_json(config) else None
    problems = [result.problem, remedy, _link_problem(assumed.links)]
    return _Report(plan, result, assumed, "\n".join(filter(None, problems)) or None, actions)


def _depth_map(plan: Plan) -> str:
    """A safe warm-up in the words of PipeDream's file."""
    depths = {str(stage): ahead for stage, ahead in enumerate(free_warm_up(plan))}
    return f'in this file: "stage_to_depth_map": {json.dumps(depths)}'


def _link_problem(links: Sequence[AssumedLink]) -> str | None:
    """The error of the first link without a transport, and how many links have none."""
    errors = [link.reasons[0] for link in links if link.transport is None]
    if not errors:
        return None
    return errors[0] if len(errors) == 1 else f"{errors[0]}\n({len(errors)} links have none)"


def _as_json(report: _Report) -> dict[str, Any]:
    plan, result = report.plan, report.result
    return {
        "verified": report.problem is None,
        "problem": report.problem,
        "schedule": plan.schedule,
        "stages": [
            {
                "name": stage.name,
                "ranks": stage.ranks,
                "warm_up": warm_up,
                "arguments": stage.arguments,
            }
            for stage, warm_up in zip(plan.stages, result.warm_up, strict=True)
        ],
        "links": [
            {
                "src": link.source,
                "dst": link.target,
                "tensors": link.tensors,
                "transport": link.transport,
                "window": link.window,
                "reasons": link.reasons,
            }
            for link in report.assumed.links
        ],
        "shared_memory": [
            {
                "src": link.source,
                "dst": link.target,
                "transport": link.transport,
                "slots": footprint.slots,
                "bytes": footprint.size_bytes,
            }
            for link, footprint in report.assumed.memory.items()
        ],
        "receive_bytes": result.receive_bytes,
        "notes": report.assumed.notes,
    }
