"""BPPSA's Tables 4 to 6: seconds of an epoch on a V100, and the speed-ups that follow from them (Appendix G)."""

from __future__ import annotations

from typing import NamedTuple

_STEPS = 32_000 // 16
"""Iterations of an epoch of §4.1, for B = 16."""


class Sides(NamedTuple):
    """A row: seconds of an epoch.

    Attributes
    ----------
    forward
        The forward pass only.
    baseline, bppsa
        Training by PyTorch with cuDNN, and by the paper's scan.
    prepared
        The forward pass with the preparation of the Jacobians, where the paper has it; else `forward`.
    """

    forward: float
    baseline: float
    bppsa: float
    prepared: float | None = None

    @property
    def overall(self) -> float:
        """Speed-up of the training."""
        return self.baseline / self.bppsa

    @property
    def backward(self) -> float:
        """Speed-up of the backward, the preparation of the Jacobians left out."""
        return (self.baseline - self.forward) / (self.bppsa - (self.prepared or self.forward))

    @property
    def doubt(self) -> str:
        """Say that `backward` follows from a difference of the last digits, if it does."""
        rest = self.bppsa - (self.prepared or self.forward)
        return f" (from {rest:.2f} s)" if rest < 0.05 else ""

    @property
    def overhead(self) -> float:
        """Share of the baseline's time that the preparation of the Jacobians takes."""
        return ((self.prepared or self.forward) - self.forward) / self.baseline

    def step_seconds(self, length: int) -> float:
        """Return the seconds of the baseline's backward for one of `length` steps of a batch of 16."""
        return (self.baseline - self.forward) / _STEPS / length


TABLE_4 = {
    10: Sides(1.57, 4.49, 4.24), 30: Sides(2.13, 5.5, 4.91), 100: Sides(3.82, 8.87, 6.64),
    300: Sides(8.79, 18.49, 11.71), 1000: Sides(25.86, 53.33, 29.29), 3000: Sides(75.33, 157.11, 79.48),
    10_000: Sides(250.28, 510.13, 265.02), 30_000: Sides(748.99, 1557.94, 764.31),
}  # fmt: skip
"""RNN, by T; B = 16."""
TABLE_5 = {
    256: Sides(2.13, 4.02, 3.72), 128: Sides(3.87, 7.96, 5.49), 64: Sides(7.51, 14.77, 9.27),
    32: Sides(13.62, 29.51, 15.0), 16: Sides(25.86, 53.33, 29.29), 8: Sides(51.29, 102.77, 56.37),
    4: Sides(100.55, 209.67, 112.23), 2: Sides(200.65, 409.33, 227.13),
}  # fmt: skip
"""RNN, by B; T = 1000."""
TABLE_6 = {
    ("S", 16): Sides(1.66, 3.71, 2.94, 2.1), ("S", 32): Sides(0.91, 1.9, 1.48, 1.09),
    ("S", 64): Sides(0.52, 1.0, 0.82, 0.62), ("M", 16): Sides(3.21, 6.19, 4.2, 3.52),
    ("M", 32): Sides(1.73, 3.3, 2.22, 1.83), ("M", 64): Sides(0.86, 1.82, 1.2, 1.18),
    ("L", 16): Sides(5.78, 11.43, 6.91, 6.06), ("L", 32): Sides(3.04, 6.09, 3.57, 3.23),
    ("L", 64): Sides(1.64, 3.19, 2.33, 2.13),
}  # fmt: skip
"""GRU, by set and B."""
