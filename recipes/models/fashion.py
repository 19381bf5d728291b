"""A teacher and a student for 28 × 28 grey images (Fashion-MNIST)."""

from __future__ import annotations

import torch
from torch import nn


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Net(nn.Module):
    """A plain convolutional network at four resolutions. (N, 1, 28, 28) → (N, 10)."""

    def __init__(self, widths: tuple[int, int, int, int], dropout: float) -> None:
        super().__init__()
        a, b, c, d = widths
        self.features = nn.Sequential(
            _conv(1, a),
            nn.MaxPool2d(2),  # (N, a, 14, 14)
            _conv(a, b),
            nn.MaxPool2d(2),  # (N, b, 7, 7)
            _conv(b, c),
            nn.MaxPool2d(2),  # (N, c, 3, 3)
            _conv(c, d),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(d, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.features(image)  # (N, d, 3, 3)
        return self.head(self.dropout(x.mean((2, 3))))


def teacher() -> nn.Module:
    return Net((32, 64, 128, 256), dropout=0.3)


def student() -> nn.Module:
    """Pruning leaves half of its channels, 34,000 weights: 1/32 of the teacher's bytes, the file included."""
    return Net((16, 48, 80, 128), dropout=0.0)
