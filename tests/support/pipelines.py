"""Pipelines for tests: the wires that carry them, their plans, and ranks that run a case.

A case is a function ``case(comm, *args)`` at a module's top level. `Ranks` calls it on every rank
with an open handler: on threads where the wire is loopback, else on warm processes.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import stagelink
from stagelink.schedule import Kind
from stagelink.testing import LeakCheck, run_fresh, run_threads
from stagelink.testing.synchronous import synchronous
from stagelink.transport.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store

    from stagelink.testing import RankPool, RankProcesses
    from stagelink.transport.contract import Transport

T = TypeVar("T")

Document = dict[str, Any]
"""A plan as nested dicts, as `Plan.from_dict` takes it; unlike a plan it can be pickled."""


@dataclass(frozen=True)
class Wire:
    """What carries the tensors of a test.

    Attributes:
        transport: its name in the plan.
        inline_bytes: payloads up to this size do not meet it.
        options: of the transport.
        processes: whether the ranks are processes.
        register: transports that no plugin brings; not where the ranks are processes.
    """

    transport: str
    inline_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    processes: bool = False
    register: tuple[type[Transport], ...] = ()

    def __str__(self) -> str:
        words = [self.transport]
        words += ["inline"] * bool(self.inline_bytes)
        return "-".join(words)


LOOPBACK = Wire("loopback")
SYNCHRONOUS = Wire("synchronous-loopback", register=(synchronous(Loopback),))
GLOO = Wire("gloo", options={"interface": "lo"}, processes=True)
SHM = Wire("shm", processes=True)
TCP = Wire("tcp", processes=True)
WIRES = (LOOPBACK, GLOO, SHM)
INLINE = (
    Wire("loopback", inline_bytes=8192),
    Wire("gloo", inline_bytes=8192, options={"interface": "lo"}, processes=True),
)


LIMITS = {"deadline_s": 20.0, "first_deadline_s": 20.0, "connect_deadline_s": 20.0}


def tensor(name: str, source: int, *targets: int, **more: Any) -> Document:
    """A ``[[tensors]]`` table between stages given by number."""
    return {"name": name, "from": f"s{source}", "to": [f"s{t}" for t in targets], **more}


def line(stages: int) -> list[Document]:
    """The tensors of a chain: ``h0`` from stage 0 to 1, ``h1`` from 1 to 2, …"""
    return [tensor(f"h{index}", index, index + 1) for index in range(stages - 1)]


def document(
    wire: Wire,
    replicas: Sequence[int] = (1, 1),
    tensors: Sequence[Document] = (),
    **tables: Any,
) -> Document:
    """A plan with so many replicas per stage, ranks counted upwards.

    Args:
        wire: what carries every link.
        replicas: per stage.
        tensors: see `tensor`; left out: ``h`` from stage 0 to 1.
        tables: more for the tables ``limits`` and ``control``; anything else for ``pipeline``.
    """
    ranks = iter(range(sum(replicas)))
    limits, control = tables.pop("limits", {}), tables.pop("control", {})
    stages = [
        {"name": f"s{index}", "ranks": [next(ranks) for _ in range(count)]}
        for index, count in enumerate(replicas)
    ]
    return {
        "pipeline": {"name": "test", "microbatches": 4, **tables},
        "stages": stages,
        "tensors": list(tensors or [tensor("h", 0, 1)]),
        "links": [{"transport": wire.transport}],
        "transports": {wire.transport: wire.options} if wire.options else {},
        "limits": {**LIMITS, **limits},
        "control": {"inline_bytes": wire.inline_bytes, **control},
    }


@contextmanager
def joined(
    rank: int,
    world_size: int,
    store: Store | str,
    plan: Document,
    transports: Sequence[type[Transport]] = (),
) -> Iterator[stagelink.Handler]:
    """An open handler, for the body of a ``with``."""
    with stagelink.connect(
        stagelink.Plan.from_dict(plan),
        rank=rank,
        world_size=world_size,
        store=store,
        run_id="run",
        transports=transports,
    ) as comm:
        yield comm


def _enter(
    rank: int,
    world_size: int,
    store: Store,
    plan: Document,
    case: Callable[..., T],
    arguments: tuple[Any, ...],
    transports: Sequence[type[Transport]],
) -> T:
    with joined(rank, world_size, store, plan, transports) as comm:
        return case(comm, *arguments)


def _enter_process(rank: int, world_size: int, store: Store, *rest: Any) -> Any:
    # The test's process checks threads that are its own; here nobody else does.
    leaks = LeakCheck("threads", "descriptors")
    result = _enter(rank, world_size, store, *rest)
    leaks.verify()
    return result


def world_size(plan: Document) -> int:
    """How many ranks a plan has."""
    return sum(len(stage["ranks"]) for stage in plan["stages"])


class Ranks:
    """Runs cases on the ranks of a wire.

    Args:
        wire: what carries the tensors.
        pool: warm processes.
    """

    def __init__(self, wire: Wire, pool: RankPool) -> None:
        self.wire = wire
        self._pool = pool

    def plan(self, *args: Any, **kwargs: Any) -> Document:
        """`document` of this wire."""
        return document(self.wire, *args, **kwargs)

    def run(
        self,
        plan: Document,
        case: Callable[..., T],
        *args: Any,
        transports: Sequence[type[Transport]] = (),
        timeout_s: float = 30.0,
    ) -> list[T]:
        """Call ``case(comm, *args)`` on every rank of the plan; what each returned."""
        call = (plan, case, args, (*self.wire.register, *transports))
        if self.wire.processes:
            size = world_size(plan)
            return self._pool.run(_enter_process, size, *call, timeout_s=timeout_s)
        return run_threads(_enter, world_size(plan), *call)

    def run_bare(self, function: Callable[..., T], count: int, *args: Any) -> list[T]:
        """Call ``function(rank, world_size, store, *args)`` on every rank, which opens itself."""
        if self.wire.processes:
            return self._pool.run(function, count, *args)
        return run_threads(function, count, *args)

    def run_to_ends(
        self,
        plan: Document,
        case: Callable[..., object],
        *args: Any,
        transports: Sequence[type[Transport]] = (),
    ) -> list[End]:
        """As `run`, for cases that end with an error: how each rank ended."""
        end = _end_process if self.wire.processes else _end
        return self.run_bare(
            end, world_size(plan), plan, case, args, (*self.wire.register, *transports)
        )


def start_fresh(plan: Document, case: Callable[..., T], *args: Any) -> RankProcesses[T]:
    """Start a case on processes that may be killed; see `stagelink.testing.run_fresh`."""
    return run_fresh(_enter, world_size(plan), plan, case, args, ())


@dataclass(frozen=True)
class End:
    """How a case ended on a rank, close included.

    Attributes:
        kind: name of the error's class, empty where there was none.
        text: of the error.
        cause: name of the class of the error's cause, empty where it has none.
        seconds: it took from the call of the case.
        left: threads, descriptors and children left behind; only known of a process.
    """

    kind: str
    text: str
    cause: str
    seconds: float
    left: tuple[str, ...] = ()


def _end(
    rank: int,
    world_size: int,
    store: Store,
    plan: Document,
    case: Callable[..., object],
    arguments: tuple[Any, ...],
    transports: Sequence[type[Transport]],
) -> End:
    began = time.monotonic()
    try:
        with joined(rank, world_size, store, plan, transports) as comm:
            began = time.monotonic()
            case(comm, *arguments)
    except Exception as error:
        cause = type(error.__cause__).__name__ if error.__cause__ else ""
        return End(type(error).__name__, str(error), cause, time.monotonic() - began)
    return End("", "", "", time.monotonic() - began)


def _end_process(rank: int, world_size: int, store: Store, *rest: Any) -> End:
    leaks = LeakCheck("threads", "descriptors", "processes")
    end = _end(rank, world_size, store, *rest)
    try:
        leaks.verify()
    except AssertionError as error:
        return replace(end, left=tuple(str(error).splitlines()[1:]))
    return end


def start_to_ends(plan: Document, case: Callable[..., object], *args: Any) -> RankProcesses[End]:
    """Start a case on new processes, to be stopped and killed; how each rank ended."""
    return run_fresh(_end_process, world_size(plan), plan, case, args, ())


def check_same(got: torch.Tensor | None, want: torch.Tensor) -> None:
    """Hold a tensor against another: dtype, shape and every bit.

    Raises:
        AssertionError: they differ.
    """
    if got is None:
        raise AssertionError(f"None in place of {want}")
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise AssertionError(f"{got.dtype} {got.shape} in place of {want.dtype} {want.shape}")
    if not torch.equal(_bits(got), _bits(want)):
        raise AssertionError(f"{got} in place of {want}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def carry(comm: stagelink.Handler, values: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Send values from stage 0 to 1 as ``h``, and back as gradients where they take one.

    A training session for each of ``counts``, then an evaluation; the values come in turn.

    Raises:
        AssertionError: a value differs at the other end, or requires a gradient when it must not.
    """
    for count in counts:
        with comm.train(count) as session:
            for action in session.actions:
                value = values[action.microbatch % len(values)]
                if action.kind is Kind.FORWARD:
                    _forward(comm, session, value, action.microbatch)
                else:
                    _backward(comm, session, value, action.microbatch)
    with comm.evaluate(len(values)) as session:
        for microbatch in session.mine:
            _forward(comm, session, values[microbatch], microbatch, trains=False)


def _forward(
    comm: stagelink.Handler,
    session: stagelink.Session,
    value: torch.Tensor,
    microbatch: int,
    *,
    trains: bool = True,
) -> None:
    if comm.stage.index == 0:
        before = value.detach().clone()
        session.send("h", value, microbatch)
        check_same(value, before)
        return
    got = session.recv("h", microbatch)
    check_same(got, value)
    wanted = trains and value.requires_grad
    if got is None or (got.requires_grad, got.is_leaf) != (wanted, True):
        raise AssertionError(f"requires_grad must be {wanted}, and it a leaf: {got!r}")


def _backward(
    comm: stagelink.Handler, session: stagelink.Session, value: torch.Tensor, microbatch: int
) -> None:
    gradient = value.detach() if value.requires_grad else None
    if comm.stage.index == 1:
        session.send_grad("h", gradient, microbatch)
        return
    got = session.recv_grad("h", microbatch)
    if gradient is not None:
        check_same(got, gradient)
    elif got is not None:
        raise AssertionError(f"a gradient {got} where there is none")
