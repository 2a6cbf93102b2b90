"""The replicas of a stage among themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

from stagelink import (
    AbortedError,
    DeadlineError,
    DisagreementError,
    PipelineRunner,
    StagelinkError,
)
from stagelink.runner.replicas import ReplicaGroup
from stagelink.testing import report
from tests.runner.models import WIDTH, build, line, make_batches, quick_sgd, tensors_of
from tests.support.interrupts import struck
from tests.support.pipelines import GLOO, LOOPBACK, Document, Ranks, document, start_fresh

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagelink import Handler
    from stagelink.testing import RankPool

TOGETHER_S = 10.0
"""Within this time a failure must have reached everybody."""


def alone(replicas: int, **tables: Any) -> Document:
    """A plan of one stage."""
    return document(LOOPBACK, (replicas,), **tables) | {"tensors": [], "links": []}


@pytest.fixture
def run(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Run a case on replicas of the only stage: ``run(3, case)``."""
    ranks = Ranks(LOOPBACK, rank_pool)
    return lambda count, case, **tables: ranks.run(alone(count, **tables), case)


def add_up(group: ReplicaGroup, buffer: torch.Tensor) -> None:
    """Replace a buffer's values by their sums over the replicas."""
    group.start_sum(buffer, buffer)
    group.finish_sums()


