"""One phase of one rank: whose minibatch is whose, and its messages in a session of ours.

A minibatch is asked for by its number among the rank's own in the phase, from 0. What comes from
the stage before, and goes back there, has no number in PipeDream but a cursor that says which peer
is next: each tensor and peer has a FIFO queue, which `Phase.due` follows.

PipeDream's callers answer every tensor in training, also one that needs no gradient: with the
tensor itself. Our messages are answered where they require a gradient, which only floating dtypes
do. So others travel under a floating dtype of the same size, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagelink.arguments import is_a
from stagelink.errors import MessageError, UsageError
from stagelink.exchange.session import Session
from stagelink.interop.pipedream.order import Assignment
from stagelink.interop.pipedream.topology import ACK, Edge, Topology, channel
from stagelink.transport.modes import outside_modes
from stagelink.transport.payload import content_of
from stagelink.transport.streams import device_here

logger = logging.getLogger("stagelink")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank in the pipeline, with the dtypes of all tensors that are no targets, by name."""

    topology: Topology
    rank: int
    dtypes: Mapping[str, torch.dtype]

    @property
    def stage(self) -> int:
        """Index of its stage."""
        return self.topology.places[self.rank][0]

    @property
    def replica(self) -> int:
        """Its place in the stage."""
        return self.topology.places[self.rank][1]


