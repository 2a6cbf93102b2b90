"""Torch's own tests of pipelining, out of a source tree of torch, over the backend and over gloo.

``python -m tests.interop.c10d_torchs_pipelining TORCH [WORD]`` runs those whose name has the
word, and says what became of each; the exit code is 1 where one passes over gloo only.

They ask for GPUs and nccl, and start processes for themselves. Here each is called on every rank
of a pool, on the CPU: what asks for a GPU is answered yes, and the backend's name is replaced.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import unittest
from collections import Counter
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from stagelink.testing import RankFailedError, RankPool
from tests.interop.c10d_programs import STAGELINK, world
from tests.interop.c10d_torchs_own import internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

FILES = (
    "test/distributed/pipelining/test_schedule_multiproc.py",
    "test/distributed/pipelining/test_stage.py",
    "test/distributed/pipelining/test_composability.py",
    "test/distributed/pipelining/test_dtensor_pp_integration.py",
    "test/distributed/pipelining/test_dtensor_pp.py",
    "test/distributed/_composable/test_composability/test_pp_composability.py",
)
DEBUGGED = frozenset({"test_stage"})
"""Files whose classes ask for `TORCH_DISTRIBUTED_DEBUG` as they are set up, which needs GPUs."""

BACKENDS = ("cpu:gloo", STAGELINK)
CPU = torch.device("cpu")
SECONDS = 90.0
WIDTH = 300


def _as_it_is(*given: Any, **options: Any) -> Callable[[Any], Any]:
    """In place of a decorator that skips."""
    return lambda test: test


def _no_instances(*given: Any, **options: Any) -> None:
    """In place of what makes a class for each kind of device that is there."""


@cache
def _module(path: str) -> Any:
    """A file of tests, with nothing skipped for want of a GPU."""
    internals()
    from torch.testing._internal import (  # noqa: PLC0415 - only after the above
        common_cuda,
        common_device_type,
        common_distributed,
        common_utils,
    )

    for module in (common_utils, common_distributed, common_cuda, common_device_type):
        for name in vars(module):
            if name.startswith(("requires_", "skip_if_", "skip_but_")):
                setattr(module, name, _as_it_is)
            elif name in {"TEST_MULTIGPU", "TEST_MULTIACCELERATOR"}:
                setattr(module, name, True)
    tests: Any = common_device_type
    tests.instantiate_device_type_tests = _no_instances
    distributed: Any = common_distributed
    distributed.at_least_x_gpu = lambda count: True
    distributed.MultiProcContinousTest = distributed.MultiProcContinuousTest  # as it was spelt
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.insert(0, folder)  # they import modules that lie beside them
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _classes(path: str) -> Iterator[type[unittest.TestCase]]:
    for found in vars(_module(path)).values():
        if isinstance(found, type) and issubclass(found, unittest.TestCase):
            yield found


def names(rank: int, size: int, store: Store, path: str) -> dict[tuple[str, str], int]:
    """All tests of several ranks, by their class and name: how many ranks."""
    sizes = {}
    for found in _classes(path):
        if found.__module__ == Path(path).stem and hasattr(found, "world_size"):
            ranks = found.world_size
            if isinstance(ranks, property):
                ranks = ranks.fget(object.__new__(found))  # type: ignore[misc]
            for name in dir(found):
                if name.startswith("test_"):
                    sizes[found.__name__, name] = ranks if ranks > 0 else 2
    return sizes


def run(rank: int, size: int, store: Store, path: str, backend: str, of: str, name: str) -> str:
    """One test: ``passed``, or what went wrong."""
    module = _module(path)
    kept = store.path  # type: ignore[attr-defined]
    own = {"device": CPU, "device_type": "cpu", "rank": rank, "world_size": size}
    case = type(of, (getattr(module, of),), own)(name)
    case.file_name = f"{kept}.own"
    case._rank_device = lambda device: CPU
    module.device_type, module.backend = "cpu", backend
    module.DEVICE_TYPE = "cpu"
    test = getattr(type(case), name)  # not the case's own, which waits for processes
    given = ["cpu"] if "device" in inspect.signature(test).parameters else []
    try:
        with ExitStack() as steps:
            steps.enter_context(mock.patch.object(torch.accelerator, "set_device_index"))
            steps.enter_context(mock.patch.object(torch.cuda, "set_device"))
            steps.callback(_leave)
            if Path(path).stem in DEBUGGED:
                steps.callback(dist.set_debug_level, dist.get_debug_level())
                dist.set_debug_level(dist.DebugLevel.DETAIL)
            if hasattr(case, "_init_pg"):  # else it makes the group itself
                steps.enter_context(world(rank, size, store, backend))
            torch.manual_seed(1234)  # as torch's own runner does, the same on all
            test(case, *given)
            if dist.is_initialized():
                dist.barrier()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except Exception as error:
        text = " ".join(f"{error}".split())
        return f"{type(error).__name__}: {text}"
    return "passed"


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.compiler.reset()


def _outcome(pool: RankPool, size: int, path: str, backend: str, of: str, name: str) -> str:
    """What a test comes to: the first rank that has more to say than ``passed``."""
    try:
        said = pool.run(run, size, path, backend, of, name, timeout_s=SECONDS)
    except RankFailedError as error:
        return [line for line in f"{error}".splitlines() if line.strip()][-1]
    return next((line for line in said if line != "passed"), "passed")


def main(tree: str, word: str = "") -> int:
    """Run what is there; 1 if something passes over gloo and not over the backend."""
    worse = 0
    for path in (str(Path(tree, file).resolve()) for file in FILES):
        if not Path(path).exists():
            continue
        passed: Counter[str] = Counter()
        with RankPool() as pool:
            (sizes,) = pool.run(names, 1, path, timeout_s=SECONDS)
            for (of, name), size in sizes.items():
                if word in name:
                    said = {
                        backend: _outcome(pool, size, path, backend, of, name)
                        for backend in BACKENDS
                    }
                    good = {backend for backend in BACKENDS if said[backend] == "passed"}
                    passed.update([*good, "tests"])
                    worse += good == {BACKENDS[0]}
                    _tell(name, said)
        _tell(Path(path).name, {key: str(passed[key]) for key in ("tests", *BACKENDS)})
    return int(worse > 0)


def _tell(name: str, said: dict[str, str]) -> None:
    texts = (f"{key} {text[:WIDTH]}" for key, text in said.items())
    sys.stdout.write(f"{name}: {' | '.join(texts)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or not Path(sys.argv[1], "test", "distributed").is_dir():
        sys.exit(
            "give the path of torch's source tree, and a word of the tests' names if you like"
        )
    sys.exit(main(*sys.argv[1:]))