# -- sums and copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_sum_is_added_in_the_order_of_replicas(
    count: int, dtype: torch.dtype, run: Callable[..., Any]
) -> None:
    def values(replica: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(replica)
        return torch.randn(7 * count, generator=generator, dtype=dtype) * 10.0**replica

    def case(comm: Handler) -> torch.Tensor:
        buffer = values(comm.replica)
        add_up(ReplicaGroup(comm), buffer)
        return buffer

    total = values(0)
    for replica in range(1, count):
        total += values(replica)
    assert all(torch.equal(found, total) for found in run(count, case))


def test_a_copy_is_that_of_the_chosen_one(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> list[float]:
        group = ReplicaGroup(comm)
        buffer = torch.full((3,), float(comm.replica))
        group.broadcast(buffer, 2)
        return buffer.tolist()

    assert run(3, case) == [[2.0] * 3] * 3


def test_two_groups_do_not_meet(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> list[float]:
        one, other = ReplicaGroup(comm), ReplicaGroup(comm)
        first, second = torch.ones(2), torch.full((2,), 5.0)
        add_up(other, second)
        add_up(one, first)
        return [*first.tolist(), *second.tolist()]

    assert run(2, case) == [[2.0, 2.0, 10.0, 10.0]] * 2


# -- what must be alike


def train_on(comm: Handler, module: torch.nn.Module) -> str:
    """Trains; what was raised."""
    runner = PipelineRunner(
        comm,
        module,
        loss=torch.nn.functional.cross_entropy,
        optimizer=quick_sgd(module),
    )
    with pytest.raises(StagelinkError) as caught, comm:
        runner.train(make_batches([4]))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_replicas_must_start_alike(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        module = build(line(1), 0)
        if comm.replica == 1:
            next(module.parameters()).data[0, 0] += 1e-9
        return train_on(comm, module)

    for text in run(3, case):
        assert "rank 0 and rank 1, replicas of stage 's0': they start with different" in text
        assert "torch.manual_seed" in text


@pytest.mark.parametrize("change", ["frozen", "buffer"])
def test_replicas_must_train_the_same(change: str, run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        module = build(line(1), 0)
        if comm.replica == 1 and change == "frozen":
            next(module.parameters()).requires_grad_(False)
        if comm.replica == 1 and change == "buffer":
            module.register_buffer("more", torch.zeros(2))
        return train_on(comm, module)

    for text in run(2, case):
        assert "differ in number, order, shape or dtype" in text
        assert DisagreementError.__name__ in text or "rank" in text


class Counting(torch.nn.Module):
    """Keeps the mean of what it saw last, as a batch norm keeps running ones."""

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "flag", torch.tensor(data=True)
        )  # one byte, so the next is not aligned
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.copy_(x.mean(dim=0))
            self.seen += 1
        return x[:, :3]


@pytest.mark.parametrize(("sizes", "winner"), [([6, 6], 2), ([6, 4], 0), ([6, 1], 0)])
def test_buffers_are_those_of_the_last_microbatch(
    sizes: list[int], winner: int, run: Callable[..., Any]
) -> None:
    """Six microbatches over three replicas end on the last of them, four or one on the first."""

    def case(comm: Handler) -> tuple[torch.Tensor, int]:
        module = Counting()
        runner = PipelineRunner(comm, module, loss=torch.nn.functional.cross_entropy)
        runner.train(make_batches(sizes))
        return module.mean.clone(), int(module.seen)

    last = make_batches(sizes)[-1]["x"][-1]
    counts = [-(-min(6, size) // 3) if winner == 0 else 2 for size in sizes]
    for mean, seen in run(3, case, microbatches=6):
        assert torch.equal(mean, last)
        assert seen == sum(counts)


def test_an_epoch_without_batches_copies_nothing(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> int:
        module = Counting()
        runner = PipelineRunner(comm, module, loss=torch.nn.functional.cross_entropy)
        runner.train([])
        return int(module.seen)

    assert run(2, case) == [0, 0]


# -- failures


def test_one_that_does_not_come_is_named(run: Callable[..., Any]) -> None:
    def case(comm: Handler) -> str:
        if comm.replica == 1:
            return ""
        with pytest.raises(DeadlineError) as caught, comm:
            ReplicaGroup(comm)
        return str(caught.value)

    (text, _) = run(2, case, limits={"first_deadline_s": 0.2, "close_deadline_s": 3.0})
    assert text.startswith("rank 0: meeting with rank 1, of the same stage 's0': not done within")


def told_before_waiting(comm: Handler) -> threading.Event:
    """Set when the rank next waits for its replicas."""
    waits = threading.Event()
    wait = comm.wait

    def tell(*args: Any) -> None:
        waits.set()
        wait(*args)

    comm.wait = tell  # type: ignore[method-assign, assignment]
    return waits


@pytest.mark.parametrize("where", ["meeting", "summing"])
def test_the_failure_of_one_ends_the_wait_of_the_others(
    where: str, run: Callable[..., Any]
) -> None:
    others: dict[int, threading.Event] = {}
    known = threading.Barrier(3)

    def case(comm: Handler) -> str:
        group = None if where == "meeting" else ReplicaGroup(comm)
        others[comm.rank] = told_before_waiting(comm)
        known.wait(TOGETHER_S)
        if comm.replica == 2:
            assert all(others[rank].wait(TOGETHER_S) for rank in (0, 1))
            with pytest.raises(ValueError, match="enough"), comm:
                raise ValueError("enough")
            return ""
        with pytest.raises(AbortedError) as caught, comm:
            add_up(group or ReplicaGroup(comm), torch.zeros(3))
        return str(caught.value)

    began = time.monotonic()
    found = run(3, case, limits={"close_deadline_s": 2.0})
    assert time.monotonic() - began < TOGETHER_S
    for text in found[:2]:
        assert "rank 2 reports: " in text
        assert "ValueError: enough" in text


def test_a_sum_after_a_failure_says_what_failed(run: Callable[..., Any]) -> None:
    met = threading.Barrier(2)

    def case(comm: Handler) -> str:
        group = ReplicaGroup(comm)
        met.wait(TOGETHER_S)
        comm.abort(ValueError("enough"))
        with pytest.raises(AbortedError) as caught, comm:
            add_up(group, torch.zeros(2))
        return str(caught.value)

    assert all("ValueError: enough" in text for text in run(2, case))


def sum_beside_one_that_stops(comm: Handler) -> None:
    group = ReplicaGroup(comm)
    if comm.rank == 2:
        report("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        report("summing")
        add_up(group, torch.zeros(3))
    except (StagelinkError, KeyboardInterrupt) as error:
        comm.abort(error)
        text = f"{type(error).__name__}: {error}"
    # By now nothing refers to gloo's group, whose end waits for what is under way in it.
    report("released", text)


def test_a_sum_that_cannot_end_holds_up_nobody() -> None:
    """Ctrl-C ends it on one rank, the other is told, and what is left of gloo is broken off."""
    plan = alone(3, limits={"first_deadline_s": 60.0})
    with start_fresh(plan, sum_beside_one_that_stops) as ranks:
        for rank, event in enumerate(["summing", "summing", "stopping"]):
            ranks.wait_for(rank, event)
        ranks.kill(1, signal.SIGINT)
        texts = [ranks.wait_for(rank, "released", TOGETHER_S) for rank in (0, 1)]
    assert texts[0].startswith("AbortedError: rank 1 reports: ")
    assert "KeyboardInterrupt" in texts[0]
    assert texts[1].startswith("KeyboardInterrupt")


def wait_in_a_sum(comm: Handler, victim: int, size: int) -> str:
    group = ReplicaGroup(comm)
    report("connected")
    if comm.rank == victim:
        time.sleep(60.0)  # until it is killed
    try:
        add_up(group, torch.zeros(size))
    except StagelinkError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_killed_replica_is_named_by_the_others() -> None:
    with start_fresh(alone(3), wait_in_a_sum, 1, 3 * 2**16) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "connected")
        ranks.kill(1)
        outcomes = ranks.outcomes(timeout_s=TOGETHER_S)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
        assert "rank 1 died" in outcomes[rank].value


def train_with_a_death(comm: Handler) -> str:
    shapes = line(2)
    module = build(shapes, comm.stage.index)
    if comm.rank == 1:
        module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    runner = PipelineRunner(
        comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
    )
    try:
        runner.train(make_batches([3] * 50) if comm.stage.index == 0 else None)
    except StagelinkError as error:
        return str(error)
    return "no error"


def test_a_replica_that_dies_in_a_batch_is_named_by_all() -> None:
    plan = document(GLOO, (2, 1), tensors_of(line(2)))
    with start_fresh(plan, train_with_a_death) as ranks:
        outcomes = ranks.outcomes(timeout_s=TOGETHER_S)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
        assert "rank 1 died" in outcomes[rank].value


def fork_with_a_group(comm: Handler) -> int:
    group = ReplicaGroup(comm)
    child = os.fork()
    if child == 0:
        group.drop()  # as when the child's copy is collected
        os._exit(0)
    _, status = os.waitpid(child, 0)
    buffer = torch.ones(4)
    add_up(group, buffer)
    return status + int(buffer[0])


def test_a_forked_child_harms_nobody(rank_pool: RankPool) -> None:
    ranks = Ranks(GLOO, rank_pool)
    plan = alone(2)
    assert ranks.run(plan, fork_with_a_group) == [2, 2]


def test_what_a_signal_handler_raises_is_no_broken_group() -> None:
    call = struck(RuntimeError)
    with pytest.raises(RuntimeError, match="a handler's"):
        ReplicaGroup._by_gloo(Mock(), "a test", call)
