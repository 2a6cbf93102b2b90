"""The pytest plugin of stagelink: fixtures for tests of pipelines, and the transports' own tests.

It stands beside the package because importing the package loads torch, and pytest imports its
plugins in every run: where stagelink is only installed, it costs and changes nothing.

    pytest --pyargs stagelink.testing --stagelink-transport NAME

runs the conformance tests against an installed transport. Fixtures: `rank_pool`, `leak_check`.
Mark: ``stagelink_conformance``, on every conformance test.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # at run time that would load torch
    from stagelink.testing import LeakCheck, RankPool

MARK = "stagelink_conformance"
KIT = "stagelink.testing.test_transport"
TRANSPORTS = "--stagelink-transport"
OPTIONS = "--stagelink-option"

_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what names a transport."""
    group = parser.getgroup("stagelink", "stagelink's conformance tests")
    group.addoption(
        TRANSPORTS,
        action="append",
        default=[],
        metavar="NAME",
        help="run the tests of `--pyargs stagelink.testing` against this transport (repeatable)",
    )
    group.addoption(
        OPTIONS,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the transport, as in [transports.NAME] (repeatable); NAME.KEY=VALUE "
        "where several transports are named",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and read the options while there is nothing else to look at."""
    config.addinivalue_line("markers", f"{MARK}: one of the tests that every transport must pass")
    chosen_transports(config)


def pytest_collection(session: pytest.Session) -> None:
    """Load the transports that are named, to say at once what is wrong with one.

    Raises:
        pytest.UsageError: one is unknown or broken, or refuses its options.
    """
    for name, options in chosen_transports(session.config).items():
        _check(f"{TRANSPORTS} {name}", name, options)


def _check(where: str, transport: Any, options: dict[str, Any], *, known: bool = True) -> None:
    """Refuse a transport that every test would fail for, in one line and before any starts.

    ``known``: whether one that is not installed, or broken, is refused as well.
    """
    from stagelink.errors import PlanError, StagelinkError  # noqa: PLC0415 - loads torch
    from stagelink.plugins.offers import parse_options  # noqa: PLC0415
    from stagelink.plugins.plugins import Plugins  # noqa: PLC0415

    try:
        cls = Plugins().load(transport) if isinstance(transport, str) else transport
        parse_options(cls, options)
    except StagelinkError as error:
        if known or isinstance(error, PlanError):
            problems = "; ".join(str(error).splitlines())
            raise pytest.UsageError(f"{where}: {problems}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested, and what is missing for it."""
    if not config.getoption(TRANSPORTS):
        return []
    chosen = chosen_transports(config)
    named = ", ".join(f"{name} {options or ''}".rstrip() for name, options in chosen.items())
    lines = [f"stagelink: testing {named}"]
    absent = [name for name in ("hypothesis", "pytest_timeout") if find_spec(name) is None]
    if absent:
        names = " and ".join(name.replace("_", "-") for name in absent)
        lines.append(f"stagelink: without {names}; all there is: pip install 'stagelink[testing]'")
    return lines


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what belongs to the conformance tests, here and in classes that inherit them."""
    kit = sys.modules.get("stagelink.testing.conformance")
    cls = getattr(item, "cls", None)
    if kit is not None and isinstance(cls, type) and issubclass(cls, kit.TransportConformance):
        item.add_marker(MARK)


@pytest.hookimpl(trylast=True)  # what is deselected is nobody's concern
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of `--pyargs stagelink.testing` out unless a transport is named.

    Raises:
        pytest.UsageError: a class gives its transport options that this refuses.
    """
    marked = [item for item in items if item.get_closest_marker(MARK)]
    for cls in dict.fromkeys(getattr(item, "cls", None) for item in marked):
        if cls is not None and hasattr(cls, "transport"):
            # One that is absent fails its own tests: those of others are none of its concern.
            _check(cls.__qualname__, cls.transport, dict(cls.options), known=False)
    if config.getoption(TRANSPORTS):
        return
    left_out = [item for item in items if _of_kit(item)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = len(left_out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say why they were left out."""
    count = config.stash.get(_LEFT_OUT, 0)
    if not count:
        return []
    from stagelink.plugins.plugins import Plugins  # noqa: PLC0415 - loads torch; it is there

    known = ", ".join(Plugins().known)
    return [
        f"stagelink: {count} conformance tests left out, since no transport is named: add "
        f"`{TRANSPORTS} NAME` (here: {known})"
    ]


def _of_kit(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return getattr(module, "__name__", None) == KIT


def chosen_transports(config: pytest.Config) -> dict[str, dict[str, Any]]:
    """The transports that the command line names, with their options.

    Raises:
        pytest.UsageError: an option is none, or it is not clear of which transport.
    """
    chosen: dict[str, dict[str, Any]] = {name: {} for name in config.getoption(TRANSPORTS, [])}
    for given in config.getoption(OPTIONS, []):
        where, equals, value = given.partition("=")
        name, _, key = where.rpartition(".")
        if not equals or not key:
            raise pytest.UsageError(f"{OPTIONS} {given!r}: write KEY=VALUE")
        if not name and len(chosen) == 1:
            (name,) = chosen
        if name not in chosen:
            raise pytest.UsageError(
                f"{OPTIONS} {given!r}: write NAME.KEY=VALUE with one of the transports named by "
                f"{TRANSPORTS}: {', '.join(chosen) or 'none is'}"
            )
        chosen[name][key] = _value(value)
    return chosen


def _value(text: str) -> Any:
    """A TOML value; what is none is text, so that it need not be quoted for TOML as well."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Rank processes that stay warm from test to test: ``rank_pool.run(function, world_size)``."""
    from stagelink.testing import RankPool  # noqa: PLC0415 - loads torch

    with RankPool() as pool:
        yield pool


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Iterator[LeakCheck]:
    """Fails the test if it leaves a thread, a file descriptor or a process behind."""
    from stagelink.testing import LeakCheck, start_rank_server  # noqa: PLC0415 - loads torch

    start_rank_server()
    used = "rank_pool" in request.fixturenames
    pool: RankPool | None = request.getfixturevalue("rank_pool") if used else None
    check = LeakCheck("threads", "descriptors", "processes", pool=pool)
    yield check
    check.verify()
