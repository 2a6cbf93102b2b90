"""Receive memory where dtypes and shapes are declared."""

from __future__ import annotations

from typing import Any

import pytest

from stagelink.plan import Plan, Tensor
from stagelink.schedule import message_bytes, verify


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", (3, 5), 60),
        ("bfloat16", (2, 2), 8),
        ("int64", (), 8),
        ("float64", (4, 0), 0),
        ("float32", (3, -1), None),
        ("float32", None, None),
        (None, (3, 5), None),
    ],
)
def test_message_bytes(
    dtype: str | None, shape: tuple[int, ...] | None, expected: int | None
) -> None:
    assert message_bytes(Tensor("t", 0, (1,), dtype, shape)) == expected


def three_stages(schedule: str = "1f1b", **changes: object) -> Plan:
    """Two replicas, one, one; 1000 bytes a hidden message, 2000 an out, 8 a target."""
    hidden = {"from": "a", "to": ["b"], "dtype": "float32", "shape": [250], **changes}
    return Plan.from_dict(
        {
            "pipeline": {"microbatches": 8, "schedule": schedule},
            "stages": [
                {"name": "a", "ranks": [0, 1]},
                {"name": "b", "ranks": [2]},
                {"name": "c", "ranks": [3]},
            ],
            "tensors": [
                {"name": "hidden"}
                | {key: hidden[key] for key in hidden if hidden[key] is not None},
                {"name": "out", "from": "b", "to": ["c"], "dtype": "float32", "shape": [500]},
                {"name": "target", "from": "a", "to": ["c"], "dtype": "int64", "shape": []},
            ],
        }
    )


def test_a_window_of_messages_per_sender_and_of_gradients_per_receiver() -> None:
    verdict = verify(three_stages())
    assert verdict.windows == (2, 2, 2)
    assert verdict.forward_windows == (2, 2, 3)
    assert verdict.receive_bytes == {
        0: 2 * 1000,
        1: 2 * 1000,
        2: 2 * 2 * 1000 + 2 * 2000,
        # Of the targets, evaluation may hold one more from each sender.
        3: 2 * 2000 + 2 * 3 * 8,
    }


def test_no_more_than_there_is_in_the_session() -> None:
    verdict = verify(three_stages("gpipe"), 3)
    assert verdict.windows == (3, 3, 3)
    assert verdict.receive_bytes == {
        0: 2 * 1000,
        1: 1 * 1000,
        # Evaluation is not bounded by it: two senders, two messages each.
        2: 3 * 1000 + 3 * 2000,
        3: 3 * 2000 + 3 * 8,
    }


def test_evaluation_may_need_more_than_training() -> None:
    held = verify(three_stages(), 1).receive_bytes
    assert held[2] == 2 * 2 * 1000
    assert held[3] == 2 * 2000 + 2 * 3 * 8


def test_no_gradients_where_there_are_none() -> None:
    assert verify(three_stages(grad=False)).receive_bytes[0] == 0
    assert verify(three_stages("forward")).receive_bytes[0] == 0


@pytest.mark.parametrize("changes", [{"shape": [-1]}, {"shape": None}, {"dtype": None}])
def test_unknown_where_an_edge_of_the_rank_is_not_declared(changes: dict[str, Any]) -> None:
    held = verify(three_stages(**changes)).receive_bytes
    assert held == {0: None, 1: None, 2: None, 3: 2 * 2000 + 2 * 3 * 8}


def test_until_the_end_it_is_that_of_a_long_session() -> None:
    deep = Plan.from_dict(
        {
            "pipeline": {"microbatches": 1, "schedule": "pipedream"},
            "stages": [{"name": f"s{i}", "ranks": [i]} for i in range(9)],
            "tensors": [
                {
                    "name": f"h{i}",
                    "from": f"s{i}",
                    "to": [f"s{i + 1}"],
                    "dtype": "int8",
                    "shape": [100],
                }
                for i in range(8)
            ],
        }
    )
    assert verify(deep).receive_bytes == verify(deep, 1000).receive_bytes
