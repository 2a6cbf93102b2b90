"""A whole pipeline on threads of one process: the same results, and errors as they were."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from tests.runner.models import (
    build,
    largest_difference,
    line,
    make_batches,
    quick_sgd,
    tensors_of,
    train_alone,
    weights,
)
from tests.support.pipelines import GLOO, Document, document, tensor

if TYPE_CHECKING:
    from stagelink import Handler


def plan(**changes: Any) -> stagelink.Plan:
    """Meant for gloo, and for deadlines that nobody meets."""
    tables: Document = document(
        GLOO, (2, 1), tensors_of(line(2)), microbatches=3, limits={"deadline_s": 0.001}
    )
    return dataclasses.replace(stagelink.Plan.from_dict(tables), **changes)


def train(comm: Handler) -> tuple[int, dict[str, torch.Tensor]]:
    module = build(line(2), comm.stage.index)
    runner = stagelink.PipelineRunner(
        comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
    )
    runner.train(make_batches([7, 5]) if comm.stage.index == 0 else None)
    assert set(comm.transports.values()) == {"loopback"}
    return comm.stage.index, weights(module)


def test_the_same_weights_as_ever() -> None:
    alone = [build(line(2), stage) for stage in range(2)]
    train_alone(alone, make_batches([7, 5]), 3)
    results = stagelink.in_one_process(plan(), train)
    assert [stage for stage, _ in results] == [0, 0, 1]
    for stage, found in results:
        assert largest_difference(found, weights(alone[stage])) <= 1e-12


def test_a_plan_for_gpus_and_servers() -> None:
    stages = tuple(dataclasses.replace(stage, device="cuda") for stage in plan().stages)
    meant = plan(stages=stages, servers=((0,), (1, 2)))
    assert stagelink.in_one_process(meant, lambda comm: comm.stage.device) == ["cpu"] * 3


def _slow(comm: Handler) -> float:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            assert not threading.Event().wait(0.05)  # as in a debugger
            session.send("h", torch.ones(2), 0)
            return 0.0
        received = session.recv("h", 0)
        assert received is not None
        return float(received.sum())


def test_nobody_is_in_a_hurry() -> None:
    tables = document(GLOO, (1, 1), [tensor("h", 0, 1)], limits={"first_deadline_s": 0.001})
    assert stagelink.in_one_process(stagelink.Plan.from_dict(tables), _slow) == [0.0, 2.0]


def _fails(comm: Handler) -> None:
    if comm.rank == 1:
        raise ZeroDivisionError("of the user")
    comm.reduce([0.0])


def test_an_error_comes_out_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        stagelink.in_one_process(plan(), _fails)
    assert caught.traceback[-1].name == "_fails"


def _leaves_early(comm: Handler) -> None:
    module = build(line(2), comm.stage.index)
    runner = stagelink.PipelineRunner(
        comm, module, loss=torch.nn.functional.cross_entropy, optimizer=quick_sgd(module)
    )
    runner.train(make_batches([4]) if comm.stage.index == 0 else None)
    if comm.rank < 2:
        runner.train(make_batches([4]))


def test_an_error_is_of_the_rank_that_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no thread that is in gloo would be cut off by the end of the process."""
    daemons = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        if thread.name == "stagelink-replicas-break":
            daemons.append(thread.daemon)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    with pytest.raises(stagelink.PeerClosedError, match="peer rank 2 closed"):
        stagelink.in_one_process(plan(schedule="pipedream"), _leaves_early)
    assert True not in daemons


def test_a_plan_that_cannot_run() -> None:
    wrong = plan(window=1, schedule="1f1b")
    stages = (dataclasses.replace(wrong.stages[0], warm_up=3), wrong.stages[1])
    with pytest.raises(stagelink.VerificationError):
        stagelink.in_one_process(dataclasses.replace(wrong, stages=stages), train)


def test_ctrl_c_ends_all_ranks() -> None:
    waiting = threading.Barrier(4)

    def work(comm: Handler) -> None:
        waiting.wait(20)
        try:
            comm.evaluate(1 if comm.stage.index == 0 else None).recv("h0", 0)
        except stagelink.UsageError:  # of the first stage, which receives nothing
            comm.reduce([0.0])

    def interrupt() -> None:
        waiting.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        stagelink.in_one_process(plan(), work)
    interrupter.join()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(20)
            assert not thread.is_alive()
