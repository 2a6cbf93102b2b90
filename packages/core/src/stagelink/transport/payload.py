"""A tensor as bytes and back: what may travel, and how it looks on the wire."""

from __future__ import annotations

from ctypes import string_at

import torch

from stagelink.errors import MessageError, MessageTypeError
from stagelink.plan.dtypes import DTYPE_BY_NAME, DTYPES, MAX_DIMS, DType

__all__ = ["dtype_of", "from_bytes", "from_raw", "is_plain", "raw_bytes", "to_bytes"]

_BY_TORCH: dict[torch.dtype, DType] = {
    getattr(torch, dtype.name): dtype for dtype in DTYPES if hasattr(torch, dtype.name)
}
_TO_TORCH: dict[int, torch.dtype] = {dtype.code: known for known, dtype in _BY_TORCH.items()}


def dtype_of(tensor: object) -> DType:
    """The wire's element type of a tensor that may travel.

    Raises:
        MessageTypeError: it is no tensor.
        MessageError: quantised, sparse, ``meta``, sub-byte, or of more than 8 dimensions. These
            are refused before anything touches their bytes: some crash the process there.
    """
    if not isinstance(tensor, torch.Tensor):
        raise MessageTypeError(
            f"only tensors and None can be sent, not {type(tensor).__qualname__!r} "
            f"({tensor!r:.80})"
        )
    dtype = _BY_TORCH.get(tensor.dtype)
    if dtype is None:  # quantised ones have dtypes of their own
        raise MessageError(
            f"tensors of {tensor.dtype} cannot be sent; these can: {', '.join(DTYPE_BY_NAME)}"
        )
    if tensor.layout is not torch.strided:
        raise MessageError(f"a tensor of layout {tensor.layout} cannot be sent; use .to_dense()")
    if tensor.is_meta:
        raise MessageError("a tensor on device 'meta' has no data to send")
    if tensor.dim() > MAX_DIMS:
        raise MessageError(
            f"a tensor of {tensor.dim()} dimensions; at most {MAX_DIMS} can be sent"
        )
    return dtype


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in logical order as a flat uint8 tensor.

    Shares memory with ``tensor`` where it is contiguous, else is a copy. Neither the tensor nor
    its autograd graph is changed.
    """
    plain = tensor.detach()
    if not is_plain(tensor):
        plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A CPU tensor's elements in logical order as bytes; for small ones, in one step."""
    if not is_plain(tensor):
        tensor = to_bytes(tensor)
    return string_at(tensor.data_ptr(), tensor.nbytes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its elements in logical order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def from_raw(payload: bytes, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor with these bytes."""
    kind = _TO_TORCH[dtype.code]
    if not payload:
        # By way of bytes: torch warns where it makes a tensor of some dtypes itself.
        return torch.empty(0, dtype=torch.uint8, device="cpu").view(kind).view(shape)
    flat = torch.frombuffer(bytearray(payload), dtype=kind)
    return flat if len(shape) == 1 else flat.view(shape)


def from_bytes(payload: torch.Tensor, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """A flat uint8 tensor of the right size seen as ``dtype`` and ``shape``; shares its memory."""
    return payload.view(_TO_TORCH[dtype.code]).view(shape)
