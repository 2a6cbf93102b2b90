"""Every rule of order is needed: with any one of them broken messages come out wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cupy.driving import RULES, exchange_by_rules, options

if TYPE_CHECKING:
    from stagelink.testing import RankPool

SEEDS = range(3)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("device_ordered", [False, True])
def test_all_rules_kept(rank_pool: RankPool, device_ordered: bool, slow: int) -> None:
    given = options(device_ordered=device_ordered)
    wrong = rank_pool.run(exchange_by_rules, 2, SEEDS, slow, None, given)[1]
    assert wrong == [0] * len(SEEDS)


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_seen(rank_pool: RankPool, name: str) -> None:
    rule = RULES[name]
    given = options(device_ordered=rule.device_ordered)
    wrong = rank_pool.run(exchange_by_rules, 2, SEEDS, rule.slow, name, given)[1]
    assert all(wrong)
