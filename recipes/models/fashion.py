"""A teacher and a student for 28 × 28 grey images (Fashion-MNIST)."""

from __future__ import annotations

import torch
from torch import nn


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Teacher(nn.Module):
    """A plain convolutional network: three resolutions, the last one wide. (N, 1, 28, 28) → (N, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(1, width, 3),
            nn.MaxPool2d(2),  # (N, width, 14, 14)
            _conv(width, 2 * width, 3),
            nn.MaxPool2d(2),  # (N, 2·width, 7, 7)
            _conv(2 * width, 4 * width, 3),
            nn.MaxPool2d(2),  # (N, 4·width, 3, 3)
            _conv(4 * width, 8 * width, 3),
        )
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.features(image)  # (N, 8·width, 3, 3)
        return self.head(self.dropout(x.mean((2, 3))))


class Student(nn.Module):
    """Three convolutions, the first of which halves the image at once. (N, 1, 28, 28) → (N, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(1, width, 5, stride=2),  # (N, width, 14, 14)
            _conv(width, 2 * width, 3),
            nn.MaxPool2d(2),  # (N, 2·width, 7, 7)
            _conv(2 * width, 4 * width, 3),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.features(image)  # (N, 4·width, 7, 7)
        return self.head(x.mean((2, 3)))


def teacher(width: int = 32) -> nn.Module:
    return Teacher(width)


def student(width: int = 32) -> nn.Module:
    return Student(width)
