"""The replicas of one stage among themselves: agreements, sums, and copies of one's buffers.

They share a gloo group of their own. Its operations run beside the caller, who waits for them on
the control plane: the death or failure of any rank ends the wait at once, although gloo would not
tell, and the group is then broken off.

A sum adds the replicas' values in the order of the replicas, so that it is the same in every run
and can be the same in one process. Each replica adds up one part of the buffer for all and the
parts are gathered: it moves as much as a ring does, and needs memory for one more buffer, however
many replicas there are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
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

_PAUSE_S = 0.005
_CAUSE_S = 2.0
_LATER_S = 1.0


class ReplicaGroup:
    """The replicas of this rank's stage, made by all of them at the same point.

    Every call is made by all, in the same order, and blocks until all have made it. A replica may
    have to wait while another works through a whole batch, so waits are bounded by the plan's
    ``limits.first_deadline_s``. Tensors are flat, contiguous and on the CPU.

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
        self._dropped = False
        self._working = False
        self._meet(comm.replica_store(self.drop))

    def _meet(self, store: Store) -> None:
        built: Future[None] = Future()
        work = partial(_carry_out, partial(self._build, store), built)
        threading.Thread(target=work, name="stagelink-replicas", daemon=True).start()
        what = self._what("meeting")
        try:
            self._comm.wait(built, what, self._deadline_s)
        except BaseException:
            self.drop()
            raise
        self._by_gloo(what, built.result)

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
        if self._dropped:
            self.drop()

    def _what(self, doing: str) -> str:
        others = ", ".join(str(rank) for rank in self._ranks if rank != self._comm.rank)
        return f"{doing} with rank {others}, of the same stage {self._comm.stage.name!r}"

    # -- operations

    def sum(self, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        """Replace a buffer's values by their sums over the replicas.

        The buffer is of a size that `size` divides, ``scratch`` as large; its values are lost.
        """
        self._run(
            "summing", lambda group: group.alltoall_base(_raw(scratch), _raw(buffer), [], [])
        )
        first, *others = scratch.chunk(self.size)
        for other in others:
            first += other
        self._run("gathering sums", lambda group: group._allgather_base(_raw(buffer), _raw(first)))

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
        group, self._group = self._group, None
        if group is not None and self._working:
            break_off(group, self._me, self.size, name="stagelink-replicas-break")


def _carry_out(work: Callable[[], None], done: Future[None]) -> None:
    try:
        work()
    except Exception as error:  # handed to the thread that waits
        done.set_exception(error)
    else:
        done.set_result(None)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: gloo moves them whatever the dtype."""
    return tensor.view(torch.uint8)
