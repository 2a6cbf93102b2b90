"""Batches cut into microbatches."""

from __future__ import annotations

import pytest
import torch

from stagelink.runner.batches import cut, items_of


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
