"""The hooks: documented, called with their arguments, and loud where a plugin fails."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import pytest

from stagelink.errors import PluginError
from stagelink.plugins.plugins import Plugins
from stagelink.plugins.problems import plugin_problems
from stagelink.plugins.relay import Relay
from stagelink.transport import hooks
from stagelink.transport.contract import Link
from stagelink.transport.events import Event, EventName, LinkCounters
from stagelink.transport.header import NO_TRACE, TRACE_BYTES, Direction, Header, MessageKind
from stagelink.transport.hooks import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.site import Site

LINK = Link(0, 1, "fast", "cpu")
EVENT = Event("send", LINK, "hidden", Direction.FORWARD, 3, 0, 64, 0.5, 100.0, NO_TRACE)


class Watcher:
    """Implements every observer hook, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    @hookimpl
    def stagelink_link_opened(self, link: Link) -> None:
        self.told.append(link)

    @hookimpl
    def stagelink_link_closed(self, counters: LinkCounters) -> None:
        self.told.append(counters)

    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        self.told.append(event)


class Picker:
    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[tuple[Link, Sequence[str]]] = []

    @hookimpl
    def stagelink_select_transport(self, link: Link, candidates: Sequence[str]) -> object:
        self.asked.append((link, candidates))
        return self.answer


class Failing:
    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        raise ZeroDivisionError("what a pity")


def specifications() -> list[str]:
    return [name for name in vars(hooks) if name.startswith("stagelink_")]


# The specifications


def test_every_hook_says_when_it_runs() -> None:
    assert len(specifications()) == 6
    for name in specifications():
        assert "Called" in (inspect.getdoc(getattr(hooks, name)) or "")


def test_every_argument_of_a_hook_is_documented() -> None:
    for name in specifications():
        function = getattr(hooks, name)
        text = inspect.getdoc(function) or ""
        for argument in inspect.signature(function).parameters:
            assert f"    {argument}: " in text


# Observers


def test_observers_given_in_code_are_told() -> None:
    watcher = Watcher()
    relay = Plugins(observers=[watcher]).hooks
    counters = LinkCounters(messages=1)
    relay.link_opened(LINK)
    relay.event(EVENT)
    relay.link_closed(LINK, counters)
    assert watcher.told == [LINK, EVENT, counters]


def test_two_observers_of_one_class_are_both_told() -> None:
    first, second = Watcher(), Watcher()
    relay = Plugins(observers=[first, second]).hooks
    relay.event(EVENT)
    assert first.told == second.told == [EVENT]


def test_an_observer_given_twice_is_told_once() -> None:
    watcher = Watcher()
    Plugins(observers=[watcher, watcher]).hooks.event(EVENT)
    assert watcher.told == [EVENT]


def test_events_are_wanted_only_where_somebody_implements_the_hook() -> None:
    assert not Relay().wants_events
    assert not Plugins(observers=[Picker(None)]).hooks.wants_events
    assert Plugins(observers=[Watcher()]).hooks.wants_events


def test_handlers_do_not_share_observers() -> None:
    Plugins(observers=[Watcher()])
    assert not Plugins().hooks.wants_events


def test_an_observer_that_raises_is_named() -> None:
    relay = Plugins(observers=[Failing()]).hooks
    with pytest.raises(
        PluginError, match=r"stagelink_event of .*Failing .*raised ZeroDivisionError: what a pity"
    ) as caught:
        relay.event(EVENT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("observer", "problem"),
    [
        (Watcher, "it is the class 'Watcher'; .* as an observer in code give an instance"),
        (object(), "it has no hook implementation; define one of 'stagelink_"),
        (None, "it has no hook implementation"),
    ],
)
def test_c095_what_is_no_observer_is_refused(observer: object, problem: str) -> None:
    with pytest.raises(PluginError, match=f"given in code cannot be used: {problem}"):
        Plugins(observers=[observer])


def test_a_wrong_hook_of_an_object_is_found() -> None:
    class Forgetful:
        def stagelink_event(self, event: Event) -> None: ...

        @hookimpl
        def stagelink_link_openned(self, link: Link) -> None: ...

    unmarked, misspelt = plugin_problems(Forgetful())
    assert unmarked.startswith("'stagelink_event' has no mark of stagelink's; put @hookimpl")
    assert "(did you mean 'stagelink_link_opened'" in misspelt


def test_an_observer_in_a_plan_comes_through_its_entry_point(site: Site) -> None:
    site.plugin(
        "watch",
        """
        from stagelink.transport.hooks import hookimpl
        told = []

        @hookimpl
        def stagelink_link_opened(link):
            told.append(link)
        """,
        group="stagelink.observers",
    )
    plugins = Plugins()
    plugins.load_observers(["watch"])
    plugins.hooks.link_opened(LINK)
    assert sys.modules["watch_module"].told == [LINK]


