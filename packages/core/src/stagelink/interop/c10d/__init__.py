"""A c10d backend: ``torch.distributed``'s send and receive over this library's links.

Importing this registers the backend ``stagelink``; then

::

    import stagelink.interop.c10d
    torch.distributed.init_process_group("cpu:stagelink")

and a program that uses ``send``, ``recv``, ``isend``, ``irecv``, ``batch_isend_irecv`` or their
forms for objects runs as it is, ``torch.distributed.pipelining`` for one. Collectives are handed
to gloo, on CUDA tensors to nccl.

What carries a pair of ranks is chosen by the usual rules, see `C10dOptions`. Errors of messages
are ``DistBackendError``; those about a message itself have classes of their own,
`C10dMessageError`, `C10dMessageTypeError` and `C10dRefusedError`, each the library's error of
that name as well.
"""

from __future__ import annotations

import torch.distributed as dist

from stagelink.interop.c10d.errors import C10dMessageError, C10dMessageTypeError, C10dRefusedError
from stagelink.interop.c10d.group import NAME, StagelinkGroup
from stagelink.interop.c10d.options import CONFIG_VARIABLE, C10dOptions

__all__ = [
    "CONFIG_VARIABLE",
    "C10dMessageError",
    "C10dMessageTypeError",
    "C10dOptions",
    "C10dRefusedError",
]


if NAME.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(NAME, StagelinkGroup, extended_api=True, devices=["cpu", "cuda"])
