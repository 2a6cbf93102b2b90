"""The values a plan is made of: stages, tensors, edges and limits. Frozen, and free of I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

__all__ = [
    "ASYNCHRONOUS",
    "ROUTINGS",
    "SCHEDULES",
    "WITH_WARM_UP",
    "Control",
    "Edge",
    "Limits",
    "Stage",
    "Tensor",
    "most_microbatches",
]

ASYNCHRONOUS = frozenset({"pipedream", "pipedream_2bw"})
"""Schedules that change weights while microbatches are under way."""

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
    """How many microbatches a session may have in the whole pipeline.

    Every rank has its actions as a list, and walks those of all ranks before it starts.

    Args:
        stages: how many stages the plan has.
    """
    return max(_ALWAYS, _MOST_OF_ALL_STAGES // stages)


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
        """How many ranks hold this stage."""
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


@dataclass(frozen=True, slots=True)
class Limits:
    """How long waits may take and how much memory receives may need.

    Attributes:
        deadline_s: seconds a call may wait for one message or one window place.
        first_deadline_s: the same for the first message of a session (compilation, data loading).
        connect_deadline_s: seconds that `connect` may take.
        close_deadline_s: seconds that `close` may take to drain and say goodbye.
        receive_bytes: bound on one rank's receive memory, checked beforehand as far as shapes are
            declared, and at run time of what has come and was not taken yet; None: no bound.
        pool_bytes: idle receive buffers kept for reuse per rank.
    """

    deadline_s: float = 60.0
    first_deadline_s: float = 600.0
    connect_deadline_s: float = 120.0
    close_deadline_s: float = 10.0
    receive_bytes: int | None = None
    pool_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Control:
    """How the control plane connects.

    Attributes:
        interface: network interface at whose address this rank listens for control connections of
            other servers; None: that of the route to the store's host, or what else tells it, see
            `stagelink.transport.addresses.own_address`.
        inline_bytes: CPU payloads up to this size travel in the header's message (0 to 65536;
            0: never).
        spin_us: microseconds that a waiting caller polls before it blocks, where its last waits
            were shorter than that; 0: never.
        ports: the first and the last port that this rank may listen at for control connections of
            other servers; None: any.
    """

    interface: str | None = None
    inline_bytes: int = 8192
    spin_us: int = 100
    ports: tuple[int, int] | None = None
