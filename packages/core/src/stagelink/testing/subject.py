"""The transport that a conformance test is about, and pipelines that use nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.distributed import Store

from stagelink.exchange.connect import connect
from stagelink.exchange.handler import Handler
from stagelink.plan import Plan
from stagelink.plugins.plugins import Plugins
from stagelink.testing.contract_check import PATIENCE_S, ContractCheck, checked
from stagelink.testing.synchronous import synchronous
from stagelink.transport.contract import Capabilities, Transport

DEADLINE_S = 15.0

_PAIR = (("one", "two"),)


@dataclass(frozen=True)
class Subject:
    """The transport under test."""

    name: str  # its name
    # classes to register in code; empty where it is installed
    classes: Sequence[type[Transport]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # its table in the plan
    device: str = "cpu"  # kind of device of the tensors
    # whether its sends wait for the receiver, see `stagelink.testing.synchronous`
    synchronous: bool = False
    patience_s: float = PATIENCE_S  # seconds for what a sound transport does in milliseconds

    def plan(
        self,
        edges: int | Sequence[tuple[str, str]] = 1,
        *,
        window: int | None = None,
        deadline_s: float = DEADLINE_S,
        close_deadline_s: float | None = None,
    ) -> Plan:
        """Edges ``e0``, ``e1``, … between a pair of ranks, or as given; none of it inline."""
        pairs = _PAIR * edges if isinstance(edges, int) else edges
        pipeline = {"name": "conformance", "schedule": "gpipe", "microbatches": 4}
        return Plan.from_dict(
            {
                "pipeline": pipeline if window is None else {**pipeline, "window": window},
                "stages": [
                    {"name": stage, "ranks": [rank], "device": self.device}
                    for rank, stage in enumerate(dict.fromkeys(chain.from_iterable(pairs)))
                ],
                "tensors": [
                    {"name": f"e{number}", "from": source, "to": [target]}
                    for number, (source, target) in enumerate(pairs)
                ],
                "links": [{"transport": self.name}],
                "transports": {self.name: dict(self.options)},
                "control": {"inline_bytes": 0},
                "limits": {
                    "deadline_s": deadline_s,
                    "first_deadline_s": deadline_s,
                    "close_deadline_s": close_deadline_s or deadline_s,
                },
            }
        )

    def triangle(self) -> Plan:
        """Three ranks, each with a link to and from each other one: ``e0``, ``e1``, ``e2``."""
        return self.plan((("one", "two"), ("two", "three"), ("one", "three")))

    def connect(self, plan: Plan, rank: int, world_size: int, store: Store) -> Handler:
        """Join the others."""
        return connect(
            plan,
            rank=rank,
            world_size=world_size,
            store=store,
            run_id="conformance",
            transports=self.classes,
        )

    def transport(self) -> type[Transport]:
        """Its class."""
        return Plugins(self.classes).load(self.name)

    @property
    def capabilities(self) -> Capabilities:
        """The class's."""
        return self.transport().capabilities

    def wrapped(self, wrap: Callable[[type[Transport]], type[Transport]]) -> Subject:
        """The same with its class wrapped; by another name, since the class's own is taken."""
        wrapper = wrap(self.transport())
        return replace(self, name=wrapper.name, classes=(wrapper,))

    @contextmanager
    def join(
        self,
        rank: int,
        world_size: int,
        store: Store,
        plan_of: Callable[[Subject], Plan] = plan,
        check: ContractCheck | None = None,
    ) -> Iterator[Handler]:
        """Join the others by ``plan_of``'s plan, with the transport held against the contract.

        What is found is kept by ``check``, if one is given, and raised at the end.
        """
        check = check or ContractCheck(self.patience_s)
        subject = self.wrapped(synchronous) if self.synchronous else self
        subject = subject.wrapped(lambda transport: checked(transport, check))
        try:
            check.start()
            with subject.connect(plan_of(subject), rank, world_size, store) as comm:
                yield comm
        finally:
            check.verify()

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the pipeline's tensors are."""
        return tensor.to(self.device)
