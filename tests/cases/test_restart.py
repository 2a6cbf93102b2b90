"""A launcher starts all ranks again when some have died: they meet, and go on where they were."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.testing import run_fresh
from tests.support import restarting

if TYPE_CHECKING:
    from torch.distributed import Store

_ROOT = Path(__file__).parents[2]


def _check_weights(folder: Path) -> None:
    for rank, wanted in enumerate(restarting.undisturbed()):
        state = torch.load(folder / f"state-{rank}-{restarting.EPOCHS - 1}.pt")
        torch.testing.assert_close(state["module"], wanted)


def _incarnations(folder: Path, rank: int) -> list[str]:
    """The first epoch, and the node's count of restarts, of each of a rank's processes."""
    return (folder / f"incarnations-{rank}").read_text().splitlines()


# -- torch's launcher


def _agent(folder: Path) -> subprocess.Popen[bytes]:
    """One of two nodes, with one of two ranks; the second dies once."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2"]
    launch += ["--nnodes=2", "--nproc-per-node=1", "--monitor-interval=0.05"]
    launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/nodes"]
    launch += ["--rdzv-conf=store_type=file", "--rdzv-id=restarted", restarting.__file__]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            [*launch, str(folder), "1:1"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )


@pytest.mark.timeout(180)
def test_two_nodes_of_torchrun_come_back_when_one_rank_died(tmp_path: Path) -> None:
    """Each node counts only its own restarts, so that the counts of the ranks differ."""
    agents = [_agent(tmp_path), _agent(tmp_path)]
    try:
        codes = [agent.wait(160) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
    assert codes == [0, 0], (tmp_path / "output").read_text()
    _check_weights(tmp_path)
    assert _incarnations(tmp_path, 0) == ["0 0", "1 0"]
    assert _incarnations(tmp_path, 1) == ["0 0", "1 1"]


# -- each way to die, with processes started as that launcher does


def _rank(
    rank: int,
    world_size: int,
    unused: Store,
    folder: str,
    deaths: list[tuple[int, int]],
    count: int,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        TORCHELASTIC_RUN_ID="restarted",
        TORCHELASTIC_RESTART_COUNT=str(count),
    )
    restarting.work(folder, deaths, f"file://{folder}/store")


@pytest.mark.parametrize(
    "deaths",
    [[(0, 1)], [(0, 1), (1, 1)], [(1, 0), (0, 1)]],
    ids=["the first", "both", "in turn"],
)
def test_ranks_that_died_come_back_and_go_on(
    tmp_path: Path, deaths: list[tuple[int, int]]
) -> None:
    epochs = sorted({epoch for _, epoch in deaths})
    for count, epoch in enumerate(epochs):
        with run_fresh(_rank, 2, str(tmp_path), deaths, count) as ranks:
            for rank in (0, 1):
                _wait_for(tmp_path / f"disturbed-{rank}-{epoch}")
            for rank in (0, 1):
                ranks.kill(rank)  # as the launcher, which first ends the ranks that are left
            ranks.outcomes()
    with run_fresh(_rank, 2, str(tmp_path), deaths, len(epochs)) as ranks:
        ranks.results(50)
    _check_weights(tmp_path)
    wanted = [f"{begun} {count}" for count, begun in enumerate([0, *epochs])]
    assert _incarnations(tmp_path, 0) == _incarnations(tmp_path, 1) == wanted


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)
