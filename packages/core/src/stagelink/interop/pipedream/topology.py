"""The topology of stages, put together from what each rank knows, and the plan made of it.

PipeDream's runtime tells the handler of a rank only what it sends and receives itself. The ranks
exchange that, and what they say must fit together.

The plan has a stage for each rank and a tensor for each pair of ranks: the caller decides which
replica gets a minibatch, and how many each gets. So no routing is left to be done: a message is
found by its name, its two ranks and its minibatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from stagelink.arguments import Expected
from stagelink.errors import PlanError
from stagelink.plan import Limits, Plan

ACK = "ack"
"""Name of what is sent back for each minibatch in evaluation."""

WINDOW = 1024
"""Minibatches that may be in flight per tensor and pair of ranks; others take no memory.

PipeDream's own callers have their warm-up and one more.
"""

LIMITS = {
    "deadline_s": 600.0,
    "first_deadline_s": 1800.0,
    "connect_deadline_s": 600.0,
    "close_deadline_s": 30.0,
}
"""Limits of the plan where the caller does not say otherwise. PipeDream has none but those of its
backend, half an hour."""

_ACROSS = "gloo"

RANKS = Expected(
    "a list of ranks",
    lambda value: isinstance(value, (list, tuple)) and all(type(rank) is int for rank in value),
)
RANKS_BY_NAME = Expected(
    "a dict from names to lists of ranks",
    lambda value: isinstance(value, dict) and all(map(RANKS.accepts, value.values())),
)
NAMES = Expected(
    "a collection of names",
    lambda value: (
        isinstance(value, (set, frozenset, list, tuple))
        and all(isinstance(name, str) for name in value)
    ),
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One rank's declaration of its neighbours and tensors.

    It is one of so many replicas of its stage; previous and following are the ranks, by replica,
    of the stages beside it. What it receives and sends has the ranks of the stage at the other
    end. Targets, which go from every stage to the next without gradient, are not among that.
    """

    rank: int
    replica: int
    replicas: int
    previous: tuple[int, ...]
    following: tuple[int, ...]
    receives: Mapping[str, tuple[int, ...]]
    sends: Mapping[str, tuple[int, ...]]
    targets: tuple[str, ...]
    acks: bool
    device: str

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Declaration:
        """Put together again what was a dict in JSON."""
        maps = {
            key: {name: tuple(ranks) for name, ranks in found[key].items()}
            for key in ("receives", "sends")
        }
        lists = {key: tuple(found[key]) for key in ("previous", "following", "targets")}
        return cls(**{**found, **maps, **lists})


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way from one stage to a later one, by the stages' indices.

    It is answered where the receiver sends something back for each: a gradient, the tensor itself
    where it needs none, or an ack.
    """

    name: str
    source: int
    target: int
    answered: bool


@dataclass(frozen=True)
class Topology:
    """The pipeline as a whole, the same on every rank.

    Stages have their ranks by replica, devices are kinds by rank, edges are in no order.
    """

    stages: tuple[tuple[int, ...], ...]
    devices: tuple[str, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, declarations: Sequence[Declaration]) -> Topology:
        """Put the ranks' declarations together.

        Raises:
            PlanError: they contradict each other; the text names the rank and what it says.
        """
        stages = _stages(declarations)
        places = {rank: place for place, ranks in enumerate(stages) for rank in ranks}
        for told in declarations:
            _check_neighbours(told, stages, places)
            _check_like_first(told, declarations[stages[places[told.rank]][0]])
            _check_alike(told, declarations[0])
        first = [declarations[ranks[0]] for ranks in stages]
        edges = [*_between(first, stages)]
        for source, target in pairwise(range(len(stages))):
            edges += [Edge(name, source, target, False) for name in first[0].targets]
            edges += [Edge(ACK, source, target, True)] * first[0].acks
        return cls(stages, tuple(told.device for told in declarations), tuple(edges))

    @cached_property
    def places(self) -> Mapping[int, tuple[int, int]]:
        """Stage and replica of each rank."""
        return {
            rank: (stage, replica)
            for stage, ranks in enumerate(self.stages)
            for replica, rank in enumerate(ranks)
        }


def _stages(declarations: Sequence[Declaration]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage: the first are those that nobody is before, and so on."""
    first = sorted((a for a in declarations if not a.previous), key=lambda a: (a.replica, a.rank))
    if not first:
        raise PlanError("no rank says that it is of the first stage: all have a previous stage")
    stages = [tuple(told.rank for told in first)]
    seen = set(stages[0])
    while following := declarations[stages[-1][0]].following:
        unknown = [rank for rank in following if not 0 <= rank < len(declarations)]
        again = seen.intersection(following) or len(set(following)) < len(following)
        if unknown or again:
            raise PlanError(
                f"rank {stages[-1][0]} has ranks_in_next_stage {list(following)}: "
                + (f"there is no rank {unknown[0]}" if unknown else "a rank holds one place")
            )
        stages.append(following)
        seen.update(following)
    missing = sorted(set(range(len(declarations))) - seen)
    if missing:
        raise PlanError(
            f"rank {missing[0]} is in no stage that is reached from the first; the stages are "
            f"{[list(ranks) for ranks in stages]}"
        )
    return tuple(stages)


