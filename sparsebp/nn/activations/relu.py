"""ReLU: max(x, 0)."""

from __future__ import annotations

import math

from sparsebp.nn.activations.clamped import Clamped


class ReLU(Clamped):
    """``max(x, 0)``, as `torch.nn.ReLU`; the slope at 0 is 0. A NaN stays a NaN."""

    told_by = "relu"

    def limits(self) -> tuple[float, float]:
        """Return zero and infinity."""
        return 0.0, math.inf
