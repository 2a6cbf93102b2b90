"""Torch's own tests of a backend, out of the installed wheel, on ranks of our own.

They are methods of a class that starts processes for itself and knows the backends by name; here
each is called on every rank in a world over the backend, and told that it is gloo, which is what
it then expects. Those of a profiler look for events of the backends that they know, so ours is
made one of these, except that its events are not marked as those of another thread.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import types
import unittest
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.interop.c10d_programs import world

if TYPE_CHECKING:
    from torch.distributed import Store

POINT_TO_POINT = (
    "test_batch_isend_irecv_gloo",
    "test_batch_isend_irecv_gloo_tags",
    "test_batch_isend_irecv_op_err",
    "test_batch_isend_irecv_op_list_err",
    "test_irecv",
    "test_isend",
    "test_isend_autograd_profiler",
    "test_isend_torch_profiler",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_autograd_profiler",
    "test_send_recv_torch_profiler",
    "test_send_recv_with_tag",
    "test_send_recv_with_tag_autograd_profiler",
    "test_send_recv_with_tag_torch_profiler",
)

PROFILED = "stagelink"
"""The backend's name as a profiler's events have it."""


def internals() -> None:
    """Have torch's modules for tests be importable; they need another that is not installed."""
    # For what none of these tests does.
    expecttest: Any = types.ModuleType("expecttest")
    expecttest.TestCase, expecttest.ACCEPT = unittest.TestCase, False
    sys.modules.setdefault("expecttest", expecttest)


@cache
def _torchs(size: int) -> Any:
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(size), "TEMP_DIR": tempfile.gettempdir()}
    internals()
    from torch.testing._internal.distributed import distributed_test  # noqa: PLC0415 - see above

    tests: Any = distributed_test
    tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(PROFILED)
    found = tests.get_profiling_event

    def events(name: str, *given: Any, **options: Any) -> list[Any]:
        assert name.startswith(PROFILED)
        matching: list[Any] = found(name, *given, **options)
        for event in matching:
            event.is_async = True
        return matching

    tests.get_profiling_event = events

    class Case(
        tests.TestDistBackend,  # type: ignore[misc]
        tests.DistributedTest._DistTestBase,  # type: ignore[misc]
    ):
        def _barrier(self, *args: object, **options: object) -> None:
            dist.barrier()

    return Case


def names(rank: int, size: int, store: Store) -> list[str]:
    """All tests that there are."""
    return [name for name in dir(_torchs(size)) if name.startswith("test_")]


def run(rank: int, size: int, store: Store, name: str, backend: str) -> str:
    """One of torch's tests: ``passed``, or what went wrong."""
    case = _torchs(size)(name)
    case.rank = rank
    try:
        with world(rank, size, store, backend):
            getattr(case, name)()
            dist.barrier()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as ended:
        return f"skipped: exit code {ended.code}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
    return "passed"
