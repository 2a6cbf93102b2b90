"""Torch's own tools see a group as they see one of gloo's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.interop import c10d_tools as tools

if TYPE_CHECKING:
    from stagelink.testing import RankPool


def test_a_compiled_function_calls_as_it_does_without_a_compiler(rank_pool: RankPool) -> None:
    rank_pool.run(tools.compiled, 2, timeout_s=100)


def test_a_profiler_records_sends_and_receives(rank_pool: RankPool) -> None:
    for rank, spans in enumerate(rank_pool.run(tools.profiled, 2, timeout_s=60)):
        assert spans == [
            span
            for tag, shape in ((3, [4, 5]), (0, [4, 40_000]))
            for span in (
                ("c10d::send", [shape, [], []], [None, 1 - rank, tag]),
                ("c10d::recv_", [shape, [], []], [None, 1 - rank, tag]),
                ("stagelink:recv", [shape], [None]),
                ("stagelink:send", [shape], [None]),
            )
        ]


def test_a_group_has_its_store_and_its_time_out_can_be_set(rank_pool: RankPool) -> None:
    rank_pool.run(tools.asked, 2)


def test_a_debugged_programs_collectives_are_compared(rank_pool: RankPool) -> None:
    rank_pool.run(tools.checked, 2)


def test_a_monitored_barrier_names_who_is_missing(rank_pool: RankPool) -> None:
    said, _ = rank_pool.run(tools.monitored, 2)
    assert "Rank 1 failed to pass monitoredBarrier" in said
