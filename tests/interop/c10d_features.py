"""Programs that try one feature of the c10d backend each, and assert for themselves."""

from __future__ import annotations

import os
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stagelink.deadline import Deadline
from stagelink.errors import MessageError, MessageTypeError, RefusedError
from stagelink.interop.c10d import (
    CONFIG_VARIABLE,
    C10dMessageError,
    C10dMessageTypeError,
    C10dOptions,
    C10dRefusedError,
)
from stagelink.interop.c10d.mailbox import MatchingKey
from stagelink.interop.c10d.mesh import Mesh
from stagelink.interop.c10d.options import EAGER_BYTES
from stagelink.interop.c10d.works import Given, RecvWork
from stagelink.links.out_link import SendJob
from stagelink.links.wiring import Wiring
from stagelink.plan.dtypes import DTYPES
from stagelink.testing import no_leaks, report
from stagelink.transport.header import Header, MessageKind
from stagelink.transport.payload import bytes_of, target_of
from tests.interop.c10d_programs import PATIENCE, STAGELINK, world
from tests.support import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

SMALL, LARGE = 1000, 100_000  # bytes: with the header, and by a transport
SOON = timedelta(seconds=5)
SHORT = timedelta(milliseconds=50)


def filled(size: int, seed: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Bytes that both ends can make."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return (raw & 1).bool()
    return raw.view(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, whatever the numbers are."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def everywhere(rank: int, size: int, store: Store, program: Callable[..., None]) -> None:
    """Run a program in a world whose end leaves nothing behind."""
    with no_leaks("threads", "descriptors", "shared mappings"), world(rank, size, store):
        program(rank, size)
        dist.barrier()


# -- what is sent


def dtypes(rank: int, size: int) -> None:
    for dtype in [getattr(torch, known.name) for known in DTYPES if hasattr(torch, known.name)]:
        if dtype.is_complex:
            expected = filled(6, 1, torch.float64).view(torch.complex128).to(dtype)
        else:
            expected = filled(6, 1, dtype)
        for count in (1, 4000):
            sent = expected.repeat(count)
            if rank == 0:
                dist.send(sent, 1)
            else:
                got = torch.zeros_like(sent)
                assert dist.recv(got, 0) == 0
                assert same(got, sent), dtype


def layouts(rank: int, size: int) -> None:
    whole = filled(4 * LARGE, 2).view(torch.int32)
    cases: list[tuple[torch.Tensor, torch.Tensor]] = [
        (torch.tensor(7.5), torch.tensor(0.0)),
        (torch.empty(0), torch.empty(0)),
        (torch.empty(3, 0, 2), torch.empty(3, 0, 2)),
        (whole.view(100, -1).t(), torch.zeros(1000, 100, dtype=torch.int32)),
        (whole.view(100, -1), torch.zeros(1000, 100, dtype=torch.int32).t()),
        (whole[::2], torch.zeros(LARGE, dtype=torch.int32)[::2]),
        (whole[:20:2], torch.zeros(20, dtype=torch.int32)[::2]),
        (torch.tensor(3).expand(40_000), torch.zeros(40_000, dtype=torch.int64)),
        (torch.view_as_complex(torch.ones(3, 2)).conj().imag, torch.zeros(3)),
        (torch.ones(2, 3, 4, 5, requires_grad=True), torch.zeros(2, 3, 4, 5, requires_grad=True)),
        (torch.nn.Parameter(torch.ones(40_000)), torch.nn.Parameter(torch.zeros(40_000))),
        (torch.ones(1, 1, 1, 1, 1, 1, 1, 2), torch.zeros(2, 1, 1, 1, 1, 1, 1, 1)),
    ]
    for sent, into in cases:
        if rank == 0:
            dist.send(sent, 1)
        else:
            dist.recv(into, 0)
            assert torch.equal(
                into.view(-1) if into.shape != sent.shape else into,
                sent.reshape(-1) if into.shape != sent.shape else sent,
            )


def what_is_around_a_target_stays(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(LARGE, dtype=torch.uint8), 1)
    else:
        whole = torch.zeros(LARGE + 200, dtype=torch.uint8)
        dist.recv(whole[100:-100], 0)
        assert int(whole.sum()) == LARGE
        assert not whole[:100].any()
        assert not whole[-100:].any()


def a_negated_target(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.tensor([2.0]), 1)
    else:
        target = torch.zeros(1, dtype=torch.complex64)
        dist.recv(target.conj().imag, 0)
        assert target.imag.item() == -2.0


def objects(rank: int, size: int) -> None:
    sent = [{"a": 1}, "two", torch.arange(5), b"x" * LARGE]
    if rank == 0:
        dist.send_object_list(sent, 1)
    else:
        got: list[Any] = [None] * 4
        assert dist.recv_object_list(got, 0) == 0
        assert got[:2] == sent[:2]
        assert got[3] == sent[3]
        assert torch.equal(got[2], torch.arange(5))


# -- order


def more_than_a_window(rank: int, size: int) -> None:
    """No isend waits, however many there are; on gloo such a program runs."""
    count = 60
    peer = 1 - rank
    works = [dist.isend(filled(LARGE, 100 * rank + n), peer) for n in range(count)]
    dist.barrier()  # nobody has received anything yet
    for n in range(count):
        got = torch.zeros(LARGE, dtype=torch.uint8)
        dist.recv(got, peer)
        assert torch.equal(got, filled(LARGE, 100 * peer + n))
    for work in works:
        assert work is not None
        assert work.wait()


def tags_in_any_order(rank: int, size: int) -> None:
    """Small messages overtake large ones on the wire, and still find their places."""
    sizes = [LARGE, SMALL, 0, 5 * LARGE, 1] * 3
    if rank == 0:
        works = [dist.isend(filled(length, n), 1, tag=n % 4) for n, length in enumerate(sizes)]
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()
        return
    by_tag = [[n for n in range(len(sizes)) if n % 4 == tag] for tag in (2, 0, 3, 1)]
    got = {n: torch.zeros(sizes[n], dtype=torch.uint8) for n in range(len(sizes))}
    early = [(n, dist.irecv(got[n], 0, tag=n % 4)) for n in by_tag[0]]
    dist.barrier()
    for n in [n for numbers in by_tag[1:] for n in numbers]:
        dist.recv(got[n], 0, tag=n % 4)
    for _, work in reversed(early):
        assert work is not None
        work.wait()
    assert all(torch.equal(got[n], filled(sizes[n], n)) for n in got)


def both_send_first(rank: int, size: int) -> None:
    for length in (SMALL, LARGE, 40 * LARGE):
        for _ in range(3):
            dist.send(filled(length, rank), 1 - rank)
            got = torch.zeros(length, dtype=torch.uint8)
            dist.recv(got, 1 - rank)
            assert torch.equal(got, filled(length, 1 - rank))


def a_batch_in_a_ring(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in (SMALL, LARGE):
        into = [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, filled(length, rank), after),
                dist.P2POp(dist.irecv, into[0], before),
                dist.P2POp(dist.irecv, into[1], after, tag=1),
                dist.P2POp(dist.isend, filled(length, rank), before, tag=1),
            ]
        )
        assert len(works) == 4
        for work in works:
            work.wait()
        assert torch.equal(into[0], filled(length, before))
        assert torch.equal(into[1], filled(length, after))


def to_oneself(rank: int, size: int) -> None:
    for length in (0, SMALL, LARGE):
        sent, first, second = filled(length, 3), *(torch.zeros(length).byte() for _ in range(2))
        early = dist.irecv(first, rank)
        works = [dist.isend(sent, rank), dist.isend(sent, rank)]
        sent.zero_()  # it is gone already
        for work in (early, dist.irecv(second, rank), *works):
            assert work is not None
            assert work.wait()
            assert work.is_completed()
        assert torch.equal(first, filled(length, 3))
        assert torch.equal(second, filled(length, 3))


def many_threads(rank: int, size: int) -> None:
    wrong: list[Any] = []

    def exchange(tag: int) -> None:
        for n in range(30):
            length = (SMALL, LARGE)[(n + tag) % 2]
            work = dist.isend(filled(length, n + tag + rank), 1 - rank, tag=tag)
            got = torch.zeros(length, dtype=torch.uint8)
            dist.recv(got, 1 - rank, tag=tag)
            if not torch.equal(got, filled(length, n + tag + 1 - rank)):
                wrong.append((tag, n))
            assert work is not None
            work.wait()

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- works


def a_work_of_a_send(rank: int, size: int) -> None:
    if rank == 0:
        for length in (SMALL, LARGE):
            sent = filled(length, 0)
            work = dist.isend(sent, 1)
            assert work is not None
            assert work.wait(SOON)
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0].data_ptr() == sent.data_ptr()
            assert work.get_future().wait()[0].data_ptr() == sent.data_ptr()
            sent.zero_()  # it is the caller's again
    dist.barrier()
    if rank == 1:
        for length in (SMALL, LARGE):
            got = torch.zeros(length, dtype=torch.uint8)
            dist.recv(got, 0)
            assert torch.equal(got, filled(length, 0))


