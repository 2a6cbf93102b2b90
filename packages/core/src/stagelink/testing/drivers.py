"""Programs that ranks run in conformance tests: small, over a pair of stages, or three.

They stand at the module's top level, so that rank processes find them. Each is called as
``driver(rank, world_size, store, subject, …)``, and raises AssertionError where the transport
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.distributed import Store

from stagelink.errors import DeadlineError, StagelinkError
from stagelink.exchange.session import Session
from stagelink.ranks.job import report
from stagelink.ranks.threads import run_threads
from stagelink.testing.contract_check import UnfinishedError
from stagelink.testing.samples import awkward_tensors, difference, same_bits, tensors_of_sizes
from stagelink.testing.subject import Subject


def use_once(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Open, use and close: what a library or a device keeps for the process is there after it."""
    with subject.join(rank, world_size, store) as comm, comm.train(2) as session:
        echo(session, rank, [subject.on_device(torch.ones(5000)) for _ in range(2)])


def echo(session: Session, rank: int, tensors: Sequence[torch.Tensor]) -> None:
    """Send every tensor forward, and where it takes one the same bits back as its gradient."""
    for microbatch, tensor in enumerate(tensors):
        if rank == 0:
            leaf = tensor.detach()
            leaf.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            session.send("e0", leaf, microbatch)
            gradient = session.recv_grad("e0", microbatch)
            if leaf.requires_grad:
                _check("a gradient", gradient, tensor)
        else:
            got = session.recv("e0", microbatch)
            _check("a tensor", got, tensor)
            assert got is not None
            assert got.is_leaf, "the received tensor is no leaf"
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            assert got.requires_grad == differentiable, f"requires_grad of {tensor.dtype}"
            session.send_grad("e0", got.detach() if differentiable else None, microbatch)


def _check(what: str, got: torch.Tensor | None, sent: torch.Tensor) -> None:
    problem = "it did not come" if got is None else difference(got, sent)
    assert not problem, f"{what} of {sent.dtype} {tuple(sent.shape)} arrived changed: {problem}"


