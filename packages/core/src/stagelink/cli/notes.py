"""What is no mistake in a plan for certain, and yet worth a look."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.filesize import decimal

from stagelink.text import did_you_mean
from stagelink.transport.host import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stagelink.plan import Plan
    from stagelink.plugins.plugins import Plugins
    from stagelink.transport.contract import Footprint, Link

__all__ = ["idle_options", "too_much_memory"]


def idle_options(plan: Plan, plugins: Plugins) -> Iterator[str]:
    """Options of transports that no rule names and that only another machine could have.

    Args:
        plan: the plan.
        plugins: those of this machine.
    """
    known = {*plugins.known, *plugins.transports.disabled}
    named = {name for rule in plan.rules for name in rule.transports}
    for name in plan.transports:
        if name not in known | named:
            yield (
                f"transports.{name} is not used here: no transport of that name is installed on "
                f"this machine, and no rule names it{did_you_mean(name, plugins.known)}"
            )


def too_much_memory(plan: Plan, memory: Mapping[Link, Footprint]) -> Iterator[str]:
    """Whether links of one server may take more shared memory than there is.

    Args:
        plan: the plan.
        memory: the most that each link takes.
    """
    by_server = defaultdict[int | None, int](int)
    for link, footprint in memory.items():
        by_server[plan.server_of(link.source)] += footprint.size_bytes
    most, machine = max(by_server.values(), default=0), memory_bytes()
    if machine is not None and most > machine:
        yield (
            f"the links of one server may take {decimal(most)} of shared memory together, and "
            f"this machine has {decimal(machine)}; it is taken only as it is needed"
        )
