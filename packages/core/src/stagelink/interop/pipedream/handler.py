"""`CommunicationHandler`, as PipeDream's runtime calls it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from stagelink.arguments import COUNT, FLAG, MAPPING, checked
from stagelink.errors import PlanError, StagelinkError, UsageError
from stagelink.exchange.connect import connect
from stagelink.exchange.handler import Handler
from stagelink.interop.pipedream.loop import Loop
from stagelink.interop.pipedream.meeting import Meeting, explain_by
from stagelink.interop.pipedream.phase import Place
from stagelink.interop.pipedream.topology import (
    ACK,
    NAMES,
    RANKS,
    RANKS_BY_NAME,
    Declaration,
    Topology,
    limits_of,
    plan_of,
)

logger = logging.getLogger("stagelink")

Ranks = Sequence[int]

_AFTER_FAILURE_S = 1.0
"""The dead never leave, and after a failure the others need nothing of this rank's."""


class CommunicationHandler:
    """Sends and receives of one rank, asked for as PipeDream's ``StageRuntime`` asks.

    Blocks until every rank has made its own. It makes the default process group, which replicated
    stages use for their gradients; messages go by our own links. Nothing is written to the
    environment, and no thread is started per tensor. Used by one thread.

    What the arguments cannot say is set on the class (or a subclass) before `initialize`, the same
    on every rank.

    Args:
        master_addr: address of rank 0; or, where the ranks share files and no port is to be used,
            ``file:///path`` of a file that does not exist.
        master_port: a free port there.
        rank: this rank.
        local_rank: kept; tensors are on the current device.
        num_ranks_in_server: so many ranks, in their order, share a server, and use the backend's
            transport (``nccl`` or ``gloo``; for other backends the best that there is); across
            servers, and for acks, it is ``gloo``. 1: nothing is taken to share one.
        world_size: how many ranks there are.
        fp16: kept; dtypes are those of ``training_tensor_dtypes``.
        backend: of the default process group.

    Attributes:
        tables: of the class: tables of the plan, as its file has them, such as
            ``{"limits": {"deadline_s": 60.0}, "links": [{"transport": "shm"}]}``. They go before
            what is made of the arguments; see `stagelink.interop.pipedream.topology.LIMITS`.
        device: of the class: ``"cpu"`` or ``"cuda"``; None: CUDA where there is a GPU.
        receive_ranks: the mapping that `initialize` was given, as is ``send_ranks``.

    Raises:
        PlanError: address, rank, world size, ``num_ranks_in_server`` or the limits in `tables`
            are wrong.
        UsageError: there is a default process group already.
        ConnectError: rank 0 cannot hold the port, or does not answer there; or ranks did not come
            within ``limits.connect_deadline_s``, and are named.
    """

    tables: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str | None] = None

    def __init__(  # noqa: PLR0913, PLR0917 - PipeDream's signature
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        local_rank: int,
        num_ranks_in_server: int,
        world_size: int,
        fp16: bool,
        backend: str | None,
    ) -> None:
        if type(num_ranks_in_server) is not int or num_ranks_in_server < 1:
            raise PlanError(
                f"num_ranks_in_server must be an int of at least 1, not {num_ranks_in_server!r}"
            )
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.num_ranks_in_server = num_ranks_in_server
        self.fp16 = fp16
        self.backend = backend
        self.receive_ranks: dict[str, Ranks] = {}
        self.send_ranks: dict[str, Ranks] = {}
        self.tensor_shapes: Mapping[str, Sequence[int]] = {}
        self._comm: Handler | None = None
        self._loop: Loop | None = None
        self._initialized = False
        self._closed = False
        self._pid = os.getpid()
        limits = limits_of(self.tables)
        self._close_s = limits.close_deadline_s
        self._meeting = Meeting(
            master_addr, master_port, rank, world_size, backend, limits.connect_deadline_s
        )
        atexit.register(self._at_exit)

    @checked(
        receive_ranks=RANKS_BY_NAME,
        send_ranks=RANKS_BY_NAME,
        tensor_tags=MAPPING,
        target_tensor_names=NAMES,
        training_tensor_dtypes=MAPPING,
        rank_in_stage=COUNT,
        num_ranks_in_stage=COUNT,
        ranks_in_previous_stage=RANKS,
        ranks_in_next_stage=RANKS,
    )
    def initialize(  # noqa: PLR0913, PLR0917 - PipeDream's signature
        self,
        receive_ranks: dict[str, Ranks],
        send_ranks: dict[str, Ranks],
        tensor_tags: Mapping[str, int],
        target_tensor_names: Iterable[str],
        training_tensor_dtypes: Mapping[str, torch.dtype],
        rank_in_stage: int,
        num_ranks_in_stage: int,
        ranks_in_previous_stage: Ranks,
        ranks_in_next_stage: Ranks,
    ) -> None:
        """Say what this rank sends and receives, and connect; blocks until all ranks have.

        Targets are written into the first two mappings, whose owner goes by them: they come from
        every replica of the previous stage and go to every one of the next.

        Args:
            receive_ranks: for each tensor that comes from an earlier stage the ranks of that
                stage, by replica; without targets.
            send_ranks: the same of the stage that a tensor goes to.
            tensor_tags: of all names; looked at for ``"ack"`` only, which evaluation needs.
            target_tensor_names: integer tensors that every stage passes on to the next.
            training_tensor_dtypes: of each name in the mappings.
            rank_in_stage: this rank's place among the replicas of its stage.
            num_ranks_in_stage: how many they are.
            ranks_in_previous_stage: ranks by replica; none on the first stage.
            ranks_in_next_stage: ranks by replica; none on the last stage.

        Raises:
            PlanError: what the ranks say does not fit together, or `tables` is wrong.
            ConnectError: ranks did not come; they are named.
            NoTransportError: nothing can carry some link.
            UsageError: it was called before.
        """
        if self._initialized or self._closed:
            raise UsageError(f"rank {self.rank}: initialize was called before, or close")
        self.receive_ranks, self.send_ranks = receive_ranks, send_ranks
        self.tensor_tags = tensor_tags
        self.target_tensor_names = target_tensor_names
        self.training_tensor_dtypes = training_tensor_dtypes
        self.rank_in_stage = rank_in_stage
        self.num_ranks_in_stage = num_ranks_in_stage
        self.ranks_in_previous_stage = ranks_in_previous_stage
        self.ranks_in_next_stage = ranks_in_next_stage
        targets = sorted(target_tensor_names)
        topology = Topology.of(self._meeting.exchange(self._declaration(targets)))
        self._initialized = True
        for name in targets:
            if ranks_in_previous_stage:
                receive_ranks[name] = ranks_in_previous_stage
            if ranks_in_next_stage:
                send_ranks[name] = ranks_in_next_stage
        if topology.edges:
            plan = plan_of(topology, self.backend, self.num_ranks_in_server, self.tables)
            self._comm = connect(
                plan,
                rank=self.rank,
                world_size=self.world_size,
                store=self._meeting.store,
                run_id="pipedream",
            )
            explain_by(self._comm)
        place = Place(topology, self.rank, {**training_tensor_dtypes, ACK: torch.int64})
        self._loop = Loop(place, self._comm, self._meeting)

    @checked(tensor_shapes=MAPPING)
    def set_tensor_shapes(self, tensor_shapes: Mapping[str, Sequence[int]]) -> None:
        """Say the shapes of the next phase; the ack's is looked at, others travel with tensors."""
        self.tensor_shapes = tensor_shapes

    def set_counter(self, counter: int) -> None:
        """Nothing: there are no helper threads to count. Kept for callers of it."""
        del counter

    @checked(num_iterations=COUNT)
    def num_iterations_for_helper_threads(self, num_iterations: int) -> tuple[int, int]:
        """The most minibatches of so many that go to one rank of the next and previous stage.

        Returns:
            Both numbers; 0 where there is no such stage. They need not divide.
        """
        self._ready()
        ends = (len(self.ranks_in_next_stage), len(self.ranks_in_previous_stage))
        forward, backward = (-(-num_iterations // count) if count else 0 for count in ends)
        return forward, backward

    @checked(forward_only=FLAG)
    def start_helper_threads(self, num_iterations: int, forward_only: bool) -> None:
        """Begin a phase; blocks until all ranks have.

        Any numbers do, whether they divide or not, that have the same sum over the replicas of
        each stage. Minibatches go the diagonal way; a replica that has as many as it asked for is
        passed over. Every phase begins that order anew.

        Args:
            num_iterations: how many minibatches this rank has in the phase.
            forward_only: an evaluation: ``"ack"`` goes back for each minibatch, and the mappings
                of `initialize` have it; in training they do not.

        Raises:
            DisagreementError: the stages differ in their numbers, or the ranks in what it is.
            DeadlineError: a rank did not come.
            UsageError: `initialize` is missing, or `wait` after the phase before.
        """
        ack_shape = self.tensor_shapes.get(ACK, (1,)) if forward_only else None
        self._ready().start(num_iterations, ack_shape)
        for ranks in (self.receive_ranks, self.send_ranks):
            ranks.pop(ACK, None)
        if forward_only:
            self.receive_ranks[ACK] = self.ranks_in_previous_stage
            self.send_ranks[ACK] = self.ranks_in_next_stage

    def send(
        self,
        tensor_name: str,
        tensor: torch.Tensor | None,
        forward_minibatch_id: int,
        backward_minibatch_id: int,
        backward: bool = False,
    ) -> None:
        """Send a tensor of a minibatch; the caller may change it afterwards.

        Blocks, forward, only while 1024 minibatches of this tensor are on their way to the same
        rank; backward never.

        Args:
            tensor_name: an output, or with ``backward`` an input (its gradient) or ``"ack"``.
            tensor: of any shape, of the dtype that ``training_tensor_dtypes`` says, or a target
                of integers. A gradient has shape and dtype of its tensor.
            forward_minibatch_id: which of this rank's minibatches of the phase, from 0.
            backward_minibatch_id: not looked at: what goes back goes by
                `increment_messaging_index`; without it, in order to the same peer.
            backward: whether it goes to the previous stage.

        Raises:
            MessageError: shape or dtype is wrong.
            UsageError: a name or minibatch out of place, or sent before.
            DeadlineError: no credit came; the text has this rank's state, and the loop's cycle.
            StagelinkError: this or another rank has failed or gone.
        """
        del backward_minibatch_id
        self._ready().send(tensor_name, tensor, forward_minibatch_id, backward=backward)

    def recv(
        self,
        tensor_name: str,
        forward_minibatch_id: int,
        backward_minibatch_id: int,
        backward: bool = False,
    ) -> torch.Tensor | None:
        """Receive a tensor of a minibatch; blocks until it is here.

        Args:
            tensor_name: an input, or with ``backward`` an output (its gradient) or ``"ack"``.
            forward_minibatch_id: not looked at: what comes forward comes by
                `increment_messaging_index`; without it, in order from the same peer.
            backward_minibatch_id: which of this rank's minibatches of the phase, from 0.
            backward: whether it comes from the next stage.

        Returns:
            A tensor of the caller's own on this rank's device, of the declared dtype; targets and
            acks are int64. What comes forward requires a gradient exactly if it is float32. What
            comes back for an input that needs no gradient is what the other rank sent for it. None
            where None was sent.

        Raises:
            DeadlineError, UsageError, MessageError, StagelinkError: as for `send`.
        """
        del forward_minibatch_id
        return self._ready().recv(tensor_name, backward_minibatch_id, backward=backward)

    @checked(sending=FLAG)
    def increment_messaging_index(self, sending: bool) -> None:
        """All tensors of a minibatch were received, or with ``sending`` sent back: go on."""
        if self._loop is not None:
            self._loop.progress.go_on(sending=sending)

    def wait(self) -> None:
        """End the phase on this rank; what was sent still arrives. Waits for no other rank."""
        if self._loop is not None:
            self._loop.end()

    # -- beyond PipeDream's

    def close(self, timeout_s: float | None = None) -> None:
        """Let what was sent reach its peers, say goodbye, and give everything back.

        The default process group goes as well. Returns within about ``timeout_s``, on rank 0 the
        double; the second call does nothing. At the end of the process it is done by itself, but
        for the process group.

        Args:
            timeout_s: seconds; None: the plan's ``limits.close_deadline_s``.

        Raises:
            StagelinkError: as `stagelink.Handler.close`.
        """
        self._close(timeout_s, destroy_group=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error, destroy_group=True)

    # -- inside

    def _declaration(self, targets: Sequence[str]) -> Declaration:
        maps = {
            what: {name: tuple(found[name]) for name in found if name not in targets}
            for what, found in (("receives", self.receive_ranks), ("sends", self.send_ranks))
        }
        for name in (*maps["receives"], *maps["sends"]):
            if not isinstance(self.training_tensor_dtypes.get(name), torch.dtype):
                raise PlanError(f"rank {self.rank}: training_tensor_dtypes has none for {name!r}")
        return Declaration(
            rank=self.rank,
            replica=self.rank_in_stage,
            replicas=self.num_ranks_in_stage,
            previous=tuple(self.ranks_in_previous_stage),
            following=tuple(self.ranks_in_next_stage),
            targets=tuple(targets),
            acks=ACK in self.tensor_tags,
            device=self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            **maps,
        )

    def _ready(self) -> Loop:
        if self._loop is None or self._closed:
            missing = "close was called" if self._closed else "initialize comes first"
            raise UsageError(f"rank {self.rank}: {missing}")
        return self._loop

    def _close(self, timeout_s: float | None, *, destroy_group: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        limit_s = self._close_s if timeout_s is None else timeout_s
        failed = True
        try:
            self.wait()
            if self._comm is not None:
                self._comm.close(timeout_s)
            failed = self._comm is not None and self._comm.failure is not None
        finally:
            most_s = min(limit_s, _AFTER_FAILURE_S) if failed else limit_s
            self._meeting.leave(most_s, destroy_group=destroy_group)

    def _end(self, error: BaseException | None, *, destroy_group: bool) -> None:
        """Close; or, after an error of the caller's, have the other ranks hear of it."""
        if error is None:
            self._close(None, destroy_group=destroy_group)
            return
        if self._comm is not None and not self._closed:
            self._comm.abort(error)
        try:
            self._close(_AFTER_FAILURE_S, destroy_group=destroy_group)
        except StagelinkError as another:
            logger.debug("rank %d: while it closed after a failure: %s", self.rank, another)

    def _at_exit(self) -> None:
        """Close for PipeDream's callers, which close nothing."""
        error = getattr(sys, "last_value", None)
        try:
            if os.getpid() == self._pid:
                self._end(error, destroy_group=False)
        except StagelinkError as late:
            logger.warning("rank %d: at the end of the process: %s", self.rank, late)
