"""The dtype table against torch itself."""

from __future__ import annotations

import pytest
import torch

from stagelink.plan import DTYPE_BY_CODE, DTYPE_BY_NAME, DTYPES, DType


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_torch_agrees(dtype: DType) -> None:
    theirs = getattr(torch, dtype.name)
    assert theirs.itemsize == dtype.itemsize
    assert (theirs.is_floating_point or theirs.is_complex) == dtype.differentiable


def test_codes_and_names_are_unique_and_codes_fit_a_byte() -> None:
    assert len(DTYPE_BY_CODE) == len(DTYPE_BY_NAME) == len(DTYPES)
    assert all(0 < dtype.code < 256 for dtype in DTYPES)
