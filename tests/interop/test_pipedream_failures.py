"""What goes wrong under PipeDream's names, and who is told what."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import stagelink
from stagelink.interop.pipedream import CommunicationHandler
from stagelink.interop.pipedream.meeting import BACKEND
from stagelink.testing import report, run_fresh
from tests.interop.pipedream_driver import (
    TABLES,
    Job,
    Runtime,
    attempt,
    drive,
    made,
    with_handler,
)
from tests.support import tensors

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink.testing import RankPool

SHORT = {**TABLES, "limits": {"deadline_s": 2.5, "first_deadline_s": 2.5}}


@pytest.mark.parametrize(
    ("shape", "warm_up", "safe", "count"),
    [
        # PipeDream's default; reported as its issue 39, where all ranks block for ever.
        ((4, 3, 1), (1, 1, 0), (2, 1, 0), 3),
        ((1, 3, 1), (3, 1, 0), (5, 1, 0), 9),
    ],
    ids=str,
)
def test_a_warm_up_that_hangs_is_named(
    shape: tuple[int, ...],
    warm_up: tuple[int, ...],
    safe: tuple[int, ...],
    count: int,
    rank_pool: RankPool,
) -> None:
    job = Job(shape, (("train", count),), warm_up, tables=SHORT, patience_s=5)
    ends = rank_pool.run(attempt, job.world_size, job)
    assert all(kind for kind, _ in ends)
    texts = [text for kind, text in ends if kind == "DeadlineError"]
    assert texts
    texts = [text for text in texts if f"warm-up of {', '.join(map(str, warm_up))}, " in text]
    assert texts, ends
    for text in texts:
        assert re.search(
            r"within 2.5 s; expected microbatch \d+ \((for|back)ward, session 0\)", text
        )
        assert re.search(r"is replica \d of stage \d, in the training of \d minibatches", text)
        assert re.search(r"\d forwards done, \d backwards begun, minibatches .* forward", text)
        assert "the window is 1024 for each tensor and pair of ranks" in text
        assert "PipeDream's loop deadlocks in a cycle: rank " in text
        assert "for its replica rank" in text
        assert f"a stage_to_depth_map of {', '.join(map(str, safe))} would not hang" in text


@pytest.mark.parametrize(
    ("shape", "safe", "count"),
    [((4, 3, 1), (2, 1, 0), 3), ((1, 3, 1), (5, 1, 0), 9)],
    ids=str,
)
def test_the_warm_up_that_is_named_instead_runs(
    shape: tuple[int, ...], safe: tuple[int, ...], count: int, rank_pool: RankPool
) -> None:
    job = Job(shape, (("train", count),), warm_up=safe)
    rank_pool.run(drive, job.world_size, job)


def test_without_waiting_replicas_the_default_runs(rank_pool: RankPool) -> None:
    rank_pool.run(drive, 8, Job((4, 3, 1), (("train", 3), ("eval", 3)), sync=False))


def _no_backward(runtime: Runtime) -> None:
    """One stage waits for what the other never sends, in a loop that would not hang."""
    runtime.start("train", 4)
    runtime.run_forward()
    if runtime.stage == 0:
        runtime.run_backward()
    else:
        runtime.receive("out0")


def _ends(rank: int, size: int, store: object, job: Job, case: object) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        with_handler(rank, size, store, job, case)  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def test_a_loop_that_departs_from_pipedreams(rank_pool: RankPool) -> None:
    ends = rank_pool.run(_ends, 2, Job((1, 1), tables=SHORT), _no_backward)
    assert {kind for kind, _, _ in ends} <= {"DeadlineError", "AbortedError"}
    text = next(text for kind, text, _ in ends if kind == "DeadlineError")
    assert "does not hang here: a rank is slow, or does something else" in text


def _goes_on(runtime: Runtime) -> None:
    """After a deadline nothing goes on: the next call fails at once, here and elsewhere."""
    runtime.start("train", 4)
    runtime.run_forward()
    if runtime.stage == 1:
        with pytest.raises(stagelink.StagelinkError):
            runtime.receive("out0")  # of the second minibatch
        return
    with pytest.raises(stagelink.DeadlineError):
        runtime.receive("out0", backward=True)
    began = time.monotonic()
    with pytest.raises(stagelink.StagelinkError, match="PipeDream's loop does not hang here"):
        runtime.receive("out0", backward=True)
    assert time.monotonic() - began < 2


def test_a_deadline_is_the_end(rank_pool: RankPool) -> None:
    ends = rank_pool.run(_ends, 2, Job((1, 1), tables=SHORT), _goes_on)
    assert {kind for kind, _, _ in ends} <= {"", "DeadlineError", "AbortedError"}, ends


def _fails(runtime: Runtime) -> None:
    runtime.start("train", 4)
    runtime.run_forward()
    if runtime.stage == 1:
        raise RuntimeError("not to my liking")
    runtime.run_backward()


def test_an_error_on_one_rank_reaches_the_others(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(_ends, 2, Job((1, 1)), _fails)
    assert second[:2] == ("RuntimeError", "not to my liking")
    assert first[0] == "AbortedError"
    assert "rank 1" in first[1]
    assert "not to my liking" in first[1]
    assert first[2] < 10


def _replicas_add(rank: int, _size: int, store: Store, job: Job, victim: int) -> str:
    """Rank 0 adds up gradients by DDP, the other replica does not come; the victim is killed."""
    with made(rank, store, job) as handler:
        runtime = Runtime(handler, rank, job)
        runtime.initialize()
        model: torch.nn.Module = torch.nn.Linear(2, 2)
        if runtime.group is not None:
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=runtime.group)
        runtime.start("train", 2 if runtime.next else 4)
        handler._comm.reduce([1.0])  # type: ignore[union-attr]
        if rank == victim:
            report("ready")
            threading.Event().wait()
        if rank != 0:
            if runtime.next:
                handler.send("out0", torch.ones(2), 0, 0)
            with pytest.raises(stagelink.StagelinkError, match=f"rank {victim} died"):
                handler.recv("out0", 0, 0, backward=bool(runtime.next))
            return ""
        with pytest.raises(RuntimeError, match=f"rank {victim} died") as found:
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(stagelink.StagelinkError, match=f"rank {victim} died"):
            dist.all_reduce(torch.ones(1), group=runtime.group)
        assert dist.get_backend() == BACKEND
        return str(found.value)


@pytest.mark.parametrize("victim", [1, 2], ids=["a replica", "a rank of another stage"])
def test_replicas_that_add_gradients_hear_who_died(victim: int) -> None:
    with run_fresh(_replicas_add, 3, Job((2, 1)), victim) as ranks:
        ranks.wait_for(victim, "ready")
        ranks.kill(victim)
        outcomes = ranks.outcomes(timeout_s=20)
    for outcome in outcomes:
        assert outcome.ok or outcome.rank == victim, str(outcome)


def _different_numbers(runtime: Runtime) -> None:
    """As with ``--num_minibatches``, which PipeDream applies to each rank."""
    runtime.start("train", 4)


def test_numbers_that_differ_between_stages(rank_pool: RankPool) -> None:
    ends = rank_pool.run(_ends, 3, Job((2, 1)), _different_numbers)
    _check_disagreement(
        ends,
        "the replicas of stage 0 were started with 4, 4 iterations, in all 8, those of stage "
        "1 with 4, in all 4; every stage handles every minibatch once",
    )


def _check_disagreement(ends: Sequence[tuple[str, str, float]], expected: str) -> None:
    """All were told, by themselves or by one that was faster."""
    assert {kind for kind, _, _ in ends} <= {"DisagreementError", "AbortedError"}
    assert any(kind == "DisagreementError" for kind, _, _ in ends)
    assert all(expected in text for _, text, _ in ends), ends


def _different_phases(runtime: Runtime) -> None:
    runtime.start("eval" if runtime.rank == 1 else "train", 2)


def test_phases_that_differ(rank_pool: RankPool) -> None:
    ends = rank_pool.run(_ends, 2, Job((1, 1)), _different_phases)
    _check_disagreement(ends, "ranks [1] start an evaluation, the others a training")


# -- arguments

INT = torch.zeros(2, dtype=torch.int64)


def _misuse(runtime: Runtime) -> None:
    """Every call out of place says so, and harms nothing: minibatches go through afterwards."""
    handler, first = runtime.handler, runtime.stage == 0
    _before_a_phase(runtime)
    runtime.start("train", 1)
    with pytest.raises(stagelink.UsageError, match=r"wait\(\) ends a phase before the next one"):
        handler.start_helper_threads(1, forward_only=False)
    if first:
        _before_the_forward(handler)
    runtime.run_forward()
    if first:
        with pytest.raises(stagelink.UsageError, match="'out0 0>1' of microbatch 0 was sent befo"):
            handler.send("out0", torch.ones(2), 0, 0)
    else:
        _before_the_backward(handler)
    runtime.run_backward()
    handler.wait()
    handler.wait()
    runtime.start("eval", 1)
    runtime.run_forward()
    if not first:
        with pytest.raises(stagelink.UsageError, match="nothing goes back for 'out0': acks do"):
            handler.send("out0", torch.ones(2), 0, 0, backward=True)
    runtime.run_ack()
    handler.wait()
    handler.close()
    handler.close()
    assert not dist.is_initialized()
    with pytest.raises(stagelink.UsageError, match="close was called"):
        handler.recv("out0", 0, 0)


def _before_a_phase(runtime: Runtime) -> None:
    handler = runtime.handler
    with pytest.raises(stagelink.UsageError, match="no phase: start_helper_threads comes first"):
        handler.send("out0", INT, 0, 0)
    with pytest.raises(stagelink.UsageError, match="initialize was called before"):
        runtime.initialize()
    with pytest.raises(stagelink.UsageError, match="num_iterations must be an int from 0, not -1"):
        handler.start_helper_threads(-1, forward_only=False)
    handler.set_counter(3)


def _before_the_forward(handler: CommunicationHandler) -> None:
    with pytest.raises(stagelink.UsageError, match="sends no 'out7' in this phase; it sends 'out"):
        handler.send("out7", INT, 0, 0)
    with pytest.raises(stagelink.UsageError, match="sends no 'ack' in this phase"):
        handler.recv("ack", 0, 0, backward=True)
    with pytest.raises(stagelink.UsageError, match="goes back for 'target': no targets do"):
        handler.recv("target", 0, 0, backward=True)
    with pytest.raises(stagelink.UsageError, match="minibatch 1 of this phase, which was started"):
        handler.send("out0", torch.ones(2), 1, 0)
    with pytest.raises(stagelink.UsageError, match="a minibatch's id is an int, not 'x'"):
        handler.send("out0", torch.ones(2), "x", 0)  # type: ignore[arg-type]
    with pytest.raises(stagelink.MessageError, match=r"'out0': the tensor is torch\.float16, tra"):
        handler.send("out0", torch.ones(2, dtype=torch.float16), 0, 0)
    with pytest.raises(stagelink.MessageError, match=r"'target': a target is received as torch\."):
        handler.send("target", torch.ones(2), 0, 0)
    with pytest.raises(stagelink.UsageError, match="was not sent in this session"):
        handler.recv("out0", 0, 0, backward=True)


def _before_the_backward(handler: CommunicationHandler) -> None:
    assert handler._loop is not None
    handler._loop.progress.received = 0  # as if increment_messaging_index had been left out
    with pytest.raises(stagelink.UsageError, match="'out0 0>1' was received before"):
        handler.recv("out0", 0, 0)
    with pytest.raises(stagelink.UsageError, match="rank 1 receives no 'ack'"):
        handler.send("ack", INT, 0, 0, backward=True)
    with pytest.raises(stagelink.MessageError, match=r"the tensor is torch\.int64, training_ten"):
        handler.send("out0", INT, 0, 0, backward=True)


def test_calls_out_of_place(rank_pool: RankPool) -> None:
    rank_pool.run(with_handler, 2, Job((1, 1)), _misuse)


# -- tensors that are more than their memory


def _kinds(runtime: Runtime) -> None:
    """What is data arrives, there and back; what is not is refused at both ends."""
    handler, values, first = runtime.handler, torch.arange(12.0), runtime.stage == 0
    kinds, refused = [*tensors.DATA.values(), tensors.zeros], [*tensors.REFUSED.values()]
    runtime.start("train", len(kinds) + len(refused))
    modes = itertools.cycle(tensors.MODES.values())
    for number, (make, mode) in enumerate(zip(kinds, modes, strict=False)):
        expected = (values * (make is not tensors.zeros)).tolist()
        given = make(values)
        if first:
            with mode():
                handler.send("out0", given, number, 0)
        with mode():
            got = handler.recv("out0", number, number, backward=first)
        assert got is not None
        assert (got.requires_grad, got.tolist()) == (not first, expected)
        if not first:
            handler.increment_messaging_index(sending=False)
            with mode():
                handler.send("out0", given, 0, number, backward=True)
            handler.increment_messaging_index(sending=True)
    for number, (make, text) in enumerate(refused, len(kinds)):
        _is_refused(handler, make, text, number, backward=False, sends=first)
        _is_refused(handler, make, text, number, backward=True, sends=not first)
    handler.wait()


def _is_refused(
    handler: CommunicationHandler,
    make: tensors.Make,
    text: str,
    number: int,
    *,
    backward: bool,
    sends: bool,
) -> None:
    values = torch.arange(12.0)
    if sends:
        with pytest.raises(stagelink.MessageTypeError, match=text):
            handler.send("out0", make(values), number, number, backward)
        dist.barrier()  # the other has heard
        handler.send("out0", values, number, number, backward)
        if backward:
            handler.increment_messaging_index(sending=True)
        return
    with pytest.raises(stagelink.RefusedError, match=text):
        handler.recv("out0", number, number, backward)
    dist.barrier()
    got = handler.recv("out0", number, number, backward)
    assert got is not None
    assert got.tolist() == values.tolist()
    if not backward:
        handler.increment_messaging_index(sending=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_kinds_of_tensors(rank_pool: RankPool) -> None:
    rank_pool.run(with_handler, 2, Job((1, 1)), _kinds)


def _shares(runtime: Runtime) -> tuple[int, int]:
    return runtime.handler.num_iterations_for_helper_threads(6)


def test_shares_of_neighbours(rank_pool: RankPool) -> None:
    shares = rank_pool.run(with_handler, 5, Job((2, 1, 2)), _shares)
    assert shares == [(6, 0), (6, 0), (3, 3), (0, 6), (0, 6)]


def _wrong_maps(runtime: Runtime) -> None:
    if runtime.rank == 1:
        runtime.previous = []
    runtime.initialize()


def _no_dtype(runtime: Runtime) -> None:
    runtime.dtypes = {}
    runtime.initialize()


def test_maps_that_do_not_fit_together(rank_pool: RankPool) -> None:
    for kind, text, _ in rank_pool.run(_bare, 2, Job((1, 1)), _wrong_maps):
        assert kind == "PlanError"
        assert "rank 1" in text or "rank 0" in text
    for rank, (kind, text, _) in enumerate(rank_pool.run(_bare, 2, Job((1, 1)), _no_dtype)):
        assert kind == "PlanError"
        assert text == f"rank {rank}: training_tensor_dtypes has none for 'out0'"


def _bare(rank: int, size: int, store: object, job: Job, case: object) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        with_handler(rank, size, store, job, case, False)  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _second_group(rank: int, _size: int, store: object, job: Job) -> str:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=1)  # type: ignore[arg-type]
    try:
        _construct(world_size=1)
    except stagelink.UsageError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_a_default_group_that_is_there_already(rank_pool: RankPool) -> None:
    (text,) = rank_pool.run(_second_group, 1, Job((1,)))
    assert text.startswith("rank 0: the default process group exists already")


def _construct(**wrong: object) -> CommunicationHandler:
    arguments = {
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "rank": 0,
        "local_rank": 0,
        "num_ranks_in_server": 1,
        "world_size": 2,
        "fp16": False,
        "backend": "gloo",
    }
    return CommunicationHandler(**(arguments | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"rank": 2}, "launched as rank 2 of a world of 2: the ranks of this world are 0 to 1"),
        ({"rank": "0"}, "the rank must be an int"),
        ({"world_size": 0}, "a world has at least 1 rank"),
        ({"num_ranks_in_server": 0}, "num_ranks_in_server must be an int of at least 1, not 0"),
    ],
    ids=str,
)
def test_arguments_of_the_constructor(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(stagelink.PlanError, match=text):
        _construct(**wrong)
