"""Checks of a message whose peer stops or dies half way, or whose own end is aborted.

Each rank follows its part of a check in order; where that depends on the other's, it waits for a
word in the store, so nothing depends on which rank is faster. A check returns, on each rank, what
the transport did wrong, or nothing; `NOTHING_TO_WAIT_FOR` of one whose message is through before.
"""

from __future__ import annotations

import os
import signal

from torch.distributed import Store

from stagelink.testing.drivers import use_once
from stagelink.testing.half_way import DEADLINE_S, WORD_S, half_way
from stagelink.testing.subject import Subject

_FAILS_S = 1.0
"""Seconds for a receive to find that nothing comes any more."""


def check_silent_sender(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that a receive neither blocks reading nor its caller when the sender stops."""
    wrong = ""
    with half_way(rank, world_size, store, subject, stops=0) as side:
        if rank == 0:
            side.send()
            side.wait("seen")
        else:
            wrong = (
                side.wait_begun()
                or side.call("receive", lambda: side.session.recv("e0", 1, deadline_s=DEADLINE_S))
                or side.arrival("sends no more")
            )
            side.tell("seen")
    return wrong


def check_silent_receiver(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that a send does not block its caller when the receiver stops."""
    wrong = ""
    with half_way(rank, world_size, store, subject, stops=1) as side:
        if rank == 0:
            wrong = side.call("send", lambda: side.send().wait(DEADLINE_S)) or side.arrival("")
            side.tell("seen")
        else:
            side.wait("seen")
    return wrong


def check_broken_off(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that a receive whose sender has been aborted half way is not done."""
    wrong = ""
    with half_way(rank, world_size, store, subject, stops=1) as side:
        if rank == 0:
            side.send()
            side.began.wait(WORD_S)
            side.end.abort(ConnectionAbortedError("this end has given up"))
            side.tell("broken off")
            side.wait("seen")
        else:
            side.wait("broken off")
            side.began.wait(WORD_S)
            side.begin()
            wrong = side.arrival("has broken off", _FAILS_S)
            side.tell("seen")
    return wrong


def check_died(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that a receive whose sender's process has died half way is not done.

    What the transport makes of that alone is looked at: core's abort comes later.
    """
    wrong = ""
    with half_way(rank, world_size, store, subject, stops=1) as side:
        if rank == 0:
            side.send()
            side.began.wait(WORD_S)
            side.wait("receiver is there")
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            side.holds_abort = True
            side.began.wait(WORD_S)
            side.tell("receiver is there")
            side.aborted.wait(WORD_S)
            side.begin()
            wrong = side.arrival("has died", _FAILS_S)
            side.let_go()
    return wrong


def check_receiver_aborts(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that whatever waits for a receive ends when it is aborted."""
    wrong = ""
    use_once(rank, world_size, store, subject)  # so that none of its threads is left by the check
    with half_way(rank, world_size, store, subject, stops=0) as side:
        if rank == 0:
            side.holds_abort = True
            side.send()
            side.wait("seen")
            side.let_go()
        else:
            wrong = side.wait_begun() or side.arrival("sends no more", DEADLINE_S)
    if rank == 1:
        wrong = wrong or side.abort_problem("receive", "Receiver.close")
        side.tell("seen")
    return wrong


def check_sender_aborts(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that whatever waits for a send ends when it is aborted."""
    wrong = ""
    use_once(rank, world_size, store, subject)  # so that none of its threads is left by the check
    with half_way(rank, world_size, store, subject, stops=1) as side:
        if rank == 0:
            side.send()
            wrong = side.arrival("", DEADLINE_S)
        else:
            side.holds_abort = True
            side.wait("seen")
            side.let_go()
    if rank == 0:
        wrong = wrong or side.abort_problem("send", "Sender.close")
        side.tell("seen")
    return wrong


def check_close(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Check that closing an end, and the transport, returns by its deadline and raises nothing."""
    with half_way(rank, world_size, store, subject, stops=None) as side:
        pass
    return side.close_problem()
