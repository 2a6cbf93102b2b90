"""Plans by their shape, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from stagelink.plan import Plan
from stagelink.schedule import Action, Mode, actions_for

Ends = tuple[int, int] | tuple[int, int, bool]
MakePlan = Callable[..., Plan]
Programs = Callable[..., list[Sequence[Action]]]
Shape = tuple[list[int], list[tuple[int, int, bool]]]


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    """``make_plan([2, 1])``: stages s0 and s1 of 2 ranks and 1, tensor t00 from s0 to s1.

    ``edges`` takes the place of the line: (source, target) or (source, target, gradient), numbered
    as listed. ``warm_up`` is by stage, ``limits`` a table; other keywords go to ``[pipeline]``.
    """

    def make(
        replicas: Sequence[int],
        edges: Sequence[Ends] | None = None,
        *,
        warm_up: Mapping[int, int] | None = None,
        limits: Mapping[str, object] | None = None,
        **pipeline: object,
    ) -> Plan:
        ends = list(pairwise(range(len(replicas)))) if edges is None else edges
        return Plan.from_dict(
            {
                "pipeline": {"microbatches": 4, **pipeline},
                "stages": [
                    _stage(index, replicas, (warm_up or {}).get(index))
                    for index in range(len(replicas))
                ],
                "tensors": [_tensor(index, *end) for index, end in enumerate(ends)],
                "limits": limits or {},
            }
        )

    return make


@pytest.fixture(scope="session")
def programs() -> Programs:
    """The actions of all ranks of a plan by its schedule."""

    def make(
        plan: Plan, microbatches: int, warm_up: Sequence[int], mode: Mode = "train"
    ) -> list[Sequence[Action]]:
        ranks = range(plan.world_size)
        return [actions_for(plan, rank, microbatches, warm_up, mode) for rank in ranks]

    return make


@pytest.fixture(scope="session")
def shapes() -> st.SearchStrategy[Shape]:
    """Replicas of 2 to 4 stages, 1 to 4 each, and edges that connect them all, skips included."""
    return _shapes()


def _stage(index: int, replicas: Sequence[int], warm_up: int | None) -> dict[str, object]:
    first = sum(replicas[:index])
    by_hand = {} if warm_up is None else {"warm_up": warm_up}
    return {"name": f"s{index}", "ranks": list(range(first, first + replicas[index])), **by_hand}


def _tensor(index: int, source: int, target: int, grad: bool = True) -> dict[str, object]:
    return {"name": f"t{index:02}", "from": f"s{source}", "to": [f"s{target}"], "grad": grad}


@st.composite
def _shapes(draw: st.DrawFn) -> Shape:
    replicas = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    stages = range(len(replicas))
    # Each stage but the first takes from some stage before it, so the plan is one piece.
    edges = [
        (draw(st.integers(0, target - 1)), target, draw(st.booleans())) for target in stages[1:]
    ]
    every = [(source, target) for target in stages for source in range(target)]
    more = draw(st.lists(st.tuples(st.sampled_from(every), st.booleans()), max_size=4))
    edges += [(*ends, grad) for ends, grad in more]
    return replicas, edges
