"""Frameworks that call c10d in ways of their own train over the backend as they do on gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from stagelink.testing import RankPool
from tests.interop import c10d_torchs_own as torchs_own
from tests.interop.c10d_callers import HOW, deepspeed, megatron
from tests.interop.c10d_programs import STAGELINK, in_world

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = [*((megatron, how) for how in HOW), (deepspeed,)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda given: " ".join(map(_name, given)))
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_weights_are_those_on_gloo(
    program: tuple[Callable[..., list[torch.Tensor]], *tuple[str, ...]],
    ranks: int,
    rank_pool: RankPool,
) -> None:
    train, *arguments = program
    ours, theirs = (
        rank_pool.run(in_world, ranks, train, backend, *arguments)
        for backend in (STAGELINK, "cpu:gloo")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == 4
        assert all(map(torch.equal, mine, other))


def _name(given: object) -> str:
    return getattr(given, "__name__", str(given))


# -- torch's own tests of a backend

NOT_HERE = {
    "test_batch_isend_irecv_mixed_backend_err": "needs GPUs",
    "test_batch_isend_irecv_op_err": "needs GPUs",
    "test_send_recv_any_source": "a message is for a rank that asks for it by its sender",
    "test_send_recv_any_source_autograd_profiler": "the same",
    "test_send_recv_any_source_torch_profiler": "the same",
}


def test_torchs_own() -> None:
    said = {}
    with RankPool() as pool:  # torch's module of tests changes much in a process
        (found,) = pool.run(torchs_own.names, 1)
        for name in torchs_own.POINT_TO_POINT:
            if name not in NOT_HERE:
                said[name] = pool.run(torchs_own.run, 3, name, torchs_own.PROFILED)
    assert said == {name: ["passed"] * 3 for name in said}
    # What a new torch tests beyond these is to be looked at.
    about = {name for name in found if "send" in name or "recv" in name}
    assert {name for name in about if "nccl" not in name} == {
        *torchs_own.POINT_TO_POINT,
        *NOT_HERE,
    }
