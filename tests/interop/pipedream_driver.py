"""Drives `CommunicationHandler` in the way of PipeDream's runtime: maps, order of calls, loop.

A model of stages that each multiply by a weight. What a stage sends begins with its replica and
its own number of the minibatch, so that the next one sees whom it received from.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from stagelink.interop.pipedream import CommunicationHandler
from tests.support.pipelines import LIMITS

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

TABLES = {
    "limits": LIMITS,
    "transports": {"gloo": {"interface": "lo"}},
    "control": {"interface": "lo"},
}


@dataclass(frozen=True)
class Job:
    """What the ranks run.

    Attributes:
        shape: replicas of each stage.
        phases: ``"train"`` or ``"eval"`` with the minibatches of each rank of the first stage,
            or of every rank by stage.
        warm_up: of each stage; None: PipeDream's default.
        aux: whether each stage sends a second activation, ``aux<i>``.
        relayed: whether the raw input ``ids`` goes through all stages to the last.
        sync: whether replicas wait for each other in every backward.
        patience_s: how long.
        servers: ``num_ranks_in_server``.
        port: whether the ranks meet at a port, as PipeDream's do, and not in a file.
        tables: of the handler.
    """

    shape: tuple[int, ...]
    phases: tuple[tuple[str, int | tuple[tuple[int, ...], ...]], ...] = (("train", 4),)
    warm_up: tuple[int, ...] | None = None
    aux: bool = False
    relayed: bool = False
    sync: bool = True
    patience_s: float = 20.0
    servers: int = 1
    port: bool = False
    tables: Mapping[str, Any] = field(default_factory=lambda: TABLES, hash=False)

    @property
    def world_size(self) -> int:
        return sum(self.shape)

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of each stage."""
        ends = [sum(self.shape[: s + 1]) for s in range(len(self.shape))]
        return [[*range(end - own, end)] for own, end in zip(self.shape, ends, strict=True)]

    def names(self) -> dict[str, int]:
        """The activations, with the stage that sends each to the next."""
        found = {f"out{s}": s for s in range(len(self.shape) - 1)}
        return found | ({f"aux{s}": s for s in range(len(self.shape) - 1)} if self.aux else {})


def weight_of(stage: int) -> float:
    """Of the stage's multiplication: a power of two, so that nothing is rounded."""
    return 2.0 if stage % 2 == 0 else 0.5


def meeting_place(rank: int, store: Store, job: Job) -> tuple[str, int]:
    """Address and port, chosen by rank 0.

    A file, since torch looks up the name of whoever connects to a store's port, and some name
    servers take seconds.
    """
    if rank == 0:
        if job.port:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                store.set("place", f"127.0.0.1 {listener.getsockname()[1]}")
        else:
            store.set("place", f"file://{mkdtemp()}/store 0")
    address, port = store.get("place").decode().split()
    return address, int(port)


@contextmanager
def made(
    rank: int, store: Store, job: Job, kind: type[CommunicationHandler] = CommunicationHandler
) -> Iterator[CommunicationHandler]:
    """A handler, constructed but not initialised."""
    own = type("Own", (kind,), {"tables": job.tables})
    address, port = meeting_place(rank, store, job)
    with own(
        master_addr=address,
        master_port=port,
        rank=rank,
        local_rank=rank,
        num_ranks_in_server=job.servers,
        world_size=job.world_size,
        fp16=False,
        backend="gloo",
    ) as handler:
        # Gloo's connecting fails on the others where one that is through leaves again.
        dist.barrier()
        yield handler
    if rank == 0 and not job.port:
        shutil.rmtree(Path(address.removeprefix("file://")).parent)


