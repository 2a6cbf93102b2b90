"""Programs that train a pipeline in the ways in which Megatron-LM and DeepSpeed call c10d."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.interop.c10d_programs import BATCH, MICROBATCHES, STEPS, WIDTH, Block, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Exchange = tuple[torch.Tensor | None, int | None]
"""What is sent, and the shape of what is received, between this rank and one other."""


class Stage:
    """One rank's stage and the microbatches under way in it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.first, self.last = rank == 0, rank == size - 1
        self.module = Block(rank)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generator = torch.Generator().manual_seed(0)
        self.inputs: tuple[torch.Tensor, ...] = ()
        self._targets: tuple[torch.Tensor, ...] = ()

    def begin(self) -> None:
        x, target = (
            torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=self._generator)
            for _ in range(2)
        )
        self.inputs, self._targets = x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        x = self.inputs[microbatch] if received is None else received.requires_grad_()
        output: torch.Tensor = self.module(x)
        if self.last:
            output = loss_of(output, self._targets[microbatch])
        self.kept[microbatch] = x, output
        return output.detach()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, output = self.kept.pop(microbatch)
        output.backward(gradient)
        return x.grad

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.module.parameters()]


# -- Megatron-LM: core/pipeline_parallel/p2p_communication.py and schedules.py


def batched(rank: int, ops: Sequence[tuple[str, torch.Tensor | None, int]]) -> None:
    """``_batched_p2p_ops``: all at once."""
    calls = {"send": dist.isend, "recv": dist.irecv}
    listed = [
        dist.P2POp(calls[kind], tensor, peer) for kind, tensor, peer in ops if tensor is not None
    ]
    for work in dist.batch_isend_irecv(listed) if listed else []:
        work.wait()


def even_and_odd(rank: int, ops: Sequence[tuple[str, torch.Tensor | None, int]]) -> None:
    """``_p2p_ops``: even ranks send to the next first, odd ones receive from the one before."""
    order = {("send", 1): 0, ("recv", -1): 1, ("send", -1): 2, ("recv", 1): 3}
    if rank % 2:
        order = {("recv", -1): 0, ("send", 1): 1, ("recv", 1): 2, ("send", -1): 3}
    works = []
    for kind, tensor, peer in sorted(ops, key=lambda op: order[op[0], op[2] - rank]):
        if tensor is not None:
            works.append((dist.isend if kind == "send" else dist.irecv)(tensor, peer))
    for work in works:
        assert work is not None
        work.wait()


HOW: dict[str, Callable[[int, Sequence[tuple[str, torch.Tensor | None, int]]], None]] = {
    "batched": batched,
    "even and odd": even_and_odd,
}


class Megatron:
    """``_communicate``, also with shapes that vary."""

    def __init__(self, stage: Stage, how: str) -> None:
        self._stage = stage
        self._run = HOW[how]

    def before(
        self, sent: torch.Tensor | None = None, *, wanted: bool = False
    ) -> torch.Tensor | None:
        """Send to the stage before, receive from it, or both; nothing on the first stage."""
        return None if self._stage.first else self._exchange(self._stage.rank - 1, sent, wanted)

    def after(
        self, sent: torch.Tensor | None = None, *, wanted: bool = False
    ) -> torch.Tensor | None:
        """The same with the stage after."""
        return None if self._stage.last else self._exchange(self._stage.rank + 1, sent, wanted)

    def _exchange(self, peer: int, sent: torch.Tensor | None, wanted: bool) -> torch.Tensor | None:
        rank = self._stage.rank
        shape = torch.zeros(2, dtype=torch.int64) if wanted else None
        mine = None if sent is None else torch.tensor(sent.shape)
        self._run(rank, [("recv", shape, peer), ("send", mine, peer)])
        into = None
        if shape is not None:
            into = torch.empty(tuple(shape.tolist()), dtype=torch.float64)
        self._run(rank, [("recv", into, peer), ("send", sent, peer)])
        return into


def megatron(rank: int, size: int, how: str) -> list[torch.Tensor]:
    """``forward_backward_pipelining_without_interleaving``; the weights of this rank's stage."""
    stage = Stage(rank, size)
    wire = Megatron(stage, how)
    warm_up = min(size - rank - 1, MICROBATCHES)
    steady = MICROBATCHES - warm_up
    for _ in range(STEPS):
        stage.begin()
        for microbatch in range(warm_up):
            wire.after(stage.forward(microbatch, wire.before(wanted=True)))
        x = wire.before(wanted=steady > 0)
        for number in range(steady):
            gradient = wire.after(stage.forward(warm_up + number, x), wanted=True)
            x = wire.before(stage.backward(number, gradient), wanted=number < steady - 1)
        for microbatch in range(steady, MICROBATCHES):
            wire.before(stage.backward(microbatch, wire.after(wanted=True)))
        stage.end()
    return stage.weights


# -- DeepSpeed: runtime/pipe/{p2p,engine,schedule}.py

DTYPES = (torch.float32, torch.float64)


def send_with_meta(tensor: torch.Tensor, peer: int) -> None:
    """``_send_tensor_meta``, then the tensor, each by a blocking send."""
    dist.send(torch.tensor([DTYPES.index(tensor.dtype)]), peer)
    dist.send(torch.tensor([tensor.dim()]), peer)
    dist.send(torch.tensor(tensor.shape), peer)
    dist.send(tensor, peer)


def receive_with_meta(peer: int) -> torch.Tensor:
    """``_recv_tensor_meta``, then the tensor."""
    dtype, dims = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    dist.recv(dtype, peer)
    dist.recv(dims, peer)
    shape = torch.zeros(int(dims), dtype=torch.int64)
    dist.recv(shape, peer)
    tensor = torch.zeros(tuple(shape.tolist()), dtype=DTYPES[int(dtype)])
    dist.recv(tensor, peer)
    return tensor


def in_step(step: int, stage: int, stages: int) -> tuple[int, bool]:
    """``TrainSchedule._step_to_micro_batch``: the microbatch, and whether it goes forward."""
    if step % 2 == stage % 2:
        return step // 2 - stage // 2, True
    if step % 2 == 0:
        return step // 2 - stages + (stage + 1) // 2, False
    return (step - 1) // 2 - stages + 1 + stage // 2, False


def deepspeed(rank: int, size: int) -> list[torch.Tensor]:
    """``PipelineEngine.train_batch``; the weights of this rank's stage."""
    stage = Stage(rank, size)
    for _ in range(STEPS):
        stage.begin()
        _train_batch(stage)
        stage.end()
    return stage.weights


def _train_batch(stage: Stage) -> None:
    outputs: dict[int, torch.Tensor | None] = {}
    before = -1
    for step in range(2 * (MICROBATCHES + stage.size - 1)):
        microbatch, forward = in_step(step, stage.rank, stage.size)
        here = 0 <= microbatch < MICROBATCHES
        peer = stage.rank - 1 if forward else stage.rank + 1
        sent, received = outputs.pop(before, None), None
        if 0 <= peer < stage.size:
            received = _swap(peer, sent, wanted=here, send_first=forward)
        if here:
            run = stage.forward if forward else stage.backward
            outputs[microbatch] = run(microbatch, received)
        before = microbatch


def _swap(
    peer: int, sent: torch.Tensor | None, *, wanted: bool, send_first: bool
) -> torch.Tensor | None:
    if send_first and sent is not None:
        send_with_meta(sent, peer)
    received = receive_with_meta(peer) if wanted else None
    if not send_first and sent is not None:
        send_with_meta(sent, peer)
    return received
