"""The page for users of torch.distributed: its code runs as it stands there."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import stagelink.interop.c10d  # noqa: F401 - registers the backend
from tests.support.docs import blocks, launched

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool

PAGE = (Path(__file__).parents[2] / "docs" / "from-c10d.md").read_text()


def _as_shown(rank: int, world_size: int, store: Store, folder: str) -> dict[str, dict[int, str]]:
    """Run the page's blocks as a launcher's rank would, where the page's file is."""
    register, with_options = blocks(PAGE, "python")
    names: dict[str, Any] = {"torch": torch, "dist": dist}
    before = os.getcwd()
    os.chdir(folder)
    try:
        launched(rank, world_size, store, "first")
        exec(register, names)
        dist.destroy_process_group()
        launched(rank, world_size, store, "second")
        exec(with_options, names)
        group: Any = dist.group.WORLD
        found: dict[str, dict[int, str]] = group.transports
        dist.destroy_process_group()
    finally:
        os.chdir(before)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    return found


def test_its_code_runs_and_says_what_is_used(rank_pool: RankPool, tmp_path: Path) -> None:
    (links,) = blocks(PAGE, "toml")
    (tmp_path / "links.toml").write_text(links)
    found = rank_pool.run(_as_shown, 3, str(tmp_path))
    (said,) = re.findall(r"transports  # (.*): what", PAGE)
    assert found[0] == eval(said)
    assert found[1] == {"cpu": {0: "gloo", 2: "shm"}}


def test_who_speaks_at_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before there is a store; then this library, which names who is missing."""

    def texts(**given: Any) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is asked
            dist.init_process_group("cpu:stagelink", timeout=timedelta(seconds=0.5), **given)
        return f"{type(caught.value).__name__}: {caught.value}"

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    for port, wanted in (
        ("99999", "ValueError: port must have value from 0 to 65535"),
        ("abc", "ValueError: invalid literal for int()"),
    ):
        monkeypatch.setenv("MASTER_PORT", port)
        assert re.match(wanted, texts())
    ours = texts(init_method=f"file://{tmp_path}/store", rank=0, world_size=2)
    assert ours.startswith("ConnectError: rank 0: missing: 1, not here within 0.5 s. ")
