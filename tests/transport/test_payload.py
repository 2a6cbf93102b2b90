"""Tensors as bytes and back: every dtype and layout, and what is refused before it is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagelink.errors import MessageError, MessageTypeError
from stagelink.plan import DTYPES
from stagelink.testing.samples import awkward_tensors, same_bits
from stagelink.transport.payload import dtype_of, from_bytes, from_raw, raw_bytes, to_bytes


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_tensor_survives_both_ways() -> None:
    for tensor in awkward_tensors():
        check_both_ways(tensor)


def check_both_ways(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    dtype, shape = dtype_of(tensor), tuple(tensor.shape)
    flat = to_bytes(tensor)
    assert (flat.dtype, flat.dim(), flat.numel()) == (torch.uint8, 1, tensor.nbytes)
    assert same_bits(from_bytes(flat, dtype, shape), tensor)
    assert same_bits(from_raw(raw_bytes(tensor), dtype, shape), tensor)
    assert same_bits(tensor, before)


def test_every_dtype_of_the_table_is_known_to_torch() -> None:
    for dtype in DTYPES:
        known = dtype_of(torch.empty(0, dtype=getattr(torch, dtype.name)))
        assert known is dtype
        tensor = torch.empty(1, dtype=getattr(torch, dtype.name))
        assert tensor.itemsize == dtype.itemsize
        assert (tensor.is_floating_point() or tensor.is_complex()) == dtype.differentiable


def test_a_contiguous_tensor_is_not_copied_and_its_graph_stays() -> None:
    leaf = torch.ones(4, requires_grad=True)
    tensor = leaf * 2
    assert to_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert not to_bytes(tensor).requires_grad
    tensor.sum().backward()
    assert leaf.grad is not None


def test_what_is_made_of_bytes_is_new_memory() -> None:
    raw = raw_bytes(torch.arange(3.0))
    one, other = (from_raw(raw, DTYPES[11], (3,)) for _ in range(2))
    one.zero_()
    assert other.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls quantised tensors deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantised_tensor_is_refused_before_its_bytes_are_touched() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    with pytest.raises(MessageError, match=r"tensors of torch.quint8 cannot be sent"):
        dtype_of(tensor)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo cannot be sent"),
        (lambda: torch.empty(2, device="meta"), "device 'meta' has no data"),
        (lambda: torch.empty([1] * 9), "a tensor of 9 dimensions; at most 8"),
        (lambda: torch.empty(2, dtype=torch.bits8), "tensors of torch.bits8 cannot be sent"),
    ],
    ids=["sparse", "meta", "dims", "bits"],
)
def test_what_cannot_travel_is_refused(make: Any, text: str) -> None:
    with pytest.raises(MessageError, match=text):
        dtype_of(make())


@pytest.mark.parametrize("thing", [[1.0], "text", object(), 3])
def test_what_is_no_tensor_is_a_type_error(thing: object) -> None:
    with pytest.raises(MessageTypeError, match="only tensors and None can be sent, not"):
        dtype_of(thing)
    with pytest.raises(TypeError):
        dtype_of(thing)
