"""What tables can have wrong between them, each with a text of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stagelink.errors import PlanError
from stagelink.plan import Plan

Table = dict[str, Any]
Chain = Callable[..., Table]
Problems = Callable[[Mapping[str, Any]], list[str]]


def tensor(name: str, source: str, *targets: str, **keys: object) -> Table:
    return {"name": name, "from": source, "to": list(targets), **keys}


def test_a_rank_in_two_stages(chain: Chain, problems: Problems) -> None:
    plan = chain(2, 2)
    plan["stages"][1]["ranks"] = [2, 1]
    assert problems(plan) == [
        "stages[1].ranks[1]: rank 1 is already replica 1 of stage 'a'; a rank holds one stage"
    ]


def test_a_rank_twice_in_a_stage(chain: Chain, problems: Problems) -> None:
    plan = chain(2)
    plan["stages"][0]["ranks"] = [0, 1, 0, 0]
    assert problems(plan) == [
        f"stages[0].ranks[{place}]: rank 0 is already replica 0 of stage 'a'; "
        "a rank holds one stage"
        for place in (2, 3)
    ]


@pytest.mark.parametrize(
    ("ranks", "missing", "beyond"),
    [
        ([1], "0", "1"),
        ([0, 2, 3], "1", "3"),
        ([7, 0, 1, 5, 9], "2-4", "5, 7, 9"),
        ([0, 2**62], "1", str(2**62)),
    ],
)
def test_a_gap(
    chain: Chain, problems: Problems, ranks: list[int], missing: str, beyond: str
) -> None:
    plan = chain(1)
    plan["stages"][0]["ranks"] = ranks
    count = len(ranks)
    assert problems(plan) == [
        f"stages: a gap: {count} ranks are numbered 0 to {count - 1}; "
        f"missing: {missing}; too high: {beyond}"
    ]


def test_a_stage_name_twice(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1, 1)
    plan["stages"][2]["name"] = "a"
    assert problems(plan) == ["stages[2].name: 'a' is already the name of stages[0]"]


def test_a_tensor_name_twice(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1, 1)
    plan["tensors"][1]["name"] = "ab"
    assert problems(plan) == ["tensors[1].name: 'ab' is already the name of tensors[0]"]


def test_an_observer_twice(chain: Chain, problems: Problems) -> None:
    assert problems(chain(1, observers=["log", "log"])) == [
        "pipeline.observers[1]: 'log' is already observers[0]"
    ]


def test_a_tensor_from_an_unknown_stage(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1)
    plan["stages"][0]["name"] = "features"
    plan["tensors"][0]["from"] = "feature"
    assert problems(plan) == [
        "tensors[0].from: unknown stage 'feature' (did you mean 'features'?); "
        "the plan has 'features', 'b'"
    ]


@pytest.mark.parametrize(("to", "path"), [("B", "to"), (["b", "zzz"], "to[1]")])
def test_a_tensor_to_an_unknown_stage(
    chain: Chain, problems: Problems, to: object, path: str
) -> None:
    plan = chain(1, 1)
    plan["tensors"][0]["to"] = to
    (line,) = problems(plan)
    assert line.startswith(f"tensors[0].{path}: unknown stage ")


def test_a_tensor_nobody_takes(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1)
    plan["tensors"].append(tensor("lost", "a"))
    assert problems(plan) == ["tensors[1].to: []: nobody takes tensor 'lost'; name a later stage"]


def test_a_consumer_twice(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1)
    plan["tensors"][0]["to"] = ["b", "b"]
    assert problems(plan) == ["tensors[0].to[1]: 'b' is already to[0]"]


def test_a_tensor_to_its_own_stage(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1)
    plan["tensors"].append(tensor("self", "b", "b"))
    assert problems(plan) == ["tensors[1].to[0]: stage 'b' cannot send to itself"]


def test_a_cycle_is_spelt_out(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1, 1)
    plan["tensors"].append(tensor("back", "c", "a"))
    assert problems(plan) == [
        "tensors[2].to[0]: a cycle: 'c' → 'a' → 'b' → 'c'; tensors go to later stages only"
    ]


def test_a_backward_tensor_without_a_cycle(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1)
    plan["tensors"] = [tensor("back", "b", "a")]
    assert problems(plan) == [
        "tensors[0].to[0]: backward: 'a' is listed before 'b'; list stages in pipeline order"
    ]


def test_a_stage_without_tensors(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1, 1)
    del plan["tensors"][1]
    assert problems(plan) == [
        "stages[2]: stage 'c' is connected to nothing: no tensor leaves or reaches it"
    ]


def test_one_stage_alone_is_a_plan(chain: Chain) -> None:
    assert Plan.from_dict(chain(3)).world_size == 3


@pytest.mark.parametrize(
    ("stage", "arguments", "said"),
    [
        (
            1,
            {"alos": "x"},
            [
                ".alos: unknown received tensor 'alos' (did you mean 'also'?); stage 'b' has "
                "'ab', 'also'"
            ],
        ),
        (1, {"ab": "also"}, [".ab: parameter 'also' already takes tensor 'also'"]),
        (
            1,
            {"ab": "x", "also": "x"},
            [".also: parameter 'x' already takes tensor 'ab'"],
        ),
        (0, {"image": "x", "img": "x"}, [".img: parameter 'x' already takes tensor 'image'"]),
        (0, {"image": "in put"}, [".image: 'in put': no parameter in Python can be named so"]),
        (0, {"image": ""}, [".image: '': must not be empty"]),
        (0, {"image": 1}, [".image: 1: must be a string"]),
        (0, ["x"], [": ['x']: must be a table"]),
    ],
)
def test_arguments_of_a_module(
    chain: Chain, problems: Problems, stage: int, arguments: Any, said: list[str]
) -> None:
    plan = chain(1, 1, 1)
    plan["tensors"].append(tensor("also", "a", "b"))
    plan["stages"][stage]["arguments"] = arguments
    assert problems(plan) == [f"stages[{stage}].arguments{text}" for text in said]


def test_arguments_that_are_in_order(chain: Chain) -> None:
    plan = chain(1, 1)
    plan["tensors"].append(tensor("also", "a", "b"))
    plan["stages"][0]["arguments"] = {"image": "x", "label": "y"}
    plan["stages"][1]["arguments"] = {"ab": "also", "also": "ab"}
    stages = Plan.from_dict(plan).stages
    assert [stage.arguments for stage in stages] == [
        {"image": "x", "label": "y"},
        {"ab": "also", "also": "ab"},
    ]
    assert hash(stages[0])


@pytest.mark.parametrize("count", [500_001, 10**7, 10**12, 2**63 - 1])
def test_more_microbatches_than_can_be_listed(
    chain: Chain, problems: Problems, count: int
) -> None:
    text = (
        f"{count}: must be at most 500000 with 2 stages, since each rank lists and walks them "
        "before it starts; let a batch be smaller, or a session go on until the end"
    )
    assert problems(chain(1, 1, microbatches=count)) == [f"pipeline.microbatches: {text}"]
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(chain(1, 1)).with_microbatches(count)
    assert str(caught.value) == f"microbatches: {text}"


def test_as_many_microbatches_as_can_be_listed(chain: Chain, problems: Problems) -> None:
    assert Plan.from_dict(chain(2, microbatches=10**6)).microbatches == 10**6
    assert "at most 1000000 with 1 stage, " in problems(chain(2, microbatches=10**6 + 1))[0]
    long = chain(1, 1, microbatches=4096)
    long["stages"] = [{"name": f"s{i}", "ranks": [i]} for i in range(300)]
    long["tensors"] = [tensor(f"t{i}", f"s{i}", f"s{i + 1}") for i in range(299)]
    assert Plan.from_dict(long).microbatches == 4096
    long["pipeline"]["microbatches"] += 1
    assert "at most 4096 with 300 stages, " in problems(long)[0]


def test_more_warm_up_than_there_are_microbatches(chain: Chain, problems: Problems) -> None:
    plan = chain(2, 1, schedule="pipedream")
    plan["stages"][0]["warm_up"] = 10**12
    plan["stages"][1]["warm_up"] = 400_000
    assert problems(plan) == [
        f"stages[0].warm_up: {10**12}: no session has so many microbatches; at most 500000 in all"
    ]


def test_a_plan_in_pieces(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1, 1, 1)
    plan["tensors"] = [tensor("x", "b", "d"), tensor("y", "a", "c")]
    assert problems(plan) == [
        "tensors: the stages fall into 2 pieces that exchange nothing: "
        "'a', 'c' | 'b', 'd'; a plan is one pipeline"
    ]


def test_a_gradient_of_an_integer(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1)
    plan["tensors"][0] |= {"dtype": "int64", "grad": True}
    assert problems(plan) == [
        "tensors[0].grad: true, but int64 has no gradients; leave grad out or set it to false"
    ]


@pytest.mark.parametrize(
    ("keys", "grad"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "complex64"}, True),
        ({"dtype": "int64"}, False),
        ({"dtype": "bool"}, False),
        ({"grad": False}, False),
        ({"dtype": "float32", "grad": True}, True),
    ],
)
def test_grad_follows_from_the_dtype(chain: Chain, keys: Table, grad: bool) -> None:
    plan = chain(1, 1)
    plan["tensors"][0] |= keys
    assert Plan.from_dict(plan).tensors[0].grad is grad


@pytest.mark.parametrize(
    ("servers", "line"),
    [
        ([[0], [1]], "pipeline.servers: no server has rank 2; list every rank, or no servers"),
        (
            [[0, 1], [2, 2]],
            "pipeline.servers[1][1]: rank 2 is on two servers or twice on one; "
            "each of the ranks 0 to 2 belongs to one server",
        ),
        (
            [[0, 1, 2, 3]],
            "pipeline.servers[0][3]: rank 3 holds no stage; "
            "each of the ranks 0 to 2 belongs to one server",
        ),
    ],
)
def test_servers_that_do_not_hold_each_rank_once(
    chain: Chain, problems: Problems, servers: list[list[int]], line: str
) -> None:
    assert problems(chain(2, 1, servers=servers)) == [line]


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ({"from": "A"}, "from: unknown stage 'A' (did you mean 'a'?); the plan has 'a', 'b'"),
        ({"to": ["b", "c"]}, "to[1]: unknown stage 'c'; the plan has 'a', 'b'"),
        (
            {"tensor": "abb"},
            "tensor: unknown tensor 'abb' (did you mean 'ab'?); the plan has 'ab'",
        ),
        ({"from_rank": [0, 3]}, "from_rank[1]: there is no rank 3; the ranks are 0 to 2"),
        ({"to_rank": 3}, "to_rank: there is no rank 3; the ranks are 0 to 2"),
        (
            {"from_server": 0},
            "from_server: server 0, but the plan lists no servers; give pipeline.servers",
        ),
        (
            {"to_server": 0},
            "to_server: server 0, but the plan lists no servers; give pipeline.servers",
        ),
        ({"transport": ["x", "y", "x"]}, "transport[2]: 'x' is already transport[0]"),
        (
            {"transport": ["x", "auto"]},
            "transport: ['x', 'auto'] mixes 'auto' with names; give 'auto' alone, or names alone",
        ),
    ],
)
def test_a_rule_with_unknown_names(
    chain: Chain, problems: Problems, rule: Table, line: str
) -> None:
    links = [{"transport": "x", **rule}]
    assert problems({**chain(2, 1), "links": links}) == [f"links[0].{line}"]


def test_a_rule_with_an_unknown_server(chain: Chain, problems: Problems) -> None:
    plan = chain(2, 1, servers=[[0, 1], [2]])
    plan["links"] = [{"transport": "x", "from_server": 2}]
    assert problems(plan) == ["links[0].from_server: there is no server 2; the servers are 0 to 1"]


def test_one_slip_is_told_once(chain: Chain, problems: Problems) -> None:
    """A misspelt stage is not also a graph in pieces and a rule that never matches."""
    plan = chain(1, 1, 1)
    plan["tensors"][1]["from"] = "bb"
    plan["links"] = [{"transport": "x", "from": "b"}]
    (line,) = problems(plan)
    assert line.startswith("tensors[1].from: unknown stage 'bb'")


def test_independent_problems_are_all_told(chain: Chain, problems: Problems) -> None:
    plan = chain(1, 1, 1, observers=["log", "log"])
    plan["stages"][2]["ranks"] = [3]
    plan["tensors"][0] |= {"dtype": "int8", "grad": True}
    plan["tensors"][1]["to"] = "a"
    plan["links"] = [{"from": "z", "transport": "x"}]
    assert [line.split(": ")[0] for line in problems(plan)] == [
        "pipeline.observers[1]",
        "stages",
        "tensors[0].grad",
        "tensors[1].to",
        "links[0].from",
    ]


@pytest.mark.parametrize(
    "links",
    [
        [],
        [{"from": "a", "transport": "gloo"}],
        [{"from": "a", "transport": "gloo"}, {"transport": "auto"}],
        [{"transport": ["gloo", "shm"]}],
    ],
)
def test_options_that_a_link_may_use(chain: Chain, links: list[Table]) -> None:
    plan = {**chain(1, 1, 1), "links": links, "transports": {"shm": {"slots": 4}}}
    assert Plan.from_dict(plan).transports == {"shm": {"slots": 4}}


def test_options_that_no_link_can_use(chain: Chain, problems: Problems) -> None:
    links = [{"from": "a", "transport": "nccl"}, {"transport": "gloo"}]
    plan = {**chain(1, 1), "links": links, "transports": {"glo": {}, "nccl": {}}}
    assert problems(plan) == [
        "transports.glo: never used: the rules name only 'gloo', 'nccl', for every link "
        "(did you mean 'gloo'?)"
    ]


def test_options_of_auto(chain: Chain, problems: Problems) -> None:
    assert problems({**chain(1, 1), "transports": {"auto": {}}}) == [
        "transports.auto: 'auto' is a choice among transports and has no options"
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "forward"])
def test_a_warm_up_where_the_schedule_has_none(
    chain: Chain, problems: Problems, schedule: str
) -> None:
    plan = chain(1, 1)
    plan["pipeline"]["schedule"] = schedule
    plan["stages"][0]["warm_up"] = 1
    assert problems(plan) == [
        f"stages[0].warm_up: 1: the schedule {schedule!r} has no warm-up to set; remove it"
    ]
