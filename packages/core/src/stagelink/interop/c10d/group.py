"""The process group: point to point by links of ours, collectives by groups of torch's own."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import Store

from stagelink.deadline import Deadline
from stagelink.errors import MessageError, PlanError, StagelinkError
from stagelink.interop.c10d.errors import one_tensor, whole
from stagelink.interop.c10d.mailbox import MatchingKey
from stagelink.interop.c10d.mesh import Mesh
from stagelink.interop.c10d.options import C10dOptions
from stagelink.interop.c10d.works import Given, RecvWork, SendWork
from stagelink.interop.collectives import WithCollectives, recorded, untraced
from stagelink.transport.addresses import check_reachable, is_loopback
from stagelink.transport.gloo_groups import VARIABLE, named_by_variable
from stagelink.transport.header import Flag
from stagelink.transport.interrupts import stops_caller
from stagelink.transport.payload import content_of, raw_bytes, target_of, to_bytes

NAME = "stagelink"
"""The backend's name."""

_CAUSE_S = 2.0
_HASH_BYTES = 8
_LOOPBACK = "127.0.0.1"
_MOST_TAG = 2**63 - 1
_world: StagelinkGroup | None = None


class StagelinkGroup(WithCollectives):
    """Process group that ``init_process_group("cpu:stagelink")`` makes, and ``new_group``.

    The group of the whole world has the connections, and every group of some of its ranks uses
    them; a group beside another backend's world has its own. An error is raised as torch's
    ``DistBackendError``; after a rank has died every call raises one.

    Args:
        given: what torch says of the group.
        options: of the links; None: those of the environment, or the defaults.
    """

    def __init__(self, given: Any, options: object) -> None:
        if options is not None and not isinstance(options, C10dOptions):
            raise PlanError(
                f"c10d options: pg_options: a {type(options).__name__}; give a "
                "stagelink.interop.c10d.C10dOptions"
            )
        super().__init__(given)
        self._rank: int = given.group_rank
        self._ranks: list[int] = list(given.global_ranks_in_group) or [*range(given.group_size)]
        self._store: Store = given.store.underlying_store  # without the device, as gloo's has it
        self._places: list[int] = []
        self._sent: Counter[tuple[int, int]] = Counter()
        self._asked: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._made: Counter[str] = Counter()
        self._join(given, options)
        try:
            store = dist.PrefixStore(f"collectives/{self._generation}", given.store)
            self._add_collectives(given, store, self._ranks, self._address())
        except BaseException as error:
            self._check_meshes(error)
            self.abort(error)
            raise
        known = ref(self)  # destroyed groups are kept by nobody
        self._meshes["cpu"].plane.failure.on_failure(lambda _: _break_off(known()))

    def _join(self, given: Any, options: C10dOptions | None) -> None:
        global _world  # noqa: PLW0603 - as torch's own default group
        is_subgroup = dist.is_initialized()
        shared = _world if is_subgroup else None
        self._owns = shared is None
        made = 0
        if shared is None:
            chosen = C10dOptions.from_environment() if options is None else options
            self._meshes = _connect(given, chosen, self._ranks)
            self._places = [*range(given.group_size)]
        else:
            if options is not None:
                raise ValueError(
                    "stagelink: a group of some of a world's ranks uses the world's connections; "
                    "give pg_options to init_process_group"
                )
            self._meshes = shared._meshes
            self._places = [shared._ranks.index(rank) for rank in self._ranks]
            made = shared._made[given.group_id]
            shared._made[given.group_id] += 1
        # A group of this name may have been destroyed: it left keys in the store, and messages.
        self._generation = f"{self._meshes['cpu'].node.rendezvous.generation}/{made}"
        self._number = _number(f"{given.group_id} {self._generation}", self._ranks)
        if not is_subgroup:
            _world = self

    def explain(self, error: RuntimeError) -> BaseException:
        """Give the failure that the connections know of in place of gloo's error.

        Gloo often notices first that a peer is gone, so this waits a moment for it to be told.
        """
        mesh = self._meshes["cpu"]
        with suppress(StagelinkError):
            mesh.plane.wait(lambda: False, Deadline(_CAUSE_S))
        cause = mesh.plane.failure.error
        return error if cause is None else mesh.error("collective", cause)

    def _check_meshes(self, error: BaseException) -> None:
        """Raise what the connections know of the reason why gloo's failed, as that of a death."""
        for mesh in self._meshes.values():
            try:
                mesh.plane.failure.check_failure()
            except StagelinkError as cause:
                self.abort(cause)
                raise cause from error

    def _address(self) -> str:
        """The address at which the others reach this rank, as the connections with them show."""
        plane = self._meshes["cpu"].plane
        others = [plane.address_with(place) for place in self._places if place != plane.rank]
        far = [address for address in others if not is_loopback(address)]
        if (named := named_by_variable()) is None:
            return far[0] if far else _LOOPBACK
        if far:
            check_reachable(named, VARIABLE)
        return named.text

    # -- point to point

    @untraced
    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> SendWork:
        """Send a tensor; returns at once, also where it has to wait until it is asked for.

        Args:
            tensors: one.
            peer: by its place in the group.
            tag: not negative.

        Raises:
            DistBackendError: it cannot be sent, there is no such peer or tag, the peer has
                closed, or the group has failed. What cannot be sent is a
                `stagelink.MessageError` as well, and the peer's receive raises the same text.
            TypeError, ValueError: an argument is none of those.
        """
        tensor, peer, tag = one_tensor(tensors), whole("rank", peer), whole("tag", tag)
        with recorded("c10d::send", tensor, peer, tag):
            return self._send(tensor, peer, tag)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> SendWork:
        place = self._place(peer, tag)
        try:
            content, dtype, in_order = content_of(tensor)
        except MessageError as error:
            raise self._refused(peer, tag, error) from error
        mesh = self._mesh_for(content)
        plane, inline, key = mesh.plane, _is_inline(mesh, place, content), None
        try:
            if plane.reader.ending:
                plane.check()
            if place in plane.gone:
                plane.goodbyes.check_here(place, "a receive there")
            plane.reader.last_call_s = time.monotonic()
            # First: where it fails, no number is taken.
            raw = (raw_bytes if inline else to_bytes)(content, in_order=in_order)
            key = MatchingKey(self._number, place, tag, self._next(self._sent, peer, tag))
            direction, flags = mesh.direction_to(place), Flag.INLINE if inline else 0
            shape = tuple(content.shape)
            header = key.message(direction, flags, dtype.code, content.nbytes, shape)
            job = mesh.send(key, header, raw)
        except BaseException as error:
            # With a number taken, the peer would wait for a message that does not come.
            plane.failure.interrupted(error, foreign=key is not None)
            if not isinstance(error, StagelinkError) or stops_caller(error):
                raise
            raise mesh.error(SendWork.named(place, tag), error) from error
        return SendWork(mesh, self._timeout.total_seconds(), tensor, key, job)

    def _refused(self, peer: int, tag: int, error: MessageError) -> dist.DistBackendError:
        """Have the peer's receive raise as well; returns what to raise here."""
        place = self._places[peer]
        what = SendWork.named(place, tag)
        key = MatchingKey(self._number, place, tag, self._next(self._sent, peer, tag))
        for mesh in self._meshes.values():  # one of them is the one that the peer receives on
            try:
                mesh.refuse(key, f"rank {self._ranks[self._rank]}, {what}: {error}")
            except StagelinkError as worse:
                if stops_caller(worse):
                    raise
                return mesh.error(what, worse)
        return self._meshes["cpu"].error(what, error)

    @untraced
    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> RecvWork:
        """Receive into a tensor; returns at once.

        Args:
            tensors: one; the message must have exactly its number of bytes.
            peer: by its place in the group.
            tag: not negative.

        Raises:
            DistBackendError: nothing can be received into it, which is a
                `stagelink.MessageError` as well and takes no message; there is no such peer or
                tag; or the group has failed.
            TypeError, ValueError: an argument is none of those.
        """
        tensor, peer, tag = one_tensor(tensors), whole("rank", peer), whole("tag", tag)
        with recorded("c10d::recv_", tensor, peer, tag):
            return self._recv(tensor, peer, tag)

    def _recv(self, tensor: torch.Tensor, peer: int, tag: int) -> RecvWork:
        place = self._place(peer, tag)
        try:
            target = target_of(tensor)
        except MessageError as error:
            raise self._meshes["cpu"].error(RecvWork.named(place, tag), error) from error
        mesh = self._mesh_for(target[0])
        plane, key = mesh.plane, None
        try:
            if plane.reader.ending:
                plane.check()
            plane.reader.last_call_s = time.monotonic()
            link = None if place == mesh.rank else mesh.link_from(place)
            key = MatchingKey(self._number, place, tag, self._next(self._asked, peer, tag))
            given = Given(tensor, *target)
            work = RecvWork(mesh, self._timeout.total_seconds(), given, peer, key, link)
            mesh.box.ask(key, work)
        except BaseException as error:
            plane.failure.interrupted(error, foreign=key is not None)
            if not isinstance(error, StagelinkError) or stops_caller(error):
                raise
            raise mesh.error(RecvWork.named(place, tag), error) from error
        return work

    @untraced
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> RecvWork:
        """Refuse with `DistBackendError`: every message is for one sender."""
        del tensors, tag
        raise dist.DistBackendError(
            "stagelink receives from a rank that is named: give recv or irecv its src"
        )

    def _place(self, peer: int, tag: int) -> int:
        """Where the peer is in the mesh."""
        if not 0 <= peer < len(self._places):
            raise dist.DistBackendError(
                f"stagelink: no rank {peer} in a group of {len(self._places)}"
            )
        if not 0 <= tag <= _MOST_TAG:
            raise dist.DistBackendError(f"stagelink: tag {tag} is not from 0 to {_MOST_TAG}")
        return self._places[peer]

    def _next(self, counted: Counter[tuple[int, int]], peer: int, tag: int) -> int:
        # A number is no order on the wire: whatever carries it, the message finds its place by it.
        with self._lock:
            number = counted[peer, tag]
            counted[peer, tag] += 1
        return number

    def _mesh_for(self, tensor: torch.Tensor) -> Mesh:
        mesh = self._meshes.get(tensor.device.type)
        if mesh is None:
            raise dist.DistBackendError(
                f"stagelink has no links for tensors on {tensor.device.type!r} here, only on "
                f"{', '.join(map(repr, self._meshes))}"
            )
        return mesh

    # -- the end

    def get_group_store(self) -> Store:
        """The store that was given to ``init_process_group``, under the group's own prefix."""
        return self._store

    def getBackendName(self) -> str:
        """``stagelink``."""
        return NAME

    @property
    def transports(self) -> dict[str, dict[int, str]]:
        """Transports to each other rank of the group, by kind of device."""
        return {
            device: {
                rank: mesh.transports[place]
                for rank, place in zip(self._ranks, self._places, strict=True)
                if place != mesh.rank
            }
            for device, mesh in self._meshes.items()
        }

    @untraced
    def shutdown(self) -> None:
        """Deliver what was sent and close the connections, if they are this group's own.

        Another group drops what was sent to this rank in it and not received.
        """
        self._is_world_no_more()
        with ExitStack() as steps:  # all, also where one raises
            steps.callback(self._finish_breaking)
            for mesh in self._meshes.values():
                if self._owns:
                    steps.callback(mesh.close, Deadline(mesh.plan.limits.close_deadline_s))
                else:
                    steps.callback(mesh.box.forget, self._number)

    @untraced
    def abort(self, error: BaseException | None = None) -> None:
        """Fail all ranks that share the connections, and close those that are this group's own."""
        self._is_world_no_more()
        cause = error or RuntimeError("the process group was aborted")
        for mesh in self._meshes.values():
            if self._owns:
                mesh.abandon(cause)
            elif error is None:
                mesh.node.fail(cause)
        self._finish_breaking()

    def _is_world_no_more(self) -> None:
        global _world  # noqa: PLW0603 - see above
        if _world is self:
            _world = None


