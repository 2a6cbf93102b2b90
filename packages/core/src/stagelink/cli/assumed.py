"""What the links of a plan would be if every rank ran on a machine like this one.

Offline, this machine's probes stand for both ends of every link. Each rank is taken to be a
process of its own, on the server that the plan names, or on one server where it names none. When
the ranks connect, each speaks for itself, and that decides.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from stagelink.errors import StagelinkError
from stagelink.schedule import message_bytes, pairs
from stagelink.transport.choice import asked_for, asker, choose, device_of
from stagelink.transport.contract import Link
from stagelink.transport.host import server_id
from stagelink.transport.offers import End, survey
from stagelink.transport.plugins import Plugins

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.plan import Edge, Plan
    from stagelink.schedule import Verdict
    from stagelink.transport.choice import Asker, Choice, Refusal
    from stagelink.transport.contract import Footprint
    from stagelink.transport.offers import Survey

__all__ = ["Assumed", "AssumedLink", "Outcome", "assume"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the choice of a link's transport ended.

    Attributes:
        transport: the one taken; None where none can be.
        decided_by: the rule, and ``auto`` where that left it to the transports; ``""`` where no
            transport was taken.
        passed_over: the transports that were preferred and cannot carry the link.
        reasons: all of it in words; where no transport was taken, the error's text.
    """

    transport: str | None
    decided_by: str
    passed_over: tuple[Refusal, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AssumedLink:
    """What goes from one rank to another by one transport.

    Attributes:
        source: the sending rank.
        target: the receiving rank.
        window: messages of one tensor that may be in flight in training.
        outcome: the transport, and why.
        tensors: names, in the plan's order.
    """

    source: int
    target: int
    window: int
    outcome: Outcome
    tensors: tuple[str, ...]


class Assumed(NamedTuple):
    """What the links of a plan would be.

    Attributes:
        links: of all ranks, by source and target.
        memory: what links take of shared memory, gradients' ways back included; only those whose
            transports say that they take some.
    """

    links: list[AssumedLink]
    memory: dict[Link, Footprint]


class _Load(NamedTuple):
    """What a link has to carry: messages under way, and the size of the largest, if known."""

    window: int = 0
    message_bytes: int | None = 0

    def plus(self, window: int, message_bytes: int | None) -> _Load:
        known = self.message_bytes is not None and message_bytes is not None
        largest = max(self.message_bytes or 0, message_bytes or 0) if known else None
        return _Load(self.window + window, largest)


def assume(plan: Plan, verdict: Verdict) -> Assumed:
    """Choose the links' transports as they would choose them.

    Imports the transports and observers that the plan asks for.

    Args:
        plan: the plan.
        verdict: on it.

    Raises:
        PlanError: the options of a transport are wrong.
        PluginError: an observer that the plan lists cannot be used.
    """
    routes = [(edge, *pair) for edge in plan.edges for pair in pairs(plan, edge)]
    plugins = Plugins()
    plugins.load_observers(plan.observers)
    found = survey(plugins, asked_for(plan, routes), plan.transports)
    ask = asker(found, plugins.hooks, None)
    ends = [_end(plan, rank, found) for rank in range(plan.world_size)]
    tensors = defaultdict[tuple[int, int, int, Outcome], list[str]](list)
    loads = defaultdict[Link, _Load](_Load)
    for edge, source, target in routes:
        outcome = _outcome(plan, edge, (ends[source], ends[target]), ask)
        tensors[source, target, verdict.windows[edge.index], outcome].append(edge.tensor.name)
        most = max(verdict.windows[edge.index], verdict.forward_windows[edge.index])
        for link in _both_ways(plan, edge, source, target, outcome):
            loads[link] = loads[link].plus(most, message_bytes(edge.tensor))
    links = [AssumedLink(*key, tuple(names)) for key, names in tensors.items()]
    links.sort(key=lambda link: (link.source, link.target, link.tensors))
    footprints = {
        link: found.transports[link.transport].footprint(*load) for link, load in loads.items()
    }
    return Assumed(links, {link: one for link, one in footprints.items() if one is not None})


def _both_ways(
    plan: Plan, edge: Edge, source: int, target: int, outcome: Outcome
) -> Iterator[Link]:
    if outcome.transport is not None:
        device = device_of(plan, edge)
        yield Link(source, target, outcome.transport, device)
        if edge.tensor.grad:
            yield Link(target, source, outcome.transport, device)


def _end(plan: Plan, rank: int, found: Survey) -> End:
    index = plan.server_of(rank)
    server = server_id() if index is None else f"server {index}"
    return End(rank, server, f"the process of rank {rank}", found.offers)


def _outcome(plan: Plan, edge: Edge, ends: tuple[End, End], ask: Asker) -> Outcome:
    try:
        choice = choose(plan, edge, *ends, ask)
    except StagelinkError as error:
        return Outcome(None, "", (), (str(error),))
    return Outcome(
        choice.transport, _decided_by(choice), choice.passed_over, tuple(choice.explain())
    )


def _decided_by(choice: Choice) -> str:
    rule = [] if choice.rule is None else [f"links[{choice.rule}]"]
    return ", ".join([*rule, *(["auto"] if choice.auto else [])])
