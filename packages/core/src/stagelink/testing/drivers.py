"""What ranks run in conformance tests: small programs over a pair of stages.

They stand at the module's top level, so that rank processes find them. Each is called as
``driver(rank, world_size, store, subject, …)``, and raises AssertionError where the transport
fails.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stagelink.exchange.connect import connect
from stagelink.plan import Plan
from stagelink.testing.leaks import LeakCheck
from stagelink.testing.samples import awkward_tensors, same_bits, tensors_of_sizes
from stagelink.testing.serving import report

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.exchange.handler import Handler
    from stagelink.exchange.session import Session
    from stagelink.transport.contract import Transport

__all__ = [
    "Subject",
    "closes_without_trace",
    "holds_what_it_received",
    "keeps_order",
    "opens_many_edges",
    "raises_in_user_code",
    "receives_out_of_order",
    "sends_both_ways_at_once",
    "sends_for_ever",
    "sends_values",
    "sends_without_copy",
    "unread_at_close",
]

_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Subject:
    """The transport under test.

    Attributes:
        name: its name.
        classes: classes to register in code; empty where it is installed.
        options: its table in the plan.
    """

    name: str
    classes: Sequence[type[Transport]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, edges: int = 1, *, window: int | None = None) -> Plan:
        """A pair of ranks with so many edges ``e0``, ``e1``, …, none of it inline."""
        pipeline: dict[str, Any] = {"name": "conformance", "schedule": "gpipe", "microbatches": 4}
        if window is not None:
            pipeline["window"] = window
        return Plan.from_dict(
            {
                "pipeline": pipeline,
                "stages": [{"name": "one", "ranks": [0]}, {"name": "two", "ranks": [1]}],
                "tensors": [
                    {"name": f"e{number}", "from": "one", "to": ["two"]} for number in range(edges)
                ],
                "links": [{"transport": self.name}],
                "transports": {self.name: dict(self.options)},
                "control": {"inline_bytes": 0},
                "limits": {"deadline_s": _DEADLINE_S, "first_deadline_s": _DEADLINE_S},
            }
        )

    def connect(self, plan: Plan, rank: int, world_size: int, store: Store) -> Handler:
        """Join the pair."""
        return connect(
            plan,
            rank=rank,
            world_size=world_size,
            store=store,
            run_id="conformance",
            transports=self.classes,
        )


def _echo(session: Session, rank: int, tensors: Sequence[torch.Tensor]) -> None:
    """Send every tensor forward, and where it takes one the same bits back as its gradient."""
    for microbatch, tensor in enumerate(tensors):
        if rank == 0:
            leaf = tensor.detach()
            leaf.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            session.send("e0", leaf, microbatch)
            gradient = session.recv_grad("e0", microbatch)
            if leaf.requires_grad:
                assert gradient is not None, "no gradient came back"
                assert same_bits(gradient, tensor), f"gradient of {tensor.dtype} {tensor.shape}"
        else:
            got = session.recv("e0", microbatch)
            assert got is not None, "None arrived in place of a tensor"
            assert same_bits(got, tensor), f"{tensor.dtype} {tuple(tensor.shape)} arrived changed"
            assert got.is_leaf, "the received tensor is no leaf"
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            assert got.requires_grad == differentiable, f"requires_grad of {tensor.dtype}"
            session.send_grad("e0", got.detach() if differentiable else None, microbatch)


def sends_values(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Every dtype, shape and layout arrives bit by bit, forward and back."""
    tensors = list(awkward_tensors())
    with (
        subject.connect(subject.plan(), rank, world_size, store) as comm,
        comm.train(len(tensors)) as session,
    ):
        _echo(session, rank, tensors)


def keeps_order(
    rank: int, world_size: int, store: Store, subject: Subject, sizes_bytes: tuple[int, ...]
) -> None:
    """Messages of many sizes under way together are told apart."""
    tensors = list(tensors_of_sizes(sizes_bytes))
    plan = subject.plan(window=len(tensors))
    with subject.connect(plan, rank, world_size, store) as comm:
        for _ in range(2):
            with comm.evaluate(len(tensors)) as session:
                for microbatch, tensor in enumerate(tensors):
                    if rank == 0:
                        session.send("e0", tensor, microbatch)
                    else:
                        got = session.recv("e0", microbatch)
                        assert got is not None
                        assert same_bits(got, tensor), f"{tensor.numel()} bytes arrived changed"