def test_an_unknown_observer_is_refused_with_the_known_ones(site: Site) -> None:
    site.plugin("watch", "", group="stagelink.observers")
    with pytest.raises(
        PluginError,
        match=r"unknown observer 'wacth' \(did you mean 'watch'\?\).*in the group "
        "'stagelink.observers'; one registered in code exists only in the process that",
    ):
        Plugins().load_observers(["wacth"])


def test_a_broken_observer_is_refused_with_its_distribution(site: Site) -> None:
    site.plugin("watch", "1 / 0", group="stagelink.observers")
    with pytest.raises(PluginError, match=r"'watch-dist' .*raised ZeroDivisionError"):
        Plugins().load_observers(["watch"])


def test_two_observers_of_one_name_conflict(site: Site) -> None:
    site.plugin("watch", "", group="stagelink.observers")
    site.distribution("other", "watch = watch_module", group="stagelink.observers")
    with pytest.raises(PluginError, match=r"(?s)'watch' is provided more than once.*'other'"):
        Plugins().load_observers(["watch"])


def test_c120_a_disabled_observer_is_kept_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("watch", "", group="stagelink.observers")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "all")
    with pytest.raises(PluginError, match=r"observer 'watch' of .* is disabled"):
        Plugins().load_observers(["watch"])


# Traces


class Tracer:
    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[tuple[object, ...]] = []

    @hookimpl
    def stagelink_trace(
        self, link: Link, edge: str, direction: Direction, microbatch: int, session: int
    ) -> object:
        self.asked.append((link, edge, direction, microbatch, session))
        return self.answer


HEADER = Header(MessageKind.GRAD, Direction.BACKWARD, session=2, edge=1, microbatch=7)


def test_traces_are_given_only_where_somebody_implements_the_hook() -> None:
    assert not Relay().gives_traces
    assert not Plugins(observers=[Watcher()]).hooks.gives_traces
    assert Plugins(observers=[Tracer(None)]).hooks.gives_traces


def test_the_first_trace_is_taken_and_the_others_are_not_asked() -> None:
    trace = bytes(range(TRACE_BYTES))
    first, second, third = Tracer(NO_TRACE), Tracer(trace), Tracer(None)
    relay = Plugins(observers=[first, second, third]).hooks
    assert relay.trace(LINK, "hidden", HEADER) == trace
    assert second.asked == third.asked == [(LINK, "hidden", Direction.BACKWARD, 7, 2)]
    assert first.asked == []


def test_no_opinion_is_no_trace() -> None:
    assert Plugins(observers=[Tracer(None)]).hooks.trace(LINK, "hidden", HEADER) == NO_TRACE


@pytest.mark.parametrize("answer", [b"", bytes(TRACE_BYTES + 1), "x" * TRACE_BYTES, 7])
def test_what_is_no_trace_is_refused(answer: object) -> None:
    relay = Plugins(observers=[Tracer(answer)]).hooks
    with pytest.raises(
        PluginError,
        match=r"stagelink_trace of .*Tracer.* answered .*; a trace context is 25 bytes",
    ):
        relay.trace(LINK, "hidden", HEADER)


@pytest.mark.parametrize("name", get_args(EventName))
def test_an_event_is_of_the_rank_that_sends_or_receives(name: EventName) -> None:
    event = replace(EVENT, name=name)
    sends = name in ("send", "wait_window")
    assert (event.rank, event.peer) == ((0, 1) if sends else (1, 0))


# Choosing


def test_nobody_has_an_opinion() -> None:
    assert Relay().select_transport(LINK, ("fast", "slow")) is None
    picker = Picker(None)
    assert Plugins(observers=[picker]).hooks.select_transport(LINK, ("fast",)) is None
    assert picker.asked == [(LINK, ("fast",))]


def test_the_last_that_was_added_is_asked_first_and_may_pass() -> None:
    first, second, third = Picker("fast"), Picker("slow"), Picker(None)
    relay = Plugins(observers=[first, second, third]).hooks
    assert relay.select_transport(LINK, ("fast", "slow")) == "slow"
    assert len(third.asked) == 1
    assert first.asked == []


@pytest.mark.parametrize("answer", ["smoke", 7, ["fast"]])
def test_an_answer_that_is_no_candidate_is_refused(answer: object) -> None:
    relay = Plugins(observers=[Picker(answer)]).hooks
    with pytest.raises(
        PluginError,
        match=r"stagelink_select_transport of .*Picker.* answered .* for 0→1; the candidates are "
        "'fast', 'slow'",
    ):
        relay.select_transport(LINK, ("fast", "slow"))


def test_a_transport_s_module_may_choose_too(site: Site) -> None:
    site.transport("fast")
    with (site.path / "fast_module.py").open("a") as module:
        module.write("@hookimpl\ndef stagelink_select_transport(): return 'slow'\n")
    plugins = Plugins()
    assert plugins.hooks.select_transport(LINK, ("fast", "slow")) is None
    plugins.load("fast")
    assert plugins.hooks.select_transport(LINK, ("fast", "slow")) == "slow"
