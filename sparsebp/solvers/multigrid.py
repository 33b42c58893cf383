"""Multigrid hierarchies whose matrix gets new values: pyamg sets up once, plans compute the coarse matrices again.

    A[l + 1] = R[l] (A[l] P[l])

P and R stay as they are; both products of every level are planned. Cycles, smoothers and coarse solvers are pyamg's:
N. Bell, L. Olson, J. Schroder, B. Southworth, "PyAMG: Algebraic Multigrid Solvers in Python", JOSS 8, 2023.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, shown
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError
from sparsebp.patterns.pattern import SparsityPattern, not_finite, values_on
from sparsebp.products.product import ProductPlan, plan_product

OF_ANY_VALUES = ("gauss_seidel", "sor", "none")
"""pyamg's smoothers that take nothing from the matrix at set-up."""
GALERKIN = 1e-5
"""Largest difference of a level from R A P, relative to its largest entry."""


def from_pyamg(ml: Any, *, presmoother: Any = None, postsmoother: Any = None) -> Multigrid:
    """Plan the products of a hierarchy of pyamg, so that it takes new values of the matrix.

    Parameters
    ----------
    ml
        A `pyamg.multilevel.MultilevelSolver`, as `pyamg.smoothed_aggregation_solver` or `pyamg.ruge_stuben_solver`
        return it. It is not changed.
    presmoother, postsmoother
        Smoothers, as for those functions: a name, (name, options), or a list of them, one a level. They are set up anew
        for new values. None keeps those of `ml`: Gauss-Seidel (pyamg's default) or SOR.

    Returns
    -------
    Multigrid

    Raises
    ------
    OptionError
        `ml` is not such a hierarchy, a smoother of it depends on the matrix (Jacobi's damping, inverses of blocks) and
        none was given, or its coarse matrices are not R A P.
    PatternError, DTypeError
        Its matrix is not a canonical CSR matrix, or not of float32 or float64.

    Examples
    --------
    >>> import pyamg, sparsebp as sb  # doctest: +SKIP
    >>> mg = sb.multigrid.from_pyamg(pyamg.ruge_stuben_solver(matrix))  # doctest: +SKIP
    >>> mg.update(2 * matrix)  # doctest: +SKIP
    >>> x = mg.solve(b)  # doctest: +SKIP
    """
    levels = getattr(ml, "levels", None)
    if not levels or not hasattr(ml, "coarse_solver"):
        raise OptionError("ml is not a hierarchy of pyamg", expected="a pyamg.multilevel.MultilevelSolver",
                          got=shown(ml))  # fmt: skip
    if (presmoother is None) != (postsmoother is None):
        raise OptionError("One smoother is given without the other", expected="presmoother and postsmoother, or none",
                          got=shown(presmoother or postsmoother))  # fmt: skip
    blocks = any(getattr(level.A, "blocksize", (1, 1)) != (1, 1) for level in levels)  # all levels become CSR here
    if blocks and presmoother is not None and "block" in str((presmoother, postsmoother)):
        raise OptionError("Smoothers of blocks need matrices of blocks", expected="smoothers of single unknowns",
                          got=f"{shown(presmoother)}, {shown(postsmoother)}", remedy="Use gauss_seidel")  # fmt: skip
    for number, level in enumerate(levels[:-1] if presmoother is None else ()):
        for smoother in (level.presmoother, level.postsmoother):
            name = getattr(getattr(smoother, "func", smoother), "__name__", None)
            if name not in OF_ANY_VALUES or (blocks and name == "sor"):  # pyamg relaxes blocks in another way
                raise OptionError(
                    f"The smoother of level {number} depends on the matrix, and its options are not known",
                    expected=" or ".join(OF_ANY_VALUES), got=getattr(smoother, "__name__", shown(smoother)),
                    remedy="Pass presmoother= and postsmoother= as you passed them to pyamg")  # fmt: skip
    return Multigrid(ml, presmoother, postsmoother)


