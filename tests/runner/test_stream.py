"""Inference without an end: outputs in order, little under way, and anybody may stop it."""

from __future__ import annotations

import gc
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink import PipelineRunner
from stagelink.runner.stream import Output, Outputs
from tests.runner.models import SKIP, WIDTH, build, line, make_batches, run_stages, tensors_of
from tests.support.pipelines import GLOO, LOOPBACK, Ranks, tensor

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from stagelink import Handler
    from stagelink.testing import RankPool

Values = dict[int, torch.Tensor]


def tensors(stages: int, *, target: bool) -> list[Any]:
    return [t for t in tensors_of(line(stages)) if target or t["name"] != "target"]


def alone(stages: int, sizes: list[int], parts: int) -> Values:
    modules = [build(line(stages), stage) for stage in range(stages)]
    found: Values = {}
    for batch in make_batches(sizes):
        for x in batch["x"].tensor_split(min(parts, len(batch["x"]))):
            found[len(found)] = run_stages(modules, {"x": x}).detach()
    return found


def all_outputs(comm: Handler, sizes: list[int]) -> list[tuple[int, torch.Tensor]]:
    stages = len(comm.plan.stages)
    runner = PipelineRunner(comm, build(line(stages), comm.stage.index))
    batches = ({"x": batch["x"]} for batch in make_batches(sizes))
    first = comm.stage.index == 0
    found = []
    for number, value in runner.stream(batches if first else None):
        assert torch.is_grad_enabled()
        assert not value.requires_grad
        found.append((number, value))
    return found


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("replicas", [(1,), (1, 1, 1), (2, 3, 1), (1, 2)], ids=str)
def test_outputs_come_in_order(
    replicas: tuple[int, ...], target: bool, rank_pool: RankPool
) -> None:
    """With a plan for training, too, whose target the batches lack."""
    sizes, parts = [7, 4, 1, 9], 3
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, microbatches=parts) | {
        "tensors": tensors(len(replicas), target=target and len(replicas) > 1)
    }
    if len(replicas) == 1:
        plan["links"] = []
    found = ranks.run(plan, all_outputs, sizes)
    assert all(outputs == [] for outputs in found[: -replicas[-1]])
    for replica, outputs in enumerate(found[-replicas[-1] :]):
        numbers = [number for number, _ in outputs]
        assert numbers == list(range(replica, len(alone(1, sizes, parts)), replicas[-1]))
    together = dict(itertools.chain(*found))
    expected = alone(len(replicas), sizes, parts)
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[number], expected[number]) for number in expected)


def test_processes(rank_pool: RankPool) -> None:
    ranks = Ranks(GLOO, rank_pool)
    plan = ranks.plan((2, 1), microbatches=2) | {"tensors": tensors(2, target=False)}
    found = dict(itertools.chain(*ranks.run(plan, all_outputs, [4, 5, 6])))
    expected = alone(2, [4, 5, 6], 2)
    assert all(torch.equal(found[number], expected[number]) for number in expected)


def _endless(comm: Handler, taken: list[int]) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        taken.append(1)
        yield {"x": torch.ones(1, WIDTH, dtype=torch.float64)}


def _the_last_stops(comm: Handler, takes: int) -> tuple[int, int]:
    """Batches taken in, and outputs; afterwards the handler still works."""
    runner = PipelineRunner(comm, build(line(3), comm.stage.index))
    taken: list[int] = []
    outputs = 0
    for _ in runner.stream(_endless(comm, taken) if comm.rank == 0 else None):
        outputs += 1
        if outputs == takes:
            break
    comm.reduce([0.0])
    again = list(runner.stream([] if comm.rank == 0 else None))
    assert again == []
    return len(taken), outputs


def test_the_last_stage_stops_and_little_was_under_way(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1, 1), microbatches=1) | {"tensors": tensors(3, target=False)}
    found = ranks.run(plan, _the_last_stops, 20)
    assert found[2] == (0, 20)
    assert 20 <= found[0][0] <= 20 + 10  # the windows and what each stage holds


@pytest.mark.parametrize("replicas", [(2, 3, 1), (3, 2, 2), (2, 1), (2, 2), (4, 2)], ids=str)
def test_with_replicas_one_of_the_last_may_stop(
    replicas: tuple[int, ...], rank_pool: RankPool
) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, microbatches=1) | {"tensors": tensors(len(replicas), target=False)}
    ranks.run(plan, _one_stops)


def _one_stops(comm: Handler) -> None:
    stages = len(comm.plan.stages)
    runner = PipelineRunner(comm, build(line(stages), comm.stage.index))
    with runner.stream(_endless(comm, []) if comm.stage.index == 0 else None) as stream:
        wanted = 5 if comm.rank == comm.plan.world_size - 1 else 10**9
        for _ in itertools.islice(stream, wanted):
            pass
    comm.reduce([0.0])


def _different(comm: Handler, counts: list[int]) -> None:
    stages = len(comm.plan.stages)
    runner = PipelineRunner(comm, build(line(stages), comm.stage.index))
    first = comm.stage.index == 0
    batches = itertools.islice(_endless(comm, []), counts[comm.rank]) if first else None
    list(runner.stream(batches))


