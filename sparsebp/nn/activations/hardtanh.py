"""Hardtanh: x cut off at two values."""

from __future__ import annotations

from sparsebp.core.arguments import check_number
from sparsebp.core.errors import OptionError
from sparsebp.nn.activations.clamped import Clamped


class Hardtanh(Clamped):
    """x limited to [min_val, max_val], as `torch.nn.Hardtanh`; the slope at both limits is 0. A NaN stays a NaN.

    Parameters
    ----------
    min_val, max_val
        The limits.

    Raises
    ------
    OptionError
        `max_val` is not above `min_val`, or one of them is no number.
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__()
        min_val, max_val = (
            check_number(name, value, finite=False) for name, value in (("min_val", min_val), ("max_val", max_val))
        )
        if not max_val > min_val:
            raise OptionError(
                "The limits of Hardtanh are in the wrong order", expected="max_val > min_val",
                got=f"min_val={min_val}, max_val={max_val}", remedy="Swap them",
            )  # fmt: skip
        self.min_val, self.max_val = min_val, max_val

    def limits(self) -> tuple[float, float]:
        """Return `min_val` and `max_val`."""
        return self.min_val, self.max_val
