"""``stagelink run``: start the ranks of a plan through torch's elastic launcher."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from torch.distributed import run as torchrun

from stagelink.cli import rank
from stagelink.cli.assumed import check_here
from stagelink.cli.failures import launching
from stagelink.cli.output import plan_file, plugins_print_to_stderr, print_note
from stagelink.control.launch import StoreAddress
from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.schedule import require, verify

PLAN_VARIABLE = "STAGELINK_PLAN"
"""Environment variable that tells the script the plan's path."""

_USUAL_PORT = "29500"
_FLAGS = "[FLAGS OF TORCHRUN]..."
_REST = "CONFIG SCRIPT [ARGS]..."


@click.command(
    "run",
    options_metavar=_FLAGS,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar=_REST)
def run_command(arguments: Sequence[str]) -> None:
    """Start SCRIPT with ARGS once for each rank of the plan in CONFIG.

    The plan is verified first: if its schedule would deadlock, nothing starts. The script
    gets the plan by stagelink.Plan.load(os.environ["STAGELINK_PLAN"]); all else that
    stagelink.connect(plan) needs to know it finds in the environment, too.

    Nothing starts either if the options of a transport are wrong, or, where all ranks run here, if
    a link's only transport is not installed. One that the script itself registers is not known
    here: let the rule name another after it, or start the script with torchrun.

    Flags before CONFIG are torchrun's (see torchrun --help). A run over two nodes is started on
    each of them by stagelink run --nnodes 2 --node-rank RANK --master-addr HOST CONFIG SCRIPT. The
    nodes share the ranks evenly unless --nproc-per-node says otherwise.

    OMP_NUM_THREADS is 1 in the ranks unless it is set. torchrun's own log is shown if LOGLEVEL is
    set. Exits with 1 if a rank fails; what is printed last is the first failure.
    """
    args = _parsed(arguments)
    config, command = args.training_script, args.training_script_args
    _check_script(args, command)
    _check_addresses(args)
    plan = Plan.load(plan_file(config))
    require(verify(plan))
    args.nproc_per_node = str(_ranks_here(plan, args))
    _check_transports(plan, args)
    args.training_script, *args.training_script_args = _rank_command(args, command)
    os.environ[PLAN_VARIABLE] = str(Path(config).resolve())
    _launch(args)


def _parsed(arguments: Sequence[str]) -> Namespace:
    """The command line as torchrun's parser has it, which takes CONFIG for the script."""
    parser = torchrun.get_args_parser()
    parser.prog, parser.usage = "stagelink run", f"%(prog)s {_FLAGS} {_REST}"
    parser.set_defaults(nproc_per_node=os.environ.get("PET_NPROC_PER_NODE"))
    return parser.parse_args(arguments)


def _check_script(args: Namespace, command: Sequence[str]) -> None:
    if not command:
        raise click.UsageError("Missing argument 'SCRIPT'.")
    if command[0].startswith("-"):
        raise click.UsageError(
            f"{command[0]!r} comes after CONFIG; flags of torchrun go before it"
        )
    is_file = not (args.module or args.no_python)
    if is_file and not Path(command[0]).exists():
        raise click.UsageError(f"Invalid value for 'SCRIPT': {command[0]!r} does not exist.")


def _check_addresses(args: Namespace) -> None:
    """Refuse what torch would only wait with, or tell of with a traceback."""
    try:
        StoreAddress.of(
            args.master_addr,
            _USUAL_PORT if args.master_port is None else args.master_port,
            f"--master-addr={args.master_addr!r}",
            f"--master-port={args.master_port!r}",
        )
        endpoint = args.rdzv_endpoint
        if (
            endpoint
            and args.rdzv_backend in {"static", "c10d"}
            and "store_type" not in args.rdzv_conf
        ):
            _check_endpoint(endpoint)
    except PlanError as error:
        raise click.UsageError(str(error).removeprefix("connect: ")) from error


def _check_endpoint(endpoint: str) -> None:
    given = f"--rdzv-endpoint={endpoint!r}"
    host, colon, port = endpoint.rpartition(":")
    if endpoint.endswith("]") or not colon:  # without a port, where torch has a usual one
        host, port = endpoint, _USUAL_PORT
    elif port == "0":  # any
        port = _USUAL_PORT
    StoreAddress.of(host, port, given, given)


def _check_transports(plan: Plan, args: Namespace) -> None:
    """Refuse what the ranks would refuse, as far as this node can know."""
    alone = _nodes(plan, args.nnodes) == 1 and plan.servers is None and not args.no_python
    with plugins_print_to_stderr():
        notes = check_here(plan, alone=alone)
    for note in notes:
        print_note(f"note: {note}")


def _ranks_here(plan: Plan, args: Namespace) -> int:
    nodes = _nodes(plan, args.nnodes)
    if args.nproc_per_node is None:
        share, rest = divmod(plan.world_size, nodes)
        if rest:
            raise click.UsageError(
                f"{nodes} nodes cannot share the plan's {plan.world_size} ranks evenly; "
                "say with --nproc-per-node how many this one starts"
            )
        return share
    given: int = _checked(torchrun.determine_local_world_size, args.nproc_per_node)
    if nodes == 1 and given != plan.world_size:
        raise click.UsageError(
            f"--nproc-per-node is {given}, and the plan has {plan.world_size} ranks; "
            "leave it out, or use more nodes"
        )
    return given


def _nodes(plan: Plan, text: str) -> int:
    least, most = _checked(torchrun.parse_min_max_nnodes, text)
    if least != most or least < 1:
        raise click.UsageError(
            f"--nnodes is {text!r}: the plan has {plan.world_size} ranks, neither more nor less, "
            "and needs a fixed number of nodes"
        )
    return int(least)


def _checked(read: Callable[[str], Any], text: str) -> Any:
    """What torchrun reads from a flag's value; it does so only after its parser."""
    try:
        return read(text)
    except (ValueError, RuntimeError) as error:
        raise click.UsageError(str(error)) from error


def _rank_command(args: Namespace, command: Sequence[str]) -> list[str]:
    if args.no_python or args.run_path:  # no Python of ours comes between
        return list(command)
    module = ["-m"] if args.module else []
    args.module = False
    return [rank.__file__, *module, *command]


def _launch(args: Namespace) -> None:
    with TemporaryDirectory(prefix="stagelink-run-") as folder:
        if not args.log_dir and args.redirects == args.tee == "0":
            args.log_dir = folder  # torchrun would leave one behind for each run, without any log
        try:
            with launching():
                torchrun.run(args)
        except (ValueError, AssertionError) as error:  # how torchrun refuses a flag's value
            raise click.UsageError(str(error)) from error
