"""Batches cut into microbatches."""

from __future__ import annotations

import pytest
import torch

from stagelink import UsageError
from stagelink.runner.batches import cut, items_of
from tests.support import tensors


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [1, 2, 7, 8, 9, 30])
def test_parts_are_those_of_tensor_split(items: int, microbatches: int) -> None:
    x = torch.arange(items * 2).view(items, 2)
    batch = cut({"x": x, "y": x[:, 0]}, microbatches)
    assert batch.items == items
    assert batch.microbatches == min(items, microbatches)
    expected = x.tensor_split(batch.microbatches)
    for microbatch, part in enumerate(expected):
        found = batch.part(microbatch)
        assert torch.equal(found["x"], part)
        assert torch.equal(found["y"], part[:, 0])
        assert items_of(microbatch, items, batch.microbatches) == len(part) > 0


def test_parts_are_views() -> None:
    x = torch.zeros(4, 2)
    part = cut({"x": x}, 2).part(1)["x"]
    assert part.data_ptr() == x[2:].data_ptr()


CUT = {
    "wrapper",
    "fake",
    "fake in a collective",
    "masked",
    "functional",
    "grad",
    "bits",
    "meta",
    "quantised",
    "quantised by channel",
}
"""Torch knows parts of them; whether they can be sent is another matter."""


@pytest.mark.parametrize("kind", [kind for kind in tensors.DATA if kind != "overriding"])
def test_data_of_any_kind_are_cut(kind: str) -> None:
    values = torch.arange(12.0)
    batch = cut({"x": tensors.DATA[kind](values)}, 4)
    parts = [batch.part(number)["x"] for number in range(4)]
    assert [value for part in parts for value in part.tolist()] == values.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", tensors.REFUSED)
def test_what_has_no_parts_is_named(kind: str) -> None:
    make, text = tensors.REFUSED[kind]
    given = make(torch.arange(12.0))
    if kind in CUT:
        assert cut({"x": given}, 4).microbatches == 4
        return
    expected = "without items" if kind == "meta, empty" else f"batch entry 'x', a .*: .*{text}"
    with pytest.raises(UsageError, match=expected):
        cut({"x": given}, 4)


def test_an_error_of_the_tensors_own_is_told() -> None:
    given = tensors.DATA["overriding"](torch.arange(12.0))
    with pytest.raises(UsageError, match=r"'x', a Overriding, cannot be cut .*: AssertionError: "):
        cut({"x": given}, 4)
