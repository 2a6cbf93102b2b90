"""The transport that a conformance test is about, and pipelines that use nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed import Store

from stagelink.exchange.connect import connect
from stagelink.exchange.handler import Handler
from stagelink.plan import Plan
from stagelink.plugins.plugins import Plugins
from stagelink.testing.contract_check import PATIENCE_S, ContractCheck, checked
from stagelink.testing.synchronous import synchronous
from stagelink.transport.contract import Transport

__all__ = ["DEADLINE_S", "Subject"]

DEADLINE_S = 15.0

_PAIR = (("one", "two"),)
_TRIANGLE = (("one", "two"), ("two", "three"), ("one", "three"))


@dataclass(frozen=True)
class Subject:
    """The transport under test.

    Attributes:
        name: its name.
        classes: classes to register in code; empty where it is installed.
        options: its table in the plan.
        device: kind of device of the tensors.
        synchronous: whether its sends wait for the receiver, see `stagelink.testing.synchronous`.
        patience_s: seconds for what a sound transport does in milliseconds.
    """

    name: str
    classes: Sequence[type[Transport]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    synchronous: bool = False
    patience_s: float = PATIENCE_S

    def plan(
        self,
        edges: int = 1,
        *,
        window: int | None = None,
        deadline_s: float = DEADLINE_S,
        close_deadline_s: float | None = None,
    ) -> Plan:
        """A pair of ranks with so many edges ``e0``, ``e1``, …, none of it inline."""
        limits = _limits(deadline_s, close_deadline_s)
        return self._plan(_PAIR * edges, window, limits)

    def triangle(self) -> Plan:
        """Three ranks, each with a link to and from each other one: ``e0``, ``e1``, ``e2``."""
        return self._plan(_TRIANGLE, None, _limits(DEADLINE_S, None))

    def _plan(
        self, edges: Sequence[tuple[str, str]], window: int | None, limits: Mapping[str, float]
    ) -> Plan:
        pipeline: dict[str, Any] = {"name": "conformance", "schedule": "gpipe", "microbatches": 4}
        if window is not None:
            pipeline["window"] = window
        stages = list(dict.fromkeys(stage for edge in edges for stage in edge))
        return Plan.from_dict(
            {
                "pipeline": pipeline,
                "stages": [
                    {"name": stage, "ranks": [rank], "device": self.device}
                    for rank, stage in enumerate(stages)
                ],
                "tensors": [
                    {"name": f"e{number}", "from": source, "to": [target]}
                    for number, (source, target) in enumerate(edges)
                ],
                "links": [{"transport": self.name}],
                "transports": {self.name: dict(self.options)},
                "control": {"inline_bytes": 0},
                "limits": dict(limits),
            }
        )

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
        plan_of: Callable[[Subject], Plan] | None = None,
        *,
        check: ContractCheck | None = None,
    ) -> Iterator[Handler]:
        """Join the others with the transport held against the contract.

        Args:
            rank: this rank.
            world_size: how many there are.
            store: where they meet.
            plan_of: makes the plan; None: one edge, `plan`.
            check: told what the transport does wrong; None: a new one.

        Raises:
            AssertionError: at the end, if the transport broke a rule of the contract.
        """
        found = check or ContractCheck(self.patience_s)
        subject = self.wrapped(synchronous) if self.synchronous else self
        subject = subject.wrapped(lambda transport: checked(transport, found))
        plan = plan_of(subject) if plan_of else subject.plan()
        try:
            with subject.connect(plan, rank, world_size, store) as comm:
                yield comm
        finally:
            found.verify()

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the pipeline's tensors are."""
        return tensor.to(self.device)


def _limits(deadline_s: float, close_deadline_s: float | None) -> dict[str, float]:
    return {
        "deadline_s": deadline_s,
        "first_deadline_s": deadline_s,
        "close_deadline_s": close_deadline_s or deadline_s,
    }
