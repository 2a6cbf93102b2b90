"""Fixtures for every test: warm rank processes, and a check that nothing is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from stagelink.testing import LeakCheck, RankPool, start_rank_server
from tests.support.pipelines import INLINE, WIRES, Ranks

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# Two cores shared with rank processes: the time of one example says nothing.
settings.register_profile("stagelink", deadline=None)
settings.load_profile("stagelink")

FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Rank processes that stay warm from test to test: ``rank_pool.run(function, world_size)``."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(params=WIRES + INLINE, ids=str)
def any_ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Ranks:
    """Ranks on every wire that the machine has; on some, small messages travel with the header."""
    return Ranks(request.param, rank_pool)


@pytest.fixture(scope="session", autouse=True)
def _rank_server() -> None:
    start_rank_server()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    used = "rank_pool" in request.fixturenames
    pool: RankPool | None = request.getfixturevalue("rank_pool") if used else None
    check = LeakCheck("threads", "descriptors", pool=pool)
    yield
    # A failed test's traceback keeps its variables alive: what they hold is not leaked.
    if not request.node.stash.get(FAILED, False):
        check.verify()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember on the test whether it failed, for the fixtures that come down after it."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