class Phase:
    """A training, or an evaluation, which has acks of some shape, from one start to its end."""

    def __init__(
        self,
        place: Place,
        session: Session,
        assignment: Assignment,
        ack_shape: Sequence[int] | None,
    ) -> None:
        # this rank's minibatches, numbered in the whole pipeline, in its order
        self.mine = assignment.mine[place.stage][place.replica]
        self.forward_only = ack_shape is not None  # whether it is an evaluation
        self._rank = f"rank {place.rank}"
        self._place = place
        self._session = session
        self._assignment = assignment
        self._ack_shape = tuple(ack_shape or ())
        known = [p for p in place.topology.edges if self.forward_only or p.name != ACK]
        self._outgoing = {p.name: p for p in known if p.source == place.stage}
        self._incoming = {p.name: p for p in known if p.target == place.stage}
        self._asked_for_ack: set[int] = set()
        self._warned: set[str] = set()
        self._received: dict[tuple[str, int], int] = {}
        self._returned: dict[tuple[str, int], int] = {}

    def leave(self) -> None:
        """The end, on this rank; waits for no other."""
        self._session.leave()

    def minibatch(self, number: int) -> int:
        """The rank's minibatch of a number, as it is numbered in the whole pipeline."""
        if not isinstance(number, int):
            raise UsageError(f"{self._rank}: a minibatch's id is an int, not {number!r}")
        if not 0 <= number < len(self.mine):
            raise UsageError(
                f"{self._rank}: minibatch {number} of this phase, which was started with "
                f"{len(self.mine)} iterations here; with fewer iterations than warm-up the "
                "caller's loop must do fewer forwards"
            )
        return self.mine[number]

    def send(self, name: str, tensor: torch.Tensor | None, number: int) -> None:
        """Send forward; waits for nothing but credit."""
        edge = self._known(self._outgoing, name, "sends")
        minibatch = self.minibatch(number)
        message = None if tensor is None else self._message(edge, tensor)
        if self.forward_only and ACK in self._outgoing and minibatch not in self._asked_for_ack:
            # An ack answers this message, which nobody but the ack's sender looks at.
            device = device_here(self._place.topology.devices[self._place.rank])
            with outside_modes():
                ask = torch.zeros(self._ack_shape, dtype=torch.int64, device=device)
            route = self._route(self._outgoing[ACK], minibatch)
            self._session.send(route, _packed(ask), minibatch)
            self._asked_for_ack.add(minibatch)
        self._session.send(self._route(edge, minibatch), message, minibatch)

    def due(self, name: str, cursor: int, *, back: bool) -> int:
        """Number of the minibatch whose tensor is next, with the caller's cursor there.

        The cursor's own; or, where that tensor of it was received already, or with ``back`` sent
        back, the next of the same peer, as a FIFO queue would give it.
        """
        edge = self._known(self._incoming, name, "receives")
        peer = self._peer(edge, self.minibatch(cursor))
        last = (self._returned if back else self._received).get((name, peer), -1)
        if cursor > last:
            return cursor
        later = range(last + 1, len(self.mine))
        found = (n for n in later if self._peer(edge, self.mine[n]) == peer)
        return next(found, cursor)  # taken already, which is refused where it is taken again

    def recv(self, name: str, number: int) -> torch.Tensor | None:
        """Receive what was sent forward; blocks until it is here."""
        edge = self._known(self._incoming, name, "receives")
        minibatch = self.minibatch(number)
        tensor = self._session.recv(self._route(edge, minibatch), minibatch)
        self._received[name, self._peer(edge, minibatch)] = number
        if tensor is None:
            return None
        if not edge.answered:
            with outside_modes():
                return tensor.to(torch.int64)
        declared, what = self._place.dtypes[name], self._what(name)
        if self.forward_only:
            _check_dtype(tensor, declared, what)
        else:
            tensor = _unpacked(tensor, declared, what)
        with outside_modes():
            return tensor.requires_grad_() if tensor.dtype == torch.float32 else tensor

    def answer(self, name: str, tensor: torch.Tensor | None, number: int) -> None:
        """Send back a gradient, or what stands for one, or an ack; never waits for room."""
        edge = self._answerable(self._incoming, name, "receives")
        minibatch = self.minibatch(number)
        route = self._route(edge, minibatch)
        plain = _plain_of(tensor)
        if plain is not None:
            _check_dtype(plain, self._place.dtypes[name], self._what(name))
            tensor = _detached(_packed(plain))
        if name == ACK:
            self._session.recv(route, minibatch)
        self._session.send_grad(route, tensor, minibatch)
        self._returned[name, self._peer(edge, minibatch)] = number

    def answered(self, name: str, number: int) -> torch.Tensor | None:
        """Receive what was sent back; blocks until it is here."""
        edge = self._answerable(self._outgoing, name, "sends")
        minibatch = self.minibatch(number)
        tensor = self._session.recv_grad(self._route(edge, minibatch), minibatch)
        if tensor is None:
            return None
        self._asked_for_ack.discard(minibatch)
        return _unpacked(tensor, self._place.dtypes[name], self._what(name))

    def _message(self, edge: Edge, tensor: Any) -> Any:
        name, plain = edge.name, _plain_of(tensor)
        if plain is None:
            return tensor
        if not edge.answered:
            if plain.is_floating_point() or plain.is_complex():  # which int64 cannot hold
                raise MessageError(
                    f"{self._what(name)}: a target is received as torch.int64; this is "
                    f"{plain.dtype}"
                )
            return _detached(plain)
        _check_dtype(plain, self._place.dtypes[name], self._what(name))
        if self.forward_only:
            return _detached(plain)
        if plain.requires_grad and plain.dtype != torch.float32 and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%s requires a gradient, but PipeDream's callers get one for torch.float32 only, "
                "not for %s: nothing before it will train",
                self._what(name),
                plain.dtype,
            )
        return _packed(plain)

    def _peer(self, edge: Edge, minibatch: int) -> int:
        """Replica of the sending stage that has a minibatch."""
        return self._assignment.replicas[edge.source][minibatch]

    def _route(self, edge: Edge, minibatch: int) -> str:
        """The plan's name for the tensor between the two ranks that have the minibatch."""
        stages, replicas = self._place.topology.stages, self._assignment.replicas
        ends = [stages[s][replicas[s][minibatch]] for s in (edge.source, edge.target)]
        return channel(edge.name, *ends)

    def _known(self, names: Mapping[str, Edge], name: str, does: str) -> Edge:
        if not is_a(name, str) or name not in names:
            listed = ", ".join(map(repr, names)) or "nothing"
            raise UsageError(f"{self._rank} {does} no {name!r} in this phase; it {does} {listed}")
        return names[name]

    def _answerable(self, names: Mapping[str, Edge], name: str, does: str) -> Edge:
        edge = self._known(names, name, does)
        if not edge.answered or self.forward_only != (name == ACK):
            back = "acks" if self.forward_only else "no targets"
            raise UsageError(f"{self._rank}: nothing goes back for {name!r}: {back} do")
        return edge

    def _what(self, name: str) -> str:
        return f"{self._rank}: {name!r}"


_BY_SIZE = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def _plain_of(given: object) -> torch.Tensor | None:
    """The tensor that travels for what a caller gave; see `content_of`.

    None where there is none: that is refused, with the reason and at both ends, where it is sent.
    """
    try:
        return content_of(given)[0]
    except MessageError:
        return None


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with outside_modes():
        return tensor.detach()


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels where it is answered, and as its answer travels.

    Shares its memory where that holds its values, requires a gradient, and is no part of its
    graph.
    """
    with outside_modes():
        resolved = tensor.detach().resolve_conj().resolve_neg()
        return resolved.view(_carrier(tensor.dtype)).requires_grad_()


def _unpacked(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Undo `_packed`, without a gradient; shares its memory."""
    if tensor.dtype != _carrier(dtype):
        raise MessageError(f"{what}: the receiver's training_tensor_dtypes says {dtype}")
    with outside_modes():
        return tensor.detach().view(dtype)


def _check_dtype(tensor: torch.Tensor, declared: torch.dtype, what: str) -> None:
    if tensor.dtype != declared:
        raise MessageError(
            f"{what}: the tensor is {tensor.dtype}, training_tensor_dtypes says {declared}"
        )


def _carrier(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    return _BY_SIZE[dtype.itemsize]