def a_work_of_a_receive(rank: int, size: int) -> None:
    for length in (SMALL, LARGE, 200 * LARGE):
        if rank == 0:
            dist.barrier()
            dist.send(filled(length, 0), 1)
            continue
        got = torch.zeros(length, dtype=torch.uint8)
        work = dist.irecv(got, 0)
        assert work is not None
        future = work.get_future()
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert not future.done()
        with pytest.raises(dist.DistBackendError, match=r"from rank 0 with tag 0.* 0\.05 s"):
            work.wait(SHORT)
        dist.barrier()
        # Also where nobody waits: whoever only looks sees it come.
        while not work.is_completed():
            pass
        work.synchronize()
        assert work.wait()
        assert work.wait()
        assert work.is_success()
        assert work._source_rank() == 0
        assert future.wait()[0].data_ptr() == got.data_ptr()
        assert torch.equal(got, filled(length, 0))


def a_work_that_nobody_keeps(rank: int, size: int) -> None:
    got = torch.zeros(LARGE, dtype=torch.uint8)
    if rank == 0:
        dist.isend(filled(LARGE, 0), 1)
        dist.isend(filled(LARGE, 1), 1)
    else:
        dist.irecv(got, 0)
        last = torch.zeros(LARGE, dtype=torch.uint8)
        dist.recv(last, 0)
        assert torch.equal(last, filled(LARGE, 1))
        assert torch.equal(got, filled(LARGE, 0))


