"""What a peer sends is data, never code; what the library says goes to its logger."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.testing import run_threads
from tests.support.pipelines import GLOO, LOOPBACK, document, joined, line, start_to_ends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

    import stagelink

PACKAGES = Path(__file__).parents[2] / "packages"
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
COLLECTIVES = ("all_gather_", "gather_", "broadcast_", "scatter_", "send_", "recv_")
CALLS = {"eval", "exec", "compile", "__import__"}


def _shipped() -> list[Path]:
    files = sorted(PACKAGES.glob("*/src/**/*.py"))
    # The launcher, and the kit for tests, talk by pipes to processes that they started themselves.
    return [file for file in files if not {"ranks", "testing"} & set(file.parts)]


def _loading(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.split(".")[0] in LOADERS)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in LOADERS:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                yield "torch.load"
            case ast.Attribute(attr=str(attr)) if (
                attr.startswith(COLLECTIVES) and "_object" in attr
            ):
                yield attr  # these pickle


def test_c064_nothing_shipped_can_load_code_from_bytes() -> None:
    files = _shipped()
    assert len(files) > 50
    found = {
        str(file.relative_to(PACKAGES)): what
        for file in files
        if (what := list(_loading(ast.parse(file.read_text(encoding="utf-8")))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "torch.load(f)",
        "dist.gather_object(y)",
    ],
)
def test_c064_the_scan_would_find_it(source: str) -> None:
    assert list(_loading(ast.parse(source)))


def _chain(comm: stagelink.Handler) -> None:
    stage, last = comm.stage.index, len(comm.plan.stages) - 1
    with comm.evaluate(3) as session:
        for mb in range(3):
            if stage:
                session.recv(f"h{stage - 1}", mb)
            if stage < last:
                session.send(f"h{stage}", torch.ones(3000), mb)
    comm.reduce([0.0])


def test_c065_a_run_is_silent() -> None:
    with start_to_ends(document(GLOO, (1,) * 4, line(4)), _chain) as ranks:
        for outcome in ranks.outcomes():
            assert outcome.ok
            assert outcome.value.kind == ""
            assert outcome.stdout == ""
            assert "stagelink" not in outcome.stderr


def test_c065_the_logger_has_the_details(caplog: pytest.LogCaptureFixture) -> None:
    plan = document(LOOPBACK, (1,) * 4, line(4))

    def run(rank: int, world_size: int, store: Store) -> None:
        with joined(rank, world_size, store, plan) as comm:
            _chain(comm)

    with caplog.at_level(logging.DEBUG, "stagelink"):
        run_threads(run, 4)
    for rank in range(4):
        assert any(f"rank {rank}" in record.getMessage() for record in caplog.records)
