"""What a session says to a caller that is out of place, and what it does when it is left early."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagelink
from stagelink.deadline import Deadline
from stagelink.testing.faults import Gate, Hold, Point, faulty
from stagelink.transport.loopback import Loopback
from tests.support.pipelines import LOOPBACK, Ranks, check_same, document, line, tensor

if TYPE_CHECKING:
    from stagelink.exchange.session import Session
    from stagelink.testing import RankPool
    from tests.support.pipelines import Document

SMALL, LARGE = 3, 30_000


def _ones(size: int = SMALL, *, grad: bool = True) -> torch.Tensor:
    return torch.ones(size, requires_grad=grad)


# -- calls out of place --------------------------------------------------------------------------


def _out_of_place(comm: stagelink.Handler) -> None:
    session = comm.train(4)
    if comm.rank == 0:
        _sender_out_of_place(comm, session)
    else:
        _receiver_out_of_place(session)
    session.leave()
    for call in (
        lambda: session.send("h", _ones(), 1),
        lambda: session.recv("g", 1),
        lambda: session.recv_grad("h", 0),
        lambda: session.send_grad("g", None, 0),
    ):
        with pytest.raises(stagelink.UsageError, match=f"rank {comm.rank}: session 0 was left"):
            call()


def _open_too_many(comm: stagelink.Handler) -> None:
    for open_session in (comm.train, comm.evaluate):
        with pytest.raises(stagelink.PlanError, match="microbatches: 10000000: must be at most"):
            open_session(10**7)
    if comm.rank == 0:  # as a peer would that does not know of the bound
        comm.reduce([0.0])
        comm._engine.sessions.open(0, "evaluate", 10**12, None)
        with pytest.raises(stagelink.AbortedError, match="rank 1 reports"):
            comm.reduce([0.0])
    else:
        text = "rank 0: OPEN of session 0 with microbatches 1000000000000; .* must be at most"
        with pytest.raises(stagelink.ProtocolError, match=text):
            _reduce_and_evaluate(comm)


def _reduce_and_evaluate(comm: stagelink.Handler) -> None:
    comm.reduce([0.0])  # behind it, the other rank opens its session
    comm.evaluate()


def test_more_microbatches_than_can_be_listed_are_not_opened(rank_pool: RankPool) -> None:
    Ranks(LOOPBACK, rank_pool).run(document(LOOPBACK), _open_too_many)


def _refused(text: str, call: Any, *args: Any) -> None:
    with pytest.raises(stagelink.UsageError) as caught:
        call(*args)
    assert text in str(caught.value)


def _sender_out_of_place(comm: stagelink.Handler, session: Session) -> None:
    session.send("h", _ones(), 0)
    again = "rank 0: 'h' of microbatch 0 was sent before"
    _refused(again, session.send, "h", _ones(), 0)
    _refused(
        "stage 's0' produces no tensor 'hh'; it produces 'h'; did you mean 'h'?",
        session.send,
        "hh",
        _ones(),
        1,
    )
    _refused("stage 's0' consumes no tensor 'h'; it consumes none", session.recv, "h", 0)
    for wrong in (4, -1):
        _refused(
            f"rank 0: microbatch {wrong} is nobody's; this replica of stage 's0' handles "
            "0, 1, 2, 3 of 4",
            session.send,
            "h",
            _ones(),
            wrong,
        )
    _refused("'h' of microbatch 1 was not sent in this session", session.recv_grad, "h", 1)
    check_same(session.recv_grad("h", 0), torch.ones(SMALL))
    _refused(
        "microbatch 0 (backward, session 0) of edge 'h' was received before",
        session.recv_grad,
        "h",
        0,
    )
    _refused("session 0 is still open; leave its with block", comm.train, 4)
    _refused("session 0 is still open; leave its with block", comm.evaluate, 4)


def _receiver_out_of_place(session: Session) -> None:
    _refused(
        "'h' of microbatch 0 was not received in this session, so it has no gradient",
        session.send_grad,
        "h",
        _ones(),
        0,
    )
    check_same(session.recv("h", 0), torch.ones(SMALL))
    _refused(
        "microbatch 0 (forward, session 0) of edge 'h' was received before", session.recv, "h", 0
    )
    session.send_grad("h", torch.ones(SMALL), 0)
    _refused(
        "'h' of microbatch 0 takes no gradient: it was answered before, or its sender's "
        "tensor did not require one",
        session.send_grad,
        "h",
        _ones(),
        0,
    )
    session.send_grad("h", None, 0)  # the loop that knows nothing of it goes on


def test_calls_out_of_place_say_what_is_wrong(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _out_of_place)


def _openings_out_of_place(comm: stagelink.Handler) -> None:
    if comm.rank == 0:
        _refused("rank 0: stage 's0' receives nothing, so it must say how many", comm.train)
    for wrong in (-1, 2.0, "4", True):
        _refused(f"must be a whole number from 0, not {wrong!r}", comm.evaluate, wrong)


def test_openings_out_of_place_say_what_is_wrong(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _openings_out_of_place)


def _odd_microbatches(comm: stagelink.Handler) -> None:
    call = "send" if comm.stage.index == 0 else "recv"
    for odd, kind in (
        (0.0, "float"),
        ("0", "str"),
        (torch.tensor(0), "Tensor"),
        (None, "NoneType"),
    ):
        with comm.evaluate(1) as session:
            args = (torch.ones(2), odd) if call == "send" else (odd,)
            with pytest.raises(
                stagelink.UsageError, match=f"a microbatch is an int, not '{kind}'"
            ):
                getattr(session, call)("h", *args)
            if call == "send":
                session.send("h", torch.ones(2), 0)
            else:
                session.recv("h", 0)


def test_a_microbatch_is_an_int(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _odd_microbatches)


def _replicas_out_of_place(comm: stagelink.Handler) -> None:
    with comm.evaluate(7) as session:
        if comm.stage.index == 0:
            assert list(session.mine) == list(range(comm.rank, 7, 2))
            _refused(
                f"microbatch {1 - comm.rank} is rank {1 - comm.rank}'s; this replica of "
                f"stage 's0' handles {', '.join(map(str, session.mine))} of 7",
                session.send,
                "h",
                _ones(),
                1 - comm.rank,
            )


def test_a_microbatch_of_another_replica(ranks: Ranks) -> None:
    ranks.run(ranks.plan((2, 1)), _replicas_out_of_place)


# -- a message that is wrong harms only itself ---------------------------------------------------


def _wrong_then_right(comm: stagelink.Handler) -> None:
    with comm.train(2) as session:
        if comm.rank == 0:
            for mb in range(2):
                with pytest.raises(stagelink.MessageError, match=r"declares shape \[3\], got \[4"):
                    session.send("h", _ones(4), mb)
                if mb == 1:
                    comm.reduce([0.0])
                session.send("h", _ones(), mb)
            for mb in range(2):
                with pytest.raises(
                    stagelink.RefusedError, match=r"shape .3. and dtype float32, it"
                ):
                    session.recv_grad("h", mb)
                comm.reduce([0.0])
                check_same(session.recv_grad("h", mb), torch.ones(SMALL))
        else:
            check_same(session.recv("h", 0), torch.ones(SMALL))  # the refusal was overtaken
            with pytest.raises(stagelink.RefusedError, match=r"declares shape \[3\], got \[4"):
                session.recv("h", 1)
            comm.reduce([0.0])
            check_same(session.recv("h", 1), torch.ones(SMALL))
            for mb in range(2):
                with pytest.raises(stagelink.MessageError, match=r"its gradient .4. and float32"):
                    session.send_grad("h", torch.ones(4), mb)
                comm.reduce([0.0])
                session.send_grad("h", torch.ones(SMALL), mb)


def test_a_refused_message_may_be_sent_again(ranks: Ranks) -> None:
    ranks.run(ranks.plan((1, 1), [tensor("h", 0, 1, shape=[SMALL])]), _waits_before_the_first)


def _waits_before_the_first(comm: stagelink.Handler) -> None:
    if comm.rank == 1:
        # So that refusal and second try of microbatch 0 are both here before it is asked for.
        _second_try_is_here(comm)
    _wrong_then_right(comm)


def _second_try_is_here(comm: stagelink.Handler) -> None:
    plane, inbox = comm._plane, comm._engine.into.inbox

    def here() -> bool:
        return any(arrival.refusal is None for arrival in inbox._arrivals.values())

    assert plane.wait(here, Deadline(20))


# -- deadlines -----------------------------------------------------------------------------------


def _slow_at_first(comm: stagelink.Handler) -> None:
    with comm.evaluate(4) as session:
        if comm.rank == 0:
            session.send("h", _ones(), 0)
            session.send("h", _ones(), 1)  # waits for longer than a later one may
            with pytest.raises(stagelink.DeadlineError, match=r"within 0\.2 s: the window of 1"):
                session.send("h", _ones(), 2)
            comm.reduce([0.0])
        else:
            time.sleep(0.5)
            session.recv("h", 0)
            comm.reduce([0.0])


def test_only_the_first_answer_may_take_long(ranks: Ranks) -> None:
    limits = {"deadline_s": 0.2, "first_deadline_s": 20.0}
    ranks.run(ranks.plan(window=1, schedule="forward", limits=limits), _slow_at_first)


# -- several consumers ---------------------------------------------------------------------------


def _sum(comm: stagelink.Handler, size: int) -> None:
    values = [0.1, 0.7, 0.2]
    with comm.train(2) as session:
        for mb in range(2):
            if comm.rank == 0:
                session.send("h", _ones(size), mb)
                wanted = torch.full((size,), values[0]) + values[1] + values[2]
                check_same(session.recv_grad("h", mb), wanted)
            else:
                got = session.recv("h", mb)
                assert got is not None
                session.send_grad("h", torch.full((size,), values[comm.rank - 1]), mb)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("inline_bytes", [0, 8192])
def test_gradients_of_several_consumers_are_added_in_their_order(
    ranks: Ranks, size: int, inline_bytes: int
) -> None:
    tensors = [tensor("h", 0, 1, 2, 3), tensor("x", 1, 2), tensor("y", 2, 3)]
    plan = ranks.plan((1,) * 4, tensors, control={"inline_bytes": inline_bytes})
    ranks.run(plan, _sum, size)


def test_a_second_try_goes_to_the_consumer_that_left_no_place(ranks: Ranks) -> None:
    tensors = [tensor("h", 0, 1, 2, grad=False), tensor("x", 1, 2)]
    ranks.run(ranks.plan((1,) * 3, tensors, window=2), _one_consumer_is_late)


def _one_consumer_is_late(comm: stagelink.Handler) -> None:
    with comm.evaluate(3) as session:
        if comm.rank == 0:
            for mb in range(2):
                session.send("h", _ones(), mb)
            comm.reduce([0.0])
            comm.reduce([0.0])  # rank 1 has taken two, rank 2 none
            with pytest.raises(
                stagelink.DeadlineError, match=r"edge .h>2. to rank 2 within 0\.1 s"
            ):
                session.send("h", _ones(), 2, deadline_s=0.1)
            with pytest.raises(stagelink.UsageError, match="microbatch 2 was not sent in this se"):
                session.recv_grad("h", 2)
            comm.reduce([0.0])
            session.send("h", _ones(), 2)
            _refused("'h' of microbatch 2 was sent before", session.send, "h", _ones(), 2)
            return
        comm.reduce([0.0])
        for mb in range(3):
            if mb == (2 if comm.rank == 1 else 0):
                comm.reduce([0.0])
                comm.reduce([0.0])
            check_same(session.recv("h", mb), torch.ones(SMALL))


def _retried(comm: stagelink.Handler) -> None:
    with comm.train(1) as session:
        if comm.rank == 0:
            session.send("h", _ones(), 0)
            comm.reduce([0.0])  # one of the two gradients is here
            with pytest.raises(stagelink.DeadlineError, match=r"from rank 2 on edge .h>2. within"):
                session.recv_grad("h", 0, deadline_s=0.1)
            comm.reduce([0.0])
            check_same(session.recv_grad("h", 0), torch.full((SMALL,), 3.0))
            return
        session.recv("h", 0)
        gradient = torch.full((SMALL,), float(comm.rank))
        if comm.rank == 1:
            session.send_grad("h", gradient, 0)
        comm.reduce([0.0])
        comm.reduce([0.0])
        if comm.rank == 2:
            session.send_grad("h", gradient, 0)


def test_no_gradient_is_lost_by_a_missed_deadline(ranks: Ranks) -> None:
    tensors = [tensor("h", 0, 1, 2), tensor("x", 1, 2)]
    ranks.run(ranks.plan((1,) * 3, tensors), _retried)


# -- handles -------------------------------------------------------------------------------------


def _parked_and_started(comm: stagelink.Handler) -> None:
    with comm.evaluate(6) as session:
        if comm.rank == 0:
            handles = [session.isend("h", torch.full((LARGE,), float(mb)), mb) for mb in range(6)]
            assert [handle.done() for handle in handles] == [True] * 2 + [False] * 4
            comm.reduce([0.0])
            for handle in handles:
                handle.wait()
                handle.wait()
            assert all(handle.done() for handle in handles)
        else:
            comm.reduce([0.0])
            waiting = session.irecv("h", 0)
            first = waiting.wait()
            assert waiting.wait() is first
            assert waiting.done()
            for mb in range(1, 6):
                check_same(session.recv("h", mb), torch.full((LARGE,), float(mb)))


def test_a_message_that_found_its_window_full_starts_by_itself(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=2), _parked_and_started)


def _answered_in_between(comm: stagelink.Handler) -> None:
    """An answer comes after a message found its window full, and before it is parked."""
    with comm.evaluate(3) as session:
        if comm.rank == 0:
            for mb in range(2):
                session.send("h", _ones(), mb)
            out = comm._engine.out
            park = out.park
            refused: list[tuple[Any, ...]] = []

            def answer_then_park(*args: Any, copy: bool) -> None:
                refused.append(args)
                comm.reduce([0.0])  # and not before, the other rank answers
                comm.reduce([0.0])  # behind its answer
                park(*args, copy=copy)

            out.park = answer_then_park  # type: ignore[method-assign,assignment]
            handle = session.isend("h", _ones(), 2)
            assert refused
            assert handle.done()
        else:
            comm.reduce([0.0])
            session.recv("h", 0)
            comm.reduce([0.0])
        comm.reduce([0.0])
        if comm.rank == 1:
            for mb in range(1, 3):
                session.recv("h", mb)


def test_an_answer_just_before_a_message_is_parked_starts_it(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=2), _answered_in_between)


def _starts_when_its_session_is_over(comm: stagelink.Handler) -> None:
    with comm.evaluate(4) as session:
        if comm.rank == 0:
            handles = [session.isend("h", _ones(), mb) for mb in range(4)]
            handles[1].wait()
            assert not handles[3].done()
        comm.reduce([0.0])
    # What the other has not read it has answered, and reads no more of.
    if comm.rank == 0:
        handles[3].wait()
    with comm.evaluate(4) as session:  # all places are free again
        for mb in range(4):
            if comm.rank == 0:
                session.send("h", _ones(), mb)
            else:
                session.recv("h", mb)


def test_a_message_may_start_when_its_session_is_over(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=2), _starts_when_its_session_is_over)


def test_a_message_under_way_is_waited_for_after_its_session(ranks: Ranks) -> None:
    gate = Gate()
    cls = faulty(Loopback, Hold(message=0, at=Point.SEND_FINISH, until=gate))

    def send_and_leave(comm: stagelink.Handler) -> None:
        with comm.evaluate(1) as session:
            if comm.rank == 0:
                handle = session.send("h", _ones(), 0, copy=False)
            else:
                session.recv("h", 0)
        if comm.rank == 0:
            with pytest.raises(stagelink.DeadlineError, match=r"still in flight after 0\.05 s"):
                handle.wait(0.05)
            gate.open()
            handle.wait()
        comm.reduce([0.0])

    ranks.run(_faulty_plan(), send_and_leave, transports=[cls])


def _faulty_plan(**more: Any) -> Document:
    plan = document(LOOPBACK, **more)
    plan["links"] = [{"transport": "faulty"}]
    return plan


def _receive_handles(comm: stagelink.Handler) -> None:
    with comm.train(2) as session:
        if comm.rank == 0:
            comm.reduce([0.0])
            session.send("h", _ones(LARGE), 0)
            handle = session.irecv_grad("h", 0)
            check_same(handle.wait(), torch.ones(LARGE))
            assert handle.done()
            session.isend("h", torch.ones(3, dtype=torch.int64), 1)
            nothing = session.irecv_grad("h", 1)
            assert nothing.done()
            assert nothing.wait() is None
        else:
            handle = session.irecv("h", 0)
            twice = session.irecv("h", 0)
            assert not handle.done()
            with pytest.raises(stagelink.DeadlineError, match=r"within 0\.05 s"):
                handle.wait(0.05)
            comm.reduce([0.0])
            check_same(handle.wait(), torch.ones(LARGE))
            with pytest.raises(stagelink.UsageError, match="was received before"):
                twice.wait()
            session.isend_grad("h", torch.ones(LARGE), 0).wait()
            session.recv("h", 1)
            session.send_grad("h", None, 1)


def test_handles_of_receives(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _receive_handles)


# -- sessions that are left early ----------------------------------------------------------------


def _left_unread(comm: stagelink.Handler, size: int, leaver: int) -> None:
    """One end leaves in the middle; three times, since a lost place would be missed only later."""
    for _ in range(3):
        with comm.train(4) as session:
            if comm.rank == 0:
                for mb in range(2):
                    session.send("h", _ones(size), mb)
            elif leaver == 0:
                session.recv("h", 0)
                session.send_grad("h", torch.ones(size), 0)
            comm.reduce([0.0])
    with comm.train(4) as session:
        for mb in range(4):
            if comm.rank == 0:
                session.send("h", _ones(size), mb)
                check_same(session.recv_grad("h", mb), torch.ones(size))
            else:
                check_same(session.recv("h", mb), torch.ones(size))
                session.send_grad("h", torch.ones(size), mb)


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("inline_bytes", [0, 8192])
def test_the_window_recovers_from_what_nobody_read(
    ranks: Ranks, size: int, leaver: int, inline_bytes: int
) -> None:
    plan = ranks.plan(window=2, control={"inline_bytes": inline_bytes})
    ranks.run(plan, _left_unread, size, leaver)


def _no_gradient_is_no_none(comm: stagelink.Handler, received: bool) -> None:
    with comm.train(2) as session:
        if comm.rank == 0:
            session.send("h", _ones(), 0)
            comm.reduce([0.0])
            session.recv_grad("h", 0)
        else:
            comm.reduce([0.0])
            if received:
                session.recv("h", 0)
    comm.reduce([0.0])


@pytest.mark.parametrize("received", [True, False])
def test_a_gradient_that_nobody_will_send_is_an_error(ranks: Ranks, received: bool) -> None:
    """It must not look like the None of a branch that was not used."""
    end, _ = ranks.run_to_ends(ranks.plan(), _no_gradient_is_no_none, received)
    assert end.kind == "PeerClosedError"
    assert end.text == (
        "rank 0: peer rank 1 left session 0; it finished before its first message; microbatch 0 "
        "(backward, session 0) expected on edge 'h'"
    )


def _leaves_by_an_error(comm: stagelink.Handler) -> str:
    if comm.rank == 1:
        with suppress(ValueError), comm.evaluate(2) as session:
            session.recv("h", 0)
            int("of the user")
        comm.reduce([0.0])
        return ""
    with comm.evaluate(2) as session:
        session.send("h", _ones(), 0)
        comm.reduce([0.0])
        with pytest.raises(stagelink.PeerClosedError) as caught:
            session.send("h", _ones(), 1)
    return str(caught.value)


def test_a_session_that_an_error_ended_says_which(ranks: Ranks) -> None:
    text, _ = ranks.run(ranks.plan(window=1, schedule="forward"), _leaves_by_an_error)
    assert " after ValueError: invalid literal" in text  # it left, or has closed by now
    assert "'of the user'; microbatch 1 (forward, session 0) of edge 'h' was not sent" in text


def _late_answers(comm: stagelink.Handler) -> None:
    """The consumer answers a message of a session that the producer has left."""
    with comm.evaluate(2) as session:
        if comm.rank == 0:
            session.send("h", _ones(), 0)
            session.leave()
            comm.reduce([0.0])
        else:
            comm.reduce([0.0])
            check_same(session.recv("h", 0), torch.ones(SMALL))
            with pytest.raises(
                stagelink.PeerClosedError, match="it finished after microbatch 0; "
            ):
                session.recv("h", 1)
    with comm.evaluate(2) as session:
        for mb in range(2):
            if comm.rank == 0:
                session.send("h", _ones(), mb)
            else:
                session.recv("h", mb)


def test_what_was_sent_before_a_session_was_left_is_still_received(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=1, schedule="forward"), _late_answers)


def _ahead(comm: stagelink.Handler) -> None:
    """The producer is sessions ahead; what it sends is held for the consumer."""
    for session_number in range(5):
        with comm.evaluate(1) as session:
            if comm.rank == 0:
                session.send("h", torch.full((SMALL,), float(session_number)), 0)
            else:
                if session_number == 0:
                    assert comm._plane.wait(lambda: len(_inbox(comm)) == 2, _patience())
                check_same(session.recv("h", 0), torch.full((SMALL,), float(session_number)))


def _inbox(comm: stagelink.Handler) -> Any:
    return comm._engine.into.inbox


def _patience() -> Deadline:
    return Deadline(20)


def test_messages_of_later_sessions_are_held(ranks: Ranks) -> None:
    ranks.run(ranks.plan(window=2), _ahead)


def test_a_session_without_microbatches(ranks: Ranks) -> None:
    plan = ranks.plan((2, 1, 1), line(3))
    ranks.run(plan, _one_by_one)


def _one_by_one(comm: stagelink.Handler) -> None:
    for mode in (comm.train, comm.evaluate):
        with mode(0) as session:
            assert list(session.mine) == []
            assert session.actions == ()


# -- openings ------------------------------------------------------------------------------------


def _learned(comm: stagelink.Handler) -> tuple[int, int | None, str]:
    with comm.train(5, items=17) if comm.stage.index == 0 else comm.train() as session:
        first = (session.microbatches, session.items, session.mode)
    with comm.evaluate(2) if comm.stage.index == 0 else comm.evaluate() as session:
        assert (session.microbatches, session.items, session.mode) == (2, None, "evaluate")
    return first


def test_later_stages_learn_the_numbers(ranks: Ranks) -> None:
    plan = ranks.plan((2, 1, 3), line(3))
    assert ranks.run(plan, _learned) == [(5, 17, "train")] * 6


def _disagree(comm: stagelink.Handler, field: str, before: int) -> None:
    for _ in range(before):
        with comm.train(4, items=8):
            comm.reduce([0.0])
    other = comm.rank == 1
    match field:
        case "mode":
            session = comm.evaluate(4) if other else comm.train(4)
        case "microbatches":
            session = comm.train(6 if other else 4)
        case _:
            session = comm.train(4, items=9 if other else 8)
    with session:
        comm.reduce([0.0])


@pytest.mark.parametrize(
    ("field", "zero", "one"),
    [("mode", "'train'", "'evaluate'"), ("microbatches", "4", "6"), ("items", "8", "9")],
)
@pytest.mark.parametrize("before", [0, 2])
def test_other_openings_are_told_on_both(
    ranks: Ranks, field: str, zero: str, one: str, before: int
) -> None:
    for rank, end in enumerate(ranks.run_to_ends(ranks.plan(), _disagree, field, before)):
        here, there = (zero, one) if rank == 0 else (one, zero)
        # Each finds it by itself, whoever of them fails first.
        assert end.kind == "DisagreementError"
        assert end.text.startswith(
            f"session {before}: {field} is {here} on rank {rank}, {there} on rank {1 - rank}; "
        )


def _closes_instead(comm: stagelink.Handler) -> None:
    if comm.rank == 1:
        with comm.train():
            pass


def test_who_waits_for_an_opening_hears_that_the_peer_closed(ranks: Ranks) -> None:
    _, end = ranks.run_to_ends(ranks.plan(), _closes_instead)
    assert end.kind == "PeerClosedError"
    assert "peer rank 0 closed; the opening of session 0 expected" in end.text


# -- threads -------------------------------------------------------------------------------------


def _two_users(comm: stagelink.Handler) -> None:
    """One thread for forward, one for backward, as some loops have it."""
    with comm.train(30) as session:
        forward = threading.Thread(target=_forwards, args=(comm, session))
        forward.start()
        for mb in range(30):
            if comm.rank == 0:
                _wait_until_sent(session, mb)
                check_same(session.recv_grad("h", mb), torch.full((LARGE,), float(mb)))
            else:
                _wait_until_taken(session, mb)
                session.send_grad("h", torch.full((LARGE,), float(mb)), mb)
        forward.join(20)
        assert not forward.is_alive()


def _forwards(comm: stagelink.Handler, session: Session) -> None:
    for mb in range(30):
        if comm.rank == 0:
            session.send("h", _ones(LARGE), mb)
        else:
            session.recv("h", mb)


def _wait_until_sent(session: Session, mb: int) -> None:
    until = time.monotonic() + 20
    while mb not in session._traffic._ledgers[0].returning and time.monotonic() < until:
        time.sleep(0.001)


def _wait_until_taken(session: Session, mb: int) -> None:
    until = time.monotonic() + 20
    while mb not in session._traffic._ledgers[0].owed and time.monotonic() < until:
        time.sleep(0.001)


def test_forward_and_backward_in_two_threads(ranks: Ranks) -> None:
    ranks.run(ranks.plan(), _two_users)


def _close_ends_other_threads(comm: stagelink.Handler) -> str:
    session = comm.evaluate(4)
    if comm.rank == 0:
        comm.reduce([0.0])
        with pytest.raises(stagelink.PeerClosedError):
            comm.reduce([0.0])
        return ""
    texts: list[str] = []

    def wait() -> None:
        with pytest.raises(stagelink.ClosedError) as caught:
            session.recv("h", 0)
        texts.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    comm.reduce([0.0])
    comm.close()
    waiter.join(20)
    return texts[0]


def test_close_ends_a_receive_in_another_thread(ranks: Ranks) -> None:
    for _ in range(10):
        assert ranks.run(ranks.plan(), _close_ends_other_threads)[1] == "rank 1 is closed"


def _endless(comm: stagelink.Handler) -> None:
    with comm.evaluate(1) as session:
        if comm.rank == 0:
            session.send("h", _ones(), 0)
        else:
            session.recv("h", 0, deadline_s=float("inf"))
    comm.close(float("inf"))


def test_endless_deadlines(ranks: Ranks) -> None:
    endless = dict.fromkeys(
        ("deadline_s", "first_deadline_s", "connect_deadline_s", "close_deadline_s"), float("inf")
    )
    ranks.run(ranks.plan(limits=endless), _endless)


def _windows_of_links(comm: stagelink.Handler) -> list[int]:
    found = []
    for count in (4, 16, 2):
        with comm.train(count) as session:
            found += [max(map(comm._engine.node.wiring.window_of, comm._engine.node.wiring.links))]
            session.leave()
    return found


def test_a_session_with_larger_windows_raises_its_links(ranks: Ranks) -> None:
    found = ranks.run(ranks.plan(schedule="gpipe", microbatches=4), _windows_of_links)
    assert found == [[4, 16, 16]] * 2
