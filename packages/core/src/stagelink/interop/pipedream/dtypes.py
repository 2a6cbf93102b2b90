"""Conversion between a caller's tensors and messages: dtypes, and which take a gradient.

PipeDream's callers answer every tensor in training, also one that needs no gradient: with the
tensor itself. Our messages are answered where they require a gradient, which only floating dtypes
do. So others travel under a floating dtype of the same size, bit for bit.
"""

from __future__ import annotations

import torch

from stagelink.errors import MessageError
from stagelink.transport.modes import outside_modes
from stagelink.transport.payload import content_of

__all__ = ["check_dtype", "check_target", "detached", "packed", "plain_of", "unpacked"]

_BY_SIZE = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def plain_of(given: object) -> torch.Tensor | None:
    """The tensor that travels for what a caller gave; see `content_of`.

    None where there is none: that is refused, with the reason and at both ends, where it is sent.
    """
    try:
        return content_of(given)[0]
    except MessageError:
        return None


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor outside its graph; shares its memory."""
    with outside_modes():
        return tensor.detach()


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels where it is answered, and as its answer travels.

    Shares its memory where that holds its values, requires a gradient, and is no part of its
    graph.
    """
    with outside_modes():
        resolved = tensor.detach().resolve_conj().resolve_neg()
        return resolved.view(_carrier(tensor.dtype)).requires_grad_()


def unpacked(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Undo `packed`, without a gradient; shares its memory.

    Raises:
        MessageError: it was of another dtype.
    """
    if tensor.dtype != _carrier(dtype):
        raise MessageError(f"{what}: the receiver's training_tensor_dtypes says {dtype}")
    with outside_modes():
        return tensor.detach().view(dtype)


def check_dtype(tensor: torch.Tensor, declared: torch.dtype, what: str) -> None:
    """Refuse a tensor of another dtype than the one that its receiver takes it for.

    Raises:
        MessageError: it has another one.
    """
    if tensor.dtype != declared:
        raise MessageError(
            f"{what}: the tensor is {tensor.dtype}, training_tensor_dtypes says {declared}"
        )


def check_target(tensor: torch.Tensor, what: str) -> None:
    """Refuse a target that int64 cannot hold: targets are received as that.

    Raises:
        MessageError: it is no tensor of whole numbers.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        raise MessageError(f"{what}: a target is received as torch.int64; this is {tensor.dtype}")


def _carrier(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    return _BY_SIZE[dtype.itemsize]
