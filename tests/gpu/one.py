"""The process of one point: ``python -m tests.gpu.one FUNCTION MACHINE FILE [ranks]``.

It stays light, so that what takes time to load is loaded side by side with the ranks' server.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import resource
import sys
import traceback
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.gpu.answers import Answer

__all__ = ["answer_of", "main"]


def _found(place: str) -> Any:
    """What stands at ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def answer_of(function: str, machine: str) -> Answer:
    """The point's answer, also where it raises; a rank of it may have hung or crashed."""
    try:
        answer: Answer = _found(function)(_found(machine)())
    except Exception as error:
        outcomes = getattr(error, "outcomes", ())  # of a RankFailedError
        if any(outcome.hung_s is not None for outcome in outcomes):
            return Answer("hung", str(error))
        if any(outcome.exit_code is not None for outcome in outcomes):
            return Answer("crashed", str(error))
        return Answer("failed", traceback.format_exc())
    return answer


def main(function: str, machine: str, file: str, ranks: str = "") -> None:
    """Write the answer, in one go."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if ranks:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "stagelink"])
        forkserver.ensure_running()
    text = json.dumps(asdict(answer_of(function, machine)))
    partial = Path(f"{file}.partial")
    partial.write_text(text)
    partial.rename(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
