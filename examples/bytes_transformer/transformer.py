"""The bytes of Python's own standard library, and a small transformer for them in three stages."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

PLAN = Path(__file__).with_name("pipeline.toml")
WIDTH = 64
HEADS = 4
LENGTHS = (32, 48, 64, 96)
"""Sequences of a batch are equally long; batches differ."""

BATCH = 16
TRAINING_BYTES = 1 << 20
HELD_OUT_BYTES = 1 << 16

Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    """Self-attention to what came before, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden``: (items, length, WIDTH), and so is the result."""
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        result: torch.Tensor = self.layer(hidden, src_mask=mask, is_causal=True)
        return result


class Bottom(nn.Module):
    """Bytes and their places, and the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(max(LENGTHS), WIDTH)
        self.block = Block()

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``text``: (items, length), int64. Returns (items, length, WIDTH)."""
        places = torch.arange(text.shape[1])
        found: torch.Tensor = self.block(self.byte(text) + self.place(places))
        return found


class Middle(nn.Module):
    """One more block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, low: torch.Tensor) -> torch.Tensor:
        """``low`` and the result: (items, length, WIDTH)."""
        found: torch.Tensor = self.block(low)
        return found


class Top(nn.Module):
    """The last block, and the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, 256)

    def forward(self, high: torch.Tensor) -> torch.Tensor:
        """``high``: (items, length, WIDTH). Returns logits (items, length, 256)."""
        logits: torch.Tensor = self.linear(self.norm(self.block(high)))
        return logits


STAGES: dict[str, type[nn.Module]] = {"bottom": Bottom, "middle": Middle, "top": Top}


def build(stage: str) -> nn.Module:
    """A stage's module with the same weights wherever it is built: replicas must start alike."""
    torch.manual_seed(list(STAGES).index(stage))
    return STAGES[stage]()


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over items and places of the cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(steps: int) -> Iterator[Batch]:
    """Make batches of sequences at random places; the same at every call."""
    text = _library()[:TRAINING_BYTES]
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        length = LENGTHS[step % len(LENGTHS)]
        starts = torch.randint(len(text) - length - 1, (BATCH,), generator=generator)
        yield _cut_out(text, starts, length)


def held_out() -> list[Batch]:
    """Sequences that training never sees."""
    text = _library()[TRAINING_BYTES : TRAINING_BYTES + HELD_OUT_BYTES]
    length = max(LENGTHS)
    starts = torch.arange(0, len(text) - length - 1, 8 * length)
    return [_cut_out(text, starts, length)]


def _cut_out(text: torch.Tensor, starts: torch.Tensor, length: int) -> Batch:
    windows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return {"text": windows[:, :-1], "target": windows[:, 1:]}


def _library() -> torch.Tensor:
    """The source of the standard library's modules, one after another, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)
