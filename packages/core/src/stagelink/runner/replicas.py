"""The replicas of one stage among themselves: agreements, sums, and copies of one's buffers.

They share a gloo group of their own. Its operations run beside the caller, who waits for them on
the control plane: the death or failure of any rank ends the wait at once, although gloo would not
tell, and the group is then broken off.

A sum adds the replicas' values in the order of the replicas, so that it is the same in every run
and can be the same in one process. Each replica adds up one part of the values for all and hands
its sums to all: it moves as much as a ring does. A thread carries sums out one after another, in
the order in which they were started; it hands out the one before while it takes in the next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from stagelink.deadline import Deadline
from stagelink.errors import DeadlineError, DisagreementError, TransportError
from stagelink.exchange.handler import Handler
from stagelink.transport.board import look_until
from stagelink.transport.gloo_groups import break_off, gloo_group
from stagelink.transport.host import server_id
from stagelink.transport.interrupts import stops_caller

_PAUSE_S = 0.005
_CAUSE_S = 2.0
_LATER_S = 1.0
_SCATTER = 0
_GATHER = 1


class ReplicaGroup:
    """The replicas of this rank's stage, made by all of them at the same point.

    Every call is made by all, in the same order, and all but `start_sum` block until all have made
    it. A replica may have to wait while another works through a whole batch, so waits are bounded
    by the plan's ``limits.first_deadline_s``. Tensors are flat, contiguous and on the CPU.

    Raises:
        DeadlineError: a replica did not come in time.
        TransportError: they could not be connected.
        StagelinkError: the handler failed or was closed, here or in any later call.
    """

    def __init__(self, comm: Handler) -> None:
        self._comm = comm
        self._ranks = comm.stage.ranks
        self._me = comm.replica
        self.size = len(self._ranks)  # how many replicas there are
        self._deadline_s = comm.plan.limits.first_deadline_s
        self._group: Any = None
        self._sums: _Sums | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._dropped = False
        self._working = False
        self._meet(comm.replica_store(self.drop))

    def _meet(self, store: Store) -> None:
        work = partial(_work, self._jobs)
        threading.Thread(target=work, name="stagelink-replicas", daemon=True).start()
        try:
            self._carry_out("meeting", partial(self._build, store))
        except BaseException:
            self.drop()
            raise

    def _carry_out(self, doing: str, work: Callable[[], None]) -> None:
        """Wait for work on the group's own thread, behind what that has to do."""
        what, done = self._what(doing), Future[None]()
        self._jobs.put(partial(_finish, work, done))
        del work  # a traceback that is kept would keep gloo's threads with it
        self._comm.wait(done, what, self._deadline_s)
        self._by_gloo(what, done.result)

    def _build(self, store: Store) -> None:
        host = server_id()
        store.set(f"here/{self._me}", host)
        keys = [f"here/{replica}" for replica in range(self.size)]
        # Gloo waits for peers without an end but its time-out, so it is called when all are there.
        here = partial(store.check, keys)
        look_until(lambda: self._dropped or here(), Deadline(math.inf), most_s=_PAUSE_S)
        if not here():
            return
        elsewhere = any(store.get(key).decode() != host for key in keys)
        self._group = gloo_group(
            store,
            self._me,
            self.size,
            address=self._comm.gloo_address(elsewhere=elsewhere),
            # Later than ours, which says what was waited for, and for whom.
            timeout=timedelta(seconds=Deadline(self._deadline_s + _LATER_S).remaining_s),
            threads=1,
        )
        self._sums = _Sums(self._group, self._me, self.size)
        if self._dropped:
            self.drop()

    def _what(self, doing: str) -> str:
        others = ", ".join(str(rank) for rank in self._ranks if rank != self._comm.rank)
        return f"{doing} with rank {others}, of the same stage {self._comm.stage.name!r}"

    # -- operations

    def start_sum(self, values: torch.Tensor, total: torch.Tensor) -> None:
        """Start to add up the replicas' values into a tensor of the same size; returns at once.

        Both stay as they are until `finish_sums`. They may be the same tensor.
        """
        sums = self._started()
        self._working = True
        self._jobs.put(partial(sums.add, values, total))

    def finish_sums(self) -> None:
        """Block until all sums that were started are there."""
        self._carry_out("summing", self._started().finish)
        self._working = False

    def _started(self) -> _Sums:
        if (sums := self._sums) is None:
            raise self._broken(self._what("summing"), "the group was dropped")
        return sums

    def broadcast(self, buffer: torch.Tensor, replica: int) -> None:
        """Replace a buffer's values by those of one replica."""
        options = dist.BroadcastOptions()
        options.rootRank = replica
        self._run("copying", lambda group: group.broadcast([_raw(buffer)], options))

    def agree(self, digest: bytes, otherwise: str) -> None:
        """Make sure that all replicas call with the same bytes, as many on each.

        Else `DisagreementError` on every replica, which means ``otherwise``.
        """
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_ = torch.empty(self.size * len(digest), dtype=torch.uint8, device="cpu")
        self._run("comparing", lambda group: group._allgather_base(all_, mine))
        digests = [bytes(part.tolist()) for part in all_.chunk(self.size)]
        for rank, theirs in zip(self._ranks, digests, strict=True):
            if theirs != digests[0]:
                raise DisagreementError(
                    f"rank {self._ranks[0]} and rank {rank}, replicas of stage "
                    f"{self._comm.stage.name!r}: {otherwise}"
                )

    def _run(self, doing: str, start: Callable[[Any], Any]) -> None:
        what, group = self._what(doing), self._group
        if group is None:
            raise self._broken(what, "the group was dropped")
        self._working = True
        work = self._by_gloo(what, partial(start, group))
        try:
            self._comm.wait(work.get_future(), what, self._deadline_s)
            self._by_gloo(what, work.wait)
        finally:
            del work  # a traceback that is kept would keep gloo's threads with it
        self._working = False

    def _by_gloo(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if stops_caller(error):
                raise
            raise self._broken(what, str(error)) from error

    def _broken(self, what: str, text: str) -> TransportError:
        # Gloo knows at once that a connection is closed, the control plane soon knows why.
        with suppress(DeadlineError):
            self._comm.wait(Future(), what, _CAUSE_S)
        return TransportError(f"rank {self._comm.rank}: {what}: {text}")

    # -- the end

    def drop(self) -> None:
        """Give the group up; an operation in progress is broken off. Returns at once."""
        self._dropped = True
        self._jobs.put(None)
        self._sums = None
        group, self._group = self._group, None
        if group is not None and self._working:
            break_off(group, self._me, self.size, name="stagelink-replicas-break")


class _Sums:
    """Sums over a gloo group, carried out by one thread; each gives its own part to all others."""

    def __init__(self, group: Any, me: int, size: int) -> None:
        self._group = group
        self._me = me
        self._others = [replica for replica in range(size) if replica != me]
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._gathering: list[Any] = []
        self._error: Exception | None = None

    @torch.no_grad()  # values may be those of a gradient that has a graph
    def add(self, values: torch.Tensor, total: torch.Tensor) -> None:
        """Add up; the other replicas' parts of the total are on their way. Never raises."""
        if self._error is not None:
            return
        try:
            self._add(values, total)
        except Exception as error:  # for `finish`; its frames would keep gloo's threads with them
            self._error = error.with_traceback(None)

    def _add(self, values: torch.Tensor, total: torch.Tensor) -> None:
        size = len(self._others) + 1
        given, sums = values.tensor_split(size), total.tensor_split(size)
        own, mine = given[self._me], sums[self._me]
        received = self._room(own)
        works = self._exchange([given[other] for other in self._others], received, _SCATTER)
        _wait_for(self._gathering)
        _wait_for(works)
        parts = [*received[: self._me], own, *received[self._me :]]
        added = parts[0]
        for place, part in enumerate(parts[1:], 2):
            # The own values may be memory of the caller's, or that of the total.
            aside = self._me > 0 and place < size
            added = torch.add(added, part, out=added if aside else mine)
        theirs = [sums[other] for other in self._others]
        self._gathering = self._exchange([mine] * len(theirs), theirs, _GATHER)

    def _room(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the others' values of a part."""
        count = len(self._others)
        needed = count * part.numel() * part.element_size()
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return list(self._scratch[:needed].view(part.dtype).view(count, part.numel()).unbind())

    def _exchange(
        self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], tag: int
    ) -> list[Any]:
        pairs = [*zip(self._others, given, taken, strict=True)]
        works = [self._group.recv([_raw(one)], other, tag) for other, _, one in pairs]
        return works + [self._group.send([_raw(one)], other, tag) for other, one, _ in pairs]

    def finish(self) -> None:
        """Wait for what is on its way; raises what went wrong in any sum that was started."""
        if self._error is not None:
            raise self._error
        _wait_for(self._gathering)


def _wait_for(works: list[Any]) -> None:
    """Wait for each, once: gloo waits for ever for what it has been asked for before."""
    while works:
        works.pop(0).wait()


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Carry out jobs, which never raise, until there is none instead of one."""
    while (job := jobs.get()) is not None:
        job()
        del job  # while it waits for the next, nothing here keeps a group


def _finish(work: Callable[[], None], done: Future[None]) -> None:
    try:
        work()
    except Exception as error:  # handed to the thread that waits
        done.set_exception(error.with_traceback(None))
    else:
        done.set_result(None)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: gloo moves them whatever the dtype."""
    return tensor.view(torch.uint8)