def sends_values(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Every dtype, shape and layout arrives bit by bit, forward and back."""
    dtypes = subject.capabilities.dtypes
    tensors = [
        subject.on_device(tensor)
        for tensor in awkward_tensors()
        if dtypes is None or str(tensor.dtype).removeprefix("torch.") in dtypes
    ]
    with subject.join(rank, world_size, store) as comm, comm.train(len(tensors)) as session:
        echo(session, rank, tensors)


def keeps_sizes(
    rank: int, world_size: int, store: Store, subject: Subject, sizes_bytes: tuple[int, ...]
) -> None:
    """Messages of many sizes in flight together arrive whole."""
    tensors = [subject.on_device(tensor) for tensor in tensors_of_sizes(sizes_bytes)]
    plan_of = partial(Subject.plan, window=len(tensors))
    with subject.join(rank, world_size, store, plan_of) as comm:
        for _ in range(2):
            with comm.evaluate(len(tensors)) as session:
                for microbatch, tensor in enumerate(tensors):
                    if rank == 0:
                        session.send("e0", tensor, microbatch)
                    else:
                        _check("a message", session.recv("e0", microbatch), tensor)


def numbers_arrived(
    rank: int, world_size: int, store: Store, subject: Subject, count: int, size_bytes: int
) -> list[int]:
    """Send numbered messages of one size; on rank 1 the numbers that were in what arrived.

    It ends at the first that does not come in time, or with an error of the transport's: what was
    lost says more than what was not done for it.
    """
    arrived: list[int] = []
    plan_of = partial(Subject.plan, window=8, deadline_s=subject.patience_s)
    with (
        suppress(StagelinkError, UnfinishedError),
        subject.join(rank, world_size, store, plan_of) as comm,
        comm.evaluate(count) as session,
    ):
        for microbatch in range(count):
            if rank == 0:
                tensor = torch.full((size_bytes,), microbatch, dtype=torch.uint8)
                session.send("e0", subject.on_device(tensor), microbatch)
            else:
                got = some(session.recv("e0", microbatch))
                values = torch.unique(got).tolist()
                arrived.append(values[0] if len(values) == 1 else -1)
    return arrived


def receives_out_of_order(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """The order of receives need not be that of sends."""
    with (
        subject.join(rank, world_size, store, partial(Subject.plan, edges=2, window=8)) as comm,
        comm.evaluate(8) as session,
    ):
        order = [(edge, microbatch) for microbatch in range(8) for edge in ("e0", "e1")]
        for edge, microbatch in order if rank == 0 else reversed(order):
            value = float(microbatch) + (0.5 if edge == "e1" else 0.0)
            if rank == 0:
                session.send(edge, subject.on_device(torch.full((3000,), value)), microbatch)
            else:
                got = some(session.recv(edge, microbatch))
                assert bool((got == value).all()), f"{edge} {microbatch} got another's values"


def sends_both_ways_at_once(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Activations and gradients cross on the wire, everybody sending before anybody receives."""
    count = 4
    plan_of = partial(Subject.plan, window=2 * count)
    with subject.join(rank, world_size, store, plan_of) as comm:
        first = subject.on_device(torch.ones(size_bytes // 4)).requires_grad_()
        with comm.train(2 * count) as session:
            if rank == 0:
                for microbatch in range(count):
                    session.send("e0", first, microbatch)
            else:
                received = [session.recv("e0", microbatch) for microbatch in range(count)]
            for step in range(count):
                if rank == 0:
                    session.send("e0", first, count + step)
                else:
                    session.send_grad("e0", torch.full_like(some(received[step]), step), step)
            for step in range(count):
                if rank == 0:
                    gradient = some(session.recv_grad("e0", step))
                    assert bool((gradient == step).all()), f"gradient {step} arrived changed"
                else:
                    assert bool((some(session.recv("e0", count + step)) == 1).all())


def holds_what_it_received(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """The sender overwrites at once; what was received is never written again."""
    count = 24
    with subject.join(rank, world_size, store, partial(Subject.plan, window=4)) as comm:
        kept = []
        with comm.evaluate(count) as session:
            tensor = subject.on_device(torch.empty(size_bytes, dtype=torch.uint8))
            for microbatch in range(count):
                if rank == 0:
                    tensor.fill_(microbatch)
                    session.send("e0", tensor, microbatch)
                    tensor.fill_(255)
                else:
                    kept.append(some(session.recv("e0", microbatch)))
        for microbatch, got in enumerate(kept):
            found = torch.unique(got).tolist()
            assert found == [microbatch], (
                f"message {microbatch} was overwritten while the user held it: {found[:5]}"
            )


def sends_without_copy(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Check that a tensor sent with copy=False is the caller's again when the handle is done."""
    with subject.join(rank, world_size, store, partial(Subject.plan, window=4)) as comm:
        tensor = subject.on_device(torch.empty(size_bytes, dtype=torch.uint8))
        with comm.evaluate(12) as session:
            for microbatch in range(12):
                if rank == 0:
                    tensor.fill_(microbatch)
                    handle = session.send("e0", tensor, microbatch, copy=False)
                    try:
                        handle.wait(subject.patience_s)
                    except DeadlineError as error:
                        raise AssertionError(
                            f"the handle of the send of message {microbatch} is lost: not done "
                            f"after {subject.patience_s:g} s"
                        ) from error
                else:
                    got = some(session.recv("e0", microbatch))
                    assert bool((got == microbatch).all()), f"message {microbatch} arrived changed"


def opens_many_edges(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Forty edges between two ranks cost no more links than one."""
    with (
        subject.join(rank, world_size, store, partial(Subject.plan, edges=40)) as comm,
        comm.evaluate(1) as session,
    ):
        links = len(comm.transports)
        assert links == len(("there", "back")), f"{links} links for 40 edges"
        for number in range(40):
            if rank == 0:
                session.send(f"e{number}", subject.on_device(torch.tensor([number])), 0)
            else:
                assert some(session.recv(f"e{number}", 0)).item() == number


def opens_in_a_triangle(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """Three ranks, each linked with both others, and messages on all six links."""
    with subject.join(rank, world_size, store, Subject.triangle) as comm, comm.train(4) as session:
        for microbatch in range(4):
            sent = subject.on_device(torch.full((5000,), float(microbatch)))
            taken = []
            for edge, source, target in (("e0", 0, 1), ("e1", 1, 2), ("e2", 0, 2)):
                if rank == source:
                    session.send(edge, sent.clone().requires_grad_(), microbatch)
                elif rank == target:
                    got = some(session.recv(edge, microbatch))
                    assert same_bits(got, sent), f"{edge} {microbatch} arrived changed"
                    taken.append((edge, got))
            for edge, got in taken:
                session.send_grad(edge, got.detach() + 1, microbatch)
            for edge, source in (("e0", 0), ("e1", 1), ("e2", 0)):
                if rank == source:
                    gradient = session.recv_grad(edge, microbatch)
                    assert same_bits(some(gradient), sent + 1), f"gradient of {edge} changed"


def opens_on_threads(rank: int, world_size: int, store: Store, subject: Subject) -> None:
    """`opens_in_a_triangle`, with three threads of this process as its ranks."""
    del rank, world_size, store
    run_threads(opens_in_a_triangle, 3, subject)


def raises_in_user_code(rank: int, world_size: int, store: Store, subject: Subject) -> str:
    """Rank 1's own error ends rank 0's wait; returns what each was told."""
    try:
        with subject.join(rank, world_size, store) as comm:
            comm.reduce([0.0])
            with comm.train(4) as session:
                if rank == 1:
                    raise ValueError("the user's own mistake")  # noqa: TRY301 - a user's would be
                tensor = subject.on_device(torch.ones(100_000)).requires_grad_()
                session.send("e0", tensor, 0)
                session.recv_grad("e0", 0)
    except AssertionError:
        raise
    except Exception as error:  # its text is the result
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def sends_for_ever(
    rank: int, world_size: int, store: Store, subject: Subject, size_bytes: int
) -> None:
    """Stream until somebody dies; reports "going" after the first messages."""
    with subject.join(rank, world_size, store, partial(Subject.plan, window=4)) as comm:
        tensor = subject.on_device(torch.ones(size_bytes, dtype=torch.uint8))
        for number in range(1_000_000):
            with comm.evaluate(4) as session:
                for microbatch in range(4):
                    value = (4 * number + microbatch) % 251
                    if rank == 0:
                        tensor[0] = tensor[-1] = value
                        session.send("e0", tensor, microbatch)
                    else:
                        _check_ends(some(session.recv("e0", microbatch)), value)
            if number == 1:
                report("going")


def _check_ends(tensor: torch.Tensor, value: int) -> None:
    found = [int(tensor[0]), int(tensor[-1])]
    assert found == [value, value], (
        f"a message that begins and ends with {value} is received as a whole one with {found}"
    )


def some(tensor: torch.Tensor | None) -> torch.Tensor:
    """Check that something was received."""
    assert tensor is not None, "None arrived in place of a tensor"
    return tensor
