"""Every case runs on every wire that the machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.pipelines import WIRES, Ranks

if TYPE_CHECKING:
    from stagelink.testing import RankPool


@pytest.fixture(params=WIRES, ids=str)
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Ranks:
    """Ranks whose messages go by the transport, however small."""
    return Ranks(request.param, rank_pool)
