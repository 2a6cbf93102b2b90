"""A rule matches by every key that it gives; the first that matches decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagelink.plan import AUTO, Edge, LinkFacts, LinkRule, Tensor, matches, named_keys, rule_for

EDGE = Edge(0, Tensor("hidden", 0, (1,)), 1)
FACTS = LinkFacts(
    edge=EDGE,
    source_rank=3,
    target_rank=5,
    source_server=0,
    target_server=1,
    same_server=False,
    device="cuda",
)
EVERY = LinkRule(0, AUTO)


def test_a_rule_without_keys_matches_anything() -> None:
    assert matches(EVERY, FACTS)
    assert EVERY.keys() == {}


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("from_", (0,), (1,)),
        ("to", (1,), (0,)),
        ("from_rank", (2, 3), (5,)),
        ("to_rank", (5,), (3, 4)),
        ("from_server", (0,), (1,)),
        ("to_server", (1, 2), (0,)),
        ("same_server", False, True),
        ("tensor", ("target", "hidden"), ("target",)),
        ("device", ("cuda",), ("cpu",)),
    ],
)
def test_each_key_decides(key: str, right: Any, wrong: Any) -> None:
    assert matches(replace(EVERY, **{key: right}), FACTS)
    assert not matches(replace(EVERY, **{key: wrong}), FACTS)
    name = key.removesuffix("_")
    assert list(replace(EVERY, **{key: right}).keys()) == [name]


def test_all_keys_must_agree() -> None:
    rule = replace(EVERY, from_=(0,), tensor=("hidden",))
    assert matches(rule, FACTS)
    assert not matches(replace(rule, tensor=("target",)), FACTS)


def test_a_server_rule_does_not_match_where_servers_are_unknown() -> None:
    unknown = replace(FACTS, source_server=None, target_server=None)
    assert not matches(replace(EVERY, from_server=(0,)), unknown)


def test_the_first_match_wins() -> None:
    rules = [
        LinkRule(0, ("shm",), same_server=True),
        LinkRule(1, ("gloo",), device=("cuda",)),
        LinkRule(2, AUTO),
    ]
    assert rule_for(rules, FACTS) is rules[1]
    assert rule_for(rules, replace(FACTS, same_server=True)) is rules[0]
    assert rule_for(rules, replace(FACTS, device="cpu")) is rules[2]
    assert rule_for(rules[:1], FACTS) is None


def test_keys_are_shown_as_in_the_file() -> None:
    rule = replace(EVERY, from_=(1, 0), to=(2,), from_rank=(4,), same_server=True)
    assert named_keys(rule, ("a", "b", "c")) == {
        "from": ["b", "a"],
        "to": ["c"],
        "from_rank": [4],
        "same_server": [True],
    }
