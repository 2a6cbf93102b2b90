"""A whole pipeline on threads of one process, for a debugger and for notebooks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import HashStore

from stagelink.arguments import CALLABLE, checked, instance
from stagelink.deadline import Deadline
from stagelink.errors import AbortedError, PeerClosedError
from stagelink.exchange.connect import connect
from stagelink.exchange.handler import Handler
from stagelink.plan import LinkRule, Plan
from stagelink.ranks.threads import RankThread
from stagelink.transport.loopback import Loopback

T = TypeVar("T")

_PATIENCE_S = 5.0


@checked(plan=instance(Plan, "a Plan"), work=CALLABLE)
def in_one_process(plan: Plan, work: Callable[[Handler], T]) -> list[T]:
    """Run ``work(comm)`` for every rank of a plan, each on a thread of this process.

    Everything is as with processes, but for three things: all stages are
    on the CPU, all links go by ``loopback``, and no message is waited for with a deadline, so that
    a debugger may stop a rank for as long as it likes. Ctrl-C ends all ranks; one that does not
    end within 5 s is left behind.

    Threads share torch's generator of random numbers, so seeding it in ``work`` does not make
    replicas alike: build modules before, or fill them from a ``torch.Generator`` of their own.

    Args:
        plan: whatever it says of devices, links and time is put aside.
        work: what a rank does; `stagelink.Handler.rank` tells which one it is.

    Returns:
        What each rank's work returned, by rank.

    Raises:
        Exception: what a rank's work raised, as it was, of the rank where it began.
    """
    plan = _for_threads(plan)
    store = HashStore()
    handlers: list[Handler] = []

    def enter(rank: int) -> T:
        with connect(
            plan, rank=rank, world_size=plan.world_size, store=store, run_id="one process"
        ) as comm:
            handlers.append(comm)
            return work(comm)

    threads = [RankThread(rank, enter) for rank in range(plan.world_size)]
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        for comm in handlers:
            comm.abort(error)
        patience = Deadline(_PATIENCE_S)
        for thread in threads:  # the process may be about to end, and must not find them at work
            thread.join(patience.remaining_s)
        raise
    if errors := [thread.error for thread in threads if thread.error]:
        raise min(errors, key=_hearsay)
    return [thread.value for thread in threads]


def _hearsay(error: BaseException) -> int:
    """Rank an error by how far it is from where it began: others were only told of it."""
    return 2 * isinstance(error, AbortedError) + isinstance(error, PeerClosedError)


def _for_threads(plan: Plan) -> Plan:
    limits = plan.limits.model_copy(update={"deadline_s": math.inf, "first_deadline_s": math.inf})
    return dataclasses.replace(
        plan,
        stages=tuple(dataclasses.replace(stage, device="cpu") for stage in plan.stages),
        rules=(LinkRule(0, (Loopback.name,)),),
        transports={},
        servers=None,
        limits=limits,
    )
