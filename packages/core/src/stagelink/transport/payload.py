"""A tensor as bytes and back: what may travel, and how it looks on the wire.

`content_of` decides on every tensor that enters the library, before anything touches its bytes:
torch knows many that have a shape and a dtype, and no memory that holds their values.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_ssize_t, c_void_p, py_object, pythonapi
from reprlib import repr as repr_of
from typing import Any

import torch
from torch.nn.parameter import Parameter, is_lazy

from stagelink.errors import MessageError, MessageTypeError
from stagelink.plan.dtypes import DTYPE_BY_NAME, DTYPES, MAX_DIMS, DType
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.modes import in_mode, outside_modes

_BY_TORCH: dict[torch.dtype, DType] = {
    getattr(torch, dtype.name): dtype for dtype in DTYPES if hasattr(torch, dtype.name)
}
_COMPLEX = frozenset(dtype.code for known, dtype in _BY_TORCH.items() if known.is_complex)
_TO_TORCH: dict[int, torch.dtype] = {dtype.code: known for known, dtype in _BY_TORCH.items()}

_HINTS = {
    "DTensor": "send its .to_local() or .full_tensor()",
    "FakeTensor": "it stands for a tensor and has no values",
    "MaskedTensor": "send its .get_data() and .get_mask()",
    "NestedTensor": "send its .values() and .offsets(), or .to_padded_tensor(…)",
}


# -- what may travel


def content_of(given: object, *, written: bool = False) -> tuple[torch.Tensor, DType, bool]:
    """The tensor whose memory is what travels for ``given``, decided on before it is touched.

    That is ``given`` itself if it is a `torch.Tensor` or a parameter with strided memory. Other
    subclasses travel as what they are made of; the result of an asynchronous collective is waited
    for; a zero tensor of torch's gets memory. It requires a gradient exactly if ``given`` does.

    Args:
        given: what a caller gave.
        written: whether it is to be written and not read.

    Returns:
        The tensor, its element type on the wire, and whether its memory is its elements in
        logical order.

    Raises:
        MessageError: as `memory_of`; or it has more than 8 dimensions.
    """
    # Every send comes by here. In these lines a tensor without memory raises or does not fit.
    kind = type(given)
    if kind is torch.Tensor or kind is Parameter:
        tensor: Any = given
        dtype = _BY_TORCH.get(tensor.dtype)
        try:
            if (
                dtype is not None
                and tensor.is_contiguous()
                and tensor.data_ptr()
                and not tensor.is_neg()
                and not (dtype.code in _COMPLEX and tensor.is_conj())
                and not tensor.is_nested
                and tensor.dim() <= MAX_DIMS
                and tensor.storage_offset() * dtype.itemsize + tensor.nbytes
                <= tensor.untyped_storage().nbytes()
            ):
                return tensor, dtype, True
        except RuntimeError as error:  # `memory_of` says what it is
            if stops_caller(error):
                raise
    found = memory_of(given, written=written)
    if found[0].dim() > MAX_DIMS:
        raise MessageError(
            f"a tensor of {found[0].dim()} dimensions; at most {MAX_DIMS} can be sent"
        )
    return found


def target_of(given: object) -> tuple[torch.Tensor, DType, bool]:
    """The tensor into whose memory a message for ``given`` is written, outside its graph.

    Returns:
        As `content_of`.

    Raises:
        MessageError: as `content_of`.
    """
    tensor, dtype, in_order = content_of(given, written=True)
    with outside_modes():
        return tensor.detach(), dtype, in_order


def memory_of(given: object, *, written: bool = False) -> tuple[torch.Tensor, DType, bool]:
    """Like `content_of`, with any number of dimensions.

    Raises:
        MessageTypeError: it is no tensor, or one without strided memory of its own; named. A zero
            tensor has none to be written.
        MessageError: it is to be written, and several of its elements share their memory.
    """
    kind = type(given)
    tensor: Any = given if kind is torch.Tensor or kind is Parameter else _unwrapped(given)
    dtype = _BY_TORCH.get(tensor.dtype)
    if dtype is None:  # quantised ones have dtypes of their own
        raise MessageTypeError(
            f"tensors of {tensor.dtype} cannot be sent; these can: {', '.join(DTYPE_BY_NAME)}"
        )
    if not has_memory(tensor):
        tensor = _materialised(tensor, written=written)
    if tensor is not given:
        tensor = _requiring(tensor, given)
    if written and _shares_elements(tensor):
        raise MessageError(
            f"elements of the tensor share their memory (shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}), so it cannot be written; .contiguous() makes one that can"
        )
    return tensor, dtype, tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class has memory, for all of its elements."""
    if tensor.is_nested:
        return False
    try:
        available_bytes = tensor.untyped_storage().nbytes()
        if not tensor.data_ptr():
            return not tensor.numel() and not tensor.is_meta
    except RuntimeError as error:  # so torch says that there is none
        if stops_caller(error):
            raise
        return False
    if tensor.is_contiguous():
        end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
        end = (last + 1) * tensor.itemsize
    return end <= available_bytes


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory; True also where that would take long to find out."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return bool(tensor.numel())
            reach += (size - 1) * stride
    return False


