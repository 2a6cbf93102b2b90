"""Wrong arguments of a group's calls are refused before anything is sent or waited for."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stagelink.errors import PlanError
from stagelink.interop.c10d import C10dOptions
from tests.interop.c10d_features import everywhere
from tests.interop.c10d_programs import STAGELINK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from stagelink.testing import RankPool

X = torch.ones(3)
NO_NUMBERS: tuple[Any, ...] = (None, "a", 1.5, X, [], object())
NO_RANKS = (-1, 2, 2**31, 2**64)
NO_TAGS = (-1, 2**63, 2**64)
NO_LISTS: tuple[tuple[Any, type[Exception], str], ...] = (
    ([], ValueError, "not of 0"),
    ([X, X], ValueError, "not of 2"),
    ("ab", ValueError, "not of 2"),
    (None, TypeError, "not a NoneType"),
    (3, TypeError, "not a int"),
    (X, TypeError, "not a Tensor"),
    (iter([X]), TypeError, "not a list_iterator"),
    ({}, TypeError, "not a dict"),
    ([None], TypeError, "not of a NoneType"),
    ([[X]], TypeError, "not of a list"),
)
NO_TIMES: tuple[Any, ...] = ("a", math.nan, object(), [], True, X)


def _refused(
    call: Callable[..., Any], *given: Any, error: type[Exception], text: str, **options: Any
) -> None:
    with pytest.raises(error, match=text):
        call(*given, **options)


def _wrong_arguments(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    peer = 1 - rank
    backend = dist.DistBackendError
    for call in (group.send, group.recv):
        for wrong in NO_NUMBERS:
            _refused(call, [X], wrong, 0, error=TypeError, text="rank .* is no whole number")
            _refused(call, [X], peer, wrong, error=TypeError, text="tag .* is no whole number")
        for number in NO_RANKS:
            _refused(call, [X], number, 0, error=backend, text=f"no rank {number} in a group of 2")
        for number in NO_TAGS:
            _refused(call, [X], peer, number, error=backend, text=f"tag {number} is not from 0")
        for tensors, error, text in NO_LISTS:
            _refused(call, tensors, peer, 0, error=error, text=text)
    for call in (dist.isend, dist.irecv):
        _refused(call, X, 7, error=backend, text="no rank 7")
        _refused(call, X, peer, tag=1.5, error=TypeError, text="is no whole number")
    _refused(dist.send, X, None, error=ValueError, text="Must specify")
    _refused(dist.send, X, rank, error=ValueError, text="rank")
    _refused(dist.recv, X, error=backend, text="a rank that is named")
    _the_first_is_still_the_first(peer)


def _the_first_is_still_the_first(peer: int) -> None:
    sent, got = torch.arange(3.0), torch.zeros(3)
    work = dist.irecv(got, peer)
    dist.send(sent, peer)
    assert work is not None
    for wrong in NO_TIMES:
        _refused(work.wait, wrong, error=TypeError, text="is no timedelta")
    work.wait(timedelta.max)
    assert torch.equal(got, sent)
    never = dist.irecv(got, peer, tag=1)
    assert never is not None
    for soon in (timedelta(seconds=-1), -1.0, 0.01, timedelta(seconds=0.01)):
        _refused(never.wait, soon, error=dist.DistBackendError, text="not done within")
    dist.barrier()
    dist.send(sent, peer, tag=1)
    never.wait()


def test_wrong_arguments_are_refused_and_take_no_number(rank_pool: RankPool) -> None:
    rank_pool.run(everywhere, 2, _wrong_arguments)


def _alone(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    for call in (group.send, group.recv):
        _refused(call, [X], 1, 0, error=dist.DistBackendError, text="no rank 1 in a group of 1")
    _refused(dist.send, X, 0, error=ValueError, text="rank")
    _refused(dist.recv, X, error=dist.DistBackendError, text="a rank that is named")


def test_in_a_group_of_one_there_is_no_other(rank_pool: RankPool) -> None:
    rank_pool.run(everywhere, 1, _alone)


def test_tables_are_tables() -> None:
    wrong: tuple[Any, ...] = (None, 3, "x", [1], {3: 1}, {None: {}}, X)
    for tables in wrong:
        with pytest.raises(PlanError, match=r"c10d options: .*tables"):
            C10dOptions(tables)


def _no_options(rank: int, size: int, store: Store, options: Any) -> None:
    with pytest.raises(PlanError, match=f"pg_options: a {type(options).__name__}.*C10dOptions"):
        dist.init_process_group(
            STAGELINK, store=store, rank=rank, world_size=size, pg_options=options
        )
    dist.distributed_c10d._world.group_count = 0


def test_options_are_options(rank_pool: RankPool) -> None:
    wrong: tuple[Any, ...] = ({"links": []}, "links.toml", 3)
    for options in wrong:
        rank_pool.run(_no_options, 1, options)
