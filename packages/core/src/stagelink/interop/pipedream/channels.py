"""The plan under PipeDream's names: a stage for each rank, a tensor for each pair of ranks.

The caller decides which replica gets a minibatch, and how many each gets. So the plan leaves no
routing to be done: a message is found by its name, its two ranks and its minibatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stagelink.interop.pipedream.topology import ACK, Edge, Topology
from stagelink.plan import Limits, Plan

__all__ = ["DEFAULTS", "WINDOW", "Servers", "channel", "limits_of", "plan_of"]

WINDOW = 1024
"""Minibatches that may be in flight per tensor and pair of ranks; others take no memory.

PipeDream's own callers have their warm-up and one more.
"""

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "limits": {
        "deadline_s": 600.0,
        "first_deadline_s": 1800.0,
        "connect_deadline_s": 600.0,
        "close_deadline_s": 30.0,
    }
}
"""Tables of the plan where the caller does not say otherwise. PipeDream has no time limits but
those of its backend, half an hour."""

_IN_SERVER = {"nccl": "nccl", "gloo": "gloo"}
_ACROSS = "gloo"


class Servers(NamedTuple):
    """Transports by the constructor's arguments.

    Attributes:
        backend: of the default process group, and of links within a server.
        ranks_in_server: so many ranks, in their order, share a server; 1: none do.
    """

    backend: str | None
    ranks_in_server: int


def channel(name: str, source: int, target: int) -> str:
    """The plan's name for a tensor between two ranks."""
    return f"{name} {source}>{target}"


def limits_of(tables: Mapping[str, Any]) -> Limits:
    """The time limits that the plan will have, for what comes before there is one.

    Raises:
        PlanError: the table of limits is wrong.
    """
    limits = tables.get("limits", {})
    stand_in = {
        "pipeline": {"name": "pipedream", "microbatches": 1},
        "stages": [{"name": "any", "ranks": [0]}],
        "limits": {**DEFAULTS["limits"], **limits} if isinstance(limits, Mapping) else limits,
    }
    return Plan.from_dict(stand_in, where="CommunicationHandler.tables").limits


def plan_of(topology: Topology, servers: Servers, tables: Mapping[str, Mapping[str, Any]]) -> Plan:
    """The plan that all ranks make for themselves, and connect with.

    Args:
        topology: the pipeline.
        servers: which transports to ask for.
        tables: more of the plan's tables, as a file has them; they go before what is made here.

    Raises:
        PlanError: the tables do not fit.
    """
    pairs = [
        (edge, source, target)
        for edge in topology.edges
        for source in topology.stages[edge.source]
        for target in topology.stages[edge.target]
    ]
    own: dict[str, Mapping[str, Any]] = {
        "pipeline": {"name": "pipedream", "microbatches": 1, "window": WINDOW},
        **DEFAULTS,
    }
    merged = {key: {**own.get(key, {}), **tables[key]} for key in tables if key != "links"}
    document = {
        **own,
        **merged,
        "stages": [
            {"name": f"stage {s}.{r}", "ranks": [rank], "device": topology.devices[rank]}
            for s, ranks in enumerate(topology.stages)
            for r, rank in enumerate(ranks)
        ],
        "tensors": [
            {
                "name": channel(edge.name, source, target),
                "from": _stage_name(topology, source),
                "to": _stage_name(topology, target),
                "grad": edge.answered,
            }
            for edge, source, target in pairs
        ],
        "links": tables.get("links", [*_rules(pairs, servers)]),
    }
    return Plan.from_dict(document, where="the plan of PipeDream's maps")


def _stage_name(topology: Topology, rank: int) -> str:
    stage, replica = topology.places[rank]
    return f"stage {stage}.{replica}"


def _rules(
    pairs: Sequence[tuple[Edge, int, int]], servers: Servers
) -> Iterable[Mapping[str, Any]]:
    """The backend within servers, but for acks; Gloo across."""
    inside = _IN_SERVER.get(servers.backend or "", "auto")
    size = servers.ranks_in_server
    ends = {(source, target) for _, source, target in pairs}
    together = {pair for pair in ends if size > 1 and pair[0] // size == pair[1] // size}
    if inside == _ACROSS:
        together = set()
    acks = [channel(ACK, source, target) for edge, source, target in pairs if edge.name == ACK]
    if together and acks:
        yield {"tensor": acks, "transport": _ACROSS}
    for server in sorted({source // size for source, _ in together}):
        ranks = {rank for pair in together for rank in pair if rank // size == server}
        yield {"from_rank": sorted(ranks), "to_rank": sorted(ranks), "transport": inside}
    if together < ends:
        yield {"transport": _ACROSS}
