"""Torch's modes, left while the library makes tensors of its own on a caller's thread.

A thread that waits reads for the whole rank, whatever mode its program waits in. A buffer that is
allocated under a fake tensor mode has no memory, inside ``torch.func.grad`` it is a wrapper, and
under ``torch.inference_mode`` it cannot take part in training later.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_dispatching = torch._C._len_torch_dispatch_stack
_overriding = torch._C._len_torch_function_stack
_transforming = torch._C._functorch.peek_interpreter_stack


def outside_modes() -> AbstractContextManager[object]:
    """Leave, for a ``with`` block, every mode of torch's that the calling thread is in.

    Those are dispatch modes (fake tensors), function modes (a default device), transforms of
    ``torch.func``, and inference mode.
    """
    # A lock that nobody else has: entered and left in C, where there is nothing to leave.
    return _outside() if in_mode() else RLock()


def in_mode() -> bool:
    """Whether the calling thread is in such a mode."""
    return bool(
        _dispatching()
        or _overriding()
        or torch.is_inference_mode_enabled()
        or _transforming() is not None
    )


@contextmanager
def _outside() -> Iterator[None]:
    with (
        torch._C.DisableTorchFunction(),
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.inference_mode(mode=False),
    ):
        yield
