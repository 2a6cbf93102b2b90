"""The digits, and a small convolutional network for them in three stages."""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

PLAN = Path(__file__).with_name("pipeline.toml")
BATCH = 64
HELD_OUT = 360

Batch = dict[str, torch.Tensor]


class Features(nn.Module):
    """Finds strokes: 8 x 8 images to 4 x 4 maps."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 16, 3, padding=1)
        self.two = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``image``: (items, 1, 8, 8). Returns (items, 32, 4, 4)."""
        maps = self.two(self.one(image).relu()).relu()
        return nn.functional.max_pool2d(maps, 2)


class Patterns(nn.Module):
    """Puts strokes together: maps to a code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3, padding=1)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """``maps``: (items, 32, 4, 4). Returns (items, 256)."""
        return nn.functional.max_pool2d(self.conv(maps).relu(), 2).flatten(1)


class Classifier(nn.Module):
    """Tells the digit from the code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 10)

    def forward(self, code: torch.Tensor) -> torch.Tensor:
        """``code``: (items, 256). Returns (items, 10)."""
        logits: torch.Tensor = self.linear(code)
        return logits


STAGES: dict[str, type[nn.Module]] = {
    "features": Features,
    "patterns": Patterns,
    "classifier": Classifier,
}


def build(stage: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A stage's module with the same weights wherever it is built: replicas must start alike."""
    torch.manual_seed(list(STAGES).index(stage))
    return STAGES[stage]().to(dtype)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Plain gradient descent with momentum."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def batches(dtype: torch.dtype = torch.float32) -> list[Batch]:
    """The training digits in batches, the last one smaller: ``image`` and ``target``."""
    images, digits = _digits(dtype)
    pairs = zip(images[HELD_OUT:].split(BATCH), digits[HELD_OUT:].split(BATCH), strict=True)
    return [{"image": image, "target": target} for image, target in pairs]


def held_out() -> list[Batch]:
    """Digits that training never sees, as one batch."""
    images, digits = _digits(torch.float32)
    return [{"image": images[:HELD_OUT], "target": digits[:HELD_OUT]}]


def _digits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).unsqueeze(1).to(dtype) / 16
    return images[order], torch.from_numpy(data.target)[order]


def accuracy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The fraction that is right."""
    return (logits.argmax(dim=1) == target).double().mean()