def the_time_out_of_a_group(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.1))
    got = torch.zeros(SMALL, dtype=torch.uint8)
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match=r"not done within 0\.1 s"):
            dist.recv(got, 0, group=group)
    dist.barrier()
    if rank == 0:  # what was asked for is still asked for: the next one is the second
        dist.send(filled(SMALL, 0), 1, group=group)
        dist.send(filled(SMALL, 1), 1, group=group)
    else:
        dist.recv(got, 0, group=group)
        assert torch.equal(got, filled(SMALL, 1))


# -- what is refused


def refused(message: str) -> Any:
    return pytest.raises(dist.DistBackendError, match=message)


def sizes_that_do_not_fit(rank: int, size: int) -> None:
    for length, wanted in ((SMALL, 10), (10, SMALL), (LARGE, 10), (10, LARGE), (LARGE, 2 * LARGE)):
        for early in (True, False):
            if rank == 0:
                if early:
                    dist.barrier()
                dist.send(filled(length, 0), 1)
                dist.send(filled(length, 1), 1)
                if not early:
                    dist.barrier()
                continue
            if not early:
                dist.barrier()
            into = torch.zeros(wanted, dtype=torch.uint8)
            work = dist.irecv(into, 0)
            assert work is not None
            if early:
                dist.barrier()
            text = rf"from rank 0 with tag 0: the message has {length} bytes .*tensor {wanted} "
            with refused(text):
                work.wait()
            assert work.is_completed()
            assert not work.is_success()
            assert re.search(text, str(work.exception()))
            assert not into.any()
            good = torch.zeros(length, dtype=torch.uint8)
            dist.recv(good, 0)  # nothing else is harmed
            assert torch.equal(good, filled(length, 1))


def what_cannot_be_sent(rank: int, size: int) -> None:
    peer = 1 - rank
    tensor = torch.ones(3)
    with refused("name.*its src"):
        dist.recv(tensor)
    with refused("name.*its src"):
        dist.irecv(tensor)
    call: Any
    for call in (dist.isend, dist.irecv):
        with refused("device 'meta' has no data"):
            call(torch.empty(3, device="meta"), peer)
        with refused(f"rank {peer} with tag 0: .*layout"):
            call(torch.eye(3).to_sparse(), peer)
        with refused("at most 8"):
            call(torch.ones([1] * 9), peer)
        with refused("qint8"):
            call(torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint8), peer)
        with refused("tag -1"):
            call(tensor, peer, tag=-1)
        with refused("tag 9223372036854775808"):
            call(tensor, peer, tag=2**63)
        with refused("no rank 5"):
            call(tensor, group_dst=5) if call is dist.isend else call(tensor, group_src=5)
    for text in ("device 'meta' has no data", "layout", "at most 8", "qint8"):
        with refused(f"from rank {peer} with tag 0: rank {peer}, send to rank {rank} .*{text}"):
            dist.recv(tensor, peer)
    with refused("elements of the tensor share their memory"):
        dist.irecv(torch.zeros(1).expand(3), peer)
    # Nothing of that harms what follows.
    dist.send(torch.full((3,), float(rank)), peer)
    dist.recv(tensor, peer)
    assert tensor.tolist() == [peer] * 3
    largest = 2**63 - 1
    dist.send(torch.full((3,), float(rank)), peer, tag=largest)
    dist.recv(tensor, peer, tag=largest)