def _check_neighbours(
    told: Declaration, stages: Sequence[tuple[int, ...]], places: Mapping[int, int]
) -> None:
    """What a rank says of its place must be what follows from all."""
    stage = places[told.rank]
    own = stages[stage]
    said = {
        "ranks_in_previous_stage": (told.previous, stages[stage - 1] if stage else ()),
        "ranks_in_next_stage": (told.following, (*stages, ())[stage + 1]),
        "rank_in_stage": (told.replica, own.index(told.rank)),
        "num_ranks_in_stage": (told.replicas, len(own)),
    }
    for what, (says, follows) in said.items():
        if says != follows:
            raise PlanError(
                f"rank {told.rank} has {what} {_shown(says)}; the others' maps say "
                f"{_shown(follows)}"
            )


def _check_like_first(told: Declaration, first: Declaration) -> None:
    """The replicas of a stage send and receive the same."""
    for what in ("receives", "sends"):
        one, other = getattr(told, what), getattr(first, what)
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                raise PlanError(
                    f"rank {told.rank} and rank {first.rank} are replicas of one stage, but "
                    f"for {name!r} {what[:-1]}_ranks differ: {_shown(one.get(name))} and "
                    f"{_shown(other.get(name))}"
                )


def _check_alike(told: Declaration, first: Declaration) -> None:
    """Targets and acks pass through all stages."""
    if told.targets != first.targets:
        raise PlanError(
            f"rank {told.rank} has target_tensor_names {_shown(told.targets)}, rank "
            f"{first.rank} {_shown(first.targets)}"
        )
    if told.acks != first.acks:
        raise PlanError(f"'ack' has a tag on one of ranks {first.rank} and {told.rank} only")


def _between(first: Sequence[Declaration], stages: Sequence[tuple[int, ...]]) -> Iterable[Edge]:
    """All that one stage sends and a later one receives, as their first replicas declare it."""
    sent = {
        (name, source, _stage_of(ranks, stages, told, name))
        for source, told in enumerate(first)
        for name, ranks in told.sends.items()
    }
    received = {
        (name, _stage_of(ranks, stages, told, name), target)
        for target, told in enumerate(first)
        for name, ranks in told.receives.items()
    }
    for name, source, target in sorted(sent ^ received):
        does, does_not = "sends it", "does not expect it from there"
        if (name, source, target) in received:
            does, does_not = "does not send it there", "expects it"
        raise PlanError(
            f"{name!r} from stage {source} to stage {target}: rank {first[source].rank} {does}, "
            f"rank {first[target].rank} {does_not}; a tensor goes to one stage, so one that two "
            "stages use needs a second name in the model"
        )
    for name, source, target in sorted(sent):
        if source >= target:
            raise PlanError(f"{name!r} goes from stage {source} to {target}: not to a later one")
        yield Edge(name, source, target, True)


def _stage_of(
    ranks: tuple[int, ...], stages: Sequence[tuple[int, ...]], told: Declaration, name: str
) -> int:
    if ranks not in stages:
        raise PlanError(
            f"rank {told.rank} has the ranks {_shown(ranks)} for {name!r}; they are not those "
            f"of a stage: {[list(stage) for stage in stages]}"
        )
    return stages.index(ranks)


def _shown(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


# -- the plan


def channel(name: str, source: int, target: int) -> str:
    """The plan's name for a tensor between two ranks."""
    return f"{name} {source}>{target}"


def limits_of(tables: Mapping[str, Any]) -> Limits:
    """The time limits that the plan will have, for what comes before there is one."""
    limits = tables.get("limits", {})
    stand_in = {
        "pipeline": {"name": "pipedream", "microbatches": 1},
        "stages": [{"name": "any", "ranks": [0]}],
        "limits": {**LIMITS, **limits} if isinstance(limits, Mapping) else limits,
    }
    return Plan.from_dict(stand_in, where="CommunicationHandler.tables").limits


def plan_of(
    topology: Topology,
    backend: str | None,
    ranks_in_server: int,
    tables: Mapping[str, Mapping[str, Any]],
) -> Plan:
    """The plan that all ranks make for themselves; tables of a plan's file go before it."""
    pairs = [
        (edge, source, target)
        for edge in topology.edges
        for source in topology.stages[edge.source]
        for target in topology.stages[edge.target]
    ]
    names = {rank: f"stage {s}.{r}" for rank, (s, r) in topology.places.items()}
    own: dict[str, Mapping[str, Any]] = {
        "pipeline": {"name": "pipedream", "microbatches": 1, "window": WINDOW},
        "limits": LIMITS,
    }
    merged = {key: {**own.get(key, {}), **tables[key]} for key in tables if key != "links"}
    document = {
        **own,
        **merged,
        "stages": [
            {"name": name, "ranks": [rank], "device": topology.devices[rank]}
            for rank, name in names.items()
        ],
        "tensors": [
            {
                "name": channel(edge.name, source, target),
                "from": names[source],
                "to": names[target],
                "grad": edge.answered,
            }
            for edge, source, target in pairs
        ],
        "links": tables.get("links", [*_rules(pairs, backend, ranks_in_server)]),
    }
    return Plan.from_dict(document, where="the plan of PipeDream's maps")


def _rules(
    pairs: Sequence[tuple[Edge, int, int]], backend: str | None, size: int
) -> Iterable[Mapping[str, Any]]:
    """The backend within servers of a size, but for acks; Gloo across."""
    inside = backend if backend in {"nccl", _ACROSS} else "auto"
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
