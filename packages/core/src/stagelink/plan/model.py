"""Stages, tensors, edges and link rules: the values a plan is made of. Frozen, and free of I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stagelink.text import shown

ASYNCHRONOUS = frozenset({"pipedream", "pipedream_2bw"})
"""Schedules that change weights while microbatches are in flight."""

WITH_WARM_UP = ASYNCHRONOUS | {"1f1b"}
"""Schedules in which forwards and backwards take turns after a warm-up of forwards."""

ROUTINGS = ("round_robin", "diagonal")
"""Every routing, by its word in a plan's file."""

SCHEDULES = ("1f1b", "gpipe", "pipedream", "pipedream_2bw", "forward")
"""Every schedule, by its word in a plan's file."""


_MOST_OF_ALL_STAGES = 1_000_000
_ALWAYS = 4096
"""Microbatches that any plan may have, however many stages it has."""


def most_microbatches(stages: int) -> int:
    """Limit of microbatches of a session in the whole pipeline.

    Every rank has its actions as a list, and walks those of all ranks before it starts.
    """
    return max(_ALWAYS, _MOST_OF_ALL_STAGES // stages)


def too_many_microbatches(microbatches: int, stages: int) -> str | None:
    """Find what is wrong with a number of microbatches; None where nothing is."""
    most = most_microbatches(stages)
    if microbatches <= most:
        return None
    of_stages = f"{stages} stage{'s' * (stages != 1)}"
    return (
        f"{shown(microbatches)}: must be at most {most} with {of_stages}, since each rank lists "
        "and walks them before it starts; let a batch be smaller, or a session go on until the end"
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model and the ranks that hold a replica of it.

    Attributes:
        index: its place in the pipeline, from 0.
        name: unique in the plan.
        ranks: the global rank of each replica; replica ``k`` is ``ranks[k]``. Any order and
            server.
        device: kind of device its tensors live on, ``"cpu"`` or ``"cuda"`` (the local rank's).
        warm_up: forwards ahead of the first backward as set by hand; None: the schedule's.
        turns: the replica of microbatch 0, 1, …, which then repeats; None: round robin.
        arguments: by tensor, the parameter of the module's ``forward`` that takes it; others go to
            the parameter of their own name.
    """

    index: int
    name: str
    ranks: tuple[int, ...]
    device: str = "cpu"
    warm_up: int | None = None
    turns: tuple[int, ...] | None = None
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold this stage."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named stream of tensors, one per microbatch, from one stage to one or several others.

    Attributes:
        name: unique in the plan.
        source: index of the producing stage.
        targets: indices of the consuming stages, in the order written; gradients are summed in it.
        dtype: a name of `stagelink.plan.dtypes.DTYPES` that every message must have; None: as
            sent.
        shape: the shape every message must have, -1 for a free dimension; None: as sent.
        grad: whether a gradient comes back for messages that require one, in training.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    grad: bool = True

    @property
    def has_contract(self) -> bool:
        """Whether messages are held against a declared dtype or shape."""
        return self.dtype is not None or self.shape is not None


@dataclass(frozen=True)
class Edge:
    """One tensor on its way to one of its consumers.

    Edges are numbered by (tensor name, place in ``targets``), so the order in which a file lists
    its tensors changes nothing.

    Attributes:
        index: its number in the plan, and on the wire.
        tensor: the stream it carries.
        target: index of the consuming stage.
    """

    index: int
    tensor: Tensor
    target: int

    @property
    def source(self) -> int:
        """Index of the producing stage."""
        return self.tensor.source

    @cached_property
    def name(self) -> str:
        """The tensor's name, with the consumer's index where the tensor has several."""
        if len(self.tensor.targets) == 1:
            return self.tensor.name
        return f"{self.tensor.name}>{self.target}"


AUTO = ("auto",)
"""The transports of a rule that leaves the choice to the transports' own declared ranks."""


def link_facts(
    edge: Edge,
    ranks: tuple[int, int],
    servers: tuple[int | None, int | None],
    *,
    same_server: bool,
    device: str,
) -> dict[str, Any]:
    """Facts about an edge between two ranks that rules may ask for, by the keys of ``[[links]]``.

    The edge is seen in its forward orientation; gradients take the same transport the other way.
    Ranks and their servers, by index in the plan if it lists any, are the sender's and the
    receiver's. They share a server by the plan or as found; the device is that of the tensors.
    """
    return {
        "from": edge.source,
        "to": edge.target,
        "from_rank": ranks[0],
        "to_rank": ranks[1],
        "from_server": servers[0],
        "to_server": servers[1],
        "same_server": same_server,
        "tensor": edge.tensor.name,
        "device": device,
    }


@dataclass(frozen=True, slots=True)
class LinkRule:
    """One ``[[links]]`` table.

    Attributes:
        index: its place in the file, from 0.
        transports: names in order of preference, or `AUTO`.
        keys: the values of `link_facts` that it accepts, by key. A key that is absent accepts
            anything.
    """

    index: int
    transports: tuple[str, ...]
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether every key accepts the link of these facts."""
        return all(facts[key] in accepted for key, accepted in self.keys.items())


def rule_for(rules: Iterable[LinkRule], facts: Mapping[str, Any]) -> LinkRule | None:
    """The first rule that matches, or None, which means the same as `AUTO`."""
    return next((rule for rule in rules if rule.matches(facts)), None)


def named_keys(rule: LinkRule, stage_names: Sequence[str]) -> dict[str, list[Any]]:
    """The rule's keys as the file has them: lists, with stages by name."""
    keys = {key: list(values) for key, values in rule.keys.items()}
    for key in keys.keys() & {"from", "to"}:
        keys[key] = [stage_names[index] for index in keys[key]]
    return keys
