"""A chain of transposed Jacobians reduced to one affine map: the first phase of reduce-then-scan, by itself.

For a piece of a longer chain, whose gradient is not known yet: what comes in, g, leaves as ``A g + b``, where A is the
product of the piece's Jacobians and b what its injections come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core.check import Array
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.algorithms import AbstractStep, Recipe, Span
from sparsebp.scan.cost import is_view, size_recipe, sized_seconds
from sparsebp.scan.plan import check_plan
from sparsebp.scan.run import Multiply


class Reduction:
    """The planned product of a chain. Made by `plan_reduction`; call it with values.

    Attributes
    ----------
    pattern : SparsityPattern
        Of the product A, (rows of the last Jacobian, columns of the first).
    flops : int
        For the whole batch, injections not counted.
    seconds : float
        What the cost model expects of a call.
    memory : int
        Bytes of the products on the way and of the index arrays of their plans.
    """

    def __init__(
        self, patterns: Sequence[SparsityPattern], memory_limit: int | None, batch: int, dtype: Any,
        shared: Sequence[bool] | None, xp: ModuleType,
    ) -> None:  # fmt: skip
        self._chain, _, limit = check_plan(
            patterns, "linear", None, None, None, memory_limit, False, batch, dtype, shared, xp
        )
        n = len(self._chain.patterns)
        steps = tuple(AbstractStep(k - 1, "reduce", Span(1, k + 1), Span(k + 1, k + 2)) for k in range(1, n))
        recipe = Recipe("chunked", n, steps, {"reduce": n - 1})
        self._sized = size_recipe(recipe, self._chain, self._chain.product, limit)
        self.pattern: SparsityPattern = self._sized.patterns[Span(1, n + 1)]
        self.flops, self.memory = self._sized.flops, self._sized.workspace + self._sized.index
        self.seconds = sized_seconds(self._sized, self._chain.machine, self._chain.sizes.itemsize)

    def __call__(
        self, data: Sequence[Array], injections: Sequence[Array | None] | None, like: Array
    ) -> tuple[Array, Array | None]:
        """Return the values of A, and b.

        Parameters
        ----------
        data, injections
            As `ScanPlan` takes them, one entry a Jacobian; with a batch.
        like
            An array of the vectors' kind: of A's columns and the batch, (columns, B).

        Returns
        -------
        data
            (nnz,) where the batch shares all of the piece's values, else (nnz, B); it may be one of `data`.
        vector
            (rows, B), or None where nothing is injected.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            Values do not fit their patterns.
        """
        added = [None] * len(data) if injections is None else list(injections)
        matrix, vector = data[0], added[0]
        multiply = Multiply(like)
        for number, product in enumerate(self._sized.plans, 1):
            pattern, right = self._chain.patterns[number], data[number]
            vector = added[number] if vector is None else multiply(pattern, right, vector, added[number])
            if not is_view(product):
                matrix = product(right, matrix)
            elif pattern.kind != "identity":
                matrix = right
        return matrix, vector


def plan_reduction(
    patterns: Sequence[SparsityPattern], memory_limit: int | None = None, *, batch: int = 1, dtype: Any = np.float32,
    shared: Sequence[bool] | None = None, xp: ModuleType = np,
) -> Reduction:  # fmt: skip
    """Plan the product of a chain, by fixed-pattern products from its first Jacobian on.

    The arguments, and the errors that they raise, are those of `plan_scan`.
    """
    return Reduction(patterns, memory_limit, batch, dtype, shared, xp)