# -- tensors that are more than their memory

LENGTHS = (12, LARGE // 4)


def kinds_that_are_sent(rank: int, size: int) -> None:
    """By the header and by a transport; both functions."""
    kinds = {**tensors.DATA, "zeros": tensors.zeros}
    for length in LENGTHS:
        values = torch.arange(float(length))
        for name, make in kinds.items():
            if rank == 0:
                work = dist.isend(make(values), 1)
                assert work is not None
                work.wait()
                continue
            got = torch.full((length,), -1.0)
            dist.recv(got, 0)
            assert torch.equal(got, torch.zeros(length) if name == "zeros" else values), name


def kinds_that_are_received_into(rank: int, size: int) -> None:
    """Asked for before a message comes and after, and nothing else is written."""
    for early in (True, False):
        for length in LENGTHS:
            values = torch.arange(float(length))
            made = [make(torch.zeros(length)) for make in tensors.DATA.values()]
            if not early:
                _send_all(rank, values, len(made))
                dist.barrier()
            works = [dist.irecv(given, 0) for given in made] if rank else []
            if early:
                dist.barrier()
                _send_all(rank, values, len(made))
            for work in works:
                assert work is not None
                work.wait()
            for name, given in zip(tensors.DATA, made, strict=True):
                wrong = rank and not torch.equal(bytes_of(given).view(torch.float32), values)
                assert not wrong, name


def _send_all(rank: int, values: torch.Tensor, count: int) -> None:
    for _ in range(count if rank == 0 else 0):
        dist.isend(values, 1)


def kinds_that_are_refused(rank: int, size: int) -> None:
    """At both ends of a message, by one error; a receive that is refused takes no message."""
    values = torch.arange(12.0)
    for name, (make, text) in tensors.REFUSED.items():
        if name.startswith("lazy"):
            continue  # torch's own functions raise before anything of the backend is called
        if rank == 0:
            with refused(f"send to rank 1 with tag 0: .*{text}") as caught:
                dist.send(make(values), 1)
            assert isinstance(caught.value, MessageTypeError), name
            assert type(caught.value) is C10dMessageTypeError
            dist.send(values, 1)
            continue
        with refused(f"from rank 0 with tag 0: .*{text}") as caught:
            dist.recv(make(values), 0)
        assert isinstance(caught.value, MessageTypeError), name
        got = torch.zeros(12)
        with refused(f"from rank 0 with tag 0: rank 0, send to .*{text}") as caught:
            dist.recv(got, 0)
        assert isinstance(caught.value, RefusedError), name
        assert type(caught.value) is C10dRefusedError  # as a traceback names it
        assert not got.any()
        dist.recv(got, 0)
        assert torch.equal(got, values), name
    for make in tensors.SHARED.values():
        with refused("elements of the tensor share their memory") as caught:
            dist.irecv(make(values), 1 - rank)
        assert isinstance(caught.value, MessageError)
        assert type(caught.value) is C10dMessageError
    with refused("a zero tensor of torch's has no memory"):
        dist.irecv(tensors.zeros(values), 1 - rank)


def a_refused_message_to_oneself(rank: int, size: int) -> None:
    work = dist.irecv(torch.zeros(12), rank)
    assert work is not None
    with refused("MaskedTensor"):
        dist.isend(tensors.REFUSED["masked"][0](torch.arange(12.0)), rank)
    for _ in range(2):
        with refused(f"from rank {rank} with tag 0: rank {rank}, send to .*MaskedTensor"):
            work.wait()


def a_refused_message_in_a_batch(rank: int, size: int) -> None:
    """In a batch whose other messages arrive."""
    wrapper, texts = tensors.Wrapper(torch.ones(12)), "tensors.Wrapper has no strided memory"
    into = [torch.zeros(12), torch.zeros(12)]
    sends = [dist.P2POp(dist.isend, given, 1) for given in (torch.ones(12), wrapper)]
    receives = [dist.P2POp(dist.irecv, given, 0) for given in into]
    if rank == 0:
        with refused(texts):
            dist.batch_isend_irecv(sends)
        return
    first, second = dist.batch_isend_irecv(receives)
    first.wait()
    assert into[0].eq(1).all()
    with refused(texts):
        second.wait()
    assert not into[1].any()


def memory_that_goes_while_it_is_waited_for(rank: int, size: int) -> None:
    """No byte is written where the tensor was."""
    for length in LENGTHS:
        if rank == 0:
            dist.barrier()
            dist.send(torch.ones(length), 1)
            continue
        into = torch.zeros(length + 1)[1:]
        work = dist.irecv(into, 0)
        assert work is not None
        into.untyped_storage().resize_(0)
        dist.barrier()
        with refused("memory was freed before the message came") as caught:
            work.wait()
        assert isinstance(caught.value, MessageError)


def results_of_collectives(rank: int, size: int) -> None:
    """As torch's functional collectives give them: to be waited for."""
    everybody: Any = dist.group.WORLD
    for length in LENGTHS:
        total = torch.arange(float(length)) * size
        reduced = funcol.all_reduce(torch.arange(float(length)), "sum", everybody)
        assert isinstance(reduced, AsyncCollectiveTensor)
        again = funcol.all_reduce(torch.ones(2 * length), "sum", everybody)
        if rank == 0:
            dist.send(reduced, 1)
            dist.send(again.view(length, 2).t()[1], 1)
            continue
        assert torch.equal(reduced + 0, total)
        assert again.eq(size).all()
        got = torch.zeros(length)
        dist.recv(got, 0)
        assert torch.equal(got, total)
        dist.recv(got, 0)
        assert got.eq(size).all()


def distributed_tensors(rank: int, size: int) -> None:
    """Parts of them are memory, they are none.

    Leaves its group behind, as a mesh of gloo's does.
    """
    peer, text = 1 - rank, r"distributed\.tensor\.DTensor has no strided memory .*\.to_local\(\)"
    mesh = init_device_mesh("cpu", (size,))
    made = distribute_tensor(torch.arange(24.0).view(size, 12), mesh, [Shard(0)])
    with refused(f"send .*{text}"):
        dist.isend(made, peer)
    with refused(f"receive .*{text}"):
        dist.irecv(made, peer)
    with refused(f"from rank {peer} .*: rank {peer}, send .*{text}"):
        dist.recv(torch.zeros(12), peer)
    dist.send(made.to_local(), peer)
    dist.send(made.redistribute(mesh, [Replicate()]).to_local(), peer)  # a collective's result
    whole = torch.zeros(size, 12)
    dist.recv(made.to_local(), peer)
    dist.recv(whole, peer)
    assert torch.equal(whole, torch.arange(24.0).view(size, 12))
    assert torch.equal(made.to_local(), whole[peer : peer + 1])


def under_a_mode(rank: int, size: int) -> None:
    """What a rank waits in is its program's own affair, also where it reads for all."""
    for mode in tensors.MODES.values():
        for length in LENGTHS:
            sent, got, unasked = torch.ones(length), torch.zeros(length), torch.zeros(length)
            with mode():
                works = [dist.isend(sent, 1 - rank, tag=tag) for tag in range(2)]
                dist.recv(got, 1 - rank, tag=1)  # the other is read on the way
                dist.recv(unasked, 1 - rank, tag=0)
                for work in works:
                    assert work is not None
                    work.wait()
            assert got.eq(1).all()
            assert unasked.eq(1).all()


# -- groups


LISTS = [[0, 2], [1, 2, 3], [0, 2], [0, 1, 2, 3], [3, 1, 0]]


def subgroups(rank: int, size: int) -> None:
    """Overlapping, in another order, one beside the same one."""
    groups: list[Any] = [dist.new_group(ranks, sort_ranks=False) for ranks in LISTS]
    mine = [n for n, ranks in enumerate(LISTS) if rank in ranks]
    for length in (SMALL, LARGE):
        # Everything to everybody before anything is received.
        works = [
            dist.isend(filled(length, 100 * n + 10 * rank + peer), peer, group=groups[n])
            for n in mine
            for peer in _others(n, rank)
        ]
        for n in reversed(mine):
            for peer in _others(n, rank):
                got = torch.zeros(length, dtype=torch.uint8)
                dist.recv(got, group=groups[n], group_src=LISTS[n].index(peer))
                assert torch.equal(got, filled(length, 100 * n + 10 * peer + rank))
        for work in works:
            assert work is not None
            work.wait()
    for n in mine:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=groups[n])
        assert total.item() == sum(LISTS[n])
    if rank in LISTS[0]:
        assert groups[0]._meshes is dist.group.WORLD._meshes  # type: ignore[union-attr]
        dist.destroy_process_group(groups[0])
    dist.barrier()
    a_batch_in_a_ring(rank, size)


