"""What a message is on the way and what the caller has: dtypes, and what takes an answer.

PipeDream's callers answer every tensor in training, also one that needs no gradient: with the
tensor itself. Our messages are answered where they require a gradient, which only floating dtypes
do. So others travel under a floating dtype of the same size, bit for bit.
"""

from __future__ import annotations

import torch

from stagelink.errors import MessageError

__all__ = ["check_dtype", "check_target", "packed", "unpacked"]

_BY_SIZE = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels where it is answered, and as its answer travels.

    Shares its memory, requires a gradient, and is no part of its graph.
    """
    return tensor.detach().view(_carrier(tensor.dtype)).requires_grad_()


def unpacked(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """What was `packed`, without a gradient; shares its memory.

    Raises:
        MessageError: it was of another dtype.
    """
    if tensor.dtype != _carrier(dtype):
        raise MessageError(f"{what}: the receiver's training_tensor_dtypes says {dtype}")
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
