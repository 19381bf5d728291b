"""The starter recipe's model: a small convolutional network with random weights. Put your own factory here."""

from torch import nn


def tiny() -> nn.Module:
    """A classifier of 32 by 32 images, (N, 3, 32, 32) → (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 32, 1),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