def _unwrapped(given: object) -> torch.Tensor:
    """What a tensor of a subclass is made of."""
    kind = type(given)
    # By its class: `isinstance` believes what an object says of itself.
    if not issubclass(kind, torch.Tensor):
        raise MessageTypeError(
            f"only tensors and None can be sent, not {kind.__qualname__!r} ({repr_of(given)})"
        )
    tensor: Any = given
    if is_lazy(tensor):
        raise MessageTypeError(f"a {_name(kind)} has no data yet: its module was never called")
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return _waited_for(tensor, kind)
    with torch._C.DisableTorchFunctionSubclass(), outside_modes():
        plain: torch.Tensor = tensor.as_subclass(torch.Tensor)
    return plain


def _requiring(tensor: torch.Tensor, given: Any) -> torch.Tensor:
    """The tensor, which requires a gradient if ``given`` does, also where gradients are off."""
    with torch._C.DisableTorchFunctionSubclass():
        wanted = given.requires_grad
    if not wanted or tensor.requires_grad:
        return tensor
    with outside_modes():
        return tensor.detach().requires_grad_()


def _waited_for(given: Any, kind: type) -> torch.Tensor:
    """The result of an asynchronous collective."""
    # Not at the top: where there is such a tensor, it is loaded.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

    if not issubclass(kind, AsyncCollectiveTensor):
        hint = _HINTS.get(kind.__name__, "send the tensors that it is made of")
        raise MessageTypeError(f"a {_name(kind)} has no strided memory of its own: {hint}")
    with outside_modes():
        tensor = given.trigger_wait()
    return tensor if type(tensor) is torch.Tensor else _unwrapped(tensor)


def _materialised(tensor: torch.Tensor, *, written: bool) -> torch.Tensor:
    """A tensor in place of one without memory whose values are known all the same."""
    if not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ZeroTensor):
        raise MessageTypeError(_why_without_memory(tensor))
    if written:
        raise MessageTypeError("a zero tensor of torch's has no memory, and cannot be written")
    with outside_modes():
        return tensor.clone()


