"""The plan: everything that is decided before a rank starts, in one frozen value."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from stagelink.arguments import NAME, PATH, checked, is_a
from stagelink.errors import PlanError
from stagelink.plan.build import edges_of, rules_of, servers_of, stages_of, tensors_of
from stagelink.plan.document import Control, Limits
from stagelink.plan.files import parse_toml, read_mapping
from stagelink.plan.model import (
    ASYNCHRONOUS,
    WITH_WARM_UP,
    Edge,
    LinkRule,
    Stage,
    Tensor,
    named_keys,
    too_many_microbatches,
)
from stagelink.plan.problems import check_launch
from stagelink.plan.reading import read_document
from stagelink.text import shown, unknown


@dataclass(frozen=True)
class Plan:
    """A validated plan, made by `load`, `from_toml` or `from_dict`; the constructor is unchecked.

    Attributes:
        name: the pipeline's name, for people.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"pipedream"``, ``"pipedream_2bw"`` or ``"forward"``.
        microbatches: per batch, in the whole pipeline; a session may choose another number.
        stages: in pipeline order; ``stages[i].index == i``.
        tensors: sorted by name.
        edges: sorted by tensor name and place among its consumers; ``edges[i].index == i``.
        rules: the link rules; the first that matches a link decides, and none means ``auto``.
        servers: the ranks of each server; None: found at connect.
        routing: which replica handles a microbatch: ``"round_robin"`` or ``"diagonal"``.
        window: microbatches in flight per edge and peer in hand-driven sessions; None: by the
            schedule.
        transports: options by name of transport, as written; the transport checks them.
        control: how the control plane connects.
        limits: bounds on time and memory.
        observers: names of the observers to switch on.
    """

    name: str
    schedule: str
    microbatches: int
    stages: tuple[Stage, ...]
    tensors: tuple[Tensor, ...]
    edges: tuple[Edge, ...]
    rules: tuple[LinkRule, ...]
    servers: tuple[tuple[int, ...], ...] | None
    routing: str
    window: int | None
    transports: Mapping[str, Mapping[str, Any]] = field(hash=False)
    control: Control
    limits: Limits
    observers: tuple[str, ...]

    @classmethod
    @checked(path=PATH)
    def load(cls, path: str | os.PathLike[str], *, microbatches: int | None = None) -> Plan:
        """Read and validate a plan's file.

        Args:
            path: a TOML file, or one of PipeDream's configurations, whose name ends in ``.json``.
            microbatches: takes the place of the file's number.

        Raises:
            PlanError: the file cannot be read or is not what its name says, or the plan is wrong.
        """
        plan = cls.from_dict(read_mapping(path), where=os.fspath(path))
        return plan if microbatches is None else plan.with_microbatches(microbatches)

    @classmethod
    @checked(text=NAME, where=NAME)
    def from_toml(cls, text: str, *, where: str = "plan") -> Plan:
        """Validate a plan given as text.

        Args:
            text: TOML.
            where: what errors call it; each of their lines begins with it.

        Raises:
            PlanError: the text is no TOML, or the plan is wrong.
        """
        return cls.from_dict(parse_toml(text, where), where=where)

    @classmethod
    @checked(where=NAME)
    def from_dict(cls, mapping: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """Validate a plan given as nested mappings and lists, as a TOML reader makes them.

        Args:
            mapping: the plan; it is copied.
            where: what errors call it; each of their lines begins with it.

        Raises:
            PlanError: with a line for everything that is wrong.
        """
        document = read_document(mapping, where)
        tensors = tensors_of(document)
        pipeline = document.pipeline
        return cls(
            name=pipeline.name,
            schedule=pipeline.schedule,
            microbatches=pipeline.microbatches,
            stages=stages_of(document),
            tensors=tensors,
            edges=edges_of(tensors),
            rules=rules_of(document),
            servers=servers_of(document),
            routing=pipeline.routing,
            window=pipeline.window,
            transports=document.transports,
            control=document.control,
            limits=document.limits,
            observers=tuple(pipeline.observers),
        )

    @cached_property
    def world_size(self) -> int:
        """Number of ranks of the plan: they are 0 to ``world_size - 1``."""
        return len(self._places)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of `facts`, equal on ranks that agree."""
        return digest_of(self.facts())

    def facts(self) -> dict[str, str]:
        """Facts that all ranks must agree on: "OWNER WORD" to a text, no space in WORD.

        What each rank may choose for itself is left out: limits, interface, ports, spin, observers
        and the number of microbatches, which a session agrees on. `differences` compares two of
        these.
        """
        return {
            f"{owner} {word}": _NOT_GIVEN if value is None else json.dumps(value, sort_keys=True)
            for owner, word, value in _facts(self)
        }

    @property
    def has_warm_up(self) -> bool:
        """Whether forwards and backwards take turns after a warm-up of forwards."""
        return self.schedule in WITH_WARM_UP

    @property
    def asynchronous(self) -> bool:
        """Whether weights change while microbatches are in flight."""
        return self.schedule in ASYNCHRONOUS

    @property
    def two_versions(self) -> bool:
        """Whether a batch makes one update of weights, of which there are two versions."""
        return self.schedule == "pipedream_2bw"

    def stage_of(self, rank: int) -> Stage:
        """The stage that a rank holds.

        Raises:
            PlanError: there is no such rank.
        """
        return self.stages[self._place(rank)[0]]

    def replica_of(self, rank: int) -> int:
        """The rank's place among its stage's replicas; raises as `stage_of`."""
        return self._place(rank)[1]

    def server_of(self, rank: int) -> int | None:
        """Index of the server that the plan puts a rank on; None where it lists no servers.

        Raises as `stage_of`.
        """
        self._place(rank)
        return self._servers.get(rank)

    def inputs(self, stage_index: int) -> tuple[Edge, ...]:
        """The edges that end at a stage, in their order in the plan; raises as `outputs`."""
        return self._inputs[self._stage_index(stage_index)]

    def outputs(self, stage_index: int) -> tuple[Edge, ...]:
        """The edges that begin at a stage, in their order in the plan.

        Raises:
            PlanError: there is no stage of this index.
        """
        return self._outputs[self._stage_index(stage_index)]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name.

        Raises:
            PlanError: there is none; the text has the closest name and all others.
        """
        found = self._tensors.get(name) if is_a(name, str) else None
        if found is None:
            raise PlanError(unknown("tensor", name, self._tensors))
        return found

    def with_microbatches(self, microbatches: int) -> Plan:
        """The same plan with another number of microbatches per batch.

        Raises:
            PlanError: the number is not an int of at least 1, or it is too large.
        """
        if type(microbatches) is not int or microbatches < 1:
            raise PlanError(f"microbatches: {shown(microbatches)}: must be an int of at least 1")
        too_many = too_many_microbatches(microbatches, len(self.stages))
        if too_many is not None:
            raise PlanError(f"microbatches: {too_many}")
        return dataclasses.replace(self, microbatches=microbatches)

    def _stage_index(self, index: int) -> int:
        if type(index) is not int or not 0 <= index < len(self.stages):
            raise PlanError(
                f"no stage has index {shown(index)}: the stages' indices are 0 to "
                f"{len(self.stages) - 1}"
            )
        return index

    def check_launch(self, rank: object, world_size: object) -> None:
        """See `stagelink.plan.problems.check_launch`."""
        check_launch(rank, world_size, self.world_size)

    def _place(self, rank: int) -> tuple[int, int]:
        if not is_a(rank, int) or rank not in self._places:
            last = self.world_size - 1
            raise PlanError(f"there is no rank {shown(rank)}; the plan's ranks are 0 to {last}")
        return self._places[rank]

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        return {
            rank: (stage.index, replica)
            for stage in self.stages
            for replica, rank in enumerate(stage.ranks)
        }

    @cached_property
    def _servers(self) -> Mapping[int, int]:
        servers = enumerate(self.servers or ())
        return {rank: server for server, ranks in servers for rank in ranks}

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def _inputs(self) -> Sequence[tuple[Edge, ...]]:
        return _by_stage(self, attrgetter("target"))

    @cached_property
    def _outputs(self) -> Sequence[tuple[Edge, ...]]:
        return _by_stage(self, attrgetter("source"))


def _by_stage(plan: Plan, end: Callable[[Edge], int]) -> Sequence[tuple[Edge, ...]]:
    edges: list[list[Edge]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        edges[end(edge)].append(edge)
    return [tuple(of_stage) for of_stage in edges]


def _facts(plan: Plan) -> Iterator[tuple[str, str, object]]:
    yield "pipeline", "schedule", plan.schedule
    yield "pipeline", "routing", plan.routing
    yield "pipeline", "window", plan.window
    yield "pipeline", "servers", plan.servers
    yield "control", "inline_bytes", plan.control.inline_bytes
    names = [stage.name for stage in plan.stages]
    for stage in plan.stages:
        owner = f"stage {stage.name!r}"
        yield owner, "place", stage.index
        yield owner, "ranks", stage.ranks
        yield owner, "device", stage.device
        yield owner, "warm_up", stage.warm_up
        yield owner, "arguments", dict(stage.arguments) or None
    for tensor in plan.tensors:
        owner = f"tensor {tensor.name!r}"
        yield owner, "from", names[tensor.source]
        yield owner, "to", [names[target] for target in tensor.targets]
        yield owner, "dtype", tensor.dtype
        yield owner, "shape", tensor.shape
        yield owner, "grad", tensor.grad
    for rule in plan.rules:
        yield f"link rule {rule.index}", "keys", named_keys(rule, names)
        yield f"link rule {rule.index}", "transport", rule.transports
    for name, options in plan.transports.items():
        yield f"transport {name!r}", "options", options


_NOT_GIVEN = "not given"


def digest_of(facts: Mapping[str, str]) -> str:
    """Hex SHA-256 of facts, in any order."""
    return hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], peer: str) -> list[str]:
    """Differences of two ranks' facts, one line each, sorted; the peer's is called ``peer``."""
    differing = (key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    here, there = ({key.rpartition(" ")[0] for key in facts} for facts in (mine, theirs))
    absent = dict.fromkeys(here - there, f"on {peer}") | dict.fromkeys(there - here, "here")
    lines = set()
    for key in differing:
        owner = key.rpartition(" ")[0]
        if owner in absent:
            lines.add(f"{owner}: absent {absent[owner]}")
        else:
            own, other = mine.get(key, _NOT_GIVEN), theirs.get(key, _NOT_GIVEN)
            lines.add(f"{key}: {own} here, {other} on {peer}")
    return sorted(lines)
