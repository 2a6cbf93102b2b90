"""Tensors as bytes and back: every dtype and layout, and what is refused before it is touched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed import _functional_collectives as functional_collectives

from stagelink.errors import MessageError, MessageTypeError
from stagelink.plan import DTYPES
from stagelink.testing.samples import awkward_tensors, same_bits
from stagelink.transport.buffers import BufferPool
from stagelink.transport.payload import (
    bytes_of,
    content_of,
    from_bytes,
    from_raw,
    has_memory,
    memory_of,
    raw_bytes,
    target_of,
    to_bytes,
)
from stagelink.transport.streams import HostStream
from tests.support import tensors
from tests.support.tensors import VALUES


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_tensor_survives_both_ways() -> None:
    for tensor in awkward_tensors():
        check_both_ways(tensor)


def check_both_ways(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    content, dtype, in_order = content_of(tensor)
    assert content is tensor
    shape, flat = tuple(tensor.shape), to_bytes(tensor, in_order=in_order)
    assert (flat.dtype, flat.dim(), flat.numel()) == (torch.uint8, 1, tensor.nbytes)
    assert same_bits(from_bytes(flat, dtype, shape), tensor)
    assert same_bits(from_raw(raw_bytes(tensor, in_order=in_order), dtype, shape), tensor)
    assert same_bits(tensor, before)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_of_the_table_is_known_to_torch() -> None:
    for dtype in DTYPES:
        known = content_of(torch.empty(0, dtype=getattr(torch, dtype.name)))[1]
        assert known is dtype
        tensor = torch.empty(1, dtype=getattr(torch, dtype.name))
        assert tensor.itemsize == dtype.itemsize
        assert (tensor.is_floating_point() or tensor.is_complex()) == dtype.differentiable


def test_a_contiguous_tensor_is_not_copied_and_its_graph_stays() -> None:
    leaf = torch.ones(4, requires_grad=True)
    tensor = leaf * 2
    assert bytes_of(tensor).data_ptr() == tensor.data_ptr()
    assert not bytes_of(tensor).requires_grad
    tensor.sum().backward()
    assert leaf.grad is not None


def test_what_is_made_of_bytes_is_new_memory() -> None:
    raw = raw_bytes(torch.arange(3.0), in_order=True)
    one, other = (from_raw(raw, DTYPES[11], (3,)) for _ in range(2))
    one.zero_()
    assert other.tolist() == [0.0, 1.0, 2.0]


def test_more_dimensions_than_a_header_has_are_refused() -> None:
    tensor = torch.empty([1] * 9)
    for decide in (content_of, target_of):
        with pytest.raises(MessageError, match="a tensor of 9 dimensions; at most 8"):
            decide(tensor)
    assert memory_of(tensor)[0] is tensor  # among replicas there is no header


@pytest.mark.parametrize("thing", [[1.0], "text", object(), 3])
def test_what_is_no_tensor_is_a_type_error(thing: object) -> None:
    with pytest.raises(MessageTypeError, match="only tensors and None can be sent, not"):
        content_of(thing)
    with pytest.raises(TypeError):
        content_of(thing)


def test_what_only_says_that_it_is_a_tensor_is_none() -> None:
    class Pretender:
        __class__: Any = torch.Tensor

        def __repr__(self) -> str:
            raise AssertionError

    with pytest.raises(MessageTypeError, match=r"not '.*Pretender'"):
        content_of(Pretender())


# -- tensors that are more than their memory

quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
"""Torch calls some of them prototypes, and others deprecated."""


@pytest.mark.parametrize("make", tensors.DATA.values(), ids=tensors.DATA)
def test_data_travel_as_they_are(make: tensors.Make) -> None:
    given = make(VALUES)
    content, dtype, _ = content_of(given)
    assert type(content) in {torch.Tensor, torch.nn.Parameter}
    assert dtype.name == "float32"
    with torch._C.DisableTorchFunctionSubclass():
        assert content.requires_grad == given.requires_grad
    assert has_memory(content)
    assert bytes_of(make(VALUES)).view(torch.float32).tolist() == VALUES.tolist()


@pytest.mark.parametrize("make", tensors.DATA.values(), ids=tensors.DATA)
def test_into_data_it_is_written_and_nowhere_else(make: tensors.Make) -> None:
    given = make(VALUES)
    target, _, _ = target_of(given)
    with torch.inference_mode(target.is_inference()):
        target.add_(1)
    assert not target.requires_grad
    assert bytes_of(given).view(torch.float32).tolist() == (VALUES + 1).tolist()


def test_what_requires_a_gradient_does_so_where_there_are_none() -> None:
    leaf = VALUES.clone().requires_grad_()
    for given in (
        leaf.as_subclass(tensors.Methods),
        leaf.as_subclass(tensors.Overriding),
        tensors.zeros(VALUES).requires_grad_(),
        tensors.collected_from(leaf),
    ):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                content = content_of(given)[0]
            assert content.requires_grad


def test_a_lazy_copy_is_no_longer_one_when_it_is_written() -> None:
    origin = torch.arange(3.0)
    copy = origin._lazy_clone()
    ctypes.memset(target_of(copy)[0].data_ptr(), 0, copy.nbytes)
    assert copy.tolist() == [0.0] * 3
    assert origin.tolist() == [0.0, 1.0, 2.0]


def test_zero_tensors_are_zeros_and_cannot_be_written() -> None:
    for given in (tensors.zeros(VALUES), tensors.zeros(VALUES).as_subclass(tensors.Methods)):
        assert bytes_of(given).tolist() == [0] * 48
        with pytest.raises(MessageTypeError, match="a zero tensor of torch's has no memory"):
            target_of(given)


def test_a_collective_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.Tensor] = []

    def wait(given: torch.Tensor) -> torch.Tensor:
        waited.append(given)
        return given.add_(1)

    monkeypatch.setattr(functional_collectives, "wait_tensor", wait)
    given = functional_collectives.AsyncCollectiveTensor(torch.zeros(3))
    for _ in range(2):
        assert bytes_of(given).view(torch.float32).tolist() == [1.0] * 3
    assert len(waited) == 1


@quiet
def test_of_a_dual_number_the_primal_travels() -> None:
    with forward_ad.dual_level():
        given = forward_ad.make_dual(VALUES.clone(), torch.ones(12))
        assert bytes_of(given).view(torch.float32).tolist() == VALUES.tolist()
        assert forward_ad.unpack_dual(target_of(given)[0]).tangent is None


@quiet
@pytest.mark.parametrize(("make", "text"), tensors.REFUSED.values(), ids=tensors.REFUSED)
def test_what_has_no_memory_of_its_own_is_refused(make: tensors.Make, text: str) -> None:
    given = make(VALUES)
    for decide in (content_of, target_of, memory_of):
        with pytest.raises(MessageTypeError, match=text):
            decide(given)


@pytest.mark.parametrize("make", tensors.SHARED.values(), ids=tensors.SHARED)
def test_elements_that_share_memory_can_be_sent_only(make: tensors.Make) -> None:
    given = make(VALUES)
    assert bytes_of(given).numel() == given.nbytes
    for decide in (target_of, partial(memory_of, written=True)):
        with pytest.raises(MessageError, match="elements of the tensor share their memory"):
            decide(given)


def test_no_elements_share_no_memory() -> None:
    for given in (torch.empty(0, 3).t(), torch.zeros(1).expand(0, 4), torch.zeros(3, 4).t()):
        assert target_of(given)[0].shape == given.shape


# -- modes of the calling thread


@pytest.mark.parametrize("mode", tensors.MODES.values(), ids=tensors.MODES)
def test_a_mode_makes_no_difference(mode: Callable[[], Any]) -> None:
    views = [
        torch.arange(12.0),
        torch.arange(12.0).view(3, 4).t(),
        tensors.DATA["negated"](VALUES),
    ]
    views += [make(VALUES) for make in tensors.DATA.values()]
    into = torch.zeros(3, 4)
    with mode():
        flat = [bytes_of(view) for view in views]
        made = from_raw(raw_bytes(views[0], in_order=True), DTYPES[11], (3, 4))
        empty = from_raw(b"", DTYPES[11], (0, 4))
        seen = from_bytes(flat[0], DTYPES[11], (3, 4))
        target = target_of(into)[0]
    for given, raw in zip(views, flat, strict=True):
        assert raw.tolist() == bytes_of(given).tolist()
    for tensor in (*flat, made, empty, seen, target):
        assert content_of(tensor)[0] is tensor
        assert not tensor.is_inference()
    assert made.tolist() == seen.tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert target.data_ptr() == into.data_ptr()


@pytest.mark.parametrize("mode", tensors.MODES.values(), ids=tensors.MODES)
def test_a_lane_leaves_the_modes(mode: Callable[[], Any]) -> None:
    stream = HostStream(BufferPool(2**20).take)
    with mode():
        with stream.entered():
            given = [stream.buffer(12), stream.buffer(2**17), stream.staging(3), torch.ones(4)]
        given.append(stream.cloned(given[1]))
    for tensor in given:
        assert content_of(tensor)[0] is tensor
        assert not tensor.is_inference()
        assert tensor.is_cpu


def test_what_is_received_without_gradients_can_be_written_where_there_are_some() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    raw = raw_bytes(torch.arange(12.0), in_order=True)
    with torch.no_grad():
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        made = [from_raw(raw, DTYPES[11], (3, 4)), from_bytes(flat, DTYPES[11], (3, 4))]
    for tensor in made:
        tensor.add_(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(2).all()