def _why_without_memory(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be sent; use .to_dense()"
    if tensor.is_nested:
        return f"a nested tensor has no strided memory of its own: {_HINTS['NestedTensor']}"
    if tensor.is_meta:
        return "a tensor on device 'meta' has no data to send"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor (torch.func.functionalize) has no memory of its own"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return (
            "a tensor inside a transform of torch.func (vmap, grad, jvp) has no memory of its "
            "own: send outside of it"
        )
    return (
        f"a tensor of shape {list(tensor.shape)} and {tensor.dtype} has less memory than its "
        "elements take: its storage was freed or resized"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# -- as bytes

bytes_at: Callable[[int, int], bytes] = PYFUNCTYPE(py_object, c_void_p, c_ssize_t)(
    ("PyBytes_FromStringAndSize", pythonapi)
)
"""Copy of so many bytes of host memory at an address: `ctypes.string_at` without its frame."""


def to_bytes(tensor: torch.Tensor, *, in_order: bool) -> torch.Tensor:
    """The tensor's elements in logical order as a flat uint8 tensor, by what `content_of` gave.

    Shares memory with ``tensor`` where that has them in order, else is a copy. Neither the tensor
    nor its autograd graph is changed.
    """
    with outside_modes():
        plain = tensor.detach()
        if not in_order:
            plain = plain.resolve_conj().resolve_neg().contiguous()
        return (plain if plain.dim() == 1 else plain.view(-1)).view(torch.uint8)


def bytes_of(given: object) -> torch.Tensor:
    """`to_bytes` of whatever may travel.

    Raises:
        MessageError: it may not; see `memory_of`.
    """
    content, _, in_order = memory_of(given)
    return to_bytes(content, in_order=in_order)


def raw_bytes(tensor: torch.Tensor, *, in_order: bool) -> bytes:
    """A CPU tensor's elements in logical order as bytes; for small ones, in one step."""
    if not in_order:
        tensor = to_bytes(tensor, in_order=False)
    return bytes_at(tensor.data_ptr(), tensor.nbytes)


def from_raw(payload: bytes, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor with these bytes."""
    if payload and len(shape) == 1 and not in_mode():  # most of what is small
        return torch.frombuffer(bytearray(payload), dtype=_TO_TORCH[dtype.code])
    kind = _TO_TORCH[dtype.code]
    with outside_modes():
        if not payload:
            # By way of bytes: torch warns where it makes a tensor of some dtypes itself.
            return _shaped(torch.empty(0, dtype=torch.uint8, device="cpu").view(kind), shape)
        flat = torch.frombuffer(bytearray(payload), dtype=kind)
        return flat if len(shape) == 1 else _shaped(flat, shape)


def from_bytes(payload: torch.Tensor, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """A flat uint8 tensor of the right size seen as ``dtype`` and ``shape``; shares its memory."""
    with outside_modes():
        flat = payload.view(_TO_TORCH[dtype.code])
        return flat if len(shape) == 1 and torch.is_grad_enabled() else _shaped(flat, shape)


def _shaped(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = flat.view(shape)
    # Torch would not have a view that is made without gradients be written where there are some.
    return tensor if torch.is_grad_enabled() else tensor.detach()


def payload_problem(
    payload: object, size_bytes: int, lent: torch.Tensor | None, device: str = "cpu"
) -> str | None:
    """Find what is wrong with the payload that a receiver gave for a message of a size.

    None stands for the buffer that it accepted, ``lent``; else the payload belongs on ``device``.
    """
    if payload is None:
        return None if lent is not None else "gives None and has accepted no buffer"
    if not isinstance(payload, torch.Tensor):
        return f"gives {type(payload).__name__} in place of a tensor"
    if (
        payload.dtype is torch.uint8
        and payload.dim() == 1
        and payload.numel() == size_bytes
        and payload.device.type == device
        and payload.layout is torch.strided
        and payload.is_contiguous()
    ):
        return None  # the usual case, for every message: no time for words
    due = f"a flat uint8 tensor of {size_bytes} bytes on {device!r} is due"
    if payload.layout is not torch.strided:
        return f"gives a tensor of layout {payload.layout}, {due}"
    count = payload.numel()
    problems = {
        f"changes the dtype: it gives {payload.dtype}": payload.dtype != torch.uint8,
        f"truncates: it gives {count} bytes": count < size_bytes,
        f"gives shape {tuple(payload.shape)}": count > size_bytes or payload.dim() != 1,
        f"gives strides {payload.stride()}": not payload.is_contiguous(),
        f"gives a tensor on {payload.device.type!r}": payload.device.type != device,
    }
    return next((f"{what}, {due}" for what, wrong in problems.items() if wrong), None)
