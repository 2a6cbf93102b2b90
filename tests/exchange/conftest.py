"""Ranks on threads, where nothing else is said; and hosts for those that need some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import hosts
from tests.support.pipelines import LOOPBACK, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagelink.testing import RankPool
    from tests.support.hosts import Hosts


@pytest.fixture
def ranks(rank_pool: RankPool) -> Ranks:
    return Ranks(LOOPBACK, rank_pool)


@pytest.fixture(scope="module")
def _laid_hosts() -> Iterator[Hosts]:
    with hosts(2) as two:
        yield two


@pytest.fixture
def two_hosts(_laid_hosts: Hosts) -> Hosts:
    """Two hosts that know each other's names, whatever a test has made of these before."""
    _laid_hosts.restore_names()
    return _laid_hosts
