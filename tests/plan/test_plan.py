"""The plan as a value: what it answers, how it is copied, and that size does not hurt it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from stagelink.errors import PlanError
from stagelink.plan import Limits, LinkRule, Plan

Table = dict[str, Any]
Chain = Callable[..., Table]

DIGITS = """
[pipeline]
name = "digits"
microbatches = 8

[[stages]]
name = "features"
ranks = [3, 1]

[[stages]]
name = "middle"
ranks = [2]

[[stages]]
name = "classifier"
ranks = [0]

[[tensors]]
name = "target"
from = "features"
to = "classifier"
dtype = "int64"

[[tensors]]
name = "hidden"
from = "features"
to = ["middle", "classifier"]

[[tensors]]
name = "logits"
from = "middle"
to = ["classifier"]

[[links]]
from = ["middle"]
same_server = true
device = "cuda"
transport = ["nccl", "cupy"]

[[links]]
transport = "gloo"

[transports.gloo]
interface = "lo"

[control]
interface = "lo"

[limits]
deadline_s = 5
"""


@pytest.fixture(scope="module")
def digits() -> Plan:
    return Plan.from_toml(DIGITS)


def test_stages_and_ranks(digits: Plan) -> None:
    assert digits.world_size == 4
    assert [stage.replicas for stage in digits.stages] == [2, 1, 1]
    assert [stage.index for stage in digits.stages] == [0, 1, 2]
    assert [digits.stage_of(rank).name for rank in range(4)] == [
        "classifier",
        "features",
        "middle",
        "features",
    ]
    assert [digits.replica_of(rank) for rank in range(4)] == [0, 1, 0, 0]


def test_edges_are_numbered_by_tensor_name_and_place(digits: Plan) -> None:
    assert [edge.index for edge in digits.edges] == [0, 1, 2, 3]
    assert [edge.name for edge in digits.edges] == ["hidden>1", "hidden>2", "logits", "target"]
    assert [(edge.source, edge.target) for edge in digits.edges] == [
        (0, 1),
        (0, 2),
        (1, 2),
        (0, 2),
    ]
    assert [tensor.name for tensor in digits.tensors] == ["hidden", "logits", "target"]


def test_inputs_and_outputs(digits: Plan) -> None:
    edges = digits.edges
    assert [digits.inputs(stage) for stage in range(3)] == [
        (),
        (edges[0],),
        (edges[1], edges[2], edges[3]),
    ]
    assert [digits.outputs(stage) for stage in range(3)] == [
        (edges[0], edges[1], edges[3]),
        (edges[2],),
        (),
    ]


def test_rules(digits: Plan) -> None:
    assert digits.rules == (
        LinkRule(
            0,
            ("nccl", "cupy"),
            {"from": (1,), "same_server": (True,), "device": ("cuda",)},
        ),
        LinkRule(1, ("gloo",)),
    )


def test_the_rest(digits: Plan) -> None:
    assert (digits.name, digits.schedule, digits.microbatches) == ("digits", "1f1b", 8)
    assert (digits.routing, digits.window, digits.servers) == ("round_robin", None, None)
    assert digits.transports == {"gloo": {"interface": "lo"}}
    assert digits.control.interface == "lo"
    assert digits.limits == Limits(deadline_s=5.0)


@pytest.mark.parametrize("rank", [4, -1, 2**70])
def test_a_rank_that_does_not_exist(digits: Plan, rank: int) -> None:
    text = rf"^there is no rank {rank}; the plan's ranks are 0 to 3$"
    with pytest.raises(PlanError, match=text):
        digits.stage_of(rank)
    with pytest.raises(PlanError, match=text):
        digits.replica_of(rank)


def test_servers_of_ranks(chain: Chain) -> None:
    plan = Plan.from_dict(chain(2, 1, servers=[[2, 0], [1]]))
    assert [plan.server_of(rank) for rank in range(3)] == [0, 1, 0]
    assert Plan.from_dict(chain(2, 1)).server_of(0) is None


def test_a_tensor_by_name(digits: Plan) -> None:
    assert digits.tensor("target").targets == (2,)
    with pytest.raises(PlanError) as caught:
        digits.tensor("hiden")
    assert str(caught.value) == (
        "unknown tensor 'hiden' (did you mean 'hidden'?); "
        "the plan has 'hidden', 'logits', 'target'"
    )


def test_another_number_of_microbatches(digits: Plan) -> None:
    other = digits.with_microbatches(3)
    assert (other.microbatches, digits.microbatches) == (3, 8)
    assert other.edges == digits.edges
    assert other.digest == digits.digest


@pytest.mark.parametrize("microbatches", [0, -1, True, 2.0, "2", None])
def test_a_wrong_number_of_microbatches(digits: Plan, microbatches: Any) -> None:
    with pytest.raises(PlanError) as caught:
        digits.with_microbatches(microbatches)
    assert str(caught.value) == f"microbatches: {microbatches!r}: must be an int of at least 1"


def test_it_cannot_be_changed(digits: Plan) -> None:
    with pytest.raises(AttributeError):
        digits.name = "other"  # type: ignore[misc]


def test_it_does_not_share_the_mapping_it_came_from(chain: Chain) -> None:
    raw = {**chain(1, 1), "transports": {"x": {"hosts": ["a"]}}}
    plan = Plan.from_dict(raw)
    raw["transports"]["x"]["hosts"].append("b")
    raw["stages"][0]["ranks"].append(9)
    assert plan.transports == {"x": {"hosts": ["a"]}}
    assert plan.stages[0].ranks == (0,)


def test_any_mapping_will_do(chain: Chain) -> None:
    assert Plan.from_dict(MappingProxyType(chain(1, 1))) == Plan.from_dict(chain(1, 1))


def test_it_travels_between_processes(digits: Plan) -> None:
    again = pickle.loads(pickle.dumps(digits))
    assert again == digits
    assert again.digest == digits.digest
    assert hash(again) == hash(digits)


def test_ten_thousand_ranks(chain: Chain) -> None:
    """A thousand stages of ten ranks and two tensors a stage: 0.1 s here, if it stays linear."""
    stages = [
        {"name": f"s{index}", "ranks": list(range(10 * index, 10 * index + 10))}
        for index in range(1000)
    ]
    tensors = [
        {"name": f"t{index}{kind}", "from": f"s{index}", "to": f"s{index + 1}"}
        for index in range(999)
        for kind in "ab"
    ]
    raw = {"pipeline": {"microbatches": 4}, "stages": stages, "tensors": tensors}
    start = time.process_time()
    plan = Plan.from_dict(raw)
    assert plan.stage_of(9999).index == 999
    assert [len(plan.inputs(stage)) for stage in (0, 500, 999)] == [0, 2, 2]
    assert time.process_time() - start < 3
