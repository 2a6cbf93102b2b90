"""Sessions until the end: who waits for what will not come hears that the data have run out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink import UNTIL_END
from stagelink.deadline import Deadline
from stagelink.exchange.ledger import Marks
from stagelink.transport.header import MessageKind
from tests.support.pipelines import check_same, line

if TYPE_CHECKING:
    from stagelink.control.connection import Frame
    from tests.support.pipelines import Ranks


def _one_by_one(comm: stagelink.Handler, count: int, mode: str) -> int:
    """Every rank follows its actions; only the first stage knows how many there will be."""
    first, last = comm.stage.index == 0, comm.stage.index == len(comm.plan.stages) - 1
    opened = comm.train if mode == "train" else comm.evaluate
    done = 0
    with opened(UNTIL_END if first else None) as session:
        if first and count == 0:
            session.end(0)
        for action in session.actions:
            mb = action.microbatch
            if action.kind is stagelink.Kind.BACKWARD:
                grad = torch.ones(3) if last else session.recv_grad(f"h{comm.stage.index}", mb)
                if not first:
                    session.send_grad(f"h{comm.stage.index - 1}", grad, mb)
                continue
            value = torch.full((3,), float(mb))
            if not first:
                received = session.recv(f"h{comm.stage.index - 1}", mb)
                assert received is not None
                check_same(received.detach(), value)
            if not last:
                tensor = value.requires_grad_(mode == "train")
                session.send(f"h{comm.stage.index}", tensor, mb)
            done += 1
            if first and mb + comm.stage.replicas >= count:
                session.end(count)
        assert session.microbatches == count
        assert len(session.mine) == done
        assert not session.has(count)
    return done


@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 23])
def test_all_learn_the_end(any_ranks: Ranks, mode: str, count: int) -> None:
    # With fewer microbatches than replicas of the first stage, the others end by the first check.
    replicas = (2, 3, 1) if count > 1 else (1, 3, 1)
    done = any_ranks.run(any_ranks.plan(replicas, line(3)), _one_by_one, count, mode)
    assert sum(done) == 3 * count


def _in_turn(comm: stagelink.Handler) -> None:
    for count, mode in ((4, "train"), (3, "evaluate"), (0, "train"), (7, "train")):
        _one_by_one(comm, count, mode)


def test_one_after_another(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan((1, 2), line(2)), _in_turn)


def _many(comm: stagelink.Handler) -> int:
    with comm.evaluate(UNTIL_END if comm.rank == 0 else None) as session:
        if comm.rank == 0:
            for mb in range(3000):
                session.send("h", torch.ones(2), mb)
            session.end(3000)
        else:
            for action in session.actions:
                session.recv("h", action.microbatch)
        ledgers = session._traffic._ledgers.values()
        marks = [mark for ledger in ledgers for mark in (ledger.sent, ledger.taken)]
        due = sum(len(ledger.returning) + len(ledger.owed) for ledger in ledgers)
        return sum(len(mark.others) for mark in marks) + due


def test_a_long_session_keeps_nothing_of_what_is_done(ranks: Ranks) -> None:
    assert ranks.run(ranks.plan(), _many) == [0, 0]


def _misused(comm: stagelink.Handler) -> None:
    with comm.evaluate(2) as session:
        with pytest.raises(stagelink.UsageError, match="has 2 microbatches already"):
            session.end(2)
        assert session.has(1)
        assert not session.has(2)
    with comm.evaluate(UNTIL_END if comm.rank == 0 else None) as session:
        if comm.rank == 0:
            for mb in range(3):
                session.send("h", torch.ones(2), mb)
            wrong: tuple[Any, ...] = (2, -1, "3", None, 3.5, True, UNTIL_END, 2**70)
            for number in wrong:
                with pytest.raises(stagelink.UsageError, match="from 3, not "):
                    session.end(number)
            session.end(3)
            with pytest.raises(stagelink.UsageError, match="has 3 microbatches already"):
                session.end(3)
            with pytest.raises(stagelink.UsageError, match="microbatch 3 is nobody's"):
                session.send("h", torch.ones(2), 3)
        else:
            with pytest.raises(stagelink.UsageError, match="only a stage that receives nothing"):
                session.end(3)
            assert [action.microbatch for action in session.actions] == [0, 1, 2]
            for mb in range(3):
                session.recv("h", mb)
        assert not session.has(-1)
    if comm.rank == 0:
        with pytest.raises(stagelink.UsageError, match="lists of actions have an end"):
            comm.train(UNTIL_END, actions={})


def test_misuse_is_told(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=4), _misused)


def _gpipe(comm: stagelink.Handler) -> None:
    if comm.rank == 0:
        with pytest.raises(stagelink.PlanError, match="no last microbatch to turn at"):
            comm.train(UNTIL_END)


def test_gpipe_has_to_know(ranks: Ranks) -> None:
    ranks.run(ranks.plan(schedule="gpipe"), _gpipe)


def _asks_again(comm: stagelink.Handler) -> None:
    with comm.evaluate(UNTIL_END if comm.rank == 0 else None) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2), 0)
        else:
            session.recv("h", 0)
            assert session.has(0)  # the end is not known yet
        comm.reduce([0.0])
        if comm.rank == 0:
            session.end(1)


def test_it_has_what_was_taken_before_the_end(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _asks_again)


def _nobody_takes_from_both(comm: stagelink.Handler) -> None:
    with comm.evaluate(UNTIL_END if comm.rank < 2 else None) as session:
        if comm.rank < 2:
            session.end(2 + comm.rank)
        comm.reduce([0.0])
        comm.reduce([0.0])


def test_replicas_of_the_first_stage_tell_each_other(any_ranks: Ranks) -> None:
    ends = any_ranks.run_to_ends(any_ranks.plan((2, 2)), _nobody_takes_from_both)
    assert all("their data differ" in end.text for end in ends)


def _two_numbers(comm: stagelink.Handler) -> None:
    with comm.evaluate(UNTIL_END if comm.rank < 2 else None) as session:
        if comm.rank < 2:
            session.send("h", torch.ones(2), comm.rank)
            session.end(2 + comm.rank)
        else:
            for action in session.actions:
                session.recv("h", action.microbatch)
        comm.reduce([0.0])


def test_replicas_of_the_first_stage_must_agree(any_ranks: Ranks) -> None:
    ends = any_ranks.run_to_ends(any_ranks.plan((2, 1)), _two_numbers)
    assert all("session 0 ends after" in end.text for end in ends)
    assert all("their data differ" in end.text for end in ends)


def _leave_before_they_hear(comm: stagelink.Handler) -> None:
    engine = comm._engine
    handlers, close = engine.plane._handlers, engine.sessions.close
    heard = handlers[MessageKind.LAST]
    held: list[tuple[int, Frame]] = []

    def hear() -> None:
        for peer, frame in held:
            heard(peer, frame)

    def close_and_hear() -> None:
        close()
        handlers[MessageKind.LAST] = heard
        engine.plane.reader.call(hear)

    handlers[MessageKind.LAST] = lambda peer, frame: held.append((peer, frame))
    engine.sessions.close = close_and_hear  # type: ignore[method-assign]
    with comm.evaluate(UNTIL_END if comm.rank < 2 else None) as session:
        if comm.rank < 2:
            session.end(comm.rank)


def test_replicas_of_the_first_stage_are_compared_after_they_have_left(any_ranks: Ranks) -> None:
    ends = any_ranks.run_to_ends(any_ranks.plan((2, 2)), _leave_before_they_hear)
    # At least by the one that ends second.
    assert any("their data differ" in end.text for end in ends[:2]), ends


def _late(comm: stagelink.Handler) -> None:
    with comm.evaluate(UNTIL_END if comm.rank < 2 else None) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2), 0)
            session.end(2)
        elif comm.rank == 1:
            session.send("h", torch.ones(2), 1)
        else:
            for action in session.actions:
                session.recv("h", action.microbatch)
        if comm.rank == 1:
            record = session._record
            assert comm._plane.wait(lambda: record.siblings_count is not None, Deadline(20))
            text = "ends after 2 microbatches on one rank .* another has microbatch 3"
            with pytest.raises(stagelink.DisagreementError, match=text):
                session.send("h", torch.ones(2), 3)
        comm.reduce([0.0])


def test_a_microbatch_beyond_the_end_is_told_for_what_it_is(any_ranks: Ranks) -> None:
    any_ranks.run(any_ranks.plan((2, 1)), _late)


def _leaves(comm: stagelink.Handler) -> None:
    with comm.evaluate(UNTIL_END if comm.rank == 0 else None) as session:
        if comm.rank == 0:
            session.send("h", torch.ones(2), 0)
            return
        session.recv("h", 0)
        with pytest.raises(
            stagelink.PeerClosedError, match=r"peer rank 0 (left session 0|closed)"
        ):
            session.has(1)


def test_a_first_stage_that_leaves_without_an_end(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _leaves)


def test_marks_in_any_order() -> None:
    marks = Marks()
    for number in (3, 1, 0, 1, 4, 2):
        assert number not in marks or number == 1
        marks.add(number)
        assert number in marks
    assert all(number in marks for number in range(5))
    assert 5 not in marks
    assert not marks.others
