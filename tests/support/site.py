"""A place to install fake distributions in, with real metadata, for tests of plugins."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

__all__ = ["Site", "open_site"]

_TRANSPORT = """
from stagelink.transport.contract import Capabilities, Transport, Verdict
from stagelink.transport.hooks import hookimpl

class Fake(Transport):
    name = {name!r}
    api_version = (2, 0)
    capabilities = Capabilities(devices=frozenset({{"cpu"}}), auto_rank={auto_rank})

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
    """A folder on the import path, for distributions with plugins in them, with real metadata.

    Attributes:
        path: the folder.
        auto_rank: of the transports in it.
        modules: names of what was imported from it, perhaps.
    """

    path: Path
    auto_rank: int
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

    def transport(
        self, name: str, changes: str = "", before: str = "", returned: str = "Fake"
    ) -> None:
        """A transport; ``changes`` are lines of its class, ``before`` lines of its module."""
        body = indent(dedent(changes), "    ")
        source = _TRANSPORT.format(
            name=name, changes=body, returned=returned, auto_rank=self.auto_rank
        )
        self.plugin(name, dedent(before) + source)

    def plugin(self, name: str, source: str, group: str = "stagelink.transports") -> None:
        """Distribution ``NAME-dist`` 1.0 with an entry point for a module of this source."""
        module = f"{name.replace('-', '_')}_module"
        self.distribution(f"{name}-dist", f"{name} = {module}", group=group)
        self.module(module, source)


@contextmanager
def open_site(folder: Path, monkeypatch: pytest.MonkeyPatch, auto_rank: int = 5) -> Iterator[Site]:
    """Make the folder and put it on the import path; afterwards nothing of it stays imported."""
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = Site(folder, auto_rank)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)
