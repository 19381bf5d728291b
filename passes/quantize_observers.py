"""Streaming observers: what range an activation has, in memory that does not grow with the number of samples.

An observer keeps a histogram of `BINS` bins over a range that doubles whenever a value falls outside it (two
neighbouring bins become one, so counts stay exact), and forgets the values. From it come three choices of range:

* min-max: everything seen;
* percentile: all but a share of the values at either end;
* mse: the range whose INT8 grid has the least expected squared error, as in Banner et al., "Post-training 4-bit
  quantization of convolutional networks" (2019), searched instead of assumed.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Calibrator = Literal["min-max", "percentile", "mse"]

BINS = 2048
LEAST_STEP = 2.0**-14
"""No scale is smaller: it is the least normal float16, in which Core ML keeps scales."""

MSE_CANDIDATES = 100  # shares of the full range that are tried


@cache
def range_observer() -> type[torch.nn.Module]:
    """The observer class, made on first use because torch is imported late."""
    import torch
    from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase

    class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
        """Per-tensor affine INT8, for activations.

        Attributes:
            least, greatest: the extreme values seen; infinite while nothing has been seen.
            finite: false once NaN or infinity has been seen.
            counts: the histogram, `BINS` bins over [low, low + width).
        """

        def __init__(self, calibrator: Calibrator = "min-max", percentile: float = 99.99, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.calibrator = calibrator
            self.percentile = percentile
            self.least, self.greatest = float("inf"), float("-inf")
            self.finite = True
            self.low, self.width = 0.0, 0.0
            self.counts = torch.zeros(BINS, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values = x.detach()
            if values.numel():
                least, greatest = (float(v) for v in torch.aminmax(values))
                if not (math.isfinite(least) and math.isfinite(greatest)):
                    self.finite = False
                    return x
                self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)
                if self.calibrator != "min-max":
                    self._count(values.float(), least, greatest)
            return x

        def _count(self, values: torch.Tensor, least: float, greatest: float) -> None:
            if self.width == 0:
                self.low, self.width = least, max(greatest - least, 1e-12) * (1 + 1e-6)
            while least < self.low:
                self._merge(grow_down=True)
            while greatest >= self.low + self.width:
                self._merge(grow_down=False)
            index = ((values - self.low) * (BINS / self.width)).long().clamp_(0, BINS - 1)
            self.counts += torch.bincount(index.flatten(), minlength=BINS)

        def _merge(self, *, grow_down: bool) -> None:
            """Double the range, downwards or upwards; each pair of bins becomes one."""
            pairs = self.counts.view(BINS // 2, 2).sum(1)
            empty = torch.zeros(BINS // 2, dtype=torch.float64)
            self.counts = torch.cat([empty, pairs] if grow_down else [pairs, empty])
            self.low -= self.width if grow_down else 0.0
            self.width *= 2

        def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
            least, greatest = self.chosen_range()
            scale, zero_point = self._calculate_qparams(torch.tensor(least), torch.tensor(greatest))
            return scale, zero_point

        def chosen_range(self) -> tuple[float, float]:
            """The values that map to the least and the greatest INT8 number."""
            if self.least > self.greatest:
                return 0.0, 0.0  # nothing reached this tensor
            if self.calibrator == "percentile":
                return self._percentile_range()
            if self.calibrator == "mse":
                return self._mse_range()
            return self.least, self.greatest

        def _edges(self) -> torch.Tensor:
            return self.low + self.width * torch.arange(BINS + 1, dtype=torch.float64) / BINS

        def _percentile_range(self) -> tuple[float, float]:
            share = (1 - self.percentile / 100) / 2
            cumulative = torch.cumsum(self.counts, 0) / self.counts.sum()
            low_bin = int(torch.searchsorted(cumulative, share, right=True))
            high_bin = int(torch.searchsorted(cumulative, 1 - share))
            edges = self._edges()
            low, high = float(edges[min(low_bin, BINS - 1)]), float(edges[min(high_bin, BINS - 1) + 1])
            return max(low, self.least), min(high, self.greatest)

        def _mse_range(self) -> tuple[float, float]:
            edges = self._edges()
            centres = (edges[:-1] + edges[1:]) / 2  # (BINS,)
            best, choice = float("inf"), (self.least, self.greatest)
            for k in range(MSE_CANDIDATES, 0, -1):
                low, high = min(self.least, 0.0) * k / MSE_CANDIDATES, max(self.greatest, 0.0) * k / MSE_CANDIDATES
                step = max((high - low) / 255, LEAST_STEP)
                rounded = ((centres.clamp(low, high) - low) / step).round() * step + low
                error = float((self.counts * (rounded - centres) ** 2).sum())
                if error < best:
                    best, choice = error, (low, high)
            return choice

    return RangeObserver
