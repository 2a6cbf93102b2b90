"""Plans to change one thing in, and a reader of what is said about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from stagelink.errors import PlanError
from stagelink.plan import Plan

Table = dict[str, Any]
Chain = Callable[..., Table]
Problems = Callable[[Mapping[str, Any]], list[str]]

NAMES = "abcdefgh"


@pytest.fixture(scope="session")
def chain() -> Chain:
    """``chain(2, 1)``: stages a and b of 2 and 1 ranks, tensor ``ab`` between them, and so on.

    Keywords become keys of ``[pipeline]``.
    """

    def make(*replicas: int, **pipeline: object) -> Table:
        starts = [sum(replicas[:index]) for index in range(len(replicas))]
        return {
            "pipeline": {"microbatches": 4, **pipeline},
            "stages": [
                {"name": NAMES[index], "ranks": list(range(start, start + replicas[index]))}
                for index, start in enumerate(starts)
            ],
            "tensors": [
                {"name": source + target, "from": source, "to": target}
                for source, target in pairwise(NAMES[: len(replicas)])
            ],
        }

    return make


@pytest.fixture(scope="session")
def problems() -> Problems:
    """The lines of the error that a mapping is refused with, without the leading ``plan: ``."""

    def refuse(mapping: Mapping[str, Any]) -> list[str]:
        with pytest.raises(PlanError) as caught:
            Plan.from_dict(mapping)
        lines = str(caught.value).split("\n")
        assert all(line.startswith("plan: ") for line in lines)
        return [line.removeprefix("plan: ") for line in lines]

    return refuse
