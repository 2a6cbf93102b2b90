"""The command line in this process, plans in files, and a place to install fake plugins in."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from textwrap import dedent, indent
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from stagelink.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Invoke = Callable[..., Result]
Write = Callable[..., "Path"]

_PLUGIN = """
from stagelink.transport.contract import Capabilities, Transport, Verdict
from stagelink.transport.hooks import hookimpl

class Fake(Transport):
    name = {name!r}
    api_version = (1, 0)
    capabilities = Capabilities(devices=frozenset({{"cpu"}}), auto_rank=50)

    @classmethod
    def probe(cls, options):
        return Verdict(True)

    def open_sender(self, link, port, deadline): ...

    def open_receiver(self, link, port, deadline): ...

{changes}

@hookimpl
def stagelink_register_transport():
    return Fake
"""


@dataclass
class Site:
    """A folder on the import path, for distributions with plugins in them."""

    path: Path
    modules: list[str] = field(default_factory=list)

    def plugin(self, name: str, source: str, group: str = "stagelink.transports") -> None:
        """Distribution ``NAME-dist`` 1.0 with an entry point for a module of this source."""
        module = f"{name.replace('-', '_')}_module"
        self.distribution(f"{name}-dist", f"{name} = {module}", group)
        (self.path / f"{module}.py").write_text(dedent(source))
        self.modules.append(module)
        importlib.invalidate_caches()

    def distribution(self, name: str, entry: str, group: str = "stagelink.transports") -> None:
        info = self.path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")

    def transport(self, name: str, changes: str = "", before: str = "") -> None:
        """A transport; ``changes`` are lines of its class, ``before`` lines of its module."""
        body = indent(dedent(changes), "    ")
        self.plugin(name, dedent(before) + _PLUGIN.format(name=name, changes=body))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = Site(folder)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


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