def receives_out_of_order(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """The order of receives need not be that of sends."""
    plan = subject.plan(edges=2, window=8)
    with (
        subject.connect(plan, rank, world_size, store) as comm,
        comm.evaluate(8) as session,
    ):
        order = [(edge, microbatch) for microbatch in range(8) for edge in ("e0", "e1")]
        for edge, microbatch in order if rank == 0 else reversed(order):
            value = float(microbatch) + (0.5 if edge == "e1" else 0.0)
            if rank == 0:
                session.send(edge, torch.full((3000,), value), microbatch)
            else:
                got = session.recv(edge, microbatch)
                assert got is not None
                assert bool((got == value).all()), f"{edge} {microbatch} got another's values"


def sends_both_ways_at_once(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Activations and gradients cross on the wire, everybody sending before anybody receives."""
    count = 4
    with subject.connect(subject.plan(window=2 * count), rank, world_size, store) as comm:
        first = torch.ones(size_bytes // 4, requires_grad=True)
        with comm.train(2 * count) as session:
            if rank == 0:
                for microbatch in range(count):
                    session.send("e0", first, microbatch)
            else:
                received = [session.recv("e0", microbatch) for microbatch in range(count)]
            for step in range(count):
                if rank == 0:
                    session.send("e0", first, count + step)
                else:
                    session.send_grad("e0", torch.full_like(_some(received[step]), step), step)
            for step in range(count):
                if rank == 0:
                    gradient = _some(session.recv_grad("e0", step))
                    assert bool((gradient == step).all()), f"gradient {step} arrived changed"
                else:
                    assert bool((_some(session.recv("e0", count + step)) == 1).all())


def holds_what_it_received(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """The sender overwrites at once; what was received is never written again."""
    count = 24
    with subject.connect(subject.plan(window=4), rank, world_size, store) as comm:
        kept = []
        with comm.evaluate(count) as session:
            tensor = torch.empty(size_bytes, dtype=torch.uint8)
            for microbatch in range(count):
                if rank == 0:
                    tensor.fill_(microbatch)
                    session.send("e0", tensor, microbatch)
                    tensor.fill_(255)
                else:
                    kept.append(_some(session.recv("e0", microbatch)))
        for microbatch, got in enumerate(kept):
            assert bool((got == microbatch).all()), f"message {microbatch} was overwritten"


def sends_without_copy(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """With copy=False the tensor is the caller's again when the handle is done."""
    with subject.connect(subject.plan(window=4), rank, world_size, store) as comm:
        tensor = torch.empty(size_bytes, dtype=torch.uint8)
        with comm.evaluate(12) as session:
            for microbatch in range(12):
                if rank == 0:
                    tensor.fill_(microbatch)
                    session.send("e0", tensor, microbatch, copy=False).wait()
                else:
                    got = _some(session.recv("e0", microbatch))
                    assert bool((got == microbatch).all()), f"message {microbatch} arrived changed"


def opens_many_edges(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Forty edges between two ranks cost no more links than one."""
    with (
        subject.connect(subject.plan(edges=40), rank, world_size, store) as comm,
        comm.evaluate(1) as session,
    ):
        links = len(comm.transports)
        assert links == len(("there", "back")), f"{links} links for 40 edges"
        for number in range(40):
            if rank == 0:
                session.send(f"e{number}", torch.tensor([number]), 0)
            else:
                assert _some(session.recv(f"e{number}", 0)).item() == number


def closes_without_trace(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Ten times opened, used and closed: nothing is there that was not before."""
    _use_once(rank, world_size, store, subject)
    check = LeakCheck("threads", "descriptors", "shared mappings")
    for _ in range(9):
        _use_once(rank, world_size, store, subject)
    # Ranks that are threads of one process would count each other's.
    if threading.current_thread() is threading.main_thread():
        check.verify()


def _use_once(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    with (
        subject.connect(subject.plan(), rank, world_size, store) as comm,
        comm.train(2) as session,
    ):
        _echo(session, rank, [torch.ones(5000), torch.ones(5000)])


def unread_at_close(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """A session left with messages unread harms neither the next session nor the close."""
    with subject.connect(subject.plan(window=4), rank, world_size, store) as comm:
        for _ in range(3):
            with comm.evaluate(4) as session:
                if rank == 0:
                    for microbatch in range(4):
                        session.send("e0", torch.ones(50_000), microbatch)
                else:
                    session.recv("e0", 0)
                comm.reduce([0.0])  # nobody leaves before everything is sent


def raises_in_user_code(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Rank 1's own error ends rank 0's wait; returns what each was told."""
    try:
        with subject.connect(subject.plan(), rank, world_size, store) as comm:
            comm.reduce([0.0])
            with comm.train(4) as session:
                if rank == 1:
                    _make_a_mistake()
                session.send("e0", torch.ones(100_000, requires_grad=True), 0)
                session.recv_grad("e0", 0)
    except Exception as error:  # its text is the result
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _make_a_mistake() -> None:
    raise ValueError("the user's own mistake")


def sends_for_ever(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Stream until somebody dies; reports "going" after the first messages."""
    plan = subject.plan(window=4)
    with subject.connect(plan, rank, world_size, store) as comm:
        tensor = torch.ones(size_bytes, dtype=torch.uint8)
        for number in range(1_000_000):
            with comm.evaluate(4) as session:
                for microbatch in range(4):
                    if rank == 0:
                        session.send("e0", tensor, microbatch)
                    else:
                        session.recv("e0", microbatch)
            if number == 1:
                report("going")


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "None arrived in place of a tensor"
    return tensor
