"""Preview of a plan's links, as if every rank ran on a machine like this one.

Offline, this machine's probes stand for both ends of every link. Each rank is taken to be a
process of its own, on the server that the plan names, or on one server where it names none. When
the ranks connect, each speaks for itself, and that decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich.filesize import decimal

from stagelink.errors import StagelinkError, UnknownTransportError
from stagelink.plan import Edge, Plan
from stagelink.plugins.choice import Asker, Choice, asked_for, asker, choose, device_of
from stagelink.plugins.offers import End, Survey, survey
from stagelink.plugins.plugins import Plugins
from stagelink.schedule import Verification, message_bytes, pairs
from stagelink.text import did_you_mean
from stagelink.transport.contract import Footprint, Link
from stagelink.transport.host import memory_bytes, server_id


@dataclass(frozen=True, slots=True)
class AssumedLink:
    """Traffic from one rank to another by one transport."""

    source: int  # the sending rank
    target: int  # the receiving rank
    window: int  # messages of one tensor that may be in flight in training
    choice: Choice | str  # the transport, and why; the error's text where none can be taken
    tensors: tuple[str, ...]  # names, in the plan's order

    @property
    def transport(self) -> str | None:
        """The transport's name; None where none can be taken."""
        return None if isinstance(self.choice, str) else self.choice.transport

    @property
    def reasons(self) -> list[str]:
        """The choice in words, or the error's text."""
        return [self.choice] if isinstance(self.choice, str) else self.choice.explain()


class Assumed(NamedTuple):
    """Preview of a plan's links."""

    links: list[AssumedLink]  # of all ranks, by source and target
    # what links take of shared memory, gradients' ways back included; only those whose transports
    # say that they take some
    memory: dict[Link, Footprint]
    notes: list[str]  # what is worth a look


class _Here(NamedTuple):
    """What this machine's plugins make of a plan."""

    plugins: Plugins
    routes: list[tuple[Edge, int, int]]
    found: Survey
    ends: list[End]
    ask: Asker


class _Load(NamedTuple):
    """Load of a link: messages in flight, and the size of the largest, if known."""

    window: int = 0
    message_bytes: int | None = 0

    def plus(self, window: int, message_bytes: int | None) -> _Load:
        known = self.message_bytes is not None and message_bytes is not None
        largest = max(self.message_bytes or 0, message_bytes or 0) if known else None
        return _Load(self.window + window, largest)


def assume(plan: Plan, result: Verification) -> Assumed:
    """Choose the links' transports as they would choose them.

    Imports the transports and observers that the plan asks for. `PlanError` where the options of a
    transport are wrong, `PluginError` where an observer cannot be used.
    """
    here = _look(plan)
    tensors = defaultdict[tuple[int, int, int, Choice | str], list[str]](list)
    loads = defaultdict[Link, _Load](_Load)
    for edge, source, target in here.routes:
        choice = _choice(plan, edge, (here.ends[source], here.ends[target]), here.ask)
        tensors[source, target, result.windows[edge.index], choice].append(edge.tensor.name)
        most = max(result.windows[edge.index], result.forward_windows[edge.index])
        for link in _both_ways(plan, edge, source, target, choice):
            loads[link] = loads[link].plus(most, message_bytes(edge.tensor))
    links = [AssumedLink(*key, tuple(names)) for key, names in tensors.items()]
    links.sort(key=lambda link: (link.source, link.target, link.tensors))
    footprints = {
        link: here.found.footprint(link.transport, *load) for link, load in loads.items()
    }
    memory = {link: one for link, one in footprints.items() if one is not None}
    notes = [*_idle_options(plan, here.plugins), *_too_much_memory(plan, memory)]
    return Assumed(links, memory, notes)


def check_here(plan: Plan, *, alone: bool) -> list[str]:
    """Refuse what the ranks of this machine would refuse for certain when they connect.

    Where they are not ``alone``, what is not installed here may be elsewhere.

    Returns:
        What is worth a look.

    Raises:
        PlanError: the options of a transport are wrong.
        PluginError: an observer that the plan lists cannot be used.
        UnknownTransportError: a link's rule names one transport only, which is not installed.
    """
    here = _look(plan)
    if alone:
        for edge, source, target in here.routes:
            try:
                choose(plan, edge, here.ends[source], here.ends[target], here.ask)
            except UnknownTransportError:
                raise
            except StagelinkError:  # the ranks have the last word, in their own environment
                continue
    return [*_idle_options(plan, here.plugins)]


def _look(plan: Plan) -> _Here:
    routes = [(edge, *pair) for edge in plan.edges for pair in pairs(plan, edge)]
    plugins = Plugins()
    plugins.load_observers(plan.observers)
    devices = {stage.device for stage in plan.stages}
    found = survey(plugins, asked_for(plan, routes), plan.transports, devices)
    ends = [_end(plan, rank, found) for rank in range(plan.world_size)]
    return _Here(plugins, routes, found, ends, asker(found, plugins.hooks, None))


def _both_ways(
    plan: Plan, edge: Edge, source: int, target: int, choice: Choice | str
) -> Iterator[Link]:
    if not isinstance(choice, str):
        device = device_of(plan, edge)
        yield Link(source, target, choice.transport, device)
        if edge.tensor.grad:
            yield Link(target, source, choice.transport, device)


def _end(plan: Plan, rank: int, found: Survey) -> End:
    index = plan.server_of(rank)
    server = server_id() if index is None else f"server {index}"
    return End(rank, server, f"the process of rank {rank}", found.offers)


def _choice(plan: Plan, edge: Edge, ends: tuple[End, End], ask: Asker) -> Choice | str:
    try:
        return choose(plan, edge, *ends, ask)
    except StagelinkError as error:
        return str(error)


def _idle_options(plan: Plan, plugins: Plugins) -> Iterator[str]:
    """Options of transports that no rule names and that only another machine could have."""
    known = {*plugins.known, *plugins.transports.disabled}
    named = {name for rule in plan.rules for name in rule.transports}
    for name in plan.transports:
        if name not in known | named:
            yield (
                f"transports.{name} is not used here: no transport of that name is installed on "
                f"this machine, and no rule names it{did_you_mean(name, plugins.known)}"
            )


def _too_much_memory(plan: Plan, memory: Mapping[Link, Footprint]) -> Iterator[str]:
    """Whether links of one server may take more shared memory than there is."""
    by_server = defaultdict[int | None, int](int)
    for link, footprint in memory.items():
        by_server[plan.server_of(link.source)] += footprint.size_bytes
    most, machine = max(by_server.values(), default=0), memory_bytes()
    if machine is not None and most > machine:
        yield (
            f"the links of one server may take {decimal(most)} of shared memory together, and "
            f"this machine has {decimal(machine)}; it is taken only as it is needed"
        )
