"""Rules that can never match are refused with the reason; rules that can are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.errors import PlanError
from stagelink.plan import Plan, link_facts, rule_for

Table = dict[str, Any]
Chain = Callable[..., Table]
Problems = Callable[[Mapping[str, Any]], list[str]]

SERVERS = [[0, 2], [1], [3, 4]]
"""Of stages a = 0, 1; b = 2; c = 3, 4: one server with a and b, one with two ranks of c."""


def with_rules(plan: Table, *rules: Table) -> Table:
    return {**plan, "links": [{"transport": "x", **rule} for rule in rules]}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"from": "a", "from_rank": 2}, "no rank has from = ['a'] and from_rank = [2]"),
        ({"to": "b", "to_rank": [0, 1]}, "no rank has to = ['b'] and to_rank = [0, 1]"),
        ({"from": "b", "from_server": 2}, "no rank has from = ['b'] and from_server = [2]"),
        (
            {"to_rank": 3, "to_server": [0, 1]},
            "no rank has to_rank = [3] and to_server = [0, 1]",
        ),
        ({"from": "c"}, "no tensor has from = ['c']"),
        ({"to": "a"}, "no tensor has to = ['a']"),
        ({"from": "a", "to": "c"}, "no tensor has from = ['a'] and to = ['c']"),
        ({"from_rank": 0, "to_rank": 1}, "no tensor has from_rank = [0] and to_rank = [1]"),
        (
            {"to": "c", "tensor": "ab"},
            "no tensor has to = ['c'] and tensor = ['ab']; 'ab' goes from 'a' to 'b'",
        ),
        (
            {"from": "b", "same_server": True},
            "every link that fits its other keys has its ends on different servers",
        ),
        (
            {"from_rank": 0, "same_server": False},
            "every link that fits its other keys has its ends on one server",
        ),
    ],
)
def test_a_contradiction(chain: Chain, problems: Problems, rule: Table, reason: str) -> None:
    plan = with_rules(chain(2, 1, 2, servers=SERVERS), rule)
    assert problems(plan) == [f"links[0]: can never match: {reason}"]


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"from": ["a", "c"]},
        {"from_rank": [1, 4]},
        {"from": "a", "same_server": True},
        {"from": "a", "same_server": False},
        {"tensor": ["ab", "bc"], "to": "c"},
        {"device": "cuda"},
    ],
)
def test_a_rule_that_can_match(chain: Chain, rule: Table) -> None:
    Plan.from_dict(with_rules(chain(2, 1, 2, servers=SERVERS), rule))


@pytest.mark.parametrize("same_server", [True, False])
def test_servers_found_later_contradict_nothing(chain: Chain, same_server: bool) -> None:
    Plan.from_dict(with_rules(chain(1, 1), {"same_server": same_server}))


ONE_EACH = {"servers": [[0], [1], [2]]}
SHAPES: list[tuple[tuple[int, ...], Table]] = [
    ((1,), {}),
    ((3,), {}),
    ((3,), ONE_EACH),
    ((1, 1), {"servers": [[0, 1]]}),
    ((1, 1, 1), ONE_EACH),
]


@pytest.mark.parametrize(("replicas", "pipeline"), SHAPES)
@pytest.mark.parametrize(
    "rules",
    [
        [{}],
        [{"same_server": True}, {"same_server": False}],
        [{"same_server": True, "device": "cpu"}, {"device": "cuda"}, {}],
    ],
    ids=["any", "servers", "devices"],
)
def test_rules_for_every_shape_load_for_every_shape(
    chain: Chain, replicas: tuple[int, ...], pipeline: Table, rules: list[Table]
) -> None:
    plan = Plan.from_dict(with_rules(chain(*replicas, **pipeline), *rules))
    assert len(plan.rules) == len(rules)


@pytest.mark.parametrize(
    "rule", [{"from": "a"}, {"to_rank": 1}, {"from_server": 0, "same_server": False}]
)
def test_without_links_no_rule_contradicts_the_plan(chain: Chain, rule: Table) -> None:
    Plan.from_dict(with_rules(chain(2, servers=[[0, 1]]), rule))


def test_without_links_a_slip_is_still_one(chain: Chain, problems: Problems) -> None:
    rules: list[Table] = [{"from": "b"}, {}, {"tensor": "ab"}]
    assert problems(with_rules(chain(1), *rules)) == [
        "links[0].from: unknown stage 'b'; the plan has 'a'",
        "links[2].tensor: unknown tensor 'ab'; the plan has none",
    ]
    assert problems(with_rules(chain(1), {}, {"to": "a"})) == [
        "links[1]: can never match: links[0] comes first and takes every link that it fits"
    ]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({}, {}),
        ({}, {"from": "a"}),
        ({"from": ["a", "b"]}, {"from": "b"}),
        ({"same_server": True}, {"same_server": True, "tensor": "ab"}),
        ({"device": "cpu"}, {"device": "cpu", "to": "b"}),
    ],
)
def test_a_rule_behind_one_that_takes_all(
    chain: Chain, problems: Problems, earlier: Table, later: Table
) -> None:
    plan = with_rules(chain(1, 1, 1), {"tensor": "bc"}, earlier, later)
    assert problems(plan) == [
        "links[2]: can never match: links[1] comes first and takes every link that it fits"
    ]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({"from": "a"}, {}),
        ({"from": "a"}, {"from": ["a", "b"]}),
        ({"same_server": True}, {"same_server": False}),
        ({"from": "a"}, {"to": "b"}),
    ],
)
def test_a_rule_behind_one_that_takes_less(chain: Chain, earlier: Table, later: Table) -> None:
    Plan.from_dict(with_rules(chain(1, 1, 1), earlier, later))


def some(*values: object) -> st.SearchStrategy[list[object]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True)


RULES = st.fixed_dictionaries(
    {},
    optional={
        "from": some("a", "b", "c"),
        "to": some("a", "b", "c"),
        "from_rank": some(*range(5)),
        "to_rank": some(*range(5)),
        "from_server": some(0, 1, 2),
        "to_server": some(0, 1, 2),
        "same_server": st.booleans(),
        "tensor": some("ab", "bc", "ac"),
    },
)


@given(rule=RULES)
def test_refused_exactly_when_no_pair_of_ranks_matches(chain: Chain, rule: Table) -> None:
    """The check narrows by keys; here every pair of ranks of every edge is tried."""
    plan = chain(2, 1, 2, servers=SERVERS)
    plan["tensors"].append({"name": "ac", "from": "a", "to": "c"})
    open_plan = Plan.from_dict(plan)
    try:
        rules = Plan.from_dict(with_rules(plan, rule)).rules
    except PlanError:
        rules = ()
    assert any(rule_for(rules, link) for link in links_of(open_plan)) == bool(rules)
    if not rules:
        assert not any(accepts(rule, link, open_plan) for link in links_of(open_plan))


def links_of(plan: Plan) -> list[Table]:
    links = []
    for edge in plan.edges:
        ends = product(plan.stages[edge.source].ranks, plan.stages[edge.target].ranks)
        for source, target in ends:
            servers = plan.server_of(source), plan.server_of(target)
            same = servers[0] == servers[1]
            links.append(
                link_facts(edge, (source, target), servers, same_server=same, device="cpu")
            )
    return links


def accepts(rule: Table, link: Table, plan: Plan) -> bool:
    names = {key: plan.stages[link[key]].name for key in ("from", "to")}
    found = {**link, **names}
    same = rule.get("same_server", link["same_server"]) == found.pop("same_server")
    return same and all(found[key] in rule[key] for key in found if key in rule)
