"""What a single table or key can have wrong; every problem with its path, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stagelink.plan import Control, Limits, Plan

Table = dict[str, Any]
Chain = Callable[..., Table]
Problems = Callable[[Mapping[str, Any]], list[str]]

INT = "must be an integer"
PORTS = "must be the first and the last port, as [20000, 20100]"


def changed(plan: Table, path: str, value: object) -> Table:
    """Set the value at a path such as ``stages.0.ranks``."""
    keys: list[Any] = [int(part) if part.isdigit() else part for part in path.split(".")]
    *outer, last = keys
    table: Any = plan
    for part in outer:
        table = table[part] if isinstance(table, list) else table.setdefault(part, {})
    table[last] = value
    return plan


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("stages.1.ranks", ["2"], f"stages[1].ranks[0]: '2': {INT}"),
        ("stages.1.ranks", [True], f"stages[1].ranks[0]: True: {INT}"),
        ("stages.1.ranks", [2.0], f"stages[1].ranks[0]: 2.0: {INT}"),
        ("stages.1.ranks", [0.5], f"stages[1].ranks[0]: 0.5: {INT}"),
        ("stages.1.ranks", [-1], "stages[1].ranks[0]: -1: must be at least 0"),
        ("stages.1.ranks", 2, "stages[1].ranks: 2: must be a list"),
        ("stages.1.ranks", [], "stages[1].ranks: []: must not be empty"),
        ("stages.1.name", "", "stages[1].name: '': must not be empty"),
        ("stages.1.name", 7, "stages[1].name: 7: must be a string"),
        ("stages.1.warm_up", -1, "stages[1].warm_up: -1: must be at least 0"),
        ("stages.1.warm_up", "1", f"stages[1].warm_up: '1': {INT}"),
        ("stages.1", 7, "stages[1]: 7: must be a table"),
        ("stages", [], "stages: []: must not be empty"),
        ("stages", {}, "stages: {}: must be a list"),
        ("pipeline.name", "", "pipeline.name: '': must not be empty"),
        ("pipeline.microbatches", 0, "pipeline.microbatches: 0: must be at least 1"),
        ("pipeline.microbatches", True, f"pipeline.microbatches: True: {INT}"),
        (
            "pipeline.microbatches",
            2**63,
            f"pipeline.microbatches: {2**63}: must be at most {2**63 - 1}",
        ),
        ("pipeline.window", 0, "pipeline.window: 0: must be at least 1"),
        ("pipeline.servers", [], "pipeline.servers: []: must not be empty"),
        ("pipeline.servers", [[0, 1, 2], []], "pipeline.servers[1]: []: must not be empty"),
        ("pipeline.observers", "x", "pipeline.observers: 'x': must be a list"),
        ("tensors.0.from", ["a"], "tensors[0].from: ['a']: must be a string"),
        ("tensors.0.to", 3, "tensors[0].to: 3: must be a string"),
        ("tensors.0.to", ["b", 3], "tensors[0].to[1]: 3: must be a string"),
        ("tensors.0.shape", [-2], "tensors[0].shape[0]: -2: must be at least -1"),
        ("tensors.0.shape", [1.5], f"tensors[0].shape[0]: 1.5: {INT}"),
        (
            "tensors.0.shape",
            [1] * 9,
            "tensors[0].shape: [1, 1, 1, 1, 1, 1, ...]: must have at most 8 entries",
        ),
        ("tensors.0.grad", 1, "tensors[0].grad: 1: must be true or false"),
        ("links", [{"transport": []}], "links[0].transport: []: must not be empty"),
        ("links", [{"transport": ""}], "links[0].transport: '': must not be empty"),
        ("links", [{}], "links[0].transport: missing; this key must be given"),
        (
            "links",
            [{"transport": "x", "from": []}],
            "links[0].from: []: must not be empty",
        ),
        (
            "links",
            [{"transport": "x", "from_rank": "0"}],
            f"links[0].from_rank: '0': {INT}",
        ),
        (
            "links",
            [{"transport": "x", "same_server": 1}],
            "links[0].same_server: 1: must be true or false",
        ),
        ("transports", {"x": 3}, "transports.x: 3: must be a table"),
        (
            "transports.x.y",
            {1, 2},
            "transports.x.y: {1, 2}: must be a string, a number, a boolean, a list or a table",
        ),
        ("control.inline_bytes", 65537, "control.inline_bytes: 65537: must be at most 65536"),
        ("control.inline_bytes", -1, "control.inline_bytes: -1: must be at least 0"),
        ("control.spin_us", -1, "control.spin_us: -1: must be at least 0"),
        ("control.ports", [20000], f"control.ports: [20000]: {PORTS}"),
        ("control.ports", [20100, 20000], f"control.ports: [20100, 20000]: {PORTS}"),
        ("control.ports", [0, 20000], f"control.ports: [0, 20000]: {PORTS}"),
        ("control.ports", [20000, 65536], f"control.ports: [20000, 65536]: {PORTS}"),
        ("control.ports", [True, 20000], f"control.ports: [True, 20000]: {PORTS}"),
        ("control.ports", "20000-20100", f"control.ports: '20000-20100': {PORTS}"),
        ("control.ports", 20000, f"control.ports: 20000: {PORTS}"),
        ("control.interface", "", "control.interface: '': must not be empty"),
        ("limits.deadline_s", 0, "limits.deadline_s: 0: must be more than 0"),
        ("limits.deadline_s", -0.5, "limits.deadline_s: -0.5: must be more than 0"),
        ("limits.deadline_s", math.nan, "limits.deadline_s: nan: must be more than 0"),
        ("limits.first_deadline_s", True, "limits.first_deadline_s: True: must be a number"),
        ("limits.connect_deadline_s", "60", "limits.connect_deadline_s: '60': must be a number"),
        ("limits.close_deadline_s", 0, "limits.close_deadline_s: 0: must be more than 0"),
        ("limits.receive_bytes", 0, "limits.receive_bytes: 0: must be at least 1"),
        ("limits.pool_bytes", 1.5, f"limits.pool_bytes: 1.5: {INT}"),
    ],
)
def test_a_wrong_value(
    chain: Chain, problems: Problems, path: str, value: object, line: str
) -> None:
    assert problems(changed(chain(2, 1), path, value)) == [line]


@pytest.mark.parametrize(
    ("path", "value", "beginning"),
    [
        (
            "pipeline.schedule",
            "pipedream_2wb",
            "pipeline.schedule: unknown schedule 'pipedream_2wb' (did you mean 'pipedream_2bw'?); "
            "this version has '1f1b', 'gpipe', 'pipedream', 'pipedream_2bw', 'forward'",
        ),
        (
            "pipeline.schedule",
            "1F1B",
            "pipeline.schedule: unknown schedule '1F1B' (did you mean '1f1b'?); this version",
        ),
        (
            "pipeline.routing",
            "diagonl",
            "pipeline.routing: unknown routing 'diagonl' (did you mean 'diagonal'?); this version",
        ),
        (
            "stages.0.device",
            "CUDA",
            "stages[0].device: unknown device 'CUDA' (did you mean 'cuda'?); "
            "this version has 'cpu', 'cuda'",
        ),
        (
            "tensors.0.dtype",
            "int46",
            "tensors[0].dtype: unknown dtype 'int46' (did you mean 'int64'?); this version has",
        ),
        (
            "tensors.0.dtype",
            "torch.float32",
            "tensors[0].dtype: unknown dtype 'torch.float32' (did you mean 'float32'?); this ver",
        ),
        (
            "links",
            [{"device": ["cpu", "gpu"], "transport": "x"}],
            "links[0].device[1]: unknown device 'gpu' (did you mean 'cpu'?); this version has",
        ),
    ],
)
def test_an_unknown_word(
    chain: Chain, problems: Problems, path: str, value: object, beginning: str
) -> None:
    (line,) = problems(changed(chain(2, 1), path, value))
    assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("path", "beginning"),
    [
        ("pipelin", "pipelin: unknown key 'pipelin' (did you mean 'pipeline'?); this table has"),
        ("pipeline.microbatch", "pipeline.microbatch: unknown key 'microbatch' (did you mean"),
        (
            "stages.0.rank",
            "stages[0].rank: unknown key 'rank' (did you mean 'ranks'?); this table",
        ),
        (
            "tensors.0.form",
            "tensors[0].form: unknown key 'form' (did you mean 'from'?); this table",
        ),
        ("tensors.0.from_", "tensors[0].from_: unknown key 'from_' (did you mean 'from'?); this"),
        ("control.spin", "control.spin: unknown key 'spin' (did you mean 'spin_us'?); this table"),
        (
            "limits.deadline",
            "limits.deadline: unknown key 'deadline' (did you mean 'deadline_s'?)",
        ),
    ],
)
def test_an_unknown_key(chain: Chain, problems: Problems, path: str, beginning: str) -> None:
    (line,) = problems(changed(chain(2, 1), path, 1))
    assert line.startswith(beginning)


def test_an_unknown_key_of_a_rule(chain: Chain, problems: Problems) -> None:
    links = [{"transport": "x", "tensors": "ab"}]
    (line,) = problems({**chain(2, 1), "links": links})
    assert line.startswith("links[0].tensors: unknown key 'tensors' (did you mean 'tensor'?)")


def test_a_key_that_is_no_plain_word_is_quoted(chain: Chain, problems: Problems) -> None:
    (line,) = problems(chain(1) | {"my key": 1})
    assert line.startswith("'my key': unknown key 'my key'")


@pytest.mark.parametrize("path", ["pipeline", "stages"])
def test_a_missing_table(chain: Chain, problems: Problems, path: str) -> None:
    plan = chain(1)
    del plan[path]
    assert problems(plan) == [f"{path}: missing; this key must be given"]


@pytest.mark.parametrize("key", ["name", "from", "to"])
def test_a_missing_key_of_a_tensor(chain: Chain, problems: Problems, key: str) -> None:
    plan = chain(1, 1)
    del plan["tensors"][0][key]
    assert problems(plan) == [f"tensors[0].{key}: missing; this key must be given"]


@pytest.mark.parametrize("raw", [[], None, 3, "pipeline", {1, 2}])
def test_not_a_table_at_all(problems: Problems, raw: Any) -> None:
    assert problems(raw) == [f"{raw!r}: must be a table"]


def test_every_problem_is_told_at_once(chain: Chain, problems: Problems) -> None:
    plan = chain(2, 1, schedule="gipe")
    plan["stages"][1]["ranks"] = ["2"]
    plan["tensors"][0]["dtype"] = "flot32"
    plan["limits"] = {"deadline_s": 0}
    plan["links"] = [{"transport": ["auto", "x"]}]
    paths = [line.split(": ")[0] for line in problems(plan)]
    assert paths == [
        "pipeline.schedule",
        "stages[1].ranks[0]",
        "tensors[0].dtype",
        "limits.deadline_s",
        "links[0].transport",  # found by a check across tables, beside the others
    ]


def test_a_flood_of_problems_is_cut(chain: Chain, problems: Problems) -> None:
    plan = chain(1)
    plan["stages"][0]["ranks"] = ["x"] * 1000
    lines = problems(plan)
    assert len(lines) == 101
    assert lines[-1] == "and more, beyond these 100"


def test_a_scalar_stands_for_a_list_of_one(chain: Chain) -> None:
    rule = {
        "from": "a",
        "to": "b",
        "from_rank": 0,
        "to_rank": 2,
        "from_server": 0,
        "to_server": 1,
        "tensor": "ab",
        "device": "cpu",
        "transport": "gloo",
    }
    listed = {key: [value] for key, value in rule.items()}
    plans = [
        Plan.from_dict({**chain(2, 1, servers=[[0, 1], [2]]), "links": [links]})
        for links in (rule, listed)
    ]
    assert plans[0] == plans[1]


def test_tuples_serve_as_lists(chain: Chain) -> None:
    plan = chain(2, 1, servers=((0, 1), (2,)), observers=("log",))
    plan["stages"][0]["ranks"] = (0, 1)
    plan["tensors"][0] |= {"to": ("b",), "shape": (2, -1)}
    plan["stages"] = tuple(plan["stages"])
    made = Plan.from_dict(plan)
    assert made.servers == ((0, 1), (2,))
    assert made.stages[0].ranks == (0, 1)
    assert made.tensors[0].shape == (2, -1)


def test_problems_in_tuples_have_their_place(chain: Chain, problems: Problems) -> None:
    plan = chain(1)
    plan["stages"] = ({"name": "a", "ranks": (0, "1")},)
    assert problems(plan) == [f"stages[0].ranks[1]: '1': {INT}"]


def test_every_key_reaches_the_plan(chain: Chain) -> None:
    plan = chain(
        2,
        1,
        name="digits",
        schedule="1f1b",
        window=3,
        observers=["log", "trace"],
        servers=[[2], [0, 1]],
    )
    plan["stages"][0] |= {"device": "cuda", "warm_up": 2}
    plan["tensors"][0] |= {"dtype": "float32", "shape": [-1, 8], "grad": False}
    plan["transports"] = {"gloo": {"interface": "lo"}}
    ports = [20000, 20100]
    plan["control"] = {"interface": "eth0", "inline_bytes": 0, "spin_us": 20, "ports": ports}
    plan["limits"] = {
        "deadline_s": 1,
        "first_deadline_s": math.inf,
        "connect_deadline_s": 3.5,
        "close_deadline_s": 4,
        "receive_bytes": 5,
        "pool_bytes": 6,
    }
    made = Plan.from_dict(plan)
    assert (made.name, made.schedule, made.window) == ("digits", "1f1b", 3)
    assert (made.observers, made.servers) == (("log", "trace"), ((2,), (0, 1)))
    assert (made.stages[0].device, made.stages[0].warm_up) == ("cuda", 2)
    assert made.stages[1].warm_up is None
    (tensor,) = made.tensors
    assert (tensor.dtype, tensor.shape, tensor.grad) == ("float32", (-1, 8), False)
    assert made.transports == {"gloo": {"interface": "lo"}}
    assert made.control == Control(
        interface="eth0", inline_bytes=0, spin_us=20, ports=(20000, 20100)
    )
    assert made.limits == Limits(
        deadline_s=1.0,
        first_deadline_s=math.inf,
        connect_deadline_s=3.5,
        close_deadline_s=4.0,
        receive_bytes=5,
        pool_bytes=6,
    )
