"""Connection of a rank to the pipeline: everything is checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import Store

from stagelink.arguments import ITERABLE, NAME, checked, instance, optional
from stagelink.control.launch import Launch, StoreAddress
from stagelink.control.opening import open_store
from stagelink.control.rendezvous import Rendezvous
from stagelink.deadline import Deadline
from stagelink.errors import PlanError
from stagelink.exchange.engine import Engine
from stagelink.exchange.handler import Handler
from stagelink.links.node import Node
from stagelink.links.topology import routes_of
from stagelink.plan import Plan, Stage
from stagelink.plugins.choice import asked_for
from stagelink.plugins.offers import survey
from stagelink.plugins.plugins import Plugins
from stagelink.schedule import Verification, require, verify
from stagelink.transport.contract import Transport


@checked(
    plan=instance(Plan, "a Plan"),
    store=optional(instance((str, Store), "a store of torch.distributed, or an address")),
    run_id=optional(NAME),
    transports=ITERABLE,
    observers=ITERABLE,
)
def connect(  # noqa: PLR0913 - what a launcher knows, each optional
    plan: Plan,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | str | None = None,
    run_id: str | None = None,
    transports: Iterable[type[Transport]] = (),
    observers: Iterable[object] = (),
) -> Handler:
    """Join the pipeline as one rank; blocks until every peer has joined and every link is open.

    What is not given is read from torchrun's environment variables, which are never changed. The
    user's process groups are not touched.

    Args:
        plan: the same on every rank.
        rank: this process's (or thread's) rank in the plan.
        world_size: must be the plan's.
        store: an open c10d store, or its address: ``tcp://host:port`` (rank 0 hosts it; an IPv6
            address in brackets) or ``file:///path``.
        run_id: tells runs apart that share a store.
        transports: transport classes of the caller's own; they must be given on every rank.
        observers: objects or modules with observer hooks, beside those that the plan names.

    Raises:
        PlanError: rank, world size or options do not fit the plan; nothing was started.
        VerificationError: the schedule cannot run; nothing was started.
        PluginError: a transport or observer that is asked for is missing or broken.
        NoTransportError: nothing can carry some link.
        DisagreementError: another rank holds another plan, version or choice of transports.
        RankTakenError: the rank is held by another process.
        ConnectError: ranks did not come within ``limits.connect_deadline_s``, or the store failed.
    """
    launch = Launch.resolve(rank, world_size, store, run_id)
    return Handler(*join(plan, launch, Plugins(transports, observers)))


def join(plan: Plan, launch: Launch, plugins: Plugins) -> tuple[Engine, Verification]:
    """Make a handler's parts and join the other ranks; see `connect`."""
    plan.check_launch(launch.rank, launch.world_size)
    me: int = launch.rank
    _check_device(plan.stage_of(me), me)
    verification = require(verify(plan))
    plugins.load_observers(plan.observers)
    asked = asked_for(plan, routes_of(plan, me))
    found = survey(plugins, asked, plan.transports, {stage.device for stage in plan.stages})
    deadline = Deadline(plan.limits.connect_deadline_s)
    client = open_store(launch.store, me, plan.world_size, deadline)
    hosts = isinstance(launch.store, StoreAddress) and launch.store.kind == "tcp" and me == 0
    rendezvous = Rendezvous(
        client,
        f"{launch.run_id}/{plan.name}",
        me,
        plan.world_size,
        restarts=launch.restarts,
        patience_s=deadline.seconds,
    )
    engine = Engine(Node(plan, me, plugins, rendezvous, hosts_store=hosts))
    try:
        engine.join(found, verification, deadline)
    except BaseException as error:
        engine.node.abandon(error)
        raise
    return engine, verification


def _check_device(stage: Stage, rank: int) -> None:
    if stage.device == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            f"rank {rank}: stage {stage.name!r} is on device 'cuda', and CUDA is not available "
            f'(torch {torch.__version__}); set device = "cpu", or run on a machine with a GPU'
        )
