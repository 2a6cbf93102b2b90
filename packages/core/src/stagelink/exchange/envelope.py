"""A tensor into a message and out again: what is checked before anything leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stagelink.errors import MessageError
from stagelink.links.out_link import SendJob
from stagelink.transport.header import Direction, Flag, Header, MessageKind
from stagelink.transport.modes import outside_modes
from stagelink.transport.payload import content_of, from_bytes, from_raw, raw_bytes, to_bytes

if TYPE_CHECKING:
    import torch

    from stagelink.links.arrival import Arrival, Key
    from stagelink.links.ways import WayOut
    from stagelink.plan import Edge

__all__ = ["Terms", "check_contract", "check_gradient", "seal", "unseal"]


class Terms(NamedTuple):
    """What messages of one session have in common.

    Attributes:
        trains: whether gradients come back.
        inline_bytes: payloads in host memory up to this size travel in the header's frame.
        device: where this stage's tensors are. A link to a stage on another kind of device carries
            host memory, and each end moves what is its own.
    """

    trains: bool
    inline_bytes: int
    device: torch.device


def seal(
    ways: Sequence[WayOut],
    key: Key,
    tensor: torch.Tensor | None,
    check: Callable[[torch.Tensor], None] | None,
    terms: Terms,
) -> SendJob:
    """The message for a tensor, or the NONE message for None.

    A small payload in host memory is copied here; others share the tensor's memory where they can.

    Args:
        ways: where it goes; all ways of one tensor in one direction.
        key: what it is, on the first of them.
        tensor: what is to be sent.
        check: raises where the tensor breaks its contract; None where there is none.
        terms: of the session.

    Raises:
        MessageError: the tensor cannot be sent, breaks its contract, or the transport refuses it.
    """
    session, edge, direction, microbatch = key
    if tensor is None:
        header = Header(MessageKind.NONE, direction, 0, session, edge, microbatch)
        return SendJob(header, None)
    content, dtype, in_order = content_of(tensor)
    if check is not None:
        check(content)
    _check_carried(ways, dtype.name)
    if content.device != terms.device:
        raise MessageError(f"the tensor is on {content.device}, this rank's stage {terms.device}")
    forward = direction is Direction.FORWARD
    takes_gradient = (
        forward and terms.trains and content.requires_grad and ways[0].edge.tensor.grad
    )
    flags = Flag.REQUIRES_GRAD if takes_gradient else 0
    carried, device = content, ways[0].link.lane.device
    if device != terms.device:
        with outside_modes():
            carried, in_order = to_bytes(content, in_order=in_order).to(device), True
    payload: torch.Tensor | bytes
    private = False
    if content.nbytes <= terms.inline_bytes and carried.is_cpu:
        payload = raw_bytes(carried, in_order=in_order)
        flags |= Flag.INLINE
    else:
        payload = to_bytes(carried, in_order=in_order)
        private = payload.data_ptr() != content.data_ptr()
    header = Header(
        MessageKind.DATA if forward else MessageKind.GRAD,
        direction,
        flags,
        session,
        edge,
        microbatch,
        dtype_code=dtype.code,
        payload_bytes=content.nbytes,
        shape=tuple(content.shape),
    )
    return SendJob(header, payload, private=private)


def unseal(arrival: Arrival, terms: Terms) -> torch.Tensor | None:
    """The tensor that arrived, sharing the payload's memory; None where None was sent."""
    payload = arrival.payload
    if payload is None:
        return None
    if isinstance(payload, bytes):
        tensor = from_raw(payload, arrival.header.dtype, arrival.header.shape)
    else:
        tensor = from_bytes(payload, arrival.header.dtype, arrival.header.shape)
    if tensor.device == terms.device:
        return tensor
    with outside_modes():
        return tensor.to(terms.device)


def check_contract(edge: Edge, tensor: torch.Tensor) -> None:
    """Hold a tensor against what the plan declares for its edge.

    Raises:
        MessageError: it differs.
    """
    declared = edge.tensor
    got = str(tensor.dtype).removeprefix("torch.")
    if declared.dtype is not None and got != declared.dtype:
        raise MessageError(f"the plan declares dtype {declared.dtype}, got {got}")
    if declared.shape is None:
        return
    shape = tuple(tensor.shape)
    fits = len(shape) == len(declared.shape) and all(
        want in (-1, size) for want, size in zip(declared.shape, shape, strict=True)
    )
    if not fits:
        raise MessageError(f"the plan declares shape {list(declared.shape)}, got {list(shape)}")


def check_gradient(like: Header, gradient: torch.Tensor) -> None:
    """Hold a gradient against the header of the tensor that it belongs to.

    Raises:
        MessageError: shape or dtype differ.
    """
    got = str(gradient.dtype).removeprefix("torch.")
    if (tuple(gradient.shape), got) != (like.shape, like.dtype.name):
        raise MessageError(
            f"the tensor has shape {list(like.shape)} and dtype {like.dtype.name}, its gradient "
            f"{list(gradient.shape)} and {got}"
        )


def _check_carried(ways: Sequence[WayOut], dtype: str) -> None:
    for way in ways:
        link = way.link
        if link.dtypes is not None and dtype not in link.dtypes:
            raise MessageError(
                f"transport {link.link.transport!r} does not carry {dtype}, only "
                f"{', '.join(sorted(link.dtypes))}"
            )