def _is_inline(mesh: Mesh, place: int, tensor: torch.Tensor) -> bool:
    """Whether it goes beside the header."""
    fits = tensor.nbytes <= mesh.plan.control.inline_bytes
    return fits and tensor.is_cpu and place != mesh.rank


def _connect(given: Any, options: C10dOptions, ranks: Sequence[int]) -> dict[str, Mesh]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    plans = {device: options.plan(ranks, device) for device in devices}
    eager_bytes = options.eager_bytes
    patience_s = options.connect_deadline_s or given.timeout.total_seconds()
    store = dist.PrefixStore(f"c10d/{given.group_id}", given.store)
    meshes: dict[str, Mesh] = {}
    try:
        for device, plan in plans.items():
            meshes[device] = Mesh(plan, ranks, given.group_rank, store, patience_s, eager_bytes)
    except BaseException as error:
        for mesh in meshes.values():
            mesh.abandon(error)
        raise
    for mesh in meshes.values():
        mesh.other_boxes += [other.box for other in meshes.values() if other is not mesh]
    return meshes


def _break_off(group: StagelinkGroup | None) -> None:
    if group is not None:
        group._break_off()


def _number(name: str, ranks: Sequence[int]) -> int:
    """The same on all ranks of a group, and another for every group."""
    text = f"{name} {list(ranks)}"
    digest = hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little")
