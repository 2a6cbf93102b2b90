"""A class that cannot be a transport is refused with everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

import pytest

from stagelink.plugins.problems import transport_problems
from stagelink.transport.contract import API_VERSION, Transport, Verdict
from tests.support.minimal import Minimal, changed

CAPABILITIES = Minimal.capabilities


def sole_problem(candidate: object) -> str:
    (problem,) = transport_problems(candidate)
    return problem


def test_a_minimal_transport_is_accepted() -> None:
    assert transport_problems(Minimal) == []


def test_other_names_and_more_arguments_with_defaults_are_accepted() -> None:
    def open_sender(self: object, a: object, b: object, c: object, *, more: int = 0) -> None: ...

    assert transport_problems(changed(open_sender=open_sender, close=lambda *_: None)) == []


def test_static_and_class_methods_are_accepted() -> None:
    assert transport_problems(changed(describe=staticmethod(dict))) == []
    assert transport_problems(changed(close=classmethod(lambda cls, deadline: None))) == []
    assert transport_problems(changed(probe=staticmethod(lambda options: Verdict(True)))) == []


def test_a_method_that_cannot_be_looked_into_is_accepted() -> None:
    assert transport_problems(changed(describe=dict.fromkeys)) == []


# C096


def test_c096_what_is_missing_is_listed() -> None:
    class Half(Transport):
        name = "half"
        api_version = (2, 0)
        capabilities = CAPABILITIES

    assert sole_problem(Half).endswith("lacks 'open_receiver', 'open_sender', 'probe'")


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        (
            {"open_receiver": lambda self, link: None},
            "open_receiver(self, link) of class 'Changed' cannot be called as "
            "open_receiver(link, port, deadline)",
        ),
        (
            {"can_connect": lambda self, link, *, local, remote: None},
            "can_connect(self, link, *, local, remote) of class 'Changed' cannot be called as "
            "can_connect(link, local, remote)",
        ),
        (
            {"close": lambda self: None},
            "close(self) of class 'Changed' cannot be called as close(deadline)",
        ),
        (
            {"describe": lambda self, more: {}},
            "describe(self, more) of class 'Changed' cannot be called as describe()",
        ),
        (
            {"__init__": lambda self: None},
            "__init__(self) of class 'Changed' cannot be called as __init__(options)",
        ),
        (
            {"probe": lambda self, options: Verdict(True)},
            "probe(self, options) of class 'Changed' cannot be called as probe(options)",
        ),
        ({"close": None}, "'close' of class 'Changed' is not a method"),
    ],
)
def test_c096_a_method_that_cannot_take_the_contract_s_arguments_is_listed(
    members: dict[str, object], problem: str
) -> None:
    assert sole_problem(changed(**members)) == problem


def test_c096_all_problems_are_told_at_once() -> None:
    wrong = changed(name=None, close=None, capabilities=None)
    assert len(transport_problems(wrong)) == 3


# C097


@pytest.mark.parametrize("version", [99, 0, "1.0", (1,), (1, 0, 0), (1, "0"), [1, 0], (True, 0)])
def test_c097_a_version_of_another_form_is_refused(version: object) -> None:
    problem = sole_problem(changed(api_version=version))
    assert f"its api_version {version!r} is not (major, minor)" in problem
    assert "this stagelink has 2.0" in problem
    assert "`api_version = (2, 0)`" in problem


def test_c097_an_absent_version_is_refused() -> None:
    class Silent(Transport):
        name = "silent"
        capabilities = CAPABILITIES

    problem = sole_problem(Silent)
    assert "states no api_version, and this stagelink has 2.0" in problem
    assert "`api_version = (2, 0)`" in problem


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ((99, 0), "install a newer stagelink"),
        ((2, 1), "install a newer stagelink"),
        ((0, 0), "install a newer release of the plugin"),
        ((1, 1), "install a newer release of the plugin"),
    ],
)
def test_c097_another_major_or_a_newer_minor_is_refused_with_both_versions(
    version: tuple[int, int], remedy: str
) -> None:
    problem = sole_problem(changed(api_version=version))
    assert f"made for api_version {version[0]}.{version[1]}, and this stagelink has 2.0" in problem
    assert remedy in problem


def test_c097_an_older_minor_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = (API_VERSION[0], API_VERSION[1] + 3)
    monkeypatch.setattr("stagelink.plugins.problems.API_VERSION", newer)
    assert transport_problems(Minimal) == []
    assert "takes 2.0 to 2.3" in sole_problem(changed(api_version=(2, 4)))


@pytest.mark.parametrize("version", [(1, 0), (1, 1)])
def test_what_was_written_for_contract_1_is_told_what_to_change(version: tuple[int, int]) -> None:
    problem = sole_problem(changed(api_version=version))
    assert "`begin` is given `done` and returns whether it took the message" in problem
    assert "stagelink.transport.blocking.Finisher" in problem
    assert "'From contract 1 to 2' in docs/writing-a-transport.md" in problem


# Name, capabilities, options


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_name_must_be_a_word(name: object) -> None:
    assert "has no name; set the class attribute `name`" in sole_problem(changed(name=name))


def test_c068_a_dtype_that_does_not_travel_is_refused() -> None:
    wrong = dataclasses.replace(CAPABILITIES, dtypes=frozenset({"float23", "int64"}))
    problem = sole_problem(changed(capabilities=wrong))
    assert problem.startswith("its capabilities: unknown dtype 'float23' (did you mean 'float")


@pytest.mark.parametrize(
    ("capabilities", "problem"),
    [
        (None, "has no `capabilities`, an instance of Capabilities"),
        ({"devices": {"cpu"}}, "has no `capabilities`, an instance of Capabilities"),
        (dataclasses.replace(CAPABILITIES, in_flight=0), "say in_flight 0; 1 is the least"),
        (
            dataclasses.replace(CAPABILITIES, same_process=True, distinct_processes=True),
            "ask for one process and for two",
        ),
    ],
)
def test_capabilities_must_make_sense(capabilities: object, problem: str) -> None:
    assert problem in sole_problem(changed(capabilities=capabilities))


@dataclass
class Bare:
    port: int
    hosts: list[str] = field(default_factory=list)


@dataclass
class Unreadable:
    port: Elsewhere = 0  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict, "Options of class 'Changed' is no dataclass"),
        (Bare(1), "Options of class 'Changed' is no dataclass"),
        (Bare, "its options 'port' have no default"),
        (Unreadable, "the types of its Options cannot be read: .*Elsewhere"),
    ],
)
def test_options_must_be_a_dataclass_of_defaults(options: object, problem: str) -> None:
    assert re.search(problem, sole_problem(changed(Options=options)))
