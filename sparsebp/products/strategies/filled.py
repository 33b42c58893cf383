"""Nearly full matrices, as the upper levels of a tree over a chain have them: a product of dense ones."""

from __future__ import annotations

from sparsebp.products.strategies.accumulate import Accumulate

SHARE = 1 / 8
"""Products, of those that full matrices would have, from which dense ones are the quicker: measured, from a twentieth
on for some hundred rows and columns, ten to twenty times as quick where nearly all are there."""
LEAST = 100_000
"""Products at least: every entry, and every zero, is written out once besides."""
NARROW = 32
"""Rows and columns at least, for the same reason."""


class Filled(Accumulate):
    """Nothing is kept per product; for a batch, and on a device, sums are collected as `Accumulate` does it."""

    name = "filled"
    kernel = "spgemm_filled"

    @property
    def fits(self) -> bool:
        """There are enough products."""
        product = self.product
        return worth(product.a.shape[0], product.a.shape[1], product.b.shape[1], product.products)


def worth(m: int, k: int, n: int, products: int) -> bool:
    """Say whether so many products of a matrix (m, k) and one (k, n) are as good as all."""
    return min(m, k, n) >= NARROW and products >= max(SHARE * m * k * n, LEAST)
