"""What stands in a page of documentation, and what its code is run in."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store

__all__ = ["blocks", "broken_links", "launched"]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """The links of a page, and their headings, that lead nowhere in the repository."""
    broken = []
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        other = page.parent / path if path else page
        if not other.exists():
            broken.append(target)
        elif heading:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
            if heading not in anchors:
                broken.append(target)
    return broken


def launched(rank: int, world_size: int, store: Store, run: str) -> None:
    """Set a launcher's environment variables, with a port that is free.

    Args:
        rank: of the calling process.
        world_size: of all.
        store: to agree on the port.
        run: a name that no other call with this store has.
    """
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store.set(run, str(free.getsockname()[1]))
    port = store.get(run).decode()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
