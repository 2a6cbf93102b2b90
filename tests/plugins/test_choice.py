"""Both ends of a link choose the same transport, and can say why not the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.errors import NoTransportError, PluginError, UnknownTransportError
from stagelink.plan import Plan
from stagelink.plugins.choice import Asker, Choice, Refusal, asked_for, asker, choose, device_of
from stagelink.plugins.offers import End, Offer, survey
from stagelink.plugins.plugins import Plugins
from stagelink.transport.contract import Capabilities, Endpoint, Link, Verdict
from stagelink.transport.hooks import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagelink.plan import Edge
    from tests.support.site import Site

ANY = Capabilities(devices=frozenset({"cpu", "cuda"}), auto_rank=10)


def plan(*rules: dict[str, Any], devices: str = "cpu cpu", **tensor: Any) -> Plan:
    first, second = devices.split()
    return Plan.from_dict(
        {
            "pipeline": {"microbatches": 4},
            "stages": [
                {"name": "a", "ranks": [0], "device": first},
                {"name": "b", "ranks": [1, 2], "device": second},
            ],
            "tensors": [{"name": "hidden", "from": "a", "to": ["b"], **tensor}],
            "links": list(rules),
        }
    )


def usable(**changes: Any) -> Offer:
    return Offer("usable", "", replace(ANY, **changes))


def ends(
    offers: dict[str, Offer],
    others: dict[str, Offer] | None = None,
    *,
    servers: str = "s s",
    processes: str = "p q",
) -> tuple[End, End]:
    (server, other_server), (process, other_process) = servers.split(), processes.split()
    theirs = offers if others is None else others
    return End(0, server, process, offers), End(1, other_server, other_process, theirs)


def yes(link: Link, source: Endpoint, target: Endpoint) -> Verdict:
    return Verdict(True)


def pass_on(link: Link, candidates: Sequence[str]) -> str | None:
    return None


AGREEABLE = Asker(yes, pass_on)


def chosen(plan: Plan, pair: tuple[End, End], ask: Asker = AGREEABLE) -> Choice:
    return choose(plan, plan.edges[0], *pair, ask)


def only_rule(*names: str) -> Plan:
    return plan({"transport": list(names)})


def refusal(plan: Plan, pair: tuple[End, End], ask: Asker = AGREEABLE) -> str:
    """The reason against transport 'x', which comes before one that fits."""
    (refused,) = chosen(plan, pair, ask).passed_over
    assert refused.name == "x"
    return refused.reason


FITS = {"y": usable()}


# Preference


def test_the_first_of_a_rule_s_transports_that_fits_is_taken() -> None:
    choice = chosen(only_rule("x", "y"), ends({"x": usable(), "y": usable()}))
    assert choice == Choice(Link(0, 1, "x", "cpu"), 0, auto=False, passed_over=())
    assert choice.transport == "x"


def test_the_first_rule_that_matches_decides() -> None:
    two = plan({"to_rank": 2, "transport": "x"}, {"transport": "y"})
    offers = {"x": usable(), "y": usable()}
    source, first = ends(offers)
    second = replace(first, rank=2)
    assert chosen(two, (source, first)).link == Link(0, 1, "y", "cpu")
    assert chosen(two, (source, first)).rule == 1
    assert chosen(two, (source, second)).link == Link(0, 2, "x", "cpu")
    assert chosen(two, (source, second)).rule == 0


def test_a_rule_may_ask_for_the_servers_as_they_were_found() -> None:
    two = plan({"same_server": True, "transport": "x"}, {"transport": "y"})
    offers = {"x": usable(), "y": usable()}
    assert chosen(two, ends(offers, servers="s s")).transport == "x"
    assert chosen(two, ends(offers, servers="s t")).transport == "y"


def test_a_transport_that_no_rule_allows_is_not_judged() -> None:
    def refuse(link: Link, source: Endpoint, target: Endpoint) -> Verdict:
        assert link.transport == "y"
        return Verdict(True)

    choice = chosen(
        only_rule("y"), ends({"x": usable(auto_rank=99), **FITS}), Asker(refuse, pass_on)
    )
    assert choice.transport == "y"


# Each reason, in the order in which they are looked for


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ({}, {"x": usable()}, "not installed on rank 0"),
        ({"x": usable()}, {}, "not installed on rank 1"),
        ({"x": Offer("absent", "long text")}, {"x": usable()}, "not installed on rank 0"),
        ({"x": usable()}, {"x": Offer("disabled", "long text")}, "disabled on rank 1"),
        (
            {"x": usable()},
            {"x": Offer("broken", "its import raised")},
            "broken on rank 1: its import raised",
        ),
        (
            {"x": Offer("unusable", "CUDA is not available", ANY)},
            {"x": usable()},
            "rank 0 cannot use it: CUDA is not available",
        ),
    ],
)
def test_what_an_end_lacks_is_said_with_its_rank(
    here: dict[str, Offer], there: dict[str, Offer], reason: str
) -> None:
    pair = ends({**here, **FITS}, {**there, **FITS})
    assert refusal(only_rule("x", "y"), pair) == reason


@pytest.mark.parametrize(
    ("changes", "servers", "processes", "reason"),
    [
        (
            {"devices": frozenset({"cuda"})},
            "s s",
            "p q",
            "carries tensors on 'cuda', not on 'cpu'",
        ),
        ({"same_server": True}, "s t", "p q", "needs both ranks on one server"),
        ({"distinct_processes": True}, "s s", "p p", "needs the ranks in two processes"),
        ({"same_process": True}, "s s", "p q", "needs both ranks in one process"),
    ],
)
def test_what_the_capabilities_exclude_is_said(
    changes: dict[str, Any], servers: str, processes: str, reason: str
) -> None:
    rule = only_rule("x", "y")
    offers = {"x": usable(**changes), **FITS}
    assert refusal(rule, ends(offers, servers=servers, processes=processes)) == reason
    # The two ends may have two releases of the plugin: what either cannot do cannot be done.
    old, new = offers, {"x": usable(), **FITS}
    assert refusal(rule, ends(old, new, servers=servers, processes=processes)) == reason
    assert refusal(rule, ends(new, old, servers=servers, processes=processes)) == reason


@pytest.mark.parametrize(
    ("changes", "servers", "processes"),
    [
        ({"same_server": True}, "s s", "p q"),
        ({"distinct_processes": True}, "s t", "p q"),
        ({"same_process": True}, "s s", "p p"),
    ],
)
def test_what_the_capabilities_ask_for_may_be_given(
    changes: dict[str, Any], servers: str, processes: str
) -> None:
    pair = ends({"x": usable(**changes)}, servers=servers, processes=processes)
    assert chosen(only_rule("x"), pair).transport == "x"


def test_c068_a_declared_dtype_must_be_carried() -> None:
    rule = [{"transport": ["x", "y"]}]
    pair = ends({"x": usable(dtypes=frozenset({"float32", "float64"})), **FITS})
    assert refusal(plan(*rule, dtype="int64"), pair) == (
        "carries dtype 'float32', 'float64', not 'int64' of tensor 'hidden'"
    )
    assert chosen(plan(*rule, dtype="float32"), pair).transport == "x"
    assert chosen(plan(*rule), pair).transport == "x"


def test_the_transport_itself_may_refuse_a_pair() -> None:
    def can_connect(link: Link, source: Endpoint, target: Endpoint) -> Verdict:
        assert (source.rank, target.rank) == (0, 1)
        return Verdict(link.transport != "x", "the GPUs cannot reach each other")

    pair = ends({"x": usable(), **FITS})
    reason = refusal(only_rule("x", "y"), pair, Asker(can_connect, pass_on))
    assert reason == "the GPUs cannot reach each other"


def test_the_transport_is_asked_only_about_what_is_possible() -> None:
    def never(link: Link, source: Endpoint, target: Endpoint) -> Verdict:
        raise AssertionError

    with pytest.raises(NoTransportError):
        chosen(
            only_rule("x"),
            ends({"x": usable(same_server=True)}, servers="s t"),
            Asker(never, pass_on),
        )


# Nothing fits


def test_where_nothing_fits_every_reason_is_told() -> None:
    pair = ends({"x": usable(same_process=True), "y": Offer("unusable", "no bus", ANY)})
    with pytest.raises(NoTransportError) as caught:
        chosen(only_rule("x", "y", "z"), pair)
    assert str(caught.value) == (
        "nothing can carry tensor 'hidden' from rank 0 to rank 1 (device 'cpu'); "
        "links[0] decides:\n"
        "  - 'x': needs both ranks in one process\n"
        "  - 'y': rank 0 cannot use it: no bus\n"
        "  - 'z': not installed on rank 0\n"
        "Install one that can on both ranks, or let the rule allow it."
    )


def test_c092_a_sole_transport_that_cannot_be_used_gives_its_reason() -> None:
    pair = ends({"nccl": Offer("unusable", "this torch was built without NCCL", ANY)})
    with pytest.raises(
        NoTransportError, match="rank 0 cannot use it: this torch was built without"
    ):
        chosen(only_rule("nccl"), pair)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("absent", UnknownTransportError),
        ("disabled", UnknownTransportError),
        ("broken", PluginError),
    ],
)
def test_a_sole_transport_s_own_error_is_raised_on_both_ends(state: Any, kind: type) -> None:
    lacking = Offer(state, "the whole text")
    for pair, rank in (
        (ends({"x": lacking}, {"x": usable()}), 0),
        (ends(FITS, {"x": lacking}), 1),
    ):
        with pytest.raises(
            kind, match=rf"hidden.* links\[0\] decides. On rank {rank}: the whole text$"
        ):
            chosen(only_rule("x"), pair)


# Auto


def test_auto_takes_the_highest_rank_and_then_the_first_by_name() -> None:
    offers = {"a": usable(auto_rank=1), "c": usable(auto_rank=20), "b": usable(auto_rank=20)}
    assert chosen(only_rule("auto"), ends(offers)) == Choice(
        Link(0, 1, "b", "cpu"), 0, auto=True, outranked=("c", "a")
    )


def test_no_rule_means_auto() -> None:
    choice = chosen(plan(), ends(FITS))
    assert (choice.transport, choice.rule, choice.auto) == ("y", None, True)


def test_auto_tells_of_all_that_either_end_has() -> None:
    here = {"a": usable(auto_rank=1), "b": usable(auto_rank=9, same_process=True)}
    there = {"a": usable(auto_rank=1), "c": usable(auto_rank=5)}
    choice = chosen(plan(), ends(here, there))
    assert choice.transport == "a"
    assert choice.passed_over == (
        Refusal("b", "not installed on rank 1"),
        Refusal("c", "not installed on rank 0"),
    )


def test_auto_with_nothing_installed_says_so() -> None:
    with pytest.raises(
        NoTransportError, match="no rule in `links` matches, and no transport is inst"
    ):
        chosen(plan(), ends({}))


def test_auto_where_nothing_fits_tells_every_reason() -> None:
    with pytest.raises(
        NoTransportError, match=r"(?s)links\[0\] decides:\n  - 'x': not installed on rank 1"
    ):
        chosen(only_rule("auto"), ends({"x": usable()}, {}))


@pytest.mark.parametrize("here", [3, 30])
def test_two_releases_that_rank_differently_are_ordered_alike_on_both_ends(here: int) -> None:
    one = {"x": usable(auto_rank=here), "y": usable(auto_rank=10)}
    other = {"x": usable(auto_rank=33 - here), "y": usable(auto_rank=10)}
    assert chosen(plan(), ends(one, other)).transport == "y"


def test_a_plugin_may_select_another_candidate_under_auto() -> None:
    asked: list[tuple[Link, Sequence[str]]] = []

    def select(link: Link, candidates: Sequence[str]) -> str:
        asked.append((link, candidates))
        return "b"

    offers = {"a": usable(auto_rank=9), "b": usable(), "z": usable(same_process=True)}
    offers["b"] = usable(auto_rank=1)
    choice = chosen(plan(), ends(offers), Asker(yes, select))
    assert asked == [(Link(0, 1, "a", "cpu"), ("a", "b"))]
    assert choice.link == Link(0, 1, "b", "cpu")
    assert Refusal("a", "a plugin chose another") in choice.passed_over


def test_no_plugin_is_asked_where_a_rule_names_transports() -> None:
    def select(link: Link, candidates: Sequence[str]) -> str:
        raise AssertionError

    assert chosen(only_rule("y"), ends(FITS), Asker(yes, select)).transport == "y"


# In words


def test_a_choice_explains_itself() -> None:
    choice = chosen(only_rule("x", "y"), ends(FITS))
    assert choice.explain() == ["0→1 by y (links[0])", "not 'x': not installed on rank 0"]


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        (
            Choice(Link(0, 1, "y", "cpu"), None, auto=True),
            "0→1 by y (auto; no rule in `links` matches)",
        ),
        (Choice(Link(0, 1, "y", "cpu"), 3, auto=True), "0→1 by y (auto; links[3])"),
    ],
)
def test_a_choice_by_auto_says_so(choice: Choice, line: str) -> None:
    assert choice.explain() == [line]


def test_a_choice_by_auto_tells_what_it_preferred_the_transport_to() -> None:
    offers = {"a": usable(auto_rank=1), "b": usable(auto_rank=9), "c": usable(same_process=True)}
    offers["d"] = usable(auto_rank=3)
    assert chosen(plan(), ends(offers)).explain() == [
        "0→1 by b (auto; no rule in `links` matches)",
        "ranked lower: 'd', 'a'",
        "not 'c': needs both ranks in one process",
    ]


# The device


def test_a_link_between_two_kinds_of_device_carries_cpu_tensors() -> None:
    mixed = plan(devices="cuda cpu")
    assert device_of(mixed, mixed.edges[0]) == "cpu"
    assert chosen(mixed, ends(FITS)).link.device == "cpu"
    both = plan(devices="cuda cuda")
    assert chosen(both, ends(FITS)).link.device == "cuda"


# What to look at


def links(plan: Plan) -> list[tuple[Edge, int, int]]:
    return [(plan.edges[0], 0, 1), (plan.edges[0], 0, 2)]


def test_a_rank_asks_for_what_the_rules_of_its_links_name() -> None:
    rules = plan({"to_rank": 1, "transport": ["x", "y"]}, {"transport": "auto"})
    assert asked_for(rules, links(rules)[:1]) == {"x", "y"}
    assert asked_for(rules, links(rules)) is None
    assert asked_for(rules, []) == set()


def test_a_link_without_a_rule_asks_for_all() -> None:
    rules = plan({"to_rank": 1, "transport": "x"})
    assert asked_for(rules, links(rules)) is None


def test_where_servers_are_found_at_connect_both_cases_count() -> None:
    rules = plan({"same_server": True, "transport": "x"}, {"transport": "y"})
    assert asked_for(rules, links(rules)) == {"x", "y"}
    placed = replace(rules, servers=((0, 1), (2,)))
    assert asked_for(placed, links(placed)[:1]) == {"x"}
    assert asked_for(placed, links(placed)[1:]) == {"y"}


# With real plugins


class Contrary:
    @hookimpl
    def stagelink_select_transport(self, candidates: Sequence[str]) -> str:
        return candidates[-1]


@pytest.mark.parametrize(("rank", "locals_"), [(0, {0}), (1, {1}), (None, {0})])
def test_each_end_asks_its_own_transport_as_the_local_one(
    site: Site, rank: int | None, locals_: set[int]
) -> None:
    site.transport(
        "fast",
        """
        def can_connect(self, link, local, remote):
            assert {local.rank, remote.rank} == {link.source, link.target}
            return Verdict(False, f"asked as {local.rank}")
        """,
    )
    plugins = Plugins()
    found = survey(plugins, ["fast"], {})
    pair = ends(dict(found.offers))
    with pytest.raises(NoTransportError, match=f"asked as {locals_.pop()}"):
        chosen(only_rule("fast"), pair, asker(found, plugins.hooks, rank))


def test_plugins_judge_and_select(site: Site) -> None:
    site.transport("fast")
    site.transport("slow")
    plugins = Plugins(observers=[Contrary()])
    found = survey(plugins, ["fast", "slow"], {})
    choice = chosen(plan(), ends(dict(found.offers)), asker(found, plugins.hooks, 0))
    assert choice.transport == "slow"
    assert choice.passed_over == (Refusal("fast", "a plugin chose another"),)
