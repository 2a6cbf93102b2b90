"""Every point on the double of a GPU, and on a GPU where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import (
    points_dead,
    points_events,
    points_lost,
    points_memory,
    points_nccl,
    points_pipeline,
    points_speed,
    points_tensors,
)
from tests.gpu.doubled import DoubleMachine, OneGpu
from tests.gpu.points import ABOUT, POINTS, TIME_S
from tests.gpu.running import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.answers import Answer
    from tests.gpu.machines import Machine

QUICK = DoubleMachine("device")
ON_DOUBLE = [
    (points_memory.memory, DoubleMachine()),
    (points_memory.free_first, DoubleMachine()),
    (points_events.events, DoubleMachine()),
    (points_dead.dead_exporter, DoubleMachine()),
    (points_dead.dead_importer, DoubleMachine()),
    (points_tensors.tensors, DoubleMachine()),
    (points_tensors.gloo, QUICK),
    (points_tensors.mixed, QUICK),
    (points_lost.lost_peer, QUICK),
    (points_pipeline.pipeline, QUICK),
]


@pytest.mark.parametrize(("point", "machine"), ON_DOUBLE)
def test_on_the_double(point: Callable[[Machine], Answer], machine: Machine) -> None:
    answer = point(machine)
    assert answer.verdict == "ok", answer.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("name", POINTS)
def test_on_a_gpu(name: str) -> None:
    result = run(name, POINTS[name])
    if result.verdict == "skipped":
        pytest.skip(result.text)
    assert result.verdict == "ok", result.text


def test_all_of_them_take_less_than_five_minutes() -> None:
    assert sum(point.limit_s for point in [ABOUT, *POINTS.values()]) < TIME_S < 300


@pytest.mark.parametrize("name", POINTS)
def test_every_point_is_there(name: str) -> None:
    module, _, function = POINTS[name].function.partition(":")
    point = getattr(__import__(module, fromlist=[function]), function)
    assert point.__doc__


def test_figures() -> None:
    answer = points_speed.speed(QUICK)
    assert answer.verdict == "ok"
    rows = answer.rows
    assert {row["payload_bytes"] for row in rows} == set(QUICK.sizes_bytes)
    assert {row["name"].partition(", ")[0] for row in rows} == {"device-ordered", "plain copy"}
    assert all(row["median_us"] > 0 and row["gib_per_s"] > 0 for row in rows)


def test_an_allocator_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_tensors, "_carry_all", lambda *_: "native")
    answer = points_tensors.malloc_async(QUICK)
    assert answer.verdict == "failed"
    assert "torch's allocator: native; needed is cudaMallocAsync" in answer.text


# -- NCCL, with others in its place --------------------------------------------------------------


class FakeNccl:
    """A group of one rank as torch has it; its operations take a while."""

    made: list[FakeNccl]

    class Options:
        def __init__(self) -> None:
            self.config = type("Config", (), {})()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        store.set("id", "there")
        self.place = rank, size
        self.limits = vars(options.config)
        self.calls: list[str] = []
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        assert options.asyncOp
        assert len(tensors) == 1
        return FakeWork()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


class FakeWork:
    looks = 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def wait(self, timeout: object) -> None:
        assert timeout
        assert self.looks > 2


def test_what_is_asked_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "made", [], raising=False)
    seen = points_nccl.groups_alone(0, 1, dist.HashStore(), QUICK)
    assert set(seen.values()) == {"works"}
    assert len(seen) == 4
    first, second = FakeNccl.made
    assert (first.place, first.limits, first.calls) == ((0, 1), {}, ["shutdown"])
    assert second.limits == {"min_ctas": 1, "max_ctas": 4}
    assert second.calls[-1] == "abort"


def test_nccl_that_never_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "made", [], raising=False)
    monkeypatch.setattr(FakeWork, "is_completed", lambda _: False)
    monkeypatch.setattr(DoubleMachine, "patience_s", 0.02)
    seen = points_nccl.groups_alone(0, 1, dist.HashStore(), QUICK)
    assert seen["broadcast"] == "operation 0 is never completed"


def test_two_ranks_are_refused_on_one_gpu() -> None:
    answer = points_nccl.nccl_pair(QUICK)
    assert answer.verdict == "ok", answer.text
    assert "both ranks are on one GPU" in answer.text
    assert "NCCL is older" in answer.text


def test_two_ranks_where_nccl_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoubleMachine, "nccl_version", lambda _: OneGpu.version)
    answer = points_nccl.nccl_pair(QUICK)
    assert answer.verdict == "ok", answer.text
    for rank in range(2):
        assert f"rank {rank}: carried" in answer.text


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoubleMachine, "nccl_version", lambda _: None)
    assert points_nccl.nccl_alone(QUICK).verdict == "skipped"
    assert points_nccl.nccl_pair(QUICK).verdict == "skipped"
