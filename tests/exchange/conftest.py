"""Ranks on threads, where nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.pipelines import LOOPBACK, Ranks

if TYPE_CHECKING:
    from stagelink.testing import RankPool


@pytest.fixture
def ranks(rank_pool: RankPool) -> Ranks:
    return Ranks(LOOPBACK, rank_pool)
