"""A tensor into a message and out again: what is checked before anything leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from stagelink.errors import MessageError
from stagelink.links.arrival import Arrival, Key
from stagelink.links.out_link import SendJob
from stagelink.links.route import OutRoute
from stagelink.plan import Edge
from stagelink.plan.dtypes import DTYPE_BY_CODE
from stagelink.transport.header import NO_TRACE, Flag, Header, MessageKind
from stagelink.transport.modes import outside_modes
from stagelink.transport.payload import bytes_at, content_of, from_bytes, from_raw, to_bytes


class Terms(NamedTuple):
    """Terms that messages of one session have in common."""

    trains: bool  # whether gradients come back
    inline_bytes: int  # payloads in host memory up to this size travel in the header's frame
    # where this stage's tensors are. A link to a stage on another kind of device carries host
    # memory, and each end moves what is its own
    device: torch.device
    on_host: bool  # whether that is host memory


def seal(  # noqa: C901 - no frame more for each message
    routes: Sequence[OutRoute],
    key: Key,
    tensor: torch.Tensor | None,
    terms: Terms,
    like: Header | None = None,
) -> list[SendJob]:
    """The messages for a tensor, or for None; one for each route, alike but for its edge.

    A small payload in host memory is copied here; others share the tensor's memory where they can.

    Args:
        routes: where it goes; all routes of one tensor in one direction.
        key: what it is, on the first of them.
        tensor: what is to be sent.
        terms: of the session.
        like: of a gradient, the header of the tensor that it belongs to.

    Raises:
        MessageError: the tensor cannot be sent, breaks its contract, or the transport refuses it.
    """
    session, edge, direction, microbatch = key
    if tensor is None:
        header = Header(MessageKind.NONE, direction, 0, session, edge, microbatch)
        job = SendJob(header, None)
        return [job, *_others(routes, job, None, terms)]
    content, dtype, in_order = content_of(tensor)
    route = routes[0]
    if like is not None:
        check_gradient(like, content)
    elif route.has_contract:
        check_contract(route.edge, content)
    for one in routes:
        if one.dtypes is not None and dtype.name not in one.dtypes:
            raise MessageError(
                f"transport {one.link.link.transport!r} does not carry {dtype.name}, only "
                f"{', '.join(sorted(one.dtypes))}"
            )
    on_host = content.is_cpu
    if not (on_host and terms.on_host) and content.device != terms.device:
        raise MessageError(f"the tensor is on {content.device}, this rank's stage {terms.device}")
    flags, size_bytes = 0, content.nbytes
    if terms.trains and route.back is not None and content.requires_grad:
        flags = Flag.REQUIRES_GRAD
    carried = content
    if not (on_host and route.on_host) and route.link.stream.device != terms.device:
        on_host = route.on_host
        with outside_modes():
            carried = to_bytes(content, in_order=in_order).to(route.link.stream.device)
            in_order = True
    payload: torch.Tensor | bytes
    private = False
    if size_bytes <= terms.inline_bytes and on_host:
        if not in_order:
            carried = to_bytes(carried, in_order=False)
        payload = bytes_at(carried.data_ptr(), size_bytes)
        flags |= Flag.INLINE
    else:
        payload = to_bytes(carried, in_order=in_order)
        private = payload.data_ptr() != content.data_ptr()
    kind = MessageKind.DATA if like is None else MessageKind.GRAD
    header = tuple.__new__(
        Header,
        (kind, direction, flags, session, edge, microbatch, 0, 0, dtype.code, 0, 0,
         size_bytes, tuple(content.shape), NO_TRACE),
    )  # fmt: skip
    job = SendJob(header, payload, private=private)
    return [job] if len(routes) == 1 else [job, *_others(routes, job, tensor, terms)]


def _others(
    routes: Sequence[OutRoute], first: SendJob, tensor: torch.Tensor | None, terms: Terms
) -> Iterator[SendJob]:
    """The messages for further consumers: the same but for edge, and for where it is carried."""
    for route in routes[1:]:
        header = first.header._replace(edge=route.edge.index)
        if first.payload is None or route.link.stream.device == routes[0].link.stream.device:
            yield SendJob(header, first.payload, private=first.private)
        else:
            key = Key(header.session, header.edge, header.direction, header.microbatch)
            yield from seal((route,), key, tensor, terms)


def unseal(arrival: Arrival, terms: Terms) -> torch.Tensor | None:
    """The tensor that arrived, sharing the payload's memory; None where None was sent."""
    payload = arrival.payload
    if payload is None:
        return None
    if isinstance(payload, bytes):
        header = arrival.header  # whose dtype was looked at when it came
        tensor = from_raw(payload, DTYPE_BY_CODE[header.dtype_code], header.shape)
        if terms.on_host:
            return tensor
    else:
        header = arrival.header
        tensor = from_bytes(payload, DTYPE_BY_CODE[header.dtype_code], header.shape)
    if tensor.device == terms.device:
        return tensor
    with outside_modes():
        return tensor.to(terms.device)


def check_contract(edge: Edge, tensor: torch.Tensor) -> None:
    """Hold a tensor against what the plan declares for its edge; `MessageError` if it differs."""
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
    """Hold a gradient against its tensor's header; `MessageError` where shape or dtype differ."""
    got = str(gradient.dtype).removeprefix("torch.")
    if (tuple(gradient.shape), got) != (like.shape, like.dtype.name):
        raise MessageError(
            f"the tensor has shape {list(like.shape)} and dtype {like.dtype.name}, its gradient "
            f"{list(gradient.shape)} and {got}"
        )