def _others(number: int, rank: int) -> list[int]:
    return [peer for peer in LISTS[number] if peer != rank]


def beside_gloo(rank: int, size: int, store: Store) -> None:
    """A group of ours in a gloo world has connections of its own."""
    with no_leaks("threads", "descriptors"), world(rank, size, store, "gloo"):
        # Torch sees to it that a group of ours is made on its ranks only.
        ours: Any = dist.new_group([2, 1], backend="stagelink", sort_ranks=False)
        if rank in (1, 2):
            peer = 3 - rank
            got = torch.zeros(LARGE, dtype=torch.uint8)
            dist.send(filled(LARGE, rank), peer, group=ours)
            dist.recv(got, peer, group=ours)
            assert torch.equal(got, filled(LARGE, peer))
            assert ours.transports["cpu"].keys() == {peer}
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group(ours)
        elif rank == 2:
            with refused(r"from rank 1 .*closed.*places in \[2, 1\]"):
                dist.recv(torch.zeros(1), 1, group=ours)
            dist.destroy_process_group(ours)
        del ours  # as with gloo's own groups: its sockets live as long as it does
        again = dist.new_group(backend="stagelink")
        dist.send(filled(SMALL, rank), (rank + 1) % size, group=again)
        got = torch.zeros(SMALL, dtype=torch.uint8)
        dist.recv(got, (rank - 1) % size, group=again)
        assert torch.equal(got, filled(SMALL, (rank - 1) % size))
        dist.barrier()
        del again


