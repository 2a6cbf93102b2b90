"""Tensors through whole transports: every kind of them, large ones, and what streams may spoil."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stagelink.testing import run_fresh
from stagelink.testing.samples import awkward_tensors
from tests.gpu.answers import Answer, Findings
from tests.gpu.plans import pair, ways
from tests.support.pipelines import carry, check_same, joined

if TYPE_CHECKING:
    from torch.distributed import Store

    from stagelink import Handler
    from tests.gpu.machines import Machine
    from tests.support.pipelines import Document

__all__ = ["expandable", "gloo", "malloc_async", "mixed", "tensors"]

_GLOO = {"interface": "lo"}
_MESSAGES = 24


def tensors(machine: Machine) -> Answer:
    """All over cupy, with little memory."""
    findings = Findings()
    for how, options in ways(machine).items():
        _carry_all(findings, how, machine, pair(machine, [machine.cupy], options, window=8))
    return findings.answer()


def gloo(machine: Machine) -> Answer:
    """All over gloo, by way of host memory."""
    findings = Findings()
    _carry_all(findings, "gloo", machine, pair(machine, ["gloo"], _GLOO, window=8))
    return findings.answer()


def mixed(machine: Machine) -> Answer:
    """From a stage on the GPU to one on the CPU; gradients come back to the GPU."""
    findings = Findings()
    devices = (machine.device, "cpu")
    plan = pair(machine, ["shm", "gloo"], devices=devices, window=8)
    _carry_all(findings, "GPU to CPU", machine, plan)
    return findings.answer()


def expandable(machine: Machine) -> Answer:
    """With the setting of torch's allocator that CUDA IPC cannot export."""
    return _with_allocator(machine, "expandable segments")


def malloc_async(machine: Machine) -> Answer:
    """With CUDA's own pool as torch's allocator, which cannot be exported either."""
    return _with_allocator(machine, "cudaMallocAsync")


def _with_allocator(machine: Machine, name: str) -> Answer:
    findings = Findings()
    how, options = next(iter(ways(machine).items()))
    used = _carry_all(findings, how, machine, pair(machine, [machine.cupy], options, window=8))
    findings.need("torch's allocator", used, name)
    return findings.answer()


def _carry_all(findings: Findings, how: str, machine: Machine, plan: Document) -> str:
    """Run all cases; the allocator that torch used."""
    with run_fresh(_cases, 2, machine, plan) as ranks:
        carried, used = ranks.results(machine.patience_s)[0]
    findings.tell(how, carried)
    return used


def _cases(
    rank: int, world_size: int, store: Store, machine: Machine, plan: Document
) -> tuple[str, str]:
    with (
        machine.process(rank),
        joined(rank, world_size, store, plan, machine.transports) as comm,
    ):
        values = list(_values(comm.stage.device))
        carry(comm, values, [len(values)])
        for case in _CASES:
            case(comm, machine)
        names = ", ".join(sorted({link.transport for link in comm.transports}))
        done = [f"{len(values)} kinds of tensor", *(str(case.__doc__) for case in _CASES)]
        return f"by {names}: {'; '.join(done)}", machine.allocator()


def _values(device: str) -> Iterator[torch.Tensor]:
    """Every dtype and shape, and views that are made on the device."""
    grid = torch.arange(24.0, device=device).view(2, 3, 4)
    views = (
        *(grid.transpose(0, 2), grid[:, 1], grid[..., ::2], grid[0, 0].expand(5, 4)),
        torch.complex(grid, -grid).conj(),
        torch.complex(grid, -grid).conj().imag,
        grid.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(700_000.0, device=device).view(700, 1000).t(),
    )
    for value in (*(tensor.to(device) for tensor in awkward_tensors()), *views):
        takes_gradient = value.is_floating_point() or value.is_complex()
        yield value.detach().requires_grad_(takes_gradient)


def _large(comm: Handler, machine: Machine) -> None:
    """a message in many pieces"""
    size = machine.large_bytes // 4
    value = torch.arange(size, dtype=torch.int32, device=comm.stage.device)
    with comm.evaluate(2) as session:
        for number in range(2):
            if comm.rank == 0:
                session.send("h", value, number)
            else:
                check_same(session.recv("h", number), value)


def _overwritten(comm: Handler, machine: Machine) -> None:
    """senders that overwrite their tensor at once"""
    kept = []
    with comm.evaluate(_MESSAGES) as session:
        value = torch.empty(machine.elements, dtype=torch.int32, device=comm.stage.device)
        for number in range(_MESSAGES):
            if comm.rank == 0:
                value.fill_(number)
                copy = number % 2 == 0
                handle = session.send("h", value, number, copy=copy)
                if not copy:
                    handle.wait()
                value.fill_(-1)
            else:
                kept.append(session.recv("h", number))
    for number, got in enumerate(kept):
        check_same(got, torch.full_like(value, number))


def _on_streams(comm: Handler, machine: Machine) -> None:
    """slow producers and readers on streams of their own"""
    right = []
    with comm.evaluate(_MESSAGES) as session:
        for number in range(_MESSAGES):
            with machine.side_stream():
                if comm.rank == 0:
                    _produce(comm, machine, number, session.send)
                else:
                    right.append(_all_are(session.recv("h", number), number, machine))
    wrong = [number for number, one in enumerate(right) if not bool(one)]
    if wrong:
        raise AssertionError(f"messages {wrong} came out wrong")


def _produce(comm: Handler, machine: Machine, number: int, send: Callable[..., Any]) -> None:
    value = torch.full((machine.elements,), -1, dtype=torch.int32, device=comm.stage.device)
    if comm.stage.device == machine.device:
        machine.linger()
    value.fill_(number)
    send("h", value, number)
    value.fill_(-2)


def _all_are(got: torch.Tensor | None, number: int, machine: Machine) -> torch.Tensor:
    """Read late, when the tensor itself is no more; what takes its memory comes after it."""
    if got is None:
        raise AssertionError("None arrived")
    if got.device.type == machine.device:
        machine.linger()
    same = (got == number).all()
    shape, device = got.shape, got.device
    del got
    torch.full(shape, -3, dtype=torch.int32, device=device)
    return same


_CASES: tuple[Callable[[Handler, Machine], None], ...] = (_large, _overwritten, _on_streams)
