"""A place to install fake distributions in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.site import Site, open_site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with open_site(tmp_path / "site", monkeypatch) as site:
        yield site
