"""`plan_factor`, `FactorPlan` and `Factors`: LU, Cholesky or LDLᵀ factors of many matrices on one pattern.

    P A Q = L U,    or, for symmetric positive definite matrices,    P A Pᵀ = Uᵀ U,    for other symmetric ones  L D Lᵀ

The plan holds the orders of rows and columns, P and Q, and the structure of L and U. A call computes the values of L
and U and nothing else; it exchanges no rows. So a plan suits all values for which the pivots of P and Q are large
enough, and every call checks that: one that would lose more than half of the digits raises `PivotError`.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array, check_choice, check_flag, check_integer, check_number
from sparsebp.core.errors import (
    DeviceError,
    OptionError,
    PatternError,
    PivotError,
    ShapeError,
    StaleError,
    within_memory,
)
from sparsebp.core.locks import cached_property
from sparsebp.patterns.pattern import SparsityPattern, frozen, not_finite, structure_of
from sparsebp.products.elimination import across, lay_out, ranges, running
from sparsebp.products.ordering import (
    INDEPENDENT,
    Order,
    check_order,
    nearly_symmetric,
    order_diagonal,
    order_pivots,
    why_singular,
)
from sparsebp.products.product import ProductPlan, _as_columns, _check_values, plan_product

MODEST = 8.0
"""Growth up to which pivots on the diagonal are as good as those that partial pivoting chooses."""
NAMED = 8
"""Samples that a message lists."""
INDEFINITE = "not positive definite to working precision"
NAMES = {"lu": "LU", "cholesky": "Cholesky", "ldlt": "LDLᵀ"}

Kind = Literal["lu", "cholesky", "ldlt"]
Trans = Literal["N", "T", "H"]


def plan_factor(
    pattern: Any, values: Any = None, *, kind: Kind = "lu", order: Order | Array | None = None, signs: Any = None,
    regularize: float | None = None,
) -> FactorPlan:  # fmt: skip
    """Choose the order of elimination of the matrices on a pattern, and find the structure of their factors.

    Parameters
    ----------
    pattern
        A square pattern; or a sparse matrix of SciPy, whose values are `values` for LU factors where none are given.
    values
        (nnz,) of float32, float64, complex64 or complex128 of NumPy, or a sparse matrix on the pattern: a matrix whose
        pivots are representative. Rows are exchanged as partial pivoting does for it. With a pattern and None, pivots
        stay on the diagonal: for matrices that are diagonally dominant or positive definite, say.
    kind
        ``"lu"``, or ``"cholesky"`` for symmetric positive definite matrices, on a symmetric pattern and without
        `values`: half of the memory and of the operations. Values above the diagonal are read, and taken for those
        below. Or ``"ldlt"`` for symmetric matrices whose pivots on the diagonal are not 0 in any order, as in
        quasi-definite ones [[H, Aᵀ], [A, -G]], H and G positive definite: as Cholesky factors, on a symmetric pattern
        or on one triangle of it. Complex matrices of both are Hermitian.
    order
        How rows and columns are ordered before pivots are chosen: ``"minimum_degree"``; ``"nested_dissection"`` by
        METIS, which fills less on three-dimensional grids, if the package `pymetis` is installed; ``"natural"``; or a
        permutation, (n,) integers, of rows and columns in the order of elimination. None: what the notes say.
    signs
        For ``"ldlt"``: (n,) integers, the sign that each row's pivot should have: 1, -1, or 0 for any. A matrix with
        another one is refused, or regularised.
    regularize
        For ``"ldlt"``, between 0 and 1, some 1e-8 in float64: a pivot that does not have its sign, or is smaller than
        this times the 1-norm of its row, becomes as large as that, and a matrix is refused only if no digit would be
        right. `Factors.shifts` tells what was added to the diagonal, and `Factors.refine` solves with the matrix that
        was given. None or 0 changes no pivot.

    Returns
    -------
    FactorPlan

    Raises
    ------
    PatternError, ShapeError
        `pattern` is neither, or not square; without `values`: it lacks an entry on the diagonal; for Cholesky
        factors: it is not symmetric; for LDLᵀ factors: nor a triangle. Or `signs` are not (n,).
    OptionError
        An unknown `kind`; `values` for Cholesky or LDLᵀ factors, `signs` or `regularize` for others than LDLᵀ; a sign
        that is none, a `regularize` that is not between 0 and 1; an unknown `order`, or no permutation.
    MissingDependencyError
        Nested dissection without `pymetis`.
    DTypeError, DeviceError, LayoutError
        `values` is not such an array.
    PivotError
        `values` are of a singular matrix, or not finite. The message names a row.
    MemoryLimitError
        The system has no memory for the plan.

    Notes
    -----
    Where at least half of the entries have a partner across the diagonal, rows and columns are ordered together, by
    minimum degree on A + Aᵀ; or by nested dissection, if `pymetis` is installed and it takes fewer operations, where
    minimum degree takes more than 20 000 for each row. Pivots are on the diagonal if that is accurate for `values`
    (terms of L U are at most eight times the matrix's entries); else one may be there if it is half as large as its
    column's largest entry. Other patterns, and those for which that is not accurate either, are ordered by COLAMD with
    partial pivoting.
    Without `values`, rows and columns with the same pattern are ordered as one: matrices of blocks are planned in the
    time that one of numbers takes.
    """
    check_choice("kind", kind, ("lu", "cholesky", "ldlt"))
    given, pattern = pattern, structure_of("pattern", pattern)
    if values is None and kind == "lu" and pattern is not given:
        values = given
    values = _values_of(pattern, values)
    n, m = pattern.shape
    if n != m:
        raise ShapeError("Only square matrices have factors", expected="as many rows as columns", got=pattern.shape)
    order = check_order(order, n)
    if values is None:
        missing = np.setdiff1d(np.arange(n), pattern.indices[pattern.row_of_entry == pattern.indices])
        if len(missing):
            raise PatternError("The pattern lacks entries on the diagonal, where pivots are taken without values",
                               expected="a full diagonal", got=f"none in row {missing[0]}, {len(missing)} in all",
                               remedy="Pass values=, from which pivots are chosen")  # fmt: skip
    else:
        _check_on_host("values", values)
        backend.number_dtype(values.dtype)
        backend.check_array("values", values, shape=(pattern.nnz,))
    if values is not None and kind != "lu":
        raise OptionError(f"{NAMES[kind]} factors need no values for their plan", expected="None, or kind='lu'",
                          got="values")  # fmt: skip
    if kind != "ldlt" and (signs is not None or regularize is not None):
        raise OptionError("Only LDLᵀ factors have signs and are regularised", expected="kind='ldlt'", got=kind)
    with within_memory(f"The plan of the factors of a matrix of shape {pattern.shape} does not fit in memory",
                       "Reorder the matrix, or solve iteratively"):  # fmt: skip
        if kind == "ldlt":
            return _plan_ldlt(pattern, order, signs, regularize)
        if values is None:
            return _plan_diagonal(pattern, order, kind == "cholesky")
        return _plan_for(pattern, values, order)[0]


def plan_and_factor(pattern: SparsityPattern, values: Array) -> tuple[FactorPlan, Factors]:
    """Plan for values as `plan_factor` does, and return their factors as well."""
    with within_memory(f"The factors of a matrix of shape {pattern.shape} do not fit in memory", "Solve iteratively"):
        plan, factors = _plan_for(pattern, values, None)
        return plan, plan(values) if factors is None else factors


def _plan_for(pattern: SparsityPattern, values: Array, order: Any) -> tuple[FactorPlan, Factors | None]:
    """Plan pivots that suit values; return the factors as well if they were computed for the choice."""
    if wrong := not_finite(pattern, values):
        raise PivotError("values are not finite", expected="finite numbers", got=wrong)
    if nearly_symmetric(pattern):
        diagonal = values[pattern.row_of_entry == pattern.indices]
        if len(diagonal) == pattern.shape[0] and diagonal.all():
            with contextlib.suppress(PivotError):
                plan = _plan_diagonal(pattern, order, half=False)
                if (factors := plan(values)).growth <= MODEST:
                    return plan, factors
        with contextlib.suppress(PivotError):  # rows of very different sizes: pivots are worth more than symmetry
            plan = FactorPlan(pattern, *lay_out(pattern, *order_pivots(pattern, values, True, order)))
            return plan, plan(values)
    return FactorPlan(pattern, *lay_out(pattern, *order_pivots(pattern, values, False, order))), None


def _plan_diagonal(pattern: SparsityPattern, order: Any, half: bool) -> FactorPlan:
    """Plan pivots on the diagonal, in the order that suits."""
    found, heads = order_diagonal(pattern, order, symmetric=half)
    return FactorPlan(pattern, *lay_out(pattern, found, found, heads, half))


def _plan_ldlt(pattern: SparsityPattern, order: Any, signs: Any, regularize: float | None) -> FactorPlan:
    """Plan LDLᵀ factors from both triangles, then read entries where the pattern has them."""
    n = pattern.shape[0]
    signs = np.zeros(n, np.int8) if signs is None else np.asarray(signs)
    if signs.shape != (n,):
        raise ShapeError("signs do not fit the pattern", expected=(n,), got=signs.shape)
    if wrong := signs[~np.isin(signs, (-1, 0, 1))][:1].tolist():
        raise OptionError("signs are not signs", expected="1, -1, or 0 for any", got=wrong[0])
    if regularize is not None:
        regularize = check_number("regularize", regularize, 0, 1) or None
    full, read = _both_triangles(pattern)
    plan = _plan_diagonal(full, order, half=True)
    source = plan.panels.source
    panels = plan.panels._replace(
        source=across(pattern, plan.panels, read[np.maximum(source, -1 - source)]),
        signs=signs.astype(np.int8)[plan.rows], definite=False,
    )  # fmt: skip
    return replace(plan, pattern=pattern, panels=panels, regularize=regularize)


def _both_triangles(pattern: SparsityPattern) -> tuple[SparsityPattern, np.ndarray]:
    """Return the pattern of symmetric matrices, and the entry to read in each place: on the diagonal or above.

    Of one triangle there is no other entry to read.
    """
    own, rows, columns = np.arange(pattern.nnz), pattern.row_of_entry, pattern.indices
    above = columns >= rows
    if pattern == pattern.T:
        return pattern, np.where(above, own, pattern.transpose_permutation)
    if not (above.all() or (columns <= rows).all()):
        raise PatternError("The pattern of LDLᵀ factors is not symmetric", got=pattern,
                           expected="an entry (j, i) for every entry (i, j), or one triangle",
                           remedy='Keep zeros as entries, or pass kind="lu"')  # fmt: skip
    off = np.flatnonzero(rows != columns)
    rows, columns, read = (np.concatenate(pair) for pair in ((rows, columns[off]), (columns, rows[off]), (own, off)))
    order = np.lexsort((columns, rows))
    indptr = running(np.bincount(rows, minlength=pattern.shape[0]))
    return SparsityPattern(indptr, columns[order], pattern.shape), read[order]


plans: WeakValueDictionary[int, FactorPlan] = WeakValueDictionary()
"""The plans that somebody keeps, by their numbers."""


@dataclass(frozen=True, eq=False)
class FactorPlan:
    """How matrices on one pattern are factorised, any number of times. Made by `plan_factor`.

    Attributes
    ----------
    pattern : SparsityPattern
        The matrices' pattern, (n, n).
    fill : int
        Values of L and U that are kept for each matrix, with zeros that fill up dense blocks.
    flops : int
        Floating-point operations for each matrix.
    panels : tuple
        `sparsebp.kernels.host.sparse.panels.Panels`, the structure of L and U.
    regularize : float or None
        Size of the smallest pivot of LDLᵀ factors over its row's 1-norm, None if no pivot is changed.
    number : int
        Another one for every plan of this process: compiled graphs hold it in the plan's place.
    """

    pattern: SparsityPattern
    fill: int
    flops: int
    panels: Any = field(repr=False)
    regularize: float | None = None
    number: int = field(init=False, repr=False, default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        *arrays, half, definite = self.panels
        object.__setattr__(self, "panels", type(self.panels)(*map(frozen, arrays), half, definite))
        plans[self.number] = self

    @property
    def kind(self) -> Kind:
        """``"lu"``, ``"cholesky"`` or ``"ldlt"``."""
        return "lu" if not self.panels.half else "cholesky" if self.panels.definite else "ldlt"

    @cached_property
    def table(self) -> np.ndarray:
        """`panels`, as kernels take them while this plan exists."""
        found: np.ndarray = kernels.on_host().panels.table_of(self.panels)
        return found

    @cached_property
    def _whole(self) -> tuple[SparsityPattern, np.ndarray]:
        return (self.pattern, np.arange(self.pattern.nnz)) if self.kind == "lu" else _both_triangles(self.pattern)

    @property
    def whole(self) -> SparsityPattern:
        """The pattern of the whole matrices, where `pattern` may be one triangle."""
        return self._whole[0]

    @property
    def read(self) -> np.ndarray:
        """The entry whose value counts in each place of `whole`; symmetric matrices' is on the diagonal or above."""
        return self._whole[1]

    @cached_property
    def across(self) -> np.ndarray:
        """Where `read` is on the other side of the diagonal: Hermitian matrices have its complex conjugate there."""
        found: np.ndarray = self.pattern.row_of_entry[self.read] != self.whole.row_of_entry
        return found

    def whole_values(self, values: Array) -> Array:
        """Return the values on `whole` of matrices on the pattern, (nnz, …)."""
        found = values if self.kind == "lu" else values[self.read]
        if found.dtype.kind == "c" and self.kind != "lu":
            np.conjugate(found, out=found, where=self.across.reshape(-1, *[1] * (found.ndim - 1)))
        return found

    def check_symmetric(self, values: Array) -> None:
        """Check that a matrix given as such is symmetric, or Hermitian, if its kind is: (nnz,), or (nnz, B)."""
        if self.kind == "lu" or self.whole is not self.pattern:
            return
        pattern, wide = self.pattern, _as_columns(values)
        across = wide[pattern.transpose_permutation].conj()
        if np.array_equal(wide, across):  # most are, and a tolerance costs ten times as much
            return
        if self.kind == "cholesky":
            largest = abs(wide[pattern.row_of_entry == pattern.indices])
        else:
            largest = np.zeros((pattern.shape[0], wide.shape[1]), backend.real_dtype(wide.dtype))
            np.maximum.at(largest, pattern.row_of_entry, abs(wide))
        size = largest[pattern.row_of_entry] ** 0.5 * largest[pattern.indices] ** 0.5
        apart = abs(wide - across) > np.finfo(wide.dtype).eps ** 0.5 * size
        apart |= np.isnan(wide) != np.isnan(across)
        for entry in np.flatnonzero(apart.any(axis=1))[:1]:
            values = wide[[entry, pattern.transpose_permutation[entry]], np.argmax(apart[entry])]
            got = (
                f"{values[0]} in row {pattern.row_of_entry[entry]}, column {pattern.indices[entry]}, {values[1]} across"
            )
            complex_ = wide.dtype.kind == "c"
            raise PivotError(f"The matrix is not {'Hermitian' if complex_ else 'symmetric'}", got=got,
                             expected=f"{'conjugate' if complex_ else 'equal'} values across the diagonal",
                             remedy='Store both triangles, or pass kind="lu"')  # fmt: skip

    @cached_property
    def times_vector(self) -> ProductPlan:
        """The product of such a matrix and a vector, whose gradients are those of a solve."""
        n, pattern = self.pattern.shape[0], self.whole
        pattern = SparsityPattern.diagonal(n) if pattern.kind == "identity" else pattern
        return plan_product(pattern, SparsityPattern.dense(n, 1))

    @property
    def rows(self) -> np.ndarray:
        """The row of every pivot, in the order of elimination: (n,) int32, read-only."""
        rows: np.ndarray = self.panels.rows
        return rows

    @property
    def columns(self) -> np.ndarray:
        """The column of every pivot, in the order of elimination: (n,) int32, read-only."""
        columns: np.ndarray = self.panels.order
        return columns

    def __call__(self, values: Any, out: Factors | None = None) -> Factors:
        """Factorise one matrix, or a batch.

        Parameters
        ----------
        values
            (nnz,) or (nnz, B) values on the pattern, float32, float64, complex64 or complex128, C-contiguous, of NumPy.
            Symmetric kinds take complex matrices as Hermitian ones. Or a sparse matrix
            whose entries lie on the pattern, in any order: see `SparsityPattern.values_of`; integers count as float64,
            and on a symmetric pattern for Cholesky or LDLᵀ factors both triangles are stored.
        out
            Factors of this plan, of as many matrices and of this dtype, whose memory is used again; they cannot be used
            if the call fails. None makes new ones.

        Returns
        -------
        Factors
            `out`, if it is given. Own copies: `values` may be overwritten.

        Raises
        ------
        PivotError
            Some sample is singular to working precision, not finite or near an end of the dtype's numbers, or these
            pivots would lose more than half of its digits; `samples` of the error names all of them. A plan made with
            its own values may suit it. Or a matrix for Cholesky or LDLᵀ factors is not symmetric.
        PatternError
            A matrix has an entry other than zero outside the pattern.
        DeviceError
            `values` is an array of CuPy: factors are computed on the host alone.
        DTypeError, ShapeError, LayoutError
            `values` do not fit.
        OptionError
            `out` is not such factors.
        """
        if type(values) is not np.ndarray:
            given, values = values, _values_of(self.pattern, values)
            if values is not given:
                self.check_symmetric(values)
            _check_on_host("values", values)
        _check_values("values", values, self.pattern.nnz, backend.number_dtype)
        if values.dtype.kind == "c" and self.kind != "lu":
            self._check_real_diagonal(values)
        wide = _as_columns(values)
        batch = wide.shape[1]
        if out is None:
            lanes, real = kernels.on_host().panels.width(batch, values.dtype), backend.real_dtype(values.dtype)
            with within_memory(
                f"{batch} factors of {self.fill} values each do not fit in memory", "Use smaller batches"
            ):
                out = Factors(self, None if values.ndim == 1 else batch, *(
                    host_pool.empty(np, (-(-batch // lanes), size, lanes), dtype) for size, dtype in (
                        (self.pattern.nnz, values.dtype), (self.fill, values.dtype), (len(self.panels.signs), real)
                    )
                ))  # fmt: skip
        elif not (isinstance(out, Factors) and out.fits(self, values)):
            wanted = f"factors of this plan for values {values.shape}, {values.dtype}"
            raise OptionError("out is not such factors", expected=wanted, got=repr(out))
        out._usable, found = False, np.zeros((2, batch), out._shifts.dtype)
        if self.pattern.shape[0] and batch:
            arrays = wide, out._values, out._data, found, out._shifts
            kernels.on_host().factor.factorise(self.table, self.flops // 2, *arrays, self.regularize or 0.0)
        self._check_pivots(values, out._data, found)
        out._usable, out.growth = True, found[0] if values.ndim == 2 else found[0, 0]
        return out

    @cached_property
    def _limits(self) -> dict[np.dtype, tuple[float, float]]:
        """The largest `loss` and `growth` of a matrix that is not refused."""
        found: dict[np.dtype, tuple[float, float]] = {}
        for dtype in backend.FLOAT_DTYPES + backend.COMPLEX_DTYPES:
            eps, largest = float(np.finfo(dtype).eps), float(np.finfo(dtype).max)
            limits = 1 / (4 * eps * max(self.pattern.shape[0], 1) ** 0.5), eps**-0.5
            found[dtype] = limits if self.regularize is None else (largest, 1 / (4 * eps))
        return found

    def _check_real_diagonal(self, values: Array) -> None:
        """Refuse samples whose diagonal is that of no Hermitian matrix."""
        at = np.flatnonzero(self.pattern.row_of_entry == self.pattern.indices)
        diagonal = _as_columns(values)[at]
        wrong = abs(diagonal.imag) > np.finfo(values.dtype).eps ** 0.5 * abs(diagonal)
        if wrong.any():
            bad = np.flatnonzero(wrong.any(axis=0))
            row = np.argmax(wrong[:, bad[0]])
            where = f", in sample {bad[0]}" if values.ndim == 2 else ""
            raise PivotError("The matrix is not Hermitian", expected="real numbers on the diagonal",
                             got=f"{diagonal[row, bad[0]]} in row {row}{where}", remedy='Pass kind="lu"',
                             samples=map(int, bad) if values.ndim == 2 else ())  # fmt: skip

    def _check_pivots(self, values: Array, data: Array, found: Array) -> None:
        """Refuse samples of which no digit, or less than half of them, would be right."""
        most_loss, most_growth = self._limits[values.dtype]
        grown, lost = (found[0, 0], found[1, 0]) if found.shape[1] == 1 else found.max(axis=1, initial=0)
        if lost <= most_loss and grown <= most_growth:  # NaN is not
            return
        growth, loss = found
        eps, batched, kind = np.finfo(values.dtype).eps, values.ndim == 2, self.kind
        bad = np.flatnonzero(~((loss <= most_loss) & (growth <= most_growth)))
        which, again, where = "The matrix", "values", ""
        if batched:
            which, again = f"{len(bad)} of {len(loss)} matrices", f"values[:, {bad[0]}].copy()"
            where = ", in samples " + ", ".join(map(str, bad[:NAMED])) + (", …" if len(bad) > NAMED else "")
        samples, pattern = map(int, bad) if batched else (), self.whole
        first = self.whole_values(values[:, bad[0]] if batched else values)
        if wrong := not_finite(pattern, first, where):
            definite = f", so {INDEFINITE}" if kind == "cholesky" else ""
            raise PivotError(f"{which} cannot be factorised: not finite{definite}", expected="finite numbers",
                             got=wrong, samples=samples)  # fmt: skip
        entries, numbers, sized = abs(first), np.finfo(first.dtype), "rows and columns whose largest entries are"
        if kind == "cholesky":  # other entries of a row may be larger
            entries, sized = np.where(pattern.row_of_entry == pattern.indices, entries, 0), "entries on the diagonal"
        sizes = np.zeros((2, len(self.rows)), entries.dtype)
        for of_lines, lines in zip(sizes, (pattern.row_of_entry, pattern.indices), strict=True):
            np.maximum.at(of_lines, lines, entries)
        low = numbers.tiny / numbers.eps
        of_parts = numbers.eps / 8 if kind == "lu" and first.dtype.kind == "c" else 1  # both parts of a reciprocal
        high = min(of_parts / numbers.tiny, numbers.max / np.diff(pattern.indptr).max())  # the latter of 1-norms
        for axis, line in np.argwhere(((sizes > 0) & (sizes <= low)) | (sizes > high))[:1]:
            raise PivotError(
                f"{which} cannot be factorised: near an end of {first.dtype}'s numbers",
                expected=f"{sized} above {low:.2g} and at most {high:.2g}",
                got=f"{sizes[axis, line]:.2g} in {('row', 'column')[axis]} {line}{where}",
                remedy="Multiply by a power of two", samples=samples,
            )  # fmt: skip
        block, lane = divmod(bad[0], data.shape[2])
        block = kernels.on_host().panels.by_sample(data[block : block + 1])
        inverse = abs(block[0, self._pivot_places, lane])
        with np.errstate(over="ignore", invalid="ignore"):
            lost = sizes[0][self.rows] * inverse
            if kind == "cholesky":
                lost *= inverse
        worst = np.flatnonzero(~(lost <= most_loss))[:1]
        if kind == "cholesky":
            raise PivotError(
                f"{which} cannot be factorised: {INDEFINITE}",
                expected=f"pivots larger than {1 / most_loss:.2g} times the diagonal's entries",
                got=f"another{where}" + "".join(f", first in row {self.rows[k]}" for k in worst),
                remedy='Symmetric matrices that are not positive definite have LDLᵀ or LU factors, kind="ldlt" or "lu"',
                samples=samples,
            )  # fmt: skip
        if reason := why_singular(pattern.to_scipy(first), eps):
            raise PivotError(f"{which} cannot be factorised: singular to working precision", expected=INDEPENDENT,
                             got=f"{reason}{where}", samples=samples)  # fmt: skip
        k = worst[0] if len(worst) else np.argmax(lost)
        times = f"{loss[bad[0]]:.2g} and {growth[bad[0]]:.2g} times" if np.isfinite(lost[k]) else "a pivot of 0"
        if kind == "ldlt":
            signed = " or of the other sign" if not np.isfinite(lost[k]) and self.panels.signs[k] else ""
            raise PivotError(
                f"{which} cannot be factorised with pivots on the diagonal",
                expected=f"terms of each pivot at most {most_loss:.2g} times the pivot, and {most_growth:.2g} times "
                "the 1-norm of its row",
                got=f"{times}{signed}, first in row {self.rows[k]}{where}",
                remedy='Pass regularize= to plan_factor and refine the solutions, or kind="lu" with values',
                samples=samples,
            )  # fmt: skip
        raise PivotError(
            f"{which} cannot be factorised with the pivots of this plan",
            expected=f"terms of each pivot at most {most_loss:.2g} times the pivot, and terms of L U at most "
            f"{most_growth:.2g} times the matrix's entries",
            got=f"{times}, first in row {self.rows[k]}, column {self.columns[k]}{where}",
            remedy=f"Plan again with these values, plan_factor(pattern, {again}); if that fails too, scale rows and "
            "columns to about the same size",
            samples=samples,
        )  # fmt: skip

    @cached_property
    def _pivot_places(self) -> np.ndarray:
        """Where the reciprocals of the pivots are among the values of L and U, in the order of elimination."""
        panels = self.panels
        sizes = np.diff(panels.first)
        within = np.arange(len(self.rows)) - np.repeat(panels.first[:-1], sizes)
        columns = np.repeat(panels.own, sizes) + within
        places: np.ndarray = np.repeat(panels.base[:-1], sizes) + columns * np.repeat(sizes, sizes) + within
        return places

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by the constructor: arrays are read-only again."""
        return FactorPlan, (self.pattern, self.fill, self.flops, self.panels, self.regularize)


class Factors:
    """L and U of one matrix or of a batch. Made by calling a `FactorPlan`.

    Attributes
    ----------
    plan : FactorPlan
        The plan.
    batch : int or None
        B, or None for one matrix.
    dtype : numpy.dtype
        float32, float64, complex64 or complex128.
    growth : numpy.ndarray
        How much larger entries of L U are than those of the matrix, the largest of all rows: () or (B,). Rounding
        changes rows, or columns, by about this many times the machine precision, over their norms: `refine` mostly
        makes that small over each entry. Of LDLᵀ factors entries of |L| |D| |L|ᵀ on
        the diagonal, over the 1-norms of rows.
    """

    def __init__(self, plan: FactorPlan, batch: int | None, values: Array, data: Array, shifts: Array) -> None:
        self.plan, self.batch, self.dtype = plan, batch, data.dtype
        self.growth: Array = np.zeros(())
        self._values, self._data, self._shifts, self._usable = values, data, shifts, False

    def fits(self, plan: FactorPlan, values: Array) -> bool:
        """Whether these are factors of matrices of a plan with such values."""
        batch = values.shape[1] if values.ndim == 2 else None
        return (self.plan, self.batch, self.dtype) == (plan, batch, values.dtype)

    @property
    def values(self) -> Array:
        """The values that were factorised, (nnz,) or (nnz, B): a copy."""
        return self._unblocked(self._values)

    @property
    def shifts(self) -> Array:
        """What was added to the diagonal, (n,) or (n, B): zeros but for LDLᵀ factors with `regularize`."""
        if self.plan.kind != "ldlt":
            return np.zeros(self.plan.pattern.shape[:1] if self.batch is None else (len(self.plan.rows), self.batch),
                            backend.real_dtype(self.dtype))  # fmt: skip
        found = self._unblocked(self._shifts)
        shifts = np.empty_like(found)
        shifts[self.plan.rows] = found
        return shifts

    def _unblocked(self, blocked: Array) -> Array:
        """Return (blocks, size, lanes) as (size,) or (size, B): a copy."""
        blocks, size, lanes = blocked.shape
        wide = kernels.on_host().panels.by_sample(blocked).swapaxes(0, 1).reshape(size, blocks * lanes)
        return wide[:, 0].copy() if self.batch is None else wide[:, : self.batch].copy()

    def solve(self, b: Array, trans: Trans = "N", *, transposed: bool = False) -> Array:
        """Solve A x = b, Aᵀ x = b or Aᴴ x = b.

        `solve` is a `matvec` of `scipy.sparse.linalg.LinearOperator`, as `SuperLU.solve` is.

        Parameters
        ----------
        b
            Of the factors' dtype, or integers, which are converted to it. For the factors of one matrix: (n,),
            contiguous, or (n, K) for K right-hand sides. For a batch: (n, B), a right-hand side for each matrix, or
            (n,) for all. A sparse matrix counts as a dense one: x is dense.
        trans
            ``"N"`` solves with A, ``"T"`` with Aᵀ, ``"H"`` with Aᴴ, the same for real matrices.
        transposed
            Another way to say ``trans="T"``.

        Returns
        -------
        numpy.ndarray
            x: (n,) or (n, K); for a batch (n, B).

        Raises
        ------
        DTypeError, ShapeError, LayoutError, DeviceError
            `b` does not fit.
        OptionError
            `trans` is none of these.
        StaleError
            A call with these factors as its `out` has failed.
        """
        trans, b = _check_trans(trans, transposed), self._right_hand_side(b)
        return self._solve(self._as_columns(b), trans).reshape(self._shape(b))

    def refine(self, b: Array, x: Array, trans: Trans = "N", *, steps: int = 1, transposed: bool = False) -> Array:
        """Improve a solution by iterative refinement, with residuals in double precision; x is not changed.

        Each step solves for the residual: ``x + solve(b - A x)`` (N. Higham, "Accuracy and Stability of Numerical
        Algorithms", 2nd ed., SIAM 2002, chapter 12).

        Parameters
        ----------
        b, x
            The right-hand side, and `solve`'s solution for it.
        trans, transposed
            As in `solve`.
        steps
            Number of steps, at least 1.

        Returns
        -------
        numpy.ndarray
            The new x.
        """
        trans, steps = _check_trans(trans, transposed), check_integer("steps", steps, 1)
        b, dtype, pattern = self._right_hand_side(b), self.dtype, self.plan.whole
        _check_on_host("x", x)
        backend.check_array("x", x, dtype=dtype, shape=self._shape(b))
        wide, double, solver = self._as_columns(b), np.result_type(dtype, np.float64), kernels.on_host().factor_solve
        values = -self.plan.whole_values(_as_columns(self.values)).astype(double)
        if trans != "N":
            pattern, values = pattern.T, np.ascontiguousarray(values[pattern.transpose_permutation])
        values = values.conj() if trans == "H" else values
        right, found = wide.astype(double), x.reshape(wide.shape).astype(double)
        if not found.size:
            return np.array(x)
        scale = -(solver.exponents(right) + solver.exponents(found)) // 2  # so that residuals are not subnormal
        right, found = solver.scaled(right, scale), solver.scaled(found, scale).astype(dtype)
        for _ in range(steps):
            residual = _product_with(pattern, values, found.astype(double), right)
            found += self._solve(residual.astype(dtype), trans)
        return solver.scaled(found, -scale).reshape(x.shape)

    def pivots(self) -> Array:
        """Return the pivots of one matrix in the order of elimination, (n,)."""
        pivots: Array = 1 / self._data[0, self.plan._pivot_places, 0]
        return pivots

    def triangles(self) -> tuple[Any, Any]:
        """Return L, with ones on its diagonal, and U of one matrix, as CSR arrays in the order of elimination."""
        from scipy.sparse import coo_array, eye_array

        at, n = self.plan.panels, self.plan.pattern.shape[0]
        sizes, widths = np.diff(at.first).astype(np.int64), np.diff(at.column_ptr)
        panel = np.repeat(np.repeat(np.arange(len(sizes)), widths), np.repeat(sizes, widths))
        columns = np.repeat(at.columns, np.repeat(sizes, widths))
        rows = at.first[panel] + ranges(np.zeros(len(at.columns), np.int64), np.repeat(sizes, widths))
        values = self._data[0, :, 0].copy()
        values[rows == columns] = 1 / values[rows == columns]
        low = rows > columns
        lower, upper = (coo_array((values[some], (rows[some], columns[some])), (n, n)).tocsr() for some in (low, ~low))
        return lower + eye_array(n, dtype=self.dtype, format="csr"), upper

    def _solve(self, wide: Array, trans: Trans) -> Array:
        return solve_columns(self.plan, self._data, wide, trans)

    def _right_hand_side(self, b: Any) -> Array:
        """Check b and return it as a C-contiguous array of the factors' dtype."""
        if not self._usable:
            raise StaleError("These factors were overwritten by a call that failed", expected="factors of a matrix",
                             got="none", remedy="Pass them as out= of a call that succeeds")  # fmt: skip
        if type(b) is not np.ndarray:
            b = b.toarray() if backend.is_sparse(b) else b
            _check_on_host("b", b)
        n = self.plan.pattern.shape[0]
        columns = self.batch
        if b.ndim not in (1, 2) or b.shape[0] != n or (b.ndim == 2 and columns is not None and b.shape[1] != columns):
            wanted = f"({n},), or ({n}, K)" if columns is None else f"({n}, {columns}), or ({n},) for all matrices"
            raise ShapeError("b does not fit the factors", expected=wanted, got=b.shape)
        if b.dtype.kind in "biu":
            b = backend.exact_floats("b", b, self.dtype)
        backend.check_array("b", b, dtype=self.dtype, contiguous=b.ndim == 1)
        return np.ascontiguousarray(b)

    def _as_columns(self, b: Array) -> Array:
        """Return the right-hand sides of all matrices."""
        return _as_columns(b) if self.batch is None or b.ndim == 2 else np.repeat(b[:, None], self.batch, axis=1)

    def _shape(self, b: Array) -> tuple[int, ...]:
        return b.shape if self.batch is None else (len(b), self.batch)

    def __repr__(self) -> str:
        count = "one matrix" if self.batch is None else f"{self.batch} matrices"
        return f"Factors({count} on {self.plan.pattern}, {self.dtype})"


def solve_columns(plan: FactorPlan, data: Array, b: Array, trans: Trans) -> Array:
    """Return the solutions for the factors' values; b is (n, K), C-contiguous. As in `Factors.solve`."""
    conjugated = b.dtype.kind == "c" and trans == ("H" if plan.kind == "lu" else "T")  # of what kernels solve with
    b = b.conj() if conjugated else b
    x = np.empty_like(b)
    if x.size:
        kernels.on_host().factor_solve.solve(plan.table, data, b, x, trans != "N")
    return np.conjugate(x, out=x) if conjugated else x


def _product_with(pattern: SparsityPattern, values: Array, x: Array, add: Array) -> Array:
    """Return ``add + A x``; of complex ones by real products."""

    def real(a: Array, x: Array, add: Array) -> Array:
        out = np.empty_like(add)
        kernels.get(np).csr_matvec(pattern.indptr, pattern.indices, a, x, out, add)
        return out

    if values.dtype.kind != "c":
        return real(values, x, add)
    a, x, out = (tuple(map(np.ascontiguousarray, (v.real, v.imag))) for v in (values, x, add))
    found = np.empty_like(add)
    found.real = real(-a[1], x[1], real(a[0], x[0], out[0]))
    found.imag = real(a[1], x[0], real(a[0], x[1], out[1]))
    return found


def _check_trans(trans: Trans, transposed: bool) -> Trans:
    """Return which matrix to solve with."""
    check_choice("trans", trans, ("N", "T", "H"))
    if check_flag("transposed", transposed) and trans != "N":
        raise OptionError("trans and transposed are both given", expected="one of them", got=f"{trans!r} and True")
    return "T" if transposed else trans


def _check_on_host(name: str, array: Array) -> None:
    if backend.namespace(**{name: array}) is not np:
        raise DeviceError(f"{name} is on a device, and factors are computed on the host", expected="an array of NumPy",
                          got=type(array).__module__, remedy=f"Pass sparsebp.backend.to_host({name})")  # fmt: skip


def _values_of(pattern: SparsityPattern, given: Any) -> Any:
    """Return a sparse matrix's values on the pattern, integers as float64, as `splu` takes them; else what is given."""
    if type(given) is np.ndarray or not backend.is_sparse(given):
        return given
    values = pattern.values_of(given)
    return backend.exact_floats("The matrix", values, np.float64) if values.dtype.kind in "biu" else values
