"""PipeDream's configurations become plans, with the faults that its shipped files have."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import tomli_w

from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.plan.files import read_mapping
from stagelink.schedule import verify
from tests.support.pipedream import SHAPES, configuration

if TYPE_CHECKING:
    from pathlib import Path


def load(folder: Path, found: dict[str, Any] | str, name: str = "conf.json") -> Plan:
    path = folder / name
    path.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    return Plan.load(path)


def refusal(folder: Path, found: dict[str, Any] | str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        load(folder, found)
    where = f"{folder / 'conf.json'}: "
    lines = str(caught.value).splitlines()
    assert all(line.startswith(where) for line in lines)
    return [line.removeprefix(where) for line in lines]


def test_a_plan_of_three_stages(tmp_path: Path) -> None:
    plan = load(tmp_path, configuration([4, 2, 2]), "Vgg16.JSON")
    assert (plan.name, plan.schedule, plan.routing) == ("Vgg16", "pipedream", "round_robin")
    assert [stage.ranks for stage in plan.stages] == [(0, 1, 2, 3), (4, 5), (6, 7)]
    assert [stage.warm_up for stage in plan.stages] == [None] * 3
    edges = [(edge.name, edge.source, edge.target, edge.tensor.grad) for edge in plan.edges]
    assert edges == [("out0", 0, 1, True), ("out1", 1, 2, True), ("target", 0, 2, False)]


def test_ranks_in_any_order(tmp_path: Path) -> None:
    found = configuration([4, 2, 2])
    found["stage_to_rank_map"] = {"0": [0, 1, 4, 5], "1": [2, 6], "2": [3, 7]}
    assert load(tmp_path, found).stages[1].ranks == (2, 6)


def test_one_stage(tmp_path: Path) -> None:
    plan = load(tmp_path, configuration([4]))
    assert (len(plan.stages), plan.edges) == (1, ())


def test_a_depth_map_is_the_warm_up(tmp_path: Path) -> None:
    plan = load(tmp_path, configuration([4, 3, 1], [2, 1, 0]))
    assert verify(plan).ok
    assert verify(plan).warm_up == (2, 1, 0)


def test_no_depth_map_may_be_written_as_null(tmp_path: Path) -> None:
    assert load(tmp_path, configuration([1, 1]) | {"stage_to_depth_map": None}).stages


def test_what_is_json_is_read_as_it_is(tmp_path: Path) -> None:
    found = {**configuration([1, 1]), "routing": "x, 1: y"}
    assert any("unknown routing 'x, 1: y'" in line for line in refusal(tmp_path, found))


def test_bare_numbers_as_keys(tmp_path: Path) -> None:
    """As in vgg16/gpus=4/mp_conf.json."""
    text = """{
        "module_to_stage_map": [0, 1, 1],
        "stage_to_rank_map": {0: [0], 1 : [1]},
        "stage_to_depth_map": { 0: 1,1: 0}
    }"""
    plan = load(tmp_path, text)
    assert [stage.warm_up for stage in plan.stages] == [1, 0]


@pytest.mark.parametrize("replicas", SHAPES, ids=str)
def test_safe_warm_up_of_shipped_shapes(replicas: tuple[int, ...], tmp_path: Path) -> None:
    verdict = verify(load(tmp_path, configuration(replicas)))
    assert verdict.ok
    assert verdict.warm_up == SHAPES[replicas]


def test_a_depth_map_that_hangs(tmp_path: Path) -> None:
    problem = verify(load(tmp_path, configuration([4, 3, 1], [1, 1, 0]))).problem
    assert problem is not None
    assert (
        "deadlock: the ranks wait for each other in a cycle: rank 0 (stage 'stage0') waits in"
        in problem
    )
    assert "leave out the warm_up of 'stage0', 'stage1', 'stage2': 2, 1, 0 is safe" in problem


def test_written_as_toml_it_is_the_same_plan(tmp_path: Path) -> None:
    plan = load(tmp_path, configuration([4, 3, 1], [2, 1, 0]))
    text = tomli_w.dumps(read_mapping(tmp_path / "conf.json"))
    assert Plan.from_dict(tomllib.loads(text)) == plan


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"stage_to_rank_map": {"0": [0], "2": [1]}},
            "stage_to_rank_map: 2 stages are numbered",
        ),
        (
            {"stage_to_rank_map": {"0": [0], "1": [0]}},
            "stage_to_rank_map.1[0]: rank 0 is already",
        ),
        ({"stage_to_rank_map": {"0": [0], "1": [2]}}, "stage_to_rank_map: 2 ranks are numbered"),
        (
            {"stage_to_rank_map": {"0": [0], "1": []}},
            "stage_to_rank_map.1: []: must not be empty",
        ),
        (
            {"stage_to_rank_map": {"0": [0], "1": ["1"]}},
            "stage_to_rank_map.1[0]: '1': must be an",
        ),
        ({"stage_to_rank_map": {"0": [0], "last": [1]}}, "stage_to_rank_map.last"),
        ({"module_to_stage_map": [0, 0]}, "module_to_stage_map: no module for stage 1"),
        ({"module_to_stage_map": [0, 1, 2]}, "module_to_stage_map[2]: stage 2 has no ranks"),
        ({"module_to_stage_map": [0, 1, 0]}, "module_to_stage_map[2]: stage 0 comes again"),
        ({"stage_to_depth_map": {"0": 1}}, "stage_to_depth_map: no depth for stage 1"),
        (
            {"stage_to_depth_map": {"0": 1, "1": 0, "2": 0}},
            "stage_to_depth_map: there is no stage 2",
        ),
        (
            {"stage_to_depth_map": {"0": 10**12, "1": 0}},
            "stage_to_depth_map.0: 1000000000000: no session has so many microbatches; at most "
            "500000 in all",
        ),
        ({"stage_to_ranks": {}}, "stage_to_ranks: unknown key 'stage_to_ranks' (did you mean"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    found = refusal(tmp_path, configuration([1, 1]) | change)
    assert any(text.startswith(line) for text in found), found


def test_a_missing_map(tmp_path: Path) -> None:
    lines = refusal(tmp_path, {"module_to_stage_map": [0]})
    assert lines == ["stage_to_rank_map: missing; this key must be given"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON: Expecting property name"),
        ('{"a": 1, "a": 2}', "not JSON: the key 'a' comes twice"),
        ("[" * 100_000, "not JSON: it is nested too deep"),
    ],
    ids=["cut", "twice", "deep"],
)
def test_not_json(text: str, reason: str, tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, text)
    assert line.startswith(reason)


def test_its_own_routing_may_be_asked_for(tmp_path: Path) -> None:
    plan = load(tmp_path, configuration([4, 3, 1]) | {"routing": "diagonal"})
    assert plan.routing == "diagonal"
    assert verify(plan).ok
    (line,) = refusal(tmp_path, configuration([1, 1]) | {"routing": "diagnal"})
    assert "unknown routing 'diagnal' (did you mean 'diagonal'?)" in line


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_no_object(text: str, tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, text)
    assert line.endswith("must be a table")


def test_a_number_written_in_two_ways(tmp_path: Path) -> None:
    found = configuration([1, 1]) | {"stage_to_rank_map": {"0": [0], "00": [1]}}
    assert any(line.startswith("stage_to_rank_map.00") for line in refusal(tmp_path, found))
