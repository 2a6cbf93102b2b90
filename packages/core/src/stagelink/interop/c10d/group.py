"""The process group: point to point by links of ours, collectives by groups of torch's own."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stagelink.errors import MessageError, StagelinkError
from stagelink.exchange.arrival import Arrival
from stagelink.exchange.out_link import SendJob
from stagelink.interop.c10d.mailbox import Address
from stagelink.interop.c10d.mesh import Mesh
from stagelink.interop.c10d.options import C10dOptions
from stagelink.interop.c10d.works import RecvWork, SendWork
from stagelink.transport.contract import Deadline
from stagelink.transport.header import Flag, Header, MessageKind
from stagelink.transport.payload import dtype_of, raw_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

__all__ = ["StagelinkGroup", "register"]

_NAME = "stagelink"
_HASH_BYTES = 8
_world: StagelinkGroup | None = None


def register() -> None:
    """Make the backend known to ``torch.distributed``; again does nothing."""
    if _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(given: Any, options: C10dOptions | None) -> StagelinkGroup:
    return StagelinkGroup(given, options)


class StagelinkGroup(dist.ProcessGroup):
    """What ``init_process_group("cpu:stagelink")`` and ``new_group(backend="stagelink")`` make.

    The group of the whole world has the connections, and every group of some of its ranks uses
    them; a group beside another backend's world has its own. An error is raised as torch's
    ``DistBackendError``; after a rank has died every call raises one.

    Args:
        given: what torch says of the group.
        options: of the links; None: those of the environment, or the defaults.
    """

    def __init__(self, given: Any, options: C10dOptions | None) -> None:
        # Torch's stubs know another form only, whose result cannot be subclassed.
        super().__init__(given.group_rank, given.group_size)  # type: ignore[call-arg]
        self._rank: int = given.group_rank
        self._ranks: list[int] = list(given.global_ranks_in_group) or [*range(given.group_size)]
        self._timeout: timedelta = given.timeout
        self._number = _number(given.group_id, self._ranks)
        self._sent: Counter[tuple[int, int]] = Counter()
        self._asked: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._add_collectives(given)
        self._join(given, options)

    def _add_collectives(self, given: Any) -> None:
        store = dist.PrefixStore("collectives", given.store)
        kinds = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(store, self._rank, given.group_size, given.timeout)
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        self._set_default_backend(kinds.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = dist.ProcessGroupNCCL(
                dist.PrefixStore("cuda", store),
                self._rank,
                given.group_size,
                dist.ProcessGroupNCCL.Options(),
            )
            self._register_backend(torch.device("cuda"), kinds.NCCL, nccl)

    def _join(self, given: Any, options: C10dOptions | None) -> None:
        global _world  # noqa: PLW0603 - as torch's own default group
        is_subgroup = dist.is_initialized()
        shared = _world if is_subgroup else None
        self._owns = shared is None
        if shared is None:
            chosen = C10dOptions.from_environment() if options is None else options
            self._meshes = _connect(given, chosen, self._ranks)
            self._places = [*range(given.group_size)]
        else:
            self._meshes = shared._meshes
            self._places = [shared._ranks.index(rank) for rank in self._ranks]
        if not is_subgroup:
            _world = self

    # -- point to point

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> SendWork:
        """Send a tensor; returns at once, and waits for no window.

        Args:
            tensors: one.
            peer: by its place in the group.
            tag: not negative.

        Raises:
            DistBackendError: it cannot be sent, or the group has failed.
        """
        (tensor,) = tensors
        place = self._places[peer]
        mesh = self._mesh_for(tensor)
        what = f"send to rank {self._ranks[peer]} with tag {tag}"
        with self._lock:  # numbers and headers in one order
            address = Address(self._number, place, tag, self._sent[peer, tag])
            try:
                mesh.plane.check()
                job = self._post(mesh, address, tensor)
            except (MessageError, StagelinkError) as error:
                raise dist.DistBackendError(f"{what}: {error}") from error
            self._sent[peer, tag] += 1
        return SendWork(mesh, what, self._timeout, tensor, job)

    def _post(self, mesh: Mesh, address: Address, tensor: torch.Tensor) -> SendJob | None:
        like = Header(
            MessageKind.DATA,
            dtype_code=dtype_of(tensor).code,
            payload_bytes=tensor.nbytes,
            shape=tuple(tensor.shape),
        )
        header = address.header(mesh.direction_to(address.peer), like)
        if address.peer == mesh.rank:
            arrival = Arrival(header, mesh.rank)
            arrival.payload = to_bytes(tensor).clone()
            mesh.box.put(address, arrival)
            return None
        if tensor.is_cpu and tensor.nbytes <= mesh.plan.control.inline_bytes:
            header = header._replace(flags=Flag.INLINE)
            mesh.plane.post(address.peer, header, payload=raw_bytes(tensor))
            return None
        job = SendJob(header, to_bytes(tensor))
        mesh.link_to(address.peer).submit(job, copy=False)
        return job

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> RecvWork:
        """Receive into a tensor; returns at once.

        Args:
            tensors: one; the message must have exactly its number of bytes.
            peer: by its place in the group.
            tag: not negative.

        Raises:
            DistBackendError: the group has failed.
        """
        (tensor,) = tensors
        place = self._places[peer]
        mesh = self._mesh_for(tensor)
        what = f"receive from rank {self._ranks[peer]} with tag {tag}"
        try:
            mesh.plane.check()
            dtype_of(tensor)
            link = None if place == mesh.rank else mesh.link_from(place)
        except (MessageError, StagelinkError) as error:
            raise dist.DistBackendError(f"{what}: {error}") from error
        work = RecvWork(mesh, what, self._timeout, tensor, peer, link)
        with self._lock:
            address = Address(self._number, place, tag, self._asked[peer, tag])
            self._asked[peer, tag] += 1
            mesh.box.ask(address, work)
        return work

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> RecvWork:
        """Not to be had: every message is for one sender.

        Raises:
            DistBackendError: always.
        """
        del tensors, tag
        raise dist.DistBackendError(
            "stagelink receives from a rank that is named: give recv or irecv its src"
        )

    def _mesh_for(self, tensor: torch.Tensor) -> Mesh:
        mesh = self._meshes.get(tensor.device.type)
        if mesh is None:
            raise dist.DistBackendError(
                f"stagelink has no links for tensors on {tensor.device.type!r} here, only on "
                f"{', '.join(map(repr, self._meshes))}"
            )
        return mesh

    # -- the end

    def getBackendName(self) -> str:
        """``stagelink``."""
        return _NAME

    def shutdown(self) -> None:
        """Deliver what was sent, and close the connections, if they are this group's own."""
        global _world  # noqa: PLW0603 - see above
        if self._owns:
            for mesh in self._meshes.values():
                mesh.close(Deadline(mesh.plan.limits.close_deadline_s))
        if _world is self:
            _world = None

    def abort(self) -> None:
        """Fail all ranks that share the connections."""
        for mesh in self._meshes.values():
            mesh.fail(RuntimeError("the process group was aborted"))


def _connect(given: Any, options: C10dOptions, ranks: Sequence[int]) -> dict[str, Mesh]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        device: Mesh(
            options.plan(ranks, device), given.group_rank, given.store, f"c10d/{given.group_id}"
        )
        for device in devices
    }


def _number(name: str, ranks: Sequence[int]) -> int:
    """The same on all ranks of a group, and another for every group."""
    text = f"{name} {list(ranks)}"
    digest = hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little")
