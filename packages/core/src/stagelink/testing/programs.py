"""Random programs of sends and receives, for a transport to do what loopback does.

A program is a list of sessions. In each, the steps of all messages are in one random order, and
each rank takes its own steps in that order; so what a rank waits for always comes before, and no
program can block itself. Needs hypothesis.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store

from stagelink.exchange.session import Session
from stagelink.testing.subject import Subject

if TYPE_CHECKING:  # an extra
    from hypothesis.strategies import SearchStrategy

_EDGES = 2
_MICROBATCHES = 3
_ITEMS = (0, 1, 4000, 70_000)
_DTYPES = ("float32", "bfloat16", "int64", "uint8", "complex64")


@dataclass(frozen=True)
class Parcel:
    """One message."""

    edge: int
    microbatch: int
    items: int
    dtype: str
    copy: bool  # the sender overwrites the tensor right after the send
    read: bool  # somebody receives it; in training everything is received


@dataclass(frozen=True)
class Pass:
    """One session; gradients come back if it trains."""

    trains: bool
    parcels: Sequence[Parcel]
    order: Sequence[int]  # of parcels; the nth time that one comes up, its nth step is taken


def programs() -> SearchStrategy[list[Pass]]:
    """Programs of one or two sessions."""
    from hypothesis import strategies as st  # noqa: PLC0415 - an extra, for this test only

    @st.composite
    def passes(draw: st.DrawFn) -> Pass:
        trains = draw(st.booleans())
        keys = [(edge, number) for edge in range(_EDGES) for number in range(_MICROBATCHES)]
        parcels = [
            Parcel(
                edge,
                number,
                draw(st.sampled_from(_ITEMS)),
                "float32" if trains else draw(st.sampled_from(_DTYPES)),
                draw(st.booleans()),
                trains or draw(st.integers(0, 4)) > 0,
            )
            for edge, number in keys
        ]
        steps = [place for place, parcel in enumerate(parcels) for _ in _steps(trains, parcel)]
        return Pass(trains, parcels, draw(st.permutations(steps)))

    return st.lists(passes(), min_size=1, max_size=2)


def _steps(trains: bool, parcel: Parcel) -> list[str]:
    if trains:
        return ["send", "recv", "send_grad", "recv_grad"]
    return ["send", "recv"] if parcel.read else ["send"]


def follows(
    rank: int, world_size: int, store: Store, subject: Subject, program: Sequence[Pass]
) -> list[str]:
    """Follow a program; a line for everything that arrived, in order."""
    seen: list[str] = []
    plan_of = partial(Subject.plan, edges=_EDGES, window=2 * _MICROBATCHES)
    with subject.join(rank, world_size, store, plan_of) as comm:
        for number, part in enumerate(program):
            mode = comm.train if part.trains else comm.evaluate
            with mode(_MICROBATCHES) as session:
                _follow(session, rank, subject, part, seen)
                comm.reduce([float(number)])  # nobody leaves before everything is sent
    return seen


def _follow(session: Session, rank: int, subject: Subject, part: Pass, seen: list[str]) -> None:
    taken: Counter[int] = Counter()
    held: dict[tuple[str, int], torch.Tensor] = {}
    for place in part.order:
        parcel = part.parcels[place]
        step = _steps(part.trains, parcel)[taken[place]]
        taken[place] += 1
        key = (f"e{parcel.edge}", parcel.microbatch)
        if rank == 0 and step == "send":
            tensor = _tensor(subject, parcel, trains=part.trains)
            session.send(key[0], tensor, key[1], copy=parcel.copy)
            if parcel.copy:
                tensor.detach().fill_(1)
        elif rank == 1 and step == "recv":
            held[key] = _told(session.recv(*key), key, seen)
        elif rank == 1 and step == "send_grad":
            session.send_grad(key[0], held.pop(key).detach() * 2, key[1])
        elif rank == 0 and step == "recv_grad":
            _told(session.recv_grad(*key), key, seen)


def _tensor(subject: Subject, parcel: Parcel, *, trains: bool) -> torch.Tensor:
    seed = 1 + 10 * parcel.edge + parcel.microbatch
    values = (torch.arange(parcel.items) * 7 + seed) % 113
    tensor = values.to(getattr(torch, parcel.dtype))
    return subject.on_device(tensor).requires_grad_(trains)


def _told(got: torch.Tensor | None, key: tuple[str, int], seen: list[str]) -> torch.Tensor:
    if got is None:
        raise AssertionError(f"None arrived as {key}")
    raw: Any = got.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(raw.tobytes()).hexdigest()[:12]
    seen.append(f"{key[0]} {key[1]}: {got.dtype} {tuple(got.shape)} {got.requires_grad} {digest}")
    return got
