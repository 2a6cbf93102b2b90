"""Whatever a mapping holds, it is a plan or it is refused with a PlanError."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelink.errors import PlanError
from stagelink.plan import Plan
from stagelink.plan.document import Document, LinkTable, PipelineTable, StageTable, TensorTable

WORDS = st.sampled_from(["a", "b", "auto", "gloo", "int64", "1f1b", "cpu", "", "\ud800"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.integers()
    | st.floats()
    | WORDS
    | st.text(string.printable, max_size=5)
    | st.binary(max_size=3)
)


def keys(*tables: Any) -> st.SearchStrategy[str]:
    known = [field.alias or name for table in tables for name, field in table.model_fields.items()]
    return st.sampled_from(known) | st.text(string.printable, max_size=5)


KEYS = keys(Document, PipelineTable, StageTable, TensorTable, LinkTable)
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS | SCALARS, inner, max_size=4)
        | st.frozensets(st.integers(), max_size=2)
    ),
    max_leaves=25,
)


def refused_or_whole(raw: Any) -> None:
    try:
        plan = Plan.from_dict(raw)
    except PlanError:
        return
    assert plan.digest


@given(raw=st.dictionaries(KEYS | SCALARS, GARBAGE) | GARBAGE)
def test_garbage(raw: Any) -> None:
    refused_or_whole(raw)


NAMES = st.sampled_from(["a", "b", "c"])
RANKS = st.integers(0, 4)
ALMOST = st.fixed_dictionaries(
    {
        "pipeline": st.fixed_dictionaries(
            {"microbatches": st.just(1)},
            optional={"servers": st.lists(st.lists(RANKS, min_size=1), min_size=1)},
        ),
        "stages": st.lists(
            st.fixed_dictionaries({"name": NAMES, "ranks": st.lists(RANKS, min_size=1)}),
            min_size=1,
            max_size=3,
        ),
    },
    optional={
        "tensors": st.lists(
            st.fixed_dictionaries(
                {"name": NAMES, "from": NAMES, "to": st.lists(NAMES, max_size=3)},
                optional={"dtype": st.sampled_from(["int8", "half"]), "grad": st.booleans()},
            )
        ),
        "links": st.lists(
            st.fixed_dictionaries(
                {"transport": st.sampled_from(["x", "auto", ["x", "auto"]])},
                optional={
                    "from": NAMES,
                    "to_rank": RANKS,
                    "tensor": NAMES,
                    "from_server": RANKS,
                    "same_server": st.booleans(),
                },
            )
        ),
        "transports": st.dictionaries(st.sampled_from(["x", "y", "auto"]), st.just({})),
    },
)


@given(raw=ALMOST)
def test_plans_that_are_almost_right(raw: Any) -> None:
    refused_or_whole(raw)


def circular() -> list[Any]:
    raw: list[Any] = []
    raw.append(raw)
    return raw


def deep() -> list[Any]:
    raw: list[Any] = []
    for _ in range(100_000):
        raw = [raw]
    return raw


UNSHOWABLE = {
    "circular": circular(),
    "deep": deep(),
    "long": 10**5000,
    "negative": -(10**5000),
    "list": [10**5000],
    "object": object(),
}


@pytest.mark.parametrize("case", UNSHOWABLE)
@pytest.mark.parametrize("key", ["pipeline", "stages", "links", "transports", "limits", "other"])
def test_a_value_that_cannot_be_shown(key: str, case: str) -> None:
    value = UNSHOWABLE[case]
    stages = [{"name": "a", "ranks": [0]}]
    raw: dict[str, Any] = {"pipeline": {"microbatches": 1}, "stages": stages, key: value}
    with pytest.raises(PlanError, match=f"^plan: {key}"):
        Plan.from_dict(raw)
    with pytest.raises(PlanError, match=r"^plan: pipeline\.microbatches: "):
        Plan.from_dict({"pipeline": {"microbatches": value}, "stages": stages})