class Runtime:
    """One rank of the job.

    Attributes:
        log: (sender's replica, sender's number) of each minibatch received, by phase.
        receive_ranks: the caller's mapping, as is ``send_ranks``.
    """

    def __init__(self, handler: CommunicationHandler, rank: int, job: Job) -> None:
        self.job, self.rank, self.handler = job, rank, handler
        (self.stage,) = [s for s, ranks in enumerate(job.stages) if rank in ranks]
        ranks = job.stages[self.stage]
        self.replica = ranks.index(rank)
        self.previous = job.stages[self.stage - 1] if self.stage else []
        self.next = [*job.stages, []][self.stage + 1]
        self.receive_ranks: dict[str, Sequence[int]] = {}
        self.send_ranks: dict[str, Sequence[int]] = {}
        names = job.names()
        for name, source in names.items():
            if source == self.stage - 1:
                self.receive_ranks[name] = self.previous
            if source == self.stage:
                self.send_ranks[name] = self.next
        if job.relayed:
            if self.previous:
                self.receive_ranks["ids"] = self.previous
            if self.next:
                self.send_ranks["ids"] = self.next
        every = [*names, "ids", "target", "target_length", "ack"]
        self.tags = {name: tag for tag, name in enumerate(every, 1)}
        self.targets = {"target", "target_length"}
        self.dtypes = dict.fromkeys(names, torch.float32) | {"ids": torch.int64}
        self.weight = torch.tensor(weight_of(self.stage), requires_grad=True)
        patience = timedelta(seconds=job.patience_s)
        groups = [
            dist.new_group(ranks, timeout=patience) if len(ranks) > 1 else None
            for ranks in job.stages
        ]
        self.group = groups[self.stage]
        self.warm_up = (
            (job.world_size - 1 - sum(job.shape[: self.stage])) // len(ranks)
            if job.warm_up is None
            else job.warm_up[self.stage]
        )
        self.log: list[list[tuple[int, int]]] = []

    def initialize(self) -> None:
        self.handler.initialize(
            self.receive_ranks,
            self.send_ranks,
            self.tags,
            self.targets,
            self.dtypes,
            self.replica,
            self.job.shape[self.stage],
            self.previous,
            self.next,
        )

    # -- a phase

    def run(self, kind: str, count: int | tuple[tuple[int, ...], ...]) -> None:
        if isinstance(count, int):
            whole = count * self.job.shape[0]
            mine, rest = divmod(whole, self.job.shape[self.stage])
            assert rest == 0
        else:
            mine = count[self.stage][self.replica]
        self.start(kind, mine)
        back = self.run_backward if kind == "train" else self.run_ack
        warm_up = min(self.warm_up, mine)
        for _ in range(warm_up):
            self.run_forward()
        for _ in range(mine - warm_up):
            self.run_forward()
            back()
        for _ in range(warm_up):
            back()
        self.handler.wait()
        loop = self.handler._loop
        assert loop is not None
        assert loop._phase is None

    def start(self, kind: str, count: int) -> None:
        self.forward_only = kind == "eval"
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.forward_id = self.backward_id = 0
        self.log.append([])
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.tags, (1,))
        self.handler.set_tensor_shapes(shapes)
        self.handler.start_helper_threads(count, forward_only=self.forward_only)

    def receive(self, name: str, *, backward: bool = False) -> torch.Tensor:
        tensor = self.handler.recv(
            name,
            forward_minibatch_id=self.forward_id,
            backward_minibatch_id=self.backward_id,
            backward=backward,
        )
        assert tensor is not None
        return tensor

    def send(self, name: str, tensor: torch.Tensor, *, backward: bool = False) -> None:
        self.handler.send(
            name,
            tensor,
            forward_minibatch_id=self.forward_id,
            backward_minibatch_id=self.backward_id,
            backward=backward,
        )

    def run_forward(self) -> None:
        tensors = self.load() if self.stage == 0 else self.receive_all()
        self.tensors.append(tensors)
        self.compute(tensors)
        for name in self.send_ranks:
            if name != "ack":
                self.send(name, tensors[name])
        if self.forward_only:
            self.tensors.pop(0)
        self.forward_id += 1

    def load(self) -> dict[str, torch.Tensor]:
        """A minibatch of the first stage: its items, and thus its shape, vary."""
        items = 1 + (self.forward_id + self.replica) % 3
        value = float(1 + self.replica + 10 * self.forward_id)
        return {
            "input": torch.full((2 + items,), value),
            "ids": torch.tensor([self.replica, self.forward_id]),
            "target": torch.tensor([self.replica, self.forward_id, items]),
            "target_length": torch.tensor([int(value)], dtype=torch.int32),
        }

    def receive_all(self) -> dict[str, torch.Tensor]:
        tensors = {name: self.receive(name) for name in self.receive_ranks if name != "ack"}
        for name, tensor in tensors.items():
            is_float = name not in {"ids", *self.targets}
            assert tensor.dtype == (torch.float32 if is_float else torch.int64), name
            assert (tensor.requires_grad, tensor.is_leaf) == (is_float, True), name
        self.handler.increment_messaging_index(sending=False)
        x = tensors[f"out{self.stage - 1}"]
        self.log[-1].append((int(x[0]), int(x[1])))
        self.check_same_minibatch(tensors)
        return tensors

    def check_same_minibatch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """All that came is of one minibatch of the first stage."""
        x = tensors[f"out{self.stage - 1}"]
        replica, number, items = tensors["target"].tolist()
        value = 1 + replica + 10 * number
        scale = 1.0
        for stage in range(self.stage):
            scale *= weight_of(stage)
        assert x[2:].tolist() == [value * scale] * items
        assert tensors["target_length"].tolist() == [value]
        if self.job.relayed:
            assert tensors["ids"].tolist() == [replica, number]
        if self.job.aux:
            assert tensors[f"aux{self.stage - 1}"].shape == (1, items)

    def compute(self, tensors: dict[str, torch.Tensor]) -> None:
        x = tensors["input"] if self.stage == 0 else tensors[f"out{self.stage - 1}"]
        y = x[2:] * self.weight
        if self.next:
            place = torch.tensor([float(self.replica), float(self.forward_id)])
            tensors[f"out{self.stage}"] = torch.cat([place, y])
            if self.job.aux:
                tensors[f"aux{self.stage}"] = y.reshape(1, -1).expand(1, -1) * 3
        elif self.job.aux:
            tensors["loss"] = (y * y).sum() / 2 + tensors[f"aux{self.stage - 1}"].sum()
        else:
            tensors["loss"] = (y * y).sum() / 2

    def run_backward(self) -> None:
        for name in self.send_ranks:
            if name not in self.targets:
                self.gradients[name] = self.receive(name, backward=True)
        tensors = self.tensors.pop(0)
        self.check_gradients(tensors)
        if self.next:
            outputs = [n for n in self.send_ranks if n.startswith(("out", "aux"))]
            torch.autograd.backward(
                [tensors[n] for n in outputs], [self.gradients[n] for n in outputs]
            )
        else:
            tensors["loss"].backward()
        if self.group is not None and self.job.sync:
            assert self.weight.grad is not None
            dist.all_reduce(self.weight.grad, group=self.group)
        for name in self.receive_ranks:
            if name not in self.targets:
                self.send(name, self.gradient(tensors[name]), backward=True)
        if self.previous:
            self.handler.increment_messaging_index(sending=True)
        self.backward_id += 1

    @staticmethod
    def gradient(tensor: torch.Tensor) -> torch.Tensor:
        """What goes back for an input: itself, where it needs no gradient."""
        if not tensor.requires_grad:
            return tensor
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    def check_gradients(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What came back is for the oldest minibatch under way."""
        if not self.next:
            return
        out, gradient = tensors[f"out{self.stage}"], self.gradients[f"out{self.stage}"]
        assert gradient.shape == out.shape
        assert not gradient.requires_grad
        if not self.job.aux:
            scale = 1.0
            for stage in range(self.stage + 1, len(self.job.shape)):
                scale *= weight_of(stage) ** 2
            assert gradient[2:].tolist() == (out[2:] * scale).tolist()
            assert gradient[:2].tolist() == [0, 0]
        if self.job.relayed:
            assert torch.equal(self.gradients["ids"], tensors["ids"])

    def run_ack(self) -> None:
        if self.next:
            ack = self.receive("ack", backward=True)
            assert (ack.dtype, ack.tolist()) == (torch.int64, [7])
        if self.previous:
            self.send("ack", torch.full((1,), 7), backward=True)
            self.handler.increment_messaging_index(sending=True)
        self.backward_id += 1


@dataclass(frozen=True)
class Report:
    """What a rank has seen.

    Attributes:
        log: as `Runtime.log`.
        receive_ranks: the caller's mapping after each phase's start, as is ``send_ranks``.
        gradient: of the stage's weight in the end.
    """

    log: list[list[tuple[int, int]]]
    receive_ranks: dict[str, list[int]]
    send_ranks: dict[str, list[int]]
    gradient: float


def drive(rank: int, _world_size: int, store: Store, job: Job) -> Report:
    """Go through all phases of a job on one rank."""
    with made(rank, store, job) as handler:
        runtime = Runtime(handler, rank, job)
        runtime.initialize()
        for kind, count in job.phases:
            runtime.run(kind, count)
        grad = runtime.weight.grad
    return Report(
        runtime.log,
        {name: [*ranks] for name, ranks in runtime.receive_ranks.items()},
        {name: [*ranks] for name, ranks in runtime.send_ranks.items()},
        0.0 if grad is None else float(grad),
    )


def attempt(rank: int, _world_size: int, store: Store, job: Job) -> tuple[str, str]:
    """As `drive`, for jobs that fail: the error's class and text."""
    try:
        drive(rank, _world_size, store, job)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def with_handler(
    rank: int,
    _world_size: int,
    store: Store,
    job: Job,
    case: Callable[[Runtime], T],
    initialize: bool = True,
) -> T:
    """Call ``case(runtime)`` on a rank."""
    with made(rank, store, job) as handler:
        runtime = Runtime(handler, rank, job)
        if initialize:
            runtime.initialize()
        return case(runtime)
