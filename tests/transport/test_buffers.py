"""Receive buffers: reused by size, lent until the last view dies, never written while lent."""

from __future__ import annotations

import gc
import os
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagelink.transport.buffers import BufferPool

MIB = 1024 * 1024


def test_memory_comes_back_when_the_tensor_dies() -> None:
    pool = BufferPool(64 * MIB)
    first = pool.take(MIB)
    assert (first.dtype, first.shape) == (torch.uint8, (MIB,))
    assert first.untyped_storage().nbytes() == MIB
    address = first.data_ptr()
    assert pool.idle_bytes == 0
    del first
    assert pool.idle_bytes == MIB
    assert pool.take(MIB).data_ptr() == address


def test_memory_is_aligned_for_every_dtype() -> None:
    pool = BufferPool(64 * MIB)
    for size_bytes in (65_536, 65_537, 100_001, MIB):
        assert pool.take(size_bytes).data_ptr() % 64 == 0


@pytest.mark.parametrize("kind", ["view", "slice", "other dtype", "graph"])
def test_memory_stays_while_anything_refers_to_it(kind: str) -> None:
    pool = BufferPool(64 * MIB)
    whole = pool.take(MIB)
    floats = whole.view(torch.float32)
    weight = torch.ones(1, requires_grad=True)
    keepers = {
        "view": whole.view(2, -1),
        "slice": whole[10:20],
        "other dtype": floats,
        "graph": (floats * weight).sum(),  # it saves its input for backward
    }
    keeper = keepers[kind]
    del whole, floats, keepers
    gc.collect()
    assert pool.idle_bytes == 0
    del keeper
    gc.collect()
    assert pool.idle_bytes == MIB


def test_a_graph_lets_go_after_its_backward() -> None:
    pool = BufferPool(64 * MIB)
    weight = torch.ones(1, requires_grad=True)
    total = (pool.take(MIB).view(torch.float32) * weight).sum()
    assert pool.idle_bytes == 0
    total.backward()
    assert pool.idle_bytes == MIB


def test_small_buffers_are_simply_allocated() -> None:
    pool = BufferPool(64 * MIB)
    for size_bytes in (0, 1, 65_535):
        assert pool.take(size_bytes).numel() == size_bytes
    assert pool.idle_bytes == 0


def test_idle_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    pool = BufferPool(3 * MIB + 4096)
    lent = {size: pool.take(size * MIB) for size in (1, 2)}
    addresses = {size: tensor.data_ptr() for size, tensor in lent.items()}
    del lent[1], lent[2]
    assert pool.idle_bytes == 3 * MIB
    extra = pool.take(MIB + 4096)
    del extra
    assert pool.idle_bytes == 3 * MIB + 4096  # without the one of 1 MiB
    assert pool.take(2 * MIB).data_ptr() == addresses[2]
    assert BufferPool(0).idle_bytes == 0


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_no_two_lent_buffers_share_memory(steps: list[tuple[bool, int]]) -> None:
    pool = BufferPool(MIB)
    lent: list[torch.Tensor] = []
    for give_back, number in steps:
        if give_back and lent:
            del lent[number % len(lent)]
        else:
            tensor = pool.take(65_536 + 4096 * number)
            tensor.fill_(len(lent))
            lent.append(tensor)
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in lent)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_threads_never_get_the_same_memory() -> None:
    pool = BufferPool(64 * MIB)
    bad: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = pool.take(70_000)
            tensor.fill_(mark)
            if not bool((tensor == mark).all()):
                bad.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad


def test_a_forked_child_keeps_what_it_holds() -> None:
    pool = BufferPool(64 * MIB)
    tensor = pool.take(MIB).fill_(7)
    memory: memoryview = memoryview(tensor.numpy())  # type: ignore[arg-type]  # it is one
    source, sink = os.pipe()
    go_in, go_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_in, 1)
        # Without torch: its threads are not there in a forked child.
        os.write(sink, b"same" if bytes(memory) == b"\7" * MIB else b"changed")
        os._exit(0)
    os.close(sink)
    del tensor, memory
    pool.take(MIB).fill_(9)  # the parent's memory is used again
    os.write(go_out, b"!")
    with open(source, "rb") as file:
        assert file.read() == b"same"
    os.waitpid(pid, 0)
    os.close(go_in)
    os.close(go_out)
