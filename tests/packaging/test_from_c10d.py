"""The page for users of torch.distributed: its code runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

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