class Multigrid:
    """A multigrid hierarchy that takes new values of its matrix. Made by `from_pyamg`.

    Attributes
    ----------
    pattern : SparsityPattern
        Pattern of the finest matrix, (n, n).
    matrices : list of scipy.sparse.csr_array
        The matrices of all levels, the finest first; `update` writes to their values.
    plans : list of tuple of ProductPlan
        Plans of A P and of R (A P), a pair a level.
    solver : pyamg.multilevel.MultilevelSolver
        The hierarchy with the current values. Operators made of it follow `update`.
    """

    def __init__(self, ml: Any, presmoother: Any, postsmoother: Any) -> None:
        matrix = ml.levels[0].A if ml.levels[0].A.format == "csr" else _csr(ml.levels[0].A)
        backend.float_dtype(matrix.dtype)
        self.pattern = SparsityPattern.from_scipy(matrix)
        self.matrices = [self.pattern.to_scipy(matrix.data, copy=True)]
        self.plans: list[tuple[ProductPlan, ProductPlan]] = []
        self._operators: list[tuple[Array, Array, Array]] = []
        self._levels, self._smoothers = ml.levels, (presmoother, postsmoother)
        pattern = self.pattern
        for level in ml.levels[:-1]:
            p, r = (_csr(operator) for operator in (level.P, level.R))
            if not p.dtype == r.dtype == matrix.dtype:
                raise DTypeError("A level has another dtype than the matrix", expected=matrix.dtype,
                                 got=f"P {p.dtype}, R {r.dtype}",
                                 remedy="pyamg's aggregation makes float64: pass it such a matrix")  # fmt: skip
            first = plan_product(pattern, SparsityPattern.from_scipy(p))
            second = plan_product(SparsityPattern.from_scipy(r), first.pattern)
            pattern = second.pattern
            self.plans.append((first, second))
            self._operators.append((p.data, r.data, np.empty(first.pattern.nnz, matrix.dtype)))
            self.matrices.append(pattern.to_scipy(np.empty(pattern.nnz, matrix.dtype), copy=True))
        self.solver = type(ml)(self._new_levels(), None)
        self.solver.symmetric_smoothing = ml.symmetric_smoothing
        self._new_coarse_solver = type(ml.coarse_solver)  # with its options, and without factors
        self.update(matrix.data)
        for number, (ours, level) in enumerate(zip(self.matrices, ml.levels, strict=True)):
            error, size = abs((ours - level.A).data).max(initial=0), abs(ours.data).max(initial=0)
            if not error <= GALERKIN * size:
                raise OptionError(f"The matrix of level {number} is not the product R A P",
                                  expected=f"differences of at most {GALERKIN * size:.2g}",
                                  got=f"{error:.2g}")  # fmt: skip

    def update(self, values: Any) -> None:
        """Compute the matrices of all levels, smoothers and coarse solver for new values of the finest matrix.

        Parameters
        ----------
        values
            (nnz,) in the order of `pattern`, of the dtype of the hierarchy, copied; or a sparse matrix on it, as
            `SparsityPattern.values_of` takes it.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            `values` do not fit.
        PatternError
            The matrix has entries outside the pattern.
        NonFiniteError
            They are not finite.
        """
        finest, values = self.matrices[0].data, values_on(self.pattern, values)
        backend.check_array("values", values, dtype=finest.dtype, shape=finest.shape)
        if wrong := not_finite(self.pattern, values):
            raise NonFiniteError("values are not finite", expected="finite numbers", got=wrong)
        finest[:] = values
        for level, (first, second) in enumerate(self.plans):
            p, r, product = self._operators[level]
            first(self.matrices[level].data, p, out=product)
            second(r, product, out=self.matrices[level + 1].data)
        self.solver.levels = self._new_levels()
        self.solver.coarse_solver = self._new_coarse_solver()
        if self._smoothers[0] is not None:
            from pyamg.relaxation.smoothing import change_smoothers

            change_smoothers(self.solver, *self._smoothers)

    def solve(self, b: Array, **options: Any) -> Array:
        """Solve A x = b: `pyamg.multilevel.MultilevelSolver.solve`, with its options.

        Parameters
        ----------
        b
            (n,), as pyamg takes it.
        **options
            ``x0``, ``tol``, ``maxiter``, ``cycle``, ``accel`` (``"cg"``, …), ``residuals`` and others.

        Returns
        -------
        numpy.ndarray
            x, (n,).
        """
        return self.solver.solve(b, **options)

    def aspreconditioner(self, cycle: str = "V") -> Any:
        """Return one cycle as a preconditioner, for `scipy.sparse.linalg.cg` say; it follows `update`.

        Parameters
        ----------
        cycle
            ``"V"``, ``"W"`` or ``"F"``.

        Returns
        -------
        scipy.sparse.linalg.LinearOperator
            Of shape (n, n).
        """
        return self.solver.aspreconditioner(cycle)

    def _new_levels(self) -> list[Any]:
        """Return levels without what pyamg keeps on them and on matrices: smoothers' copies, spectral radii."""
        from scipy.sparse import csr_array

        levels = []
        for matrix, level in zip(self.matrices, self._levels, strict=True):
            new = type(level)()
            kept = ("P", "R", "C", "splitting", "presmoother", "postsmoother")
            shared = csr_array((matrix.data, matrix.indices, matrix.indptr), matrix.shape)
            new.__dict__.update(A=shared, **{name: level.__dict__[name] for name in kept if name in level.__dict__})
            levels.append(new)
        return levels

    def __repr__(self) -> str:
        sizes = " > ".join(str(matrix.shape[0]) for matrix in self.matrices)
        return f"Multigrid({sizes}, {self.matrices[0].dtype})"


def _csr(matrix: Any) -> Any:
    """Return an operator of pyamg, of blocks or unsorted, as canonical CSR: a copy."""
    from scipy.sparse import csr_array

    matrix = csr_array(matrix, copy=True)
    matrix.sum_duplicates()
    return matrix