@pytest.mark.parametrize("counts", [[4, 20], [20, 4], [0, 5], [5, 0]], ids=str)
@pytest.mark.parametrize("replicas", [(2, 1), (2, 2)], ids=str)
def test_different_data_are_found(
    replicas: tuple[int, ...], counts: list[int], rank_pool: RankPool
) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan(replicas, microbatches=1) | {"tensors": tensors(2, target=False)}
    ends = ranks.run_to_ends(plan, _different, counts)
    # Whichever of the two ends second: the first may be through before it hears of the other.
    assert any("their data differ" in end.text for end in ends[:2]), ends


def _kept(comm: Handler) -> None:
    module = build(line(2), comm.stage.index)
    runner = PipelineRunner(comm, module)
    stream = runner.stream(_endless(comm, []) if comm.rank == 0 else None)
    for _ in stream:
        break
    if comm.rank == 1:
        with pytest.raises(stagelink.UsageError, match="or close the stream"):
            list(runner.stream())
        stream.close()
        stream.close()
    assert module.training
    comm.reduce([0.0])


def test_a_stream_that_is_held_is_closed_by_its_holder(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), microbatches=1) | {"tensors": tensors(2, target=False)}
    ranks.run(plan, _kept)


def test_the_collector_only_asks_for_the_close() -> None:
    """It may run where locks are held; the close takes some."""
    asked: list[Any] = []
    closed: list[int] = []

    def steps() -> Generator[Output, None, None]:
        try:
            yield Output(0, None)
        finally:
            closed.append(1)

    ring: list[Any] = [Outputs(steps(), asked.append)]
    next(ring[0])
    ring.append(ring)
    del ring
    gc.collect()
    assert not closed
    asked.pop()()
    assert closed == [1]


def _idle(comm: Handler) -> int:
    """The consumer pauses for longer than any deadline, and so does a producer."""
    module = build(SKIP, comm.stage.index)
    runner = PipelineRunner(comm, module)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(_endless(comm, [])):
            if number == 3:
                time.sleep(0.6)
            if number == 12:
                return
            yield batch

    count = 0
    for _ in runner.stream(batches() if comm.rank == 0 else None):
        count += 1
        if count == 4:
            time.sleep(0.6)
    return count


def test_nobody_minds_a_pause(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    limits = {"deadline_s": 0.2, "first_deadline_s": 0.2}
    plan = ranks.plan((1, 1, 1), microbatches=1, limits=limits) | {
        "tensors": [t for t in tensors_of(SKIP) if t["name"] != "target"]
    }
    assert ranks.run(plan, _idle)[2] == 12


def _the_first_stops(comm: Handler, count: int) -> int:
    runner = PipelineRunner(comm, build(line(3), comm.stage.index))
    batches = _endless(comm, [])
    if comm.rank:
        return len(list(runner.stream()))
    stream = runner.stream(itertools.islice(batches, count))
    return len(list(stream))


def test_the_first_stage_stops_and_all_comes_out(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1, 1), microbatches=1) | {"tensors": tensors(3, target=False)}
    assert ranks.run(plan, _the_first_stops, 9) == [0, 0, 9]


def _fails(comm: Handler) -> None:
    runner = PipelineRunner(comm, build(line(2), comm.stage.index))
    if comm.rank:
        for _ in runner.stream():
            raise ZeroDivisionError("in the consumer")
    for _ in runner.stream(_endless(comm, [])):
        pass
    comm.reduce([0.0])  # the stream is stopped first, and who closes then hears no more


def test_an_error_of_who_takes_outputs_reaches_all(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), microbatches=1) | {"tensors": tensors(2, target=False)}
    ends = ranks.run_to_ends(plan, _fails)
    assert ends[1].kind == "ZeroDivisionError"
    assert "ZeroDivisionError: in the consumer" in ends[0].text


def _bad_batch(comm: Handler) -> None:
    runner = PipelineRunner(comm, build(line(2), comm.stage.index))
    bad: Any = {"x": 1}
    list(runner.stream([{"x": torch.ones(2, WIDTH, dtype=torch.float64)}, bad]))


def test_a_bad_batch_reaches_all(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1), microbatches=1) | {"tensors": tensors(2, target=False)}
    ends = ranks.run_to_ends(plan, _bad_batch)
    assert all("batch entry 'x' is a int, not a tensor" in end.text for end in ends)


def _needs_a_loss(comm: Handler) -> None:
    runner = PipelineRunner(comm, build(line(2), comm.stage.index))
    if comm.rank == 1:
        for call in (runner.train, runner.evaluate):
            with pytest.raises(stagelink.UsageError, match="give the runner a loss"):
                call()


def test_without_a_loss_there_is_only_inference(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1)) | {"tensors": tensors(2, target=False)}
    ranks.run(plan, _needs_a_loss)


def _mode(comm: Handler) -> None:
    module = build(line(2), comm.stage.index)
    runner = PipelineRunner(comm, module)
    assert module.training
    for _ in runner.stream(make_batches([2, 2]) if comm.rank == 0 else None):
        assert not module.training
    assert module.training


def test_in_eval_mode_for_as_long_as_it_takes(rank_pool: RankPool) -> None:
    ranks = Ranks(LOOPBACK, rank_pool)
    plan = ranks.plan((1, 1)) | {"tensors": [tensor("h0", 0, 1)]}
    ranks.run(plan, _mode)
