"""Where the values of a Jacobian come from: exact derivatives, a function of the user, or differences.

Each source has a `pattern`, says whether the Jacobian is `dense`, an array, and returns new values at x, where the
residuals are f.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, PatternError
from sparsebp.jacobians.function import SparseJacobian
from sparsebp.patterns.pattern import SparsityPattern, color_columns, structure_of


def pattern_of(sparsity: Any) -> SparsityPattern:
    """Return the pattern of `jac_sparsity`."""
    if not isinstance(sparsity, SparsityPattern) and not backend.is_sparse(sparsity):
        from scipy.sparse import csr_array

        sparsity = csr_array(np.atleast_2d(sparsity))
    return structure_of("jac_sparsity", sparsity)


class Exact:
    """A `SparseJacobian`."""

    dense = False

    def __init__(self, jacobian: SparseJacobian, args: tuple[Any, ...]) -> None:
        self.jacobian, self.args, self.pattern = jacobian, args, jacobian.pattern

    def values(self, x: Array, f: Array) -> Array:
        """Return the values at x."""
        return self.jacobian.values(x, *self.args)


class Matrices:
    """A function that returns matrices; its first one, at `start`, is kept for the first call of `values`."""

    def __init__(
        self, jac: Callable[..., Any], args: tuple[Any, ...], start: Array, pattern: SparsityPattern | None
    ) -> None:  # fmt: skip
        self.jac, self.args, self.dtype = jac, args, start.dtype
        self.first: Any = self._matrix(start)
        self.dense = pattern is None and isinstance(self.first, np.ndarray)
        if pattern is None:
            dense = self.dense
            pattern = SparsityPattern.dense(*self.first.shape) if dense else structure_of("jac", self.first)
        self.pattern = pattern

    def values(self, x: Array, f: Array) -> Array:
        """Return copies: the function may write to its matrix again."""
        matrix, self.first = self._matrix(x) if self.first is None else self.first, None
        if self.dense and isinstance(matrix, np.ndarray) and matrix.shape == self.pattern.shape:
            return matrix.ravel().copy()
        if isinstance(matrix, np.ndarray):
            from scipy.sparse import csr_array

            matrix = csr_array(matrix)
        try:
            return self._floats(self.pattern.values_of(matrix)).copy()
        except PatternError as error:
            remedy = "Keep entries that happen to be zero, or pass jac_sparsity="
            raise PatternError(f"jac returned a matrix on another pattern. {error}", remedy=remedy) from error

    def _matrix(self, x: Array) -> Any:
        """Return a sparse matrix, or a dense one as an array."""
        matrix = self.jac(x.copy(), *self.args)
        if backend.is_sparse(matrix):
            return matrix
        found = None
        if isinstance(matrix, (np.ndarray, list, tuple, int, float)):
            found = self._floats(np.atleast_2d(np.asarray(matrix)))
        if found is None or found.dtype.kind != "f" or found.ndim != 2:
            raise OptionError("jac does not return a matrix", expected="a sparse matrix of SciPy, or an array (m, n)",
                              got=type(matrix).__name__,
                              remedy="scipy.optimize.least_squares takes linear operators")  # fmt: skip
        return found

    def _floats(self, values: Array) -> Array:
        return backend.exact_floats("jac", values, self.dtype) if values.dtype.kind in "biu" else values


Scheme = Literal["2-point", "3-point", "cs"]
SCHEMES: tuple[Scheme, ...] = ("2-point", "3-point", "cs")


class Differences:
    """Differences: columns of one colour share no row, so one displacement serves them all.

    Schemes and steps are those of `scipy.optimize.least_squares`; colours as in A. Curtis, M. Powell, J. Reid, "On the
    Estimation of Sparse Jacobian Matrices", 1974.

    Parameters
    ----------
    fun
        Maps x (n,), complex for ``"cs"``, to residuals (m,).
    scheme
        ``"2-point"``, ``"3-point"`` (more accurate, with twice the evaluations) or ``"cs"`` (complex steps).
    shape, pattern
        (m, n), and where derivatives may differ from zero; None: everywhere.
    relative
        Steps over the magnitudes of x, a number or (n,); None for the square root of the machine precision, or its
        cube root for ``"3-point"``, times 1 at least.
    low, high
        Bounds, (n,), within which `fun` is evaluated.
    """

    def __init__(
        self, fun: Callable[[Array], Array], scheme: Scheme, shape: tuple[int, int], pattern: SparsityPattern | None,
        relative: Array | None, low: Array, high: Array,
    ) -> None:  # fmt: skip
        self.dense, pattern = pattern is None, SparsityPattern.dense(*shape) if pattern is None else pattern
        if pattern.shape != shape:
            raise PatternError("The pattern does not fit x0 and the residuals", expected=shape, got=pattern.shape)
        self.fun, self.scheme, self.pattern, self.relative = fun, scheme, pattern, relative
        self.low, self.high = low, high
        colors = np.arange(shape[1]) if pattern.kind == "dense" else color_columns(pattern)
        count = int(colors.max(initial=-1)) + 1
        self.columns = _groups(colors, count)
        self.entries = _groups(colors[pattern.indices], count)

    def values(self, x: Array, f: Array) -> Array:
        """Return the values at x, where the function is f: (nnz,)."""
        steps, one_sided = self._steps(x)
        found = np.empty(self.pattern.nnz, x.dtype)
        for columns, entries in zip(self.columns, self.entries, strict=True):
            rows, of = self.pattern.row_of_entry[entries], self.pattern.indices[entries]
            h, once = steps[columns], one_sided[columns]
            if self.scheme == "cs":
                found[entries] = self._at(x.astype(np.result_type(x, 1j)), columns, 1j * h).imag[rows] / steps[of]
            elif self.scheme == "2-point":
                moved = x[of] + steps[of] - x[of]  # the step after rounding
                found[entries] = (self._at(x, columns, h) - f)[rows] / moved
            else:
                first, second = (
                    self._at(x, columns, np.where(once, h, -h)),
                    self._at(x, columns, np.where(once, 2 * h, h)),
                )
                ahead = np.where(one_sided[of], 2 * steps[of], steps[of])
                behind = np.where(one_sided[of], 0, steps[of])
                change = np.where(one_sided[of], (4 * first - 3 * f - second)[rows], (second - first)[rows])
                found[entries] = change / ((x[of] + ahead) - (x[of] - behind))
        return found

    def _at(self, x: Array, columns: Array, steps: Array) -> Array:
        moved = x.copy()
        moved[columns] += steps
        return self.fun(moved)

    def _steps(self, x: Array) -> tuple[Array, Array]:
        """Return the steps within the bounds, and which are taken to one side alone."""
        least = np.finfo(x.dtype).eps ** (1 / 3 if self.scheme == "3-point" else 1 / 2)
        sign = np.where(x < 0, -1, 1).astype(x.dtype)
        steps = (least * sign * np.maximum(1, abs(x))).astype(x.dtype)
        if self.relative is not None:
            asked = (self.relative * sign * abs(x)).astype(x.dtype)
            steps = np.where(x + asked == x, steps, asked)
        below, above = x - self.low, self.high - x
        if self.scheme == "2-point":
            outside = (x + steps < self.low) | (x + steps > self.high)
            fits = abs(steps) <= np.maximum(below, above)
            shorter = np.where(above >= below, above, -below)
            return np.where(outside, np.where(fits, -steps, shorter), steps), np.ones(len(x), bool)
        if self.scheme == "cs":
            return abs(steps), np.zeros(len(x), bool)
        steps = abs(steps)
        least_room = np.minimum(below, above)
        side = np.where(above >= below, np.minimum(steps, above / 2), -np.minimum(steps, below / 2))
        central = (least_room >= steps) | (abs(side) <= least_room)
        return np.where(central, np.minimum(steps, least_room), side), ~central


def _groups(colors: Array, count: int) -> list[Array]:
    """Return the places of every colour."""
    order = np.argsort(colors, kind="stable")
    return np.split(order, np.searchsorted(colors[order], np.arange(1, count))) if count else []
