"""Training, evaluation and training again under PipeDream's names; numbers that do not divide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.interop.pipedream_driver import TABLES, Job, Runtime, drive, weight_of, with_handler
from tests.interop.test_pipedream_order import check_order

if TYPE_CHECKING:
    from stagelink.testing import RankPool

PHASES = (("train", 4), ("eval", 2), ("train", 2))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2), (4, 2, 2), (1, 1, 1)], ids=str)
def test_train_evaluate_train(shape: tuple[int, ...], rank_pool: RankPool) -> None:
    job = Job(shape, PHASES, aux=True, relayed=True)
    reports = rank_pool.run(drive, job.world_size, job)
    check_order(job, [report.log for report in reports])
    assert all(len(report.log) == 3 for report in reports)


def test_three_two(rank_pool: RankPool) -> None:
    job = Job((3, 2), (("train", 4), ("eval", 2), ("eval", 4), ("train", 2)), relayed=True)
    check_order(job, [report.log for report in rank_pool.run(drive, 5, job)])


def test_gradients_are_those_of_one_process(rank_pool: RankPool) -> None:
    """The replicas add theirs by the default process group, beside our messages."""
    job = Job((2, 1, 2), (("train", 4),), warm_up=(2, 2, 0))
    got = [report.gradient for report in rank_pool.run(drive, 5, job)]
    values = [(1 + r + 10 * f, 1 + (f + r) % 3) for f in range(4) for r in range(2)]
    scale = 1.0
    for stage in range(3):
        scale *= weight_of(stage)
    whole = sum((value * scale) ** 2 * items for value, items in values)
    # Where replicas add theirs in each round, they add sums to sums; one alone has the plain sum.
    assert got[2] == whole / weight_of(1)
    assert got[0] == got[1]
    assert got[3] == got[4]


def _maps(runtime: Runtime) -> list[dict[str, list[int]]]:
    """Both mappings: after initialize, and while a phase is under way."""
    seen = []
    for kind in ("", "eval", "train"):
        if kind:
            runtime.start(kind, 0)
            runtime.handler.wait()
        for ranks in (runtime.receive_ranks, runtime.send_ranks):
            seen.append({name: [*there] for name, there in ranks.items()})
    return seen


def test_what_is_written_into_the_callers_mappings(rank_pool: RankPool) -> None:
    first, middle, last, also_last = rank_pool.run(with_handler, 4, Job((1, 1, 2)), _maps)
    assert last == also_last
    targets = ("target", "target_length")
    to_middle = {name: [1] for name in ("out0", *targets)}
    from_first = {name: [0] for name in ("out0", *targets)}
    to_last = {name: [2, 3] for name in ("out1", *targets)}
    from_middle = {name: [1] for name in ("out1", *targets)}
    assert first == [{}, to_middle, {"ack": []}, to_middle | {"ack": [1]}, {}, to_middle]
    assert middle[:2] == middle[4:] == [from_first, to_last]
    assert middle[2:4] == [from_first | {"ack": [0]}, to_last | {"ack": [2, 3]}]
    assert last == [from_middle, {}, from_middle | {"ack": [1]}, {"ack": []}, from_middle, {}]
    assert [*last[0]] == ["out1", *targets]  # targets are received last


def _by_tensor(runtime: Runtime) -> list[tuple[str, int]]:
    """One tensor of every minibatch after another, and no cursor moved, as in a link test."""
    handler, count = runtime.handler, 4
    runtime.start("eval", count)
    received: list[tuple[str, int]] = []
    for name in ("aux0", "out0"):
        for number in range(count):
            if runtime.rank == 0:
                handler.send(name, torch.tensor([float(number)]), number, number)
            else:
                tensor = handler.recv(name, number, number)
                assert tensor is not None
                received.append((name, int(tensor)))
    for number in range(count):
        if runtime.rank == 1:
            handler.send("ack", torch.full((1,), number), number, number, backward=True)
        else:
            ack = handler.recv("ack", number, number, backward=True)
            assert ack is not None
            received.append(("ack", int(ack)))
    handler.wait()
    return received


def test_a_queue_without_its_cursor_is_first_in_first_out(rank_pool: RankPool) -> None:
    acks, tensors = rank_pool.run(with_handler, 2, Job((1, 1), aux=True), _by_tensor)
    assert tensors == [(name, number) for name in ("aux0", "out0") for number in range(4)]
    assert acks == [("ack", number) for number in range(4)]


def _one_peer(runtime: Runtime) -> list[list[float]]:
    """Two minibatches of one peer, then, the cursor moved, of the other; gradients likewise."""
    handler = runtime.handler
    count = 2 if runtime.rank < 2 else 4
    runtime.start("train", count)
    found: list[list[float]] = []
    if runtime.rank < 2:
        for number in range(count):
            handler.send("out0", torch.full((1,), 10.0 * runtime.rank + number), number, number)
        for number in range(count):
            gradient = handler.recv("out0", number, number, backward=True)
            assert gradient is not None
            found.append(gradient.tolist())
    else:
        for peer in range(2):
            for number in range(2):
                tensor = handler.recv("out0", number, number)
                assert tensor is not None
                found.append(tensor.tolist())
                handler.send("out0", tensor.detach() + 0.5, number, number, backward=True)
            if peer == 0:
                handler.increment_messaging_index(sending=False)
                handler.increment_messaging_index(sending=True)
    handler.wait()
    return found


def test_each_peer_has_a_queue_of_its_own(rank_pool: RankPool) -> None:
    first, second, last = rank_pool.run(with_handler, 3, Job((2, 1)), _one_peer)
    assert last == [[0.0], [1.0], [10.0], [11.0]]
    assert first == [[0.5], [1.5]]
    assert second == [[10.5], [11.5]]


UNEVEN = [
    # PipeDream asserts: 3 minibatches do not divide among 2 ranks.
    Job((2, 2), (("train", 3), ("eval", 5), ("train", 3)), relayed=True),
    # 2 do not among 4; the diagonal would give one rank none.
    Job((2, 4), (("train", 2), ("eval", 2)), warm_up=(1, 0)),
    Job((3, 2), (("train", 2), ("eval", 2), ("train", 2))),
    Job((2, 3, 1), (("train", 3), ("eval", 3)), warm_up=(3, 1, 0)),
    # Replicas with unequal numbers do not wait for each other.
    Job((2, 3), (("train", ((3, 2), (2, 2, 1))), ("eval", ((1, 3), (0, 0, 4)))), sync=False),
    Job((1, 2), (("train", ((5,), (3, 2))), ("train", ((1,), (0, 1)))), sync=False),
    # Fewer than the warm-up, and none at all.
    Job((1, 1, 1), (("train", 1), ("eval", 0), ("train", 2))),
]


@pytest.mark.parametrize("job", UNEVEN, ids=lambda job: str(job.shape))
def test_numbers_that_do_not_divide(job: Job, rank_pool: RankPool) -> None:
    reports = rank_pool.run(drive, job.world_size, job)
    for (_, count), phase in zip(job.phases, range(len(job.phases)), strict=True):
        for stage, ranks in enumerate(job.stages[1:], 1):
            logs = [reports[rank].log[phase] for rank in ranks]
            if isinstance(count, int):
                wanted = [count * job.shape[0] // len(ranks)] * len(ranks)
            else:
                wanted = [*count[stage]]
            assert [len(log) for log in logs] == wanted


def test_by_shared_memory(rank_pool: RankPool) -> None:
    links = {"links": [{"transport": "shm"}], "control": {"inline_bytes": 0}}
    tables = {key: value for key, value in TABLES.items() if key != "transports"} | links
    job = Job((2, 1), PHASES, aux=True, relayed=True, servers=3, tables=tables)
    reports = rank_pool.run(drive, 3, job)
    check_order(job, [report.log for report in reports])


def test_without_inline_messages(rank_pool: RankPool) -> None:
    tables = {**TABLES, "control": {"interface": "lo", "inline_bytes": 0}}
    job = Job((2, 1), PHASES, aux=True, relayed=True, tables=tables)
    reports = rank_pool.run(drive, 3, job)
    check_order(job, [report.log for report in reports])


def test_places_in_the_window_come_free(rank_pool: RankPool) -> None:
    """As many minibatches as fill any window that is not emptied."""
    job = Job((1, 1), (("train", 12), ("eval", 12)), tables={**TABLES, "pipeline": {"window": 3}})
    rank_pool.run(drive, 2, job)


def test_meeting_at_a_port(rank_pool: RankPool) -> None:
    limits = {"deadline_s": 30.0, "first_deadline_s": 30.0, "connect_deadline_s": 60.0}
    job = Job((1, 1), PHASES, port=True, tables={**TABLES, "limits": limits})
    rank_pool.run(drive, 2, job, timeout_s=50)


def test_one_stage_of_two_replicas(rank_pool: RankPool) -> None:
    """Data parallelism alone: nothing is sent."""
    job = Job((2,), (("train", 2), ("eval", 1)))
    assert [report.log for report in rank_pool.run(drive, 2, job)] == [[[], []], [[], []]]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def _echo(runtime: Runtime) -> None:
    """One minibatch of each dtype, every bit of it there and back."""
    handler = runtime.handler
    for train in (True, False):
        handler.start_helper_threads(1, forward_only=not train)
        for dtype in DTYPES:
            name = f"out-{dtype}"
            value = torch.tensor([[1, 0], [3, -2]]).to(dtype).t()
            if runtime.stage == 0:
                handler.send(name, value, 0, 0)
                if train:
                    back = handler.recv(name, 0, 0, backward=True)
                    assert back is not None
                    assert (back.dtype, back.tolist()) == (dtype, value.tolist())
                continue
            got = handler.recv(name, 0, 0)
            assert got is not None
            assert (got.dtype, got.tolist()) == (dtype, value.tolist())
            assert got.requires_grad == (dtype == torch.float32)
            if train:
                handler.send(name, got.detach(), 0, 0, backward=True)
        handler.wait()


def _with_dtypes(runtime: Runtime) -> None:
    for dtype in DTYPES:
        name = f"out-{dtype}"
        runtime.dtypes[name] = dtype
        if runtime.stage == 0:
            runtime.send_ranks[name] = [1]
        else:
            runtime.receive_ranks[name] = [0]
    runtime.initialize()
    _echo(runtime)


def test_every_dtype_goes_there_and_back(rank_pool: RankPool) -> None:
    rank_pool.run(with_handler, 2, Job((1, 1)), _with_dtypes, False)