def made_again(rank: int, size: int, store: Store) -> None:
    """Destroyed and made again, on one store and with the names of the first."""
    for turn in range(3):
        with no_leaks("threads", "descriptors"), world(rank, size, store):
            group = dist.new_group([0, 1])
            got = torch.zeros(LARGE, dtype=torch.uint8)
            dist.isend(filled(LARGE, turn + rank), 1 - rank, group=group)
            dist.recv(got, 1 - rank, group=group)
            assert torch.equal(got, filled(LARGE, turn + 1 - rank))
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            assert total.item() == 1
            del group


def alone(rank: int, size: int) -> None:
    to_oneself(rank, size)


def hears_early(rank: int, size: int, store: Store) -> None:
    """A rank may be sent something before it knows that it has met all others."""
    enter = Wiring.enter

    def slow(wiring: Wiring, windows: Sequence[int]) -> None:
        enter(wiring, windows)
        box: Any = wiring.plane._handlers[MessageKind.DATA].__self__  # type: ignore[attr-defined]
        assert wiring.plane.wait(lambda: bool(box._here), Deadline(20))

    if rank == 0:
        Wiring.enter = slow  # type: ignore[method-assign, assignment]
    try:
        mesh = Mesh(C10dOptions().plan([0, 1], "cpu"), [0, 1], rank, store, 20, EAGER_BYTES)
    finally:
        Wiring.enter = enter  # type: ignore[method-assign]
    sent = filled(LARGE, 0)
    address = MatchingKey(1, 1 - rank, 0, 0)
    if rank == 1:
        like = Header(MessageKind.DATA, payload_bytes=LARGE, shape=(LARGE,))
        header = address.header(mesh.direction_to(0), like)
        mesh.link_to(0).submit(SendJob(header, sent), copy=False)
    else:
        got = torch.zeros_like(sent)
        given = Given(got, *target_of(got))
        work = RecvWork(mesh, 20.0, given, 1, address, mesh.link_from(1))
        mesh.box.ask(address, work)
        assert work.wait()
        assert torch.equal(got, sent)
    mesh.close(Deadline(20))


# -- ends


