"""Ranks agree exactly when their facts do, and where they do not the lines say it (C037)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.plan import Plan, differences
from stagelink.plan.plan import digest_of

Table = dict[str, Any]
Chain = Callable[..., Table]
Change = Callable[[Table], object]


def plan_with(chain: Chain, change: Change) -> Plan:
    raw = copy.deepcopy(chain(2, 1, 1, servers=[[0, 1, 2, 3]]))
    raw["tensors"] += [
        {"name": "skip", "from": "a", "to": ["b", "c"], "dtype": "float32", "shape": [2, 3]},
        {"name": "my tensor", "from": "b", "to": "c", "dtype": "int8", "grad": False},
    ]
    raw["links"] = [{"from": "a", "transport": ["gloo", "shm"]}]
    raw["transports"] = {"gloo": {"interface": "lo", "hosts": {"b": 1, "a": 2}}}
    change(raw)
    return Plan.from_dict(raw)


def same(_: Table) -> None:
    """Change nothing."""


DIFFERENT: dict[str, tuple[Change, list[str]]] = {
    "arguments": (
        lambda raw: raw["stages"][1].update(arguments={"ab": "input", "skip": "other"}),
        ['stage \'b\' arguments: not given here, {"ab": "input", "skip": "other"} on rank 1'],
    ),
    "shape": (
        lambda raw: raw["tensors"][2].update(shape=[2, 4]),
        ["tensor 'skip' shape: [2, 3] here, [2, 4] on rank 1"],
    ),
    "dtype": (
        lambda raw: raw["tensors"][2].update(dtype="float64"),
        ['tensor \'skip\' dtype: "float32" here, "float64" on rank 1'],
    ),
    "no dtype": (
        lambda raw: raw["tensors"][2].pop("dtype"),
        ["tensor 'skip' dtype: \"float32\" here, not given on rank 1"],
    ),
    "to": (
        lambda raw: raw["tensors"][2].update(to=["c", "b"]),
        ['tensor \'skip\' to: ["b", "c"] here, ["c", "b"] on rank 1'],
    ),
    "from and grad": (
        lambda raw: raw["tensors"][3].update({"from": "a", "dtype": "float16", "grad": True}),
        [
            'tensor \'my tensor\' dtype: "int8" here, "float16" on rank 1',
            'tensor \'my tensor\' from: "b" here, "a" on rank 1',
            "tensor 'my tensor' grad: false here, true on rank 1",
        ],
    ),
    "tensor gone": (lambda raw: raw["tensors"].pop(3), ["tensor 'my tensor': absent on rank 1"]),
    "tensor more": (
        lambda raw: raw["tensors"].append({"name": "b", "from": "a", "to": "c"}),
        ["tensor 'b': absent here"],
    ),
    "stage": (
        lambda raw: raw["stages"][0].update(ranks=[1, 0], device="cuda", warm_up=2),
        [
            'stage \'a\' device: "cpu" here, "cuda" on rank 1',
            "stage 'a' ranks: [0, 1] here, [1, 0] on rank 1",
            "stage 'a' warm_up: not given here, 2 on rank 1",
        ],
    ),
    "pipeline": (
        lambda raw: raw["pipeline"].update(schedule="gpipe", window=3),
        [
            'pipeline schedule: "1f1b" here, "gpipe" on rank 1',
            "pipeline window: not given here, 3 on rank 1",
        ],
    ),
    "servers": (
        lambda raw: raw["pipeline"].pop("servers"),
        ["pipeline servers: [[0, 1, 2, 3]] here, not given on rank 1"],
    ),
    "rule keys": (
        lambda raw: raw["links"][0].update({"from": "b"}),
        ['link rule 0 keys: {"from": ["a"]} here, {"from": ["b"]} on rank 1'],
    ),
    "rule transport": (
        lambda raw: raw["links"][0].update(transport=["shm", "gloo"]),
        ['link rule 0 transport: ["gloo", "shm"] here, ["shm", "gloo"] on rank 1'],
    ),
    "rule gone": (lambda raw: raw["links"].pop(), ["link rule 0: absent on rank 1"]),
    "options gone": (
        lambda raw: raw["transports"].pop("gloo"),
        ["transport 'gloo': absent on rank 1"],
    ),
    "options": (
        lambda raw: raw["transports"]["gloo"].pop("hosts"),
        [
            'transport \'gloo\' options: {"hosts": {"a": 2, "b": 1}, "interface": "lo"} here, '
            '{"interface": "lo"} on rank 1'
        ],
    ),
    "inline": (
        lambda raw: raw.update(control={"inline_bytes": 0}),
        ["control inline_bytes: 8192 here, 0 on rank 1"],
    ),
}


def test_what_ranks_must_agree_on(chain: Chain) -> None:
    raw = {**chain(1, 1), "links": [{"transport": "x"}], "transports": {"x": {}}}
    raw["tensors"][0]["shape"] = [-1]
    assert Plan.from_dict(raw).facts() == {
        "pipeline schedule": '"1f1b"',
        "pipeline routing": '"round_robin"',
        "pipeline window": "not given",
        "pipeline servers": "not given",
        "control inline_bytes": "8192",
        "stage 'a' place": "0",
        "stage 'a' ranks": "[0]",
        "stage 'a' device": '"cpu"',
        "stage 'a' warm_up": "not given",
        "stage 'a' arguments": "not given",
        "stage 'b' place": "1",
        "stage 'b' ranks": "[1]",
        "stage 'b' device": '"cpu"',
        "stage 'b' warm_up": "not given",
        "stage 'b' arguments": "not given",
        "tensor 'ab' from": '"a"',
        "tensor 'ab' to": '["b"]',
        "tensor 'ab' dtype": "not given",
        "tensor 'ab' shape": "[-1]",
        "tensor 'ab' grad": "true",
        "link rule 0 keys": "{}",
        "link rule 0 transport": '["x"]',
        "transport 'x' options": "{}",
    }


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference(chain: Chain, case: str) -> None:
    change, lines = DIFFERENT[case]
    mine, theirs = plan_with(chain, same), plan_with(chain, change)
    assert differences(mine.facts(), theirs.facts(), "rank 1") == lines
    assert mine.digest != theirs.digest


ALIKE: dict[str, Change] = {
    "nothing": same,
    "pipeline": lambda raw: raw["pipeline"].update(
        name="other", microbatches=9, observers=["log"]
    ),
    "limits": lambda raw: raw.update(limits={"deadline_s": 1}),
    "control": lambda raw: raw.update(
        control={"interface": "eth1", "spin_us": 3, "ports": [1, 9]}
    ),
    "tensor order": lambda raw: raw["tensors"].reverse(),
    "option order": lambda raw: raw["transports"]["gloo"].update(hosts={"a": 2, "b": 1}),
    "grad left out": lambda raw: raw["tensors"][3].pop("grad"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_a_rank_may_have_for_itself(chain: Chain, case: str) -> None:
    mine, theirs = plan_with(chain, same), plan_with(chain, ALIKE[case])
    assert differences(mine.facts(), theirs.facts(), "rank 1") == []
    assert mine.digest == theirs.digest


def test_the_digest_is_of_the_facts_in_any_order(chain: Chain) -> None:
    plan = plan_with(chain, same)
    facts = plan.facts()
    assert len(plan.digest) == 64
    assert digest_of(dict(reversed(facts.items()))) == plan.digest
    assert digest_of({**facts, "pipeline window": "3"}) != plan.digest


@given(order=st.permutations(range(4)))
def test_the_order_of_tensors_changes_nothing(chain: Chain, order: list[int]) -> None:
    def shuffle(raw: Table) -> None:
        raw["tensors"] = [raw["tensors"][index] for index in order]

    mine, theirs = plan_with(chain, same), plan_with(chain, shuffle)
    assert mine.digest == theirs.digest
    assert mine.edges == theirs.edges
    assert mine == theirs


OWNERS = st.sampled_from(["pipeline", "tensor 'a'", "tensor 'a b'", "stage 'a'"])
KEYS = st.builds(" ".join, st.tuples(OWNERS, st.sampled_from(["ranks", "shape", "to"])))
FACTS = st.dictionaries(KEYS, st.sampled_from(["1", "2", "not given"]))


@given(mine=FACTS, theirs=FACTS)
def test_differences_are_symmetrical(mine: dict[str, str], theirs: dict[str, str]) -> None:
    here = differences(mine, theirs, "rank 1")
    there = differences(theirs, mine, "rank 1")
    assert sorted(mirrored(line) for line in here) == there
    assert (here == []) == (mine == theirs)


def mirrored(line: str) -> str:
    owner, text = line.split(": ", 1)
    if text.startswith("absent"):
        return f"{owner}: absent {'on rank 1' if text == 'absent here' else 'here'}"
    here, there = text.removesuffix(" on rank 1").split(" here, ")
    return f"{owner}: {there} here, {here} on rank 1"
