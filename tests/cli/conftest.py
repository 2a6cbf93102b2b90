"""The command line in this process, plans in files, and a place to install fake plugins in."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from stagelink.cli import main
from tests.support.site import Site, open_site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Invoke = Callable[..., Result]
Write = Callable[..., "Path"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Its transports come before all others."""
    with open_site(tmp_path / "site", monkeypatch, auto_rank=50) as site:
        yield site


@pytest.fixture
def invoke() -> Invoke:
    """``invoke("plan", path, columns=40)``: the command's result; its traceback is a failure."""

    def run(*arguments: object, columns: int = 200) -> Result:
        runner = CliRunner(env={"COLUMNS": str(columns), "FORCE_COLOR": None})
        result = runner.invoke(main, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return run


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write((2, 1), schedule="gpipe")``: a file with a line of stages a, b, … of so many ranks.

    Keywords become keys of ``[pipeline]``; ``more`` is TOML to add, ``tensor`` more lines of each
    tensor.
    """

    def make(
        replicas: tuple[int, ...], more: str = "", *, tensor: str = "", **pipeline: object
    ) -> Path:
        names = "abcdefgh"[: len(replicas)]
        keys = {"name": "line", "schedule": "1f1b", "microbatches": 4, **pipeline}
        text = "[pipeline]\n"
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        first = 0
        for name, count in zip(names, replicas, strict=True):
            ranks = list(range(first, first + count))
            text += f'[[stages]]\nname = "{name}"\nranks = {ranks}\n'
            first += count
        for source, target in pairwise(names):
            text += f'[[tensors]]\nname = "{source}{target}"\nfrom = "{source}"\nto = "{target}"\n'
            text += tensor
        path = tmp_path / "pipeline.toml"
        path.write_text(text + more)
        return path

    return make
