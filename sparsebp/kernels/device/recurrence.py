"""Launchers of linear recurrences (``cuda/recurrence.cu``): a thread a unit of a sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.device.launch import BLOCK, Launcher, c_types, ceil_div


class LinearRecurrenceKernels(Launcher):
    """Device side of linear recurrences in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def linear_recurrence(
        self, a: Array, b: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, h: Array
    ) -> None:
        """Every thread runs down the steps."""
        self._run("linear_recurrence", (a, b, h0, lengths, h), a, h, pairs, np.int32(reverse))

    def linear_recurrence_grad(
        self, a: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, ga: Array,
        gb: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """The same, from the last step to the first."""
        summed = np.int32(len(ga) != len(h))
        self._run(
            "linear_recurrence_grad", (a, h, gh, h0, lengths, ga, gb, gh0), a, h, pairs, np.int32(reverse), summed
        )

    def _run(self, name: str, arrays: tuple[Any, ...], a: Array, h: Array, pairs: bool, *flags: np.int32) -> None:
        steps, batch, width = h.shape
        units, of_units = (n // (1 + pairs) for n in (width, a.shape[2]))
        apart = (
            a.shape[1] * of_units if len(a) > 1 else 0,
            of_units if a.shape[1] > 1 else 0,
            1 if of_units > 1 else 0,
        )
        sizes = map(np.int64, (*apart, steps, batch * units, units))
        defines = c_types(REAL=h) | {"PAIRS": int(pairs)}
        self._launch(
            "recurrence.cu", name, defines, ceil_div(batch * units, BLOCK), (BLOCK,), (*arrays, *sizes, *flags)
        )
