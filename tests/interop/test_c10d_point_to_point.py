"""Point to point over the c10d backend: what may be sent, works, groups, ends and options."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.testing import run_fresh
from tests.interop import c10d_features as features
from tests.interop.c10d_programs import STAGELINK, in_world

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stagelink.testing import RankPool


@pytest.mark.parametrize("program", features.IN_A_PAIR, ids=lambda program: program.__name__)
def test_between_two_ranks(program: Callable[[int, int], None], rank_pool: RankPool) -> None:
    rank_pool.run(features.everywhere, 2, program)


@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        (features.alone, 1),
        (features.a_batch_in_a_ring, 4),
        (features.subgroups, 4),
        (features.collectives, 3),
        (features.collectives_one_after_another, 3),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_among_ranks(program: Callable[[int, int], None], ranks: int, rank_pool: RankPool) -> None:
    rank_pool.run(features.everywhere, ranks, program)


def test_distributed_tensors(rank_pool: RankPool) -> None:
    rank_pool.run(in_world, 2, features.distributed_tensors, STAGELINK)


def test_a_group_of_ours_beside_gloo(rank_pool: RankPool) -> None:
    rank_pool.run(features.beside_gloo, 3)


def test_a_group_is_made_again(rank_pool: RankPool) -> None:
    rank_pool.run(features.made_again, 2)


def test_a_rank_hears_of_messages_before_it_has_met_all(rank_pool: RankPool) -> None:
    rank_pool.run(features.hears_early, 2)


# -- ends


def test_a_peer_that_closes_early_is_no_time_out(rank_pool: RankPool) -> None:
    rank_pool.run(features.closes_early, 2)


def test_no_room_any_more(rank_pool: RankPool) -> None:
    rank_pool.run(features.no_room_any_more, 2)


def test_a_rank_that_dies_is_named_in_every_receive() -> None:
    with run_fresh(features.dies, 3) as ranks:
        ranks.wait_for(0, "ready")
        ranks.kill(0)
        killed, *others = ranks.outcomes(timeout_s=20)
    assert not killed.ok
    assert all(outcome.ok for outcome in others), others
    assert all("rank 0 died" in outcome.value for outcome in others)


def test_a_rank_that_dies_is_named_in_every_collective() -> None:
    with run_fresh(features.dies_beside_a_collective, 3) as ranks:
        ranks.wait_for(0, "ready")
        ranks.kill(0)
        _, *others = ranks.outcomes(timeout_s=20)
    for outcome in others:
        assert outcome.ok, str(outcome)
        assert "rank 0 died" in outcome.value


def test_an_abort_reaches_all(rank_pool: RankPool) -> None:
    rank_pool.run(features.aborts, 2)


SCRIPT = """
import sys
import torch, torch.distributed as dist
import stagelink.interop.c10d
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("cpu:stagelink", store=store, rank=rank, world_size=2)
tensor = torch.full((100_000,), float(1 - rank))
if rank == 0:
    work = dist.isend(tensor, 1)
    work.wait()
else:
    dist.recv(tensor, 0)
    dist.irecv(tensor, 0)
print(int(tensor.sum()))
"""


def test_a_program_may_end_without_destroying_its_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, errors = rank.communicate(timeout=50)
        assert (rank.returncode, output, errors) == (0, "100000\n", "")


ENDS = """\
_sends_once closed
fork: exit codes [0, 0]
_leaves_works_alone closed
fork: exit codes [0, 0]
_sends_from_a_thread closed
fork: exit codes [0, 0]
_fails closed
fork: exit codes [3, 0]
_ends_without_a_word died
fork: exit codes [0, 0]
_leaves_works_alone closed
forkserver: exit codes [0, 0]
_leaves_works_alone closed
spawn: exit codes [0, 0]
"""


@pytest.mark.timeout(120)
def test_a_child_of_multiprocessing_delivers_what_it_sent_and_does_not_die() -> None:
    command = [sys.executable, "-m", "tests.interop.c10d_children", "fork", "forkserver", "spawn"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.stdout, ended.stderr) == (ENDS, "")


# -- options


@pytest.mark.parametrize("how", ["options", "environment"])
def test_rules_choose_what_carries_a_pair(how: str, rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(features.by_rules, 3, how, str(tmp_path / "links.toml"))
    assert found == [{1: "gloo", 2: "shm"}, {0: "gloo", 2: "shm"}, {0: "shm", 1: "shm"}]


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"pipeline": {"name": "x"}}, "PlanError: c10d options: pipeline: only the tables"),
        ({"link": []}, "control, limits have a meaning here (did you mean 'links'?)"),
        (
            {"links": [{"transport": "shm"}, {"transport": "shm", "tensor": "x", "to": 1}]},
            "links.tensor has no meaning here; those that have are transport, from_rank",
        ),
        ({"limits": {"deadline_s": 3}}, "limits.deadline_s has no meaning here"),
        ({"limits": 3}, "c10d options: limits: 3: must be a table"),
        ({"links": [{"transport": "carrier pigeon"}]}, "carrier pigeon"),
        ({"links": [{"colour": "red"}]}, "colour"),
        ({"transports": {"shm": {"link_bytes": 1}}}, "link_bytes"),
        ({"control": {"inline_bytes": -1}}, "inline_bytes"),
        ({"c10d": 3}, "c10d options: c10d: 3: must be a table"),
        ({"c10d": {"eager": 3}}, "c10d: unknown key 'eager'"),
        ({"c10d": {"eager_bytes": -1}}, "c10d.eager_bytes: -1: must be a whole number from 0"),
        ({"c10d": {"eager_bytes": "1 MiB"}}, "c10d.eager_bytes: '1 MiB': must be a whole"),
        ("/nonexistent/links.toml", "c10d options: /nonexistent/links.toml"),
    ],
    ids=[
        "table",
        "misspelt",
        "key of a plan's rule",
        "limit",
        "no table",
        "transport",
        "rule",
        "option",
        "number",
        "own table",
        "own key",
        "own number",
        "own type",
        "file",
    ],
)
def test_wrong_options_are_named(tables: Any, text: str, rank_pool: RankPool) -> None:
    for said in rank_pool.run(features.wrong_options, 2, tables):
        assert text in said


def test_options_that_differ_between_ranks_are_named(rank_pool: RankPool) -> None:
    for said in rank_pool.run(features.options_that_differ, 2):
        assert "inline_bytes" in said
        assert "100" in said
        assert "101" in said
