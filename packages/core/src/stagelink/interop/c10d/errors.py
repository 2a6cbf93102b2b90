"""Errors that torch's callers catch, and checks of their arguments before anything is sent."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from stagelink.errors import MessageError, MessageTypeError, RefusedError


class C10dMessageError(dist.DistBackendError, MessageError):
    """A tensor that cannot be sent for its shape, or received into for how it lies in memory."""


class C10dMessageTypeError(dist.DistBackendError, MessageTypeError):
    """An object that cannot be sent, or received into, for what it is."""


class C10dRefusedError(dist.DistBackendError, RefusedError):
    """The peer could not send the message that is received; the text is the peer's own error."""


_OF: dict[type[Exception], type[dist.DistBackendError]] = {
    MessageTypeError: C10dMessageTypeError,
    RefusedError: C10dRefusedError,
    MessageError: C10dMessageError,
}


def error_like(error: BaseException, text: str) -> dist.DistBackendError:
    """An error for torch's caller; where it is about a message, one of the library's as well."""
    made = next((new for old, new in _OF.items() if isinstance(error, old)), None)
    return (made or dist.DistBackendError)(text)


def one_tensor(tensors: object) -> torch.Tensor:
    """The tensor of a list of one, as c10d's calls take it; else TypeError or ValueError."""
    if type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        return tensors[0]  # the usual case, for every message
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"stagelink: a list of one tensor is asked for, not a {_kind(tensors)}")
    if len(tensors) != 1:
        raise ValueError(f"stagelink: a list of one tensor is asked for, not of {len(tensors)}")
    (tensor,) = tensors
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"stagelink: a list of one tensor is asked for, not of a {_kind(tensor)}")
    return tensor


def whole(what: str, number: object) -> int:
    """A rank or a tag; `TypeError` where it is no whole number."""
    if type(number) is int:
        return number
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as error:  # the latter by a tensor of several numbers
        raise TypeError(f"stagelink: {what} {number!r} is no whole number") from error


def seconds_of(timeout: object, default_s: float) -> float:
    """Convert a time-out to seconds; None and 0 mean the group's, as in c10d. Else TypeError."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    elif timeout is None:
        timeout = 0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise TypeError(f"stagelink: timeout {timeout!r} is no timedelta")
    return timeout or default_s


def _kind(value: object) -> str:
    return type(value).__name__
