"""Link rules that can never match, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stagelink.plan.build import edges_of, rules_of, servers_of, stages_of, tensors_of
from stagelink.plan.document import Document
from stagelink.plan.model import Edge, LinkRule, named_keys
from stagelink.plan.problems import Problem
from stagelink.text import quoted

_OF_EVERY_PLAN = frozenset({"same_server", "device"})
"""Keys that speak of no stage, rank, server or tensor of the plan."""


class _Rank(NamedTuple):
    stage: int
    rank: int
    server: int | None


@dataclass(frozen=True, slots=True)
class _Topology:
    names: tuple[str, ...]
    ranks: tuple[_Rank, ...]
    edges: tuple[Edge, ...]


def dead_rules(document: Document) -> Iterator[Problem]:
    """Rules whose keys contradict each other or the plan, and rules that come too late.

    Plans of different shapes and machines may share their rules: a device or `same_server` alone
    never contradicts the plan, and in one without links no rule does.
    """
    topology = _topology(document)
    rules = rules_of(document)
    for rule in rules:
        reason = _contradiction(rule, topology)
        for other in rules[: rule.index]:
            if _covers(other, rule):
                reason = f"links[{other.index}] comes first and takes every link that it fits"
                break
        if reason is not None:
            yield Problem(("links", rule.index), f"can never match: {reason}")


def _topology(document: Document) -> _Topology:
    server_of: dict[int, int] = {}
    for server, members in enumerate(servers_of(document) or ()):
        server_of.update(dict.fromkeys(members, server))
    stages = stages_of(document)
    return _Topology(
        names=tuple(stage.name for stage in stages),
        ranks=tuple(
            _Rank(stage.index, rank, server_of.get(rank))
            for stage in stages
            for rank in stage.ranks
        ),
        edges=edges_of(tensors_of(document)),
    )


def _covers(earlier: LinkRule, later: LinkRule) -> bool:
    wanted = later.keys
    return all(
        key in wanted and set(wanted[key]).issubset(accepted)
        for key, accepted in earlier.keys.items()
    )


def _contradiction(rule: LinkRule, topology: _Topology) -> str | None:
    if not topology.edges or rule.keys.keys() <= _OF_EVERY_PLAN:
        return None
    sources = _side(rule, "from", topology)
    targets = _side(rule, "to", topology)
    for side, fitting in (("from", sources), ("to", targets)):
        if not fitting:
            return f"no rank has {_given(rule, topology, (side,))}"
    edges = [edge for edge in topology.edges if edge.source in sources and edge.target in targets]
    if "tensor" in rule.keys:
        edges = [edge for edge in edges if edge.tensor.name in rule.keys["tensor"]]
    if not edges:
        keys = _given(rule, topology, ("from", "to", "tensor"))
        return f"no tensor has {keys}{_paths(rule, topology)}"
    if not any(_servers_fit(rule, sources[edge.source], targets[edge.target]) for edge in edges):
        ends = "different servers" if True in rule.keys["same_server"] else "one server"
        return f"every link that fits its other keys has its ends on {ends}"
    return None


def _side(rule: LinkRule, side: str, topology: _Topology) -> Mapping[int, set[int | None]]:
    """The stages that the keys of one side allow, with the servers of their allowed ranks."""
    keys = rule.keys
    names = (side, f"{side}_rank", f"{side}_server")
    tests = [(place, frozenset(keys[key])) for place, key in enumerate(names) if key in keys]
    servers: dict[int, set[int | None]] = defaultdict(set)
    for rank in topology.ranks:
        if all(rank[place] in accepted for place, accepted in tests):
            servers[rank.stage].add(rank.server)
    return servers


def _servers_fit(
    rule: LinkRule, sources: Collection[int | None], targets: Collection[int | None]
) -> bool:
    if "same_server" not in rule.keys or None in sources:
        return True
    if True in rule.keys["same_server"]:
        return not set(sources).isdisjoint(targets)
    return len({*sources, *targets}) > 1


def _given(rule: LinkRule, topology: _Topology, sides: tuple[str, ...]) -> str:
    keys = named_keys(rule, topology.names).items()
    return " and ".join(f"{key} = {values}" for key, values in keys if key.split("_")[0] in sides)


def _paths(rule: LinkRule, topology: _Topology) -> str:
    """Where the tensors that the rule names do go."""
    names = topology.names
    paths = [
        f"; {tensor.name!r} goes from {names[tensor.source]!r} to "
        f"{quoted(names[target] for target in tensor.targets)}"
        for tensor in dict.fromkeys(edge.tensor for edge in topology.edges)
        if tensor.name in rule.keys.get("tensor", ())
    ]
    return "".join(paths)