def closes_early(rank: int, size: int, store: Store) -> None:
    """What was sent before is received; what can never come ends at once, not at the time-out."""
    dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if rank == 0:
        dist.send(filled(SMALL, 0), 1)
        dist.send(filled(LARGE, 1), 1)
        dist.destroy_process_group()
        return
    posted = dist.irecv(torch.zeros(3), 0, tag=9)
    assert posted is not None
    for length, seed in ((SMALL, 0), (LARGE, 1)):
        got = torch.zeros(length, dtype=torch.uint8)
        dist.recv(got, 0)
        assert torch.equal(got, filled(length, seed))
    with refused("rank 0 with tag 9.*rank 0 closed"):
        posted.wait()
    assert posted.is_completed()
    assert not posted.is_success()
    assert "rank 0 closed" in str(posted.exception())
    with refused("receive from rank 0.*rank 0 closed"):
        dist.recv(torch.zeros(3), 0)
    with refused("send to rank 0.*rank 0 closed"):
        dist.send(torch.zeros(3), 0)
    dist.destroy_process_group()
    with refused("closed"):
        posted.wait()


def no_room_any_more(rank: int, size: int, store: Store) -> None:
    """Whoever waits for room hears of it when the peer closes."""
    dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if rank == 0:
        group: Any = dist.group.WORLD
        link = group._meshes["cpu"].link_to(1)
        dist.send(filled(LARGE, 0), 1)
        link._sender.begin = lambda *message: False  # it has no room, and never will
        work = dist.isend(filled(LARGE, 1), 1)
        assert work is not None
        assert not work.is_completed()
        dist.barrier()
        with refused("send to rank 1.*closed"):
            work.wait()
        assert work.is_completed()
        assert work.exception() is not None
    else:
        dist.barrier()
    dist.destroy_process_group()


def dies(rank: int, size: int, store: Store) -> str:
    """Rank 0 is killed; the others have posted receives, from it and from each other."""
    dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if rank == 0:
        dist.barrier()
        report("ready")
        threading.Event().wait()
    tensors = [torch.zeros(LARGE, dtype=torch.uint8) for _ in range(2)]
    posted = [dist.irecv(into, peer) for into, peer in zip(tensors, (0, 3 - rank), strict=True)]
    future = posted[0].get_future() if posted[0] is not None else None
    dist.barrier()
    with refused("rank 0 died") as found:
        assert posted[1] is not None
        posted[1].wait()
    assert future is not None
    with pytest.raises(RuntimeError, match="rank 0 died"):
        future.wait()
    for work in posted:
        assert work is not None
        assert work.is_completed()
        assert "rank 0 died" in str(work.exception())
    for call in (dist.isend, dist.irecv):
        with refused("rank 0 died"):
            call(torch.zeros(3), 3 - rank)
    dist.destroy_process_group()
    return str(found.value)


def dies_beside_a_collective(rank: int, size: int, store: Store) -> str:
    """Rank 0 is killed while ranks 1 and 2 are in collectives, of which it is no part or one."""
    dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    pair = dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        report("ready")
        threading.Event().wait()
    value = torch.ones(4)
    if rank == 1:  # nobody else comes, and gloo hears of no death
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 2), process_group=None, init_sync=False
        )
        with refused("rank 0 died"):
            dist.all_reduce(value, group=pair)
    else:
        model = None
        with refused("rank 0 died"):
            dist.all_reduce(value)
    with refused("rank 0 died") as found:
        dist.broadcast(value, 1)
    if model is not None:
        with pytest.raises(RuntimeError, match="rank 0 died"):
            model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    return str(found.value)


