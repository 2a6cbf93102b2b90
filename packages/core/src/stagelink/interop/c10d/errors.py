"""Errors of messages that torch's callers catch: torch's error and ours in one."""

from __future__ import annotations

import torch.distributed as dist

from stagelink.errors import MessageError, MessageTypeError, RefusedError

__all__ = ["C10dMessageError", "C10dMessageTypeError", "C10dRefusedError", "error_like"]


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
