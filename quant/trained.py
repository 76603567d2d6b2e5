"""A quantised matrix whose codes and scales are trained: rounding counts as no change in the
gradient ("straight-through").

Esser et al., "Learned Step Size Quantization", 2019; Liu et al., "LLM-QAT: Data-Free Quantization
Aware Training for Large Language Models", 2023.
"""

from dataclasses import dataclass

import numpy as np
import torch

from llmbuild.quant.grid import QuantisedMatrix, empty_matrix, row_parts


@dataclass(frozen=True)
class Rates:
    """How far Adam moves at a step, at most. positions, minima: in codes. scales: relative."""

    positions: float
    scales: float


class TrainedMatrix:
    """A matrix on its grid, each weight at a position among the codes, of which it has the nearest.

    positions: fp32 [rows, groups, columns of a group]. scales and minima are trained as what they
    have changed by: relative to where they began, and in codes.
    """

    def __init__(self, matrix: QuantisedMatrix, rates: Rates) -> None:
        assert matrix.zeros is None, "whole zero points come from checkpoints alone"
        self._grid = matrix.grid
        self._shape = matrix.codes.shape
        grouped = (len(matrix.codes), matrix.scales.shape[1], -1)
        codes = torch.from_numpy(matrix.codes.reshape(grouped))
        self._first_scales = torch.from_numpy(matrix.scales.astype(np.float32))[..., None]
        self._positions = codes.float()
        self._growth = torch.zeros_like(self._first_scales)
        self._shift, self._first_minima = torch.empty(0), torch.empty(0)
        trained = [(self._positions, rates.positions), (self._growth, rates.scales)]
        if matrix.minima is not None:
            self._first_minima = torch.from_numpy(matrix.minima.astype(np.float32))[..., None]
            self._shift = torch.zeros_like(self._first_minima)
            trained.append((self._shift, rates.positions))
        self._rates = [rate for _, rate in trained]
        groups = [{"params": [values], "lr": rate} for values, rate in trained]
        self._adam = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)

    def values(self) -> torch.Tensor:
        """bf16 [rows, columns]."""
        values = torch.empty(self._shape, dtype=torch.bfloat16)
        scales, offsets = self._levels()
        for part in row_parts(self._shape):
            codes = self._codes(part)
            torch.addcmul(offsets[part], codes, scales[part], out=codes)
            values[part] = codes.flatten(1)
        return values

    def step(self, gradient: torch.Tensor, rate: float) -> None:
        """Take one step of Adam for the loss's gradient by the values, [rows, columns]; rate: of
        the rates, 0 to 1."""
        grouped = gradient.unflatten(1, self._positions.shape[1:])
        scales, _ = self._levels()
        self._positions.grad = torch.empty_like(self._positions)
        self._growth.grad = torch.empty_like(self._growth)
        sums = torch.empty_like(self._growth)
        last = self._last_code
        for part in row_parts(self._shape):
            mine, positions = grouped[part].float(), self._positions[part]
            codes = self._codes(part)
            if self._grid.symmetric:
                codes -= self._grid.zero
            self._growth.grad[part] = (codes.mul_(mine)).sum(-1, keepdim=True)
            sums[part] = mine.sum(-1, keepdim=True)
            is_inside = (positions > -0.5) & (positions < last + 0.5)
            torch.mul(mine.mul_(is_inside), scales[part], out=self._positions.grad[part])
        self._growth.grad *= self._first_scales
        if not self._grid.symmetric:
            self._shift.grad = sums * self._first_scales
        for group, full in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = full * rate
        self._adam.step()
        self._adam.zero_grad()

    def rounded(self) -> QuantisedMatrix:
        """The matrix as it is now."""
        matrix = empty_matrix(self._grid, self._shape)
        scales, offsets = self._levels()
        for part in row_parts(self._shape):
            matrix.codes[part] = self._codes(part).flatten(1).numpy()
        matrix.scales[:] = scales[..., 0].numpy()
        if matrix.minima is not None:
            matrix.minima[:] = offsets[..., 0].numpy()
        return matrix

    @property
    def _last_code(self) -> int:
        return (1 << self._grid.bits) - 1

    def _codes(self, part: slice) -> torch.Tensor:
        return torch.round(self._positions[part]).clamp_(0, self._last_code)

    def _levels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and offsets, [rows, groups, 1], that float16 holds."""
        scales = (self._first_scales * (1 + self._growth)).half().float()
        if self._grid.symmetric:
            return scales, -self._grid.zero * scales
        return scales, (self._first_minima + self._shift * self._first_scales).half().float()
