"""Both observers are found by their entry points; without their library `doctor` says why not."""

from __future__ import annotations

import json
import sys
import threading
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from stagelink.cli import main
from stagelink.errors import PluginError, StagelinkError
from stagelink.plugins.plugins import Plugins
from stagelink.plugins.problems import plugin_problems
from stagelink.testing import RankFailedError, run_threads
from stagelink.transport.hooks import hookimpl
from tests.observers.watching import NARROW, connect, exchange, park, run
from tests.support.pipelines import LOOPBACK, document

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.transport.contract import Link
    from stagelink.transport.events import Event

OBSERVERS = ["prometheus", "opentelemetry"]


def found_by_doctor(name: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    (found,) = (one for one in json.loads(result.stdout)["observers"] if one["name"] == name)
    return dict(found)


@pytest.mark.parametrize("name", OBSERVERS)
def test_doctor_finds_it(name: str) -> None:
    assert found_by_doctor(name) == {
        "name": name,
        "distribution": f"stagelink-{name}",
        "version": metadata.version("stagelink"),
        "state": "usable",
        "reason": "",
        "options": {},
    }


@pytest.mark.parametrize(
    ("name", "library"), [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")]
)
def test_without_its_library_doctor_says_so(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [*sys.modules]:
        if module.partition(".")[0] == f"stagelink_{name}":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    found = found_by_doctor(name)
    assert found["state"] == "broken"
    assert f"its import raised ModuleNotFoundError: import of {library} halted" in found["reason"]
    assert f"repair or uninstall 'stagelink-{name}'" in found["reason"]
    with pytest.raises(PluginError, match="its import raised ModuleNotFoundError"):
        Plugins().load_observers([name])


@pytest.mark.parametrize("name", OBSERVERS)
def test_its_module_and_its_objects_are_plugins(name: str) -> None:
    plugins = Plugins()
    plugins.load_observers([name])
    assert plugins.hooks.wants_events
    assert plugins.hooks.gives_traces == (name == "opentelemetry")
    module = sys.modules[f"stagelink_{name}"]
    (cls,) = (getattr(module, public) for public in module.__all__)
    hooks = [hook for hook in vars(module) if hook.startswith("stagelink_")]
    assert sorted(hooks) == sorted(h for h in vars(cls) if h.startswith("stagelink_"))
    assert plugin_problems(cls) != []  # a class; an instance is meant


class Failing:
    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def stagelink_event(self, event: Event) -> None:
        if (event.name, event.microbatch) == (self.name, 1):
            raise ZeroDivisionError("what a pity")


class Choosy:
    """Cannot stand the second link that is opened."""

    def __init__(self) -> None:
        self.opened: list[Link] = []
        self.closed: list[Link] = []

    @hookimpl
    def stagelink_link_opened(self, link: Link) -> None:
        if self.opened:
            raise ZeroDivisionError("one is enough")
        self.opened.append(link)

    @hookimpl
    def stagelink_link_closed(self, link: Link) -> None:
        self.closed.append(link)


def _with_a_choosy_one(rank: int, world_size: int, store: Store) -> Choosy:
    del world_size
    observer = Choosy()
    with pytest.raises(StagelinkError, match=r"stagelink_link_opened of .+ one is enough"):
        connect(document(LOOPBACK), rank, store, [observer])
    return observer


def test_only_links_that_were_told_open_are_told_closed() -> None:
    observers = run_threads(_with_a_choosy_one, 2)
    assert any(observer.opened for observer in observers)
    for observer in observers:  # one of them may have failed before it was told of any
        assert observer.closed[:1] == observer.opened
        assert len(observer.closed) == 2 * len(observer.opened)


def check_told(caught: RankFailedError) -> None:
    assert len(caught.outcomes) == 2
    for outcome in caught.outcomes:
        text = str(outcome)
        assert "stagelink_event of 'observer <tests.observers.test_plugins.Failing" in text
        assert "raised ZeroDivisionError: what a pity" in text


@pytest.mark.parametrize("name", ["send", "recv", "wait_wire"])
def test_an_observer_that_raises_fails_every_rank_with_its_text(name: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        run(document(LOOPBACK), exchange, 3, observers=[Failing(name)])
    check_told(caught.value)


def test_so_does_one_that_raises_where_messages_are_read() -> None:
    with pytest.raises(RankFailedError) as caught:
        run(NARROW, park, threading.Event(), 2, observers=[Failing("send")])
    check_told(caught.value)