def aborts(rank: int, size: int, store: Store) -> None:
    dist.init_process_group(STAGELINK, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    work = dist.irecv(torch.zeros(3), 1 - rank)
    assert work is not None
    dist.barrier()
    store.set(f"through/{rank}", "")  # an abort breaks off a barrier that others are still in
    if rank == 0:
        store.wait(["through/1"])
        dist.group.WORLD.abort()  # type: ignore[union-attr]
    with refused("the process group was aborted"):
        work.wait()
    dist.destroy_process_group()


def forks(rank: int, size: int) -> None:
    """A child, a loader's for one, is told that the group is not its own, and ends in peace."""
    dist.barrier()
    child = os.fork()
    if child == 0:
        try:
            with refused("fork"):
                dist.send(torch.ones(3), 1 - rank)
            dist.group.WORLD.shutdown()  # type: ignore[union-attr]
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    both_send_first(rank, size)


# -- options


RULES = """
[[links]]
from_rank = 0
to_rank = 1
transport = "gloo"

[[links]]
transport = "shm"
"""


def by_rules(rank: int, size: int, store: Store, how: str, path: str) -> dict[int, str]:
    """Links by pair, and what was used is what was asked for."""
    options = None
    path = f"{path}.{rank}"  # no rank reads what another is writing
    Path(path).write_text(RULES)
    if how == "options":
        options = C10dOptions.load(path)
    else:
        os.environ[CONFIG_VARIABLE] = path
    try:
        with world(rank, size, store, options=options):
            a_batch_in_a_ring(rank, size)
            group: Any = dist.group.WORLD
            found: dict[int, str] = group.transports["cpu"]
            sub: Any = dist.new_group([0, 1])
            if rank in (0, 1):
                assert sub.transports["cpu"] == {1 - rank: "gloo"}
            threads = {thread.name for thread in threading.enumerate()}
            assert any("gloo" in name for name in threads) == (rank != 2)
            return found
    finally:
        os.environ.pop(CONFIG_VARIABLE, None)


def wrong_options(rank: int, size: int, store: Store, tables: dict[str, Any] | str) -> str:
    """What the error says."""
    options = None
    if isinstance(tables, str):
        os.environ[CONFIG_VARIABLE] = tables
    else:
        options = C10dOptions(tables)
    try:
        dist.init_process_group(
            STAGELINK, store=store, rank=rank, world_size=size, pg_options=options
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop(CONFIG_VARIABLE, None)
        if dist.is_initialized():
            dist.destroy_process_group()
        # Torch counts groups that failed as well, and names the next one by the count: another
        # test's ranks, some of them new processes, would wait for each other under two names.
        dist.distributed_c10d._world.group_count = 0
    return "nothing"


def options_that_differ(rank: int, size: int, store: Store) -> str:
    return wrong_options(rank, size, store, {"control": {"inline_bytes": 100 + rank}})


# -- collectives


def collectives(rank: int, size: int) -> None:
    one = torch.tensor([float(rank)])
    total = one.clone()
    dist.all_reduce(total)
    assert total.item() == 3
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    work.wait()
    given = torch.tensor([float(rank)])
    dist.broadcast(given, 2)
    assert given.item() == 2
    everyone = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(everyone, one)
    assert [x.item() for x in everyone] == [0, 1, 2]
    flat = torch.zeros(size)
    dist.all_gather_single(flat, one) if hasattr(dist, "all_gather_single") else (
        dist.all_gather_into_tensor(flat, one)
    )
    assert flat.tolist() == [0, 1, 2]
    dist.gather(one, everyone if rank == 1 else None, dst=1)
    mine = torch.zeros(1)
    dist.scatter(mine, [torch.tensor([float(n)]) for n in range(size)] if rank == 0 else None)
    assert mine.item() == rank
    dist.reduce(total, 0)
    dist.reduce_scatter(mine, [torch.tensor([float(n)]) for n in range(size)])
    assert mine.item() == size * rank
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
    assert swapped.tolist() == [0, 1, 2]
    said: list[Any] = [None] * size
    dist.all_gather_object(said, f"rank {rank}")
    assert said == ["rank 0", "rank 1", "rank 2"]
    told = ["x" if rank == 0 else None]
    dist.broadcast_object_list(told, 0)
    assert told == ["x"]
    everybody: Any = dist.group.WORLD
    found = funcol.all_reduce(one, "sum", everybody)
    assert found.item() == 3
    gathered = funcol.all_gather_tensor(one, 0, everybody)
    assert gathered.tolist() == [0, 1, 2]
    dist.barrier()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    weight = model.module.weight.grad
    assert weight is not None
    assert weight.tolist() == [[1.0, 1.0]]


def collectives_one_after_another(rank: int, size: int) -> None:
    """While gloo's thread drops the views of one, which takes Python's lock, the next is begun."""
    for number in range(300):
        said: list[Any] = [None] * size
        dist.all_gather_object(said, (rank, number))
        assert said == [(peer, number) for peer in range(size)]


IN_A_PAIR: Sequence[Callable[[int, int], None]] = (
    dtypes,
    layouts,
    what_is_around_a_target_stays,
    a_negated_target,
    objects,
    more_than_a_window,
    tags_in_any_order,
    both_send_first,
    a_batch_in_a_ring,
    to_oneself,
    many_threads,
    a_work_of_a_send,
    a_work_of_a_receive,
    a_work_that_nobody_keeps,
    the_time_out_of_a_group,
    sizes_that_do_not_fit,
    what_cannot_be_sent,
    kinds_that_are_sent,
    kinds_that_are_received_into,
    kinds_that_are_refused,
    a_refused_message_to_oneself,
    a_refused_message_in_a_batch,
    memory_that_goes_while_it_is_waited_for,
    results_of_collectives,
    under_a_mode,
    forks,
)
