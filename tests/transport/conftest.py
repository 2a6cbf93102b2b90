"""A place to install fake distributions in, with real metadata, for tests of plugins."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TRANSPORT = """
from stagelink.transport.contract import Capabilities, Transport, Verdict
from stagelink.transport.hooks import hookimpl

class Fake(Transport):
    name = {name!r}
    api_version = (1, 0)
    capabilities = Capabilities(devices=frozenset({{"cpu"}}), auto_rank=5)

    @classmethod
    def probe(cls, options):
        return Verdict(True)

    def open_sender(self, link, port, deadline): ...

    def open_receiver(self, link, port, deadline): ...

{changes}

@hookimpl
def stagelink_register_transport():
    return {returned}
"""


@dataclass
class Site:
    """A folder on the import path."""

    path: Path
    modules: list[str] = field(default_factory=list)

    def module(self, name: str, source: str) -> None:
        (self.path / f"{name}.py").write_text(dedent(source))
        self.modules.append(name)
        importlib.invalidate_caches()

    def distribution(
        self,
        name: str,
        *entries: str,
        version: str = "1.0",
        group: str = "stagelink.transports",
    ) -> None:
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries]))
        importlib.invalidate_caches()

    def transport(self, name: str, changes: str = "", returned: str = "Fake") -> None:
        """A distribution ``NAME-dist`` with a transport; ``changes`` are lines of its class."""
        self.distribution(f"{name}-dist", f"{name} = {name}_module")
        body = indent(dedent(changes), "    ")
        source = _TRANSPORT.format(name=name, changes=body, returned=returned)
        self.module(f"{name}_module", source)

    def plugin(self, name: str, source: str, group: str = "stagelink.transports") -> None:
        """A distribution ``NAME-dist`` with an entry point for a module of this source."""
        self.distribution(f"{name}-dist", f"{name} = {name}_module", group=group)
        self.module(f"{name}_module", source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = Site(folder)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)
