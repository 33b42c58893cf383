"""Numbers of channels under a width multiplier."""

from __future__ import annotations

from sparsebp.core.arguments import check_number
from sparsebp.core.errors import OptionError


def scaled(channels: int, width: float, multiple: int = 1) -> int:
    """Return ``channels * width`` rounded to a multiple, at least one of it.

    Rounding down by more than a tenth is avoided, as in the reference code of MobileNetV2.

    Raises
    ------
    OptionError
        `width` is not positive.
    """
    width = check_number("width", width)
    if width <= 0:
        raise OptionError("Invalid width", expected="a finite number above 0", got=width, remedy="Pass width=1")
    wanted = channels * width
    rounded = max(multiple, int(wanted + multiple / 2) // multiple * multiple)
    return rounded + multiple if rounded < 0.9 * wanted else rounded
