"""A rule matches by every key that it gives; the first that matches decides."""

from __future__ import annotations

from typing import Any

import pytest

from stagelink.plan import AUTO, Edge, LinkRule, Tensor, link_facts, named_keys, rule_for

EDGE = Edge(0, Tensor("hidden", 0, (1,)), 1)
FACTS = link_facts(EDGE, (3, 5), (0, 1), same_server=False, device="cuda")
EVERY = LinkRule(0, AUTO)


def test_a_rule_without_keys_matches_anything() -> None:
    assert EVERY.matches(FACTS)
    assert EVERY.keys == {}


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("from", (0,), (1,)),
        ("to", (1,), (0,)),
        ("from_rank", (2, 3), (5,)),
        ("to_rank", (5,), (3, 4)),
        ("from_server", (0,), (1,)),
        ("to_server", (1, 2), (0,)),
        ("same_server", (False,), (True,)),
        ("tensor", ("target", "hidden"), ("target",)),
        ("device", ("cuda",), ("cpu",)),
    ],
)
def test_each_key_decides(key: str, right: Any, wrong: Any) -> None:
    assert LinkRule(0, AUTO, {key: right}).matches(FACTS)
    assert not LinkRule(0, AUTO, {key: wrong}).matches(FACTS)


def test_all_keys_must_agree() -> None:
    rule = LinkRule(0, AUTO, {"from": (0,), "tensor": ("hidden",)})
    assert rule.matches(FACTS)
    assert not LinkRule(0, AUTO, {**rule.keys, "tensor": ("target",)}).matches(FACTS)


def test_a_server_rule_does_not_match_where_servers_are_unknown() -> None:
    unknown = link_facts(EDGE, (3, 5), (None, None), same_server=False, device="cuda")
    assert not LinkRule(0, AUTO, {"from_server": (0,)}).matches(unknown)


def test_the_first_match_wins() -> None:
    rules = [
        LinkRule(0, ("shm",), {"same_server": (True,)}),
        LinkRule(1, ("gloo",), {"device": ("cuda",)}),
        LinkRule(2, AUTO),
    ]
    assert rule_for(rules, FACTS) is rules[1]
    assert rule_for(rules, {**FACTS, "same_server": True}) is rules[0]
    assert rule_for(rules, {**FACTS, "device": "cpu"}) is rules[2]
    assert rule_for(rules[:1], FACTS) is None


def test_keys_are_shown_as_in_the_file() -> None:
    keys = {"from": (1, 0), "to": (2,), "from_rank": (4,), "same_server": (True,)}
    rule = LinkRule(0, AUTO, keys)
    assert named_keys(rule, ("a", "b", "c")) == {
        "from": ["b", "a"],
        "to": ["c"],
        "from_rank": [4],
        "same_server": [True],
    }
