"""Many messages of many sizes, each checked; by hand for longer, see benchmarks/soak.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.pipelines import SHM, Ranks

if TYPE_CHECKING:
    import stagelink
    from stagelink.testing import RankPool

SIZES = (1, 100, 8192, 40_000, 300_001, 2_000_003)
MESSAGES = 1200


def _payload(number: int) -> torch.Tensor:
    size = SIZES[number % len(SIZES)]
    return torch.full((size,), number % 251, dtype=torch.uint8)


def _exchange(comm: stagelink.Handler) -> int:
    wrong = 0
    kept: list[torch.Tensor] = []
    for _ in range(2):
        with comm.evaluate(MESSAGES // 2) as session:
            for number in session.mine:
                if comm.rank == 0:
                    session.send("h", _payload(number), number)
                    continue
                got = session.recv("h", number)
                assert got is not None
                wrong += not torch.equal(got, _payload(number))
                kept.append(got)
                if number % 7 == 0:  # now and then it keeps more than there are slots
                    kept.clear()
    return wrong


def test_a_short_form(rank_pool: RankPool) -> None:
    ranks = Ranks(SHM, rank_pool)
    assert ranks.run(ranks.plan(window=4), _exchange) == [0, 0]
