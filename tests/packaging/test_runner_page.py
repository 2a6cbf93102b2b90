"""The page on the runner: its code runs as it stands there, its script goes on after a stop."""

from __future__ import annotations

import copy
import inspect
import os
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

import stagelink
from tests.support.docs import blocks, broken_links, launched

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool

PATH = Path(__file__).parents[2] / "docs" / "runner.md"
PAGE = PATH.read_text()
*SHOWN, STREAM, SCRIPT = blocks(PAGE, "python")
(PLAN,) = blocks(PAGE, "toml")


def test_every_argument_has_a_row_and_every_link_a_place() -> None:
    table = PAGE.split("## Arguments")[1].split("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted([*inspect.signature(stagelink.PipelineRunner).parameters][1:])
    assert broken_links(PATH) == []


def _stages() -> list[torch.nn.Linear]:
    """The model; made before ranks run, since threads share torch's random numbers."""
    torch.manual_seed(7)
    return [torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)]


def _batch() -> dict[str, torch.Tensor]:
    """As many targets that are 0 as are not, unevenly in the four microbatches."""
    inputs = torch.linspace(-1, 1, 32).reshape(8, 4).sin()
    return {"input": inputs, "target": torch.tensor([0, 0, 0, 2, 1, 2, 1, 1])}


def _as_shown(comm: stagelink.Handler, stages: list[torch.nn.Linear]) -> dict[str, Any]:
    module = copy.deepcopy(stages[comm.stage.index])
    given = [_batch()] if comm.stage.index == 0 else None
    names: dict[str, Any] = {"comm": comm, "module": module, "batches": given, "held_out": given}
    for text in (*SHOWN, STREAM):
        exec(text, names)
    return names


def test_its_code_runs() -> None:
    plan = stagelink.Plan.from_dict(tomllib.loads(PLAN))
    found = stagelink.in_one_process(plan, partial(_as_shown, stages=_stages()))
    assert [set(names["results"]) for names in found] == [{"loss", "accuracy"}] * 3
    assert ["output" in names for names in found] == [False, False, True]


def _losses(comm: stagelink.Handler, stages: list[torch.nn.Linear]) -> list[float]:
    """A number for the stage's weights after an epoch with each of the page's losses."""
    names: dict[str, Any] = {
        "torch": torch,
        "stagelink": stagelink,
        "cross_entropy": cross_entropy,
    }
    for text in SHOWN[1:]:
        exec(text, names)
    sums = []
    for name in ("without_padding", "padded", "unknown", "in_chunks"):
        module = copy.deepcopy(stages[comm.stage.index])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        runner = stagelink.PipelineRunner(comm, module, loss=names[name], optimizer=optimizer)
        runner.train([_batch()] if comm.stage.index == 0 else None)
        sums.append(module.weight.detach().double().sum().item())
    return sums


def _alone(ignored: int) -> float:
    """The same number of the first stage, after a step of one process."""
    first, last = _stages()
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    batch = _batch()
    cross_entropy(last(first(batch["input"])), batch["target"], ignore_index=ignored).backward()
    optimizer.step()
    return first.weight.detach().double().sum().item()


def test_its_losses_are_what_it_says() -> None:
    """Also that a function around a torch loss is not known, which is why the page says so."""
    plan = stagelink.Plan.from_dict(tomllib.loads(PLAN))
    counted, known, unknown, chunks = stagelink.in_one_process(
        plan, partial(_losses, stages=_stages())
    )[0]
    kept, all_items = _alone(0), _alone(-100)
    torch.testing.assert_close([counted, known, chunks], [kept, kept, all_items])
    assert abs(unknown - kept) > 1e-4


def _run_script(rank: int, world_size: int, store: Store, folder: str) -> None:
    """Two epochs, then the script again from one state fewer; and all four at once elsewhere."""
    before = os.getcwd()
    try:
        for run, place, epochs in (("a", "parted", 2), ("b", "parted", 4), ("c", "whole", 4)):
            os.chdir(Path(folder) / place)
            launched(rank, world_size, store, run)
            exec(SCRIPT.replace("EPOCHS = 4", f"EPOCHS = {epochs}"), {})
            if run == "a" and rank == 2:
                Path("states/classifier-1.pt").unlink()  # as if this stage had saved an epoch less
    finally:
        os.chdir(before)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def test_its_script_goes_on_where_it_was(rank_pool: RankPool, tmp_path: Path) -> None:
    for place in ("parted", "whole"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "pipeline.toml").write_text(PLAN)
    rank_pool.run(_run_script, 3, str(tmp_path))
    for stage in ("features", "classifier"):
        states = [
            torch.load(tmp_path / place / "states" / f"{stage}-3.pt")
            for place in ("parted", "whole")
        ]
        assert set(states[0]) == set(
            re.findall(r"^\| `(\w+)` \|", PAGE.split("is the state of")[1], re.MULTILINE)
        )
        torch.testing.assert_close(*(state["module"] for state in states), rtol=0, atol=0)
