"""`least_squares`: Levenberg-Marquardt with a sparse Jacobian, whose normal equations are planned once.

Each step h solves

    (Jᵀ J + μ D²) h = -Jᵀ f,    D² = the largest diagonal of Jᵀ J so far

for residuals f and their Jacobian J, both already with weights and loss. The patterns of J, Jᵀ J and its factors never
change, so an iteration computes values only. Unknowns that meet few others are eliminated first: in bundle adjustment
these are the points, and what is left is the Schur complement of the cameras.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_integer, check_number, shown
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, PatternError, PivotError, ShapeError
from sparsebp.jacobians.function import SparseJacobian, sparse_jacobian
from sparsebp.patterns.pattern import SparsityPattern
from sparsebp.products.factor import FactorPlan, plan_factor
from sparsebp.products.product import ProductPlan, plan_product

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

FIRST_DAMPING = 1e-3
"""μ at the start, Madsen's τ for a start that is not close."""
EASE = 1 / 3
"""The least factor by which a good step changes μ."""
PLANS = 8
"""Patterns of J whose plans are kept."""

Loss = Literal["linear", "soft_l1", "huber", "cauchy", "arctan"]
LOSS_NAMES: tuple[Loss, ...] = ("linear", "soft_l1", "huber", "cauchy", "arctan")
MESSAGES = {
    0: "The maximum number of function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
    3: "`xtol` termination condition is satisfied.",
    4: "Both `ftol` and `xtol` termination conditions are satisfied.",
}


def least_squares(
    f: Callable[..., Array], x0: Array, jac: Callable[..., Any] | SparsityPattern | None = None, *,
    bounds: Any = (-np.inf, np.inf), ftol: float | None = 1e-8, xtol: float | None = 1e-8, gtol: float | None = 1e-8,
    loss: Loss = "linear", f_scale: float = 1.0, max_nfev: int | None = None, weights: Array | None = None,
    args: tuple[Any, ...] = (),
) -> OptimizeResult:  # fmt: skip
    """Minimise ``½ Σ wᵢ fᵢ(x)²`` by the Levenberg-Marquardt method. Arguments and result as in `scipy.optimize`.

    Parameters
    ----------
    f
        ``f(x, *args)`` returns the residuals, (m,) of the dtype of x.
    x0
        Where to start: (n,) of NumPy, float32 or float64. Use float64: Jᵀ J has the square of J's condition.
    jac
        None: by `sparsebp.sparse_jacobian`, which traces f. A pattern (m, n): the same, without tracing. Else a
        function ``jac(x, *args)`` that returns a SciPy matrix, (m, n) and always on one pattern: a `SparseJacobian`,
        say.
    bounds
        Not supported; only infinite ones are accepted.
    ftol, xtol, gtol
        Stop if a step lowers the cost by less than ``ftol * cost``, and as its model foretells; if it is shorter than
        ``xtol * (xtol + norm(x))``; or if the largest element of the gradient is less than `gtol`. None: never.
    loss
        ρ of the cost ``½ Σ f_scale² ρ(wᵢ fᵢ² / f_scale²)``: ``"linear"`` (z), ``"soft_l1"`` (2 (√(1 + z) - 1)),
        ``"huber"`` (z up to 1, then 2 √z - 1), ``"cauchy"`` (log(1 + z)) or ``"arctan"``. All but the first limit the
        influence of outliers.
    f_scale
        Size of a residual from which it counts as an outlier.
    max_nfev
        Most evaluations of f, None for ``100 * n``.
    weights
        (m,) weights w of the residuals, 0 or more, of the dtype of x; None for ones.
    args
        Further arguments of f and `jac`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``, ``cost``, ``fun`` (residuals without weights), ``jac`` (`scipy.sparse.csr_array`; with weights and loss,
        so that ``jac.T @ jac`` approximates the Hessian of the cost), ``grad``, ``optimality`` (largest element of
        ``grad``), ``nfev``, ``njev``, ``status`` (0: `max_nfev` reached, 1: `gtol`, 2: `ftol`, 3: `xtol`, 4: both),
        ``message``, ``success`` (``status > 0``).

    Raises
    ------
    OptionError, ShapeError, DTypeError
        An argument does not fit, or f or `jac` do not return what they should.
    PatternError
        The pattern does not fit, or `jac` returned a matrix on another one.
    TracingError
        f cannot be followed; pass a `jac`.
    NonFiniteError
        Residuals at x0, or derivatives, are not finite. Elsewhere the step is shortened.

    See Also
    --------
    scipy.optimize.least_squares : with bounds, dense matrices, or Jacobians too large to factorise.

    Notes
    -----
    Plans of the last 8 patterns are kept, so further fits of one model plan nothing.

    K. Madsen, H. B. Nielsen, O. Tingleff, "Methods for Non-Linear Least Squares Problems", 2nd ed., IMM DTU 2004,
    algorithm 3.16, with Nielsen's rule (eq. 2.21) for μ. D is Moré's: J. J. Moré, "The Levenberg-Marquardt algorithm:
    implementation and theory", 1978, section 6. A loss multiplies each residual and its row of J by √ρ', which leaves
    out ρ'' of the Hessian: it is negative, and could make Jᵀ J singular far from the minimum (B. Triggs et al.,
    "Bundle Adjustment - A Modern Synthesis", 2000, section 4.3).

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> found = sb.least_squares(lambda x: np.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]]), np.zeros(1000))
    >>> found.success, bool(abs(found.x - 1).max() < 1e-6)
    (True, True)
    """
    from scipy.optimize import OptimizeResult

    try:
        low, high = (bounds.lb, bounds.ub) if hasattr(bounds, "lb") else bounds
        unbounded = bool(np.all(np.equal(low, -np.inf)) and np.all(np.equal(high, np.inf)))
    except (TypeError, ValueError):  # nothing like bounds
        unbounded = False
    if not unbounded:
        raise OptionError("bounds are not supported", expected="(-inf, inf)", got=shown(bounds),
                          remedy="Use scipy.optimize.least_squares")  # fmt: skip
    ftol, xtol, gtol = (0.0 if tol is None else check_number(name, tol, 0)
                        for name, tol in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol)))  # fmt: skip
    problem = _Problem(f, x0, jac, args, weights, check_choice("loss", loss, LOSS_NAMES), f_scale)
    most = max(1, 100 * problem.n) if max_nfev is None else check_integer("max_nfev", max_nfev, 1)

    x, least = np.array(x0), np.finfo(x0.dtype).eps  # below it, damping is lost in rounding
    raw = problem.first
    cost = problem.cost(raw)
    if not np.isfinite(cost):
        raise NonFiniteError("The residuals at x0 are not finite", expected="finite numbers", got=f"cost {cost}")
    problem.linearise(x, raw)
    nfev, damping, growth, status = 1, FIRST_DAMPING, 2.0, 0
    while True:
        if problem.optimality < gtol:
            status = 1
        if status or nfev >= most:
            break
        ratio, found = -1.0, problem.step(damping)
        if found is not None:
            step, foretold = found
            trial = x + step
            if (trial == x).all():  # shorter than rounding
                status = 3
                continue
            raw_there = problem.residuals(trial)
            there, nfev = problem.cost(raw_there), nfev + 1
            short = xtol > 0 and _norm(step) < xtol * (xtol + _norm(x))
            status = 3 if short else 0
            if np.isfinite(there):
                gain = cost - there
                ratio = gain / foretold if foretold > 0 else -1.0
                small = gain < ftol * cost and ratio > 0.25
                status = 4 if small and short else 2 if small else 3 if short else 0
        if ratio > 0:
            x, raw, cost = trial, raw_there, there
            problem.linearise(x, raw)
            damping, growth = max(least, damping * max(EASE, 1 - (2 * ratio - 1) ** 3)), 2.0
        else:
            damping, growth = damping * growth, growth * 2
            if damping > float(np.finfo(x0.dtype).max):  # steps of any length have failed
                status = 3
    return OptimizeResult(
        x=x, cost=cost, fun=raw, jac=problem.pattern.to_scipy(problem.values, copy=True), grad=problem.gradient,
        optimality=problem.optimality, nfev=nfev, njev=problem.njev, status=status, message=MESSAGES[status],
        success=status > 0,
    )  # fmt: skip


@lru_cache(maxsize=PLANS)
def plan_normal_equations(pattern: SparsityPattern) -> tuple[SparsityPattern, ProductPlan, np.ndarray, FactorPlan]:
    """Plan Jᵀ J and its factors; kept for further fits on the same pattern.

    Return the pattern of J with a further row for each empty column, so that Jᵀ J has a full diagonal; the product; the
    diagonal's entries; the factors.
    """
    empty = np.flatnonzero(np.bincount(pattern.indices, minlength=pattern.shape[1]) == 0)
    if len(empty):
        indptr = np.append(pattern.indptr, pattern.nnz + 1 + np.arange(len(empty)))
        shape = pattern.shape[0] + len(empty), pattern.shape[1]
        pattern = SparsityPattern(indptr, np.append(pattern.indices, empty), shape)
    product = plan_product(pattern.T, pattern)
    diagonal = np.flatnonzero(product.pattern.row_of_entry == product.pattern.indices)
    return pattern, product, diagonal, plan_factor(product.pattern, kind="cholesky")


def _norm(x: Array) -> float:
    """Return the Euclidean norm, without BLAS, whose sums depend on its threads."""
    return float(np.sqrt((x * x).sum()))


class _Problem:
    """The residuals with weights and loss, the planned Jacobian, and the steps at the point of the last `linearise`."""

    def __init__(self, f: Any, x0: Any, jac: Any, args: Any, weights: Any, loss: Loss, f_scale: float) -> None:
        if not callable(f):
            raise OptionError("f is not a function", expected="a function of arrays", got=shown(f))
        if not isinstance(args, (tuple, list)):
            raise OptionError("args is not a tuple", expected="further arguments of f", got=shown(args))
        if not isinstance(x0, np.ndarray):
            raise DTypeError("x0 is not an array of NumPy", expected="float32 or float64", got=type(x0).__name__)
        backend.float_dtype(x0.dtype)
        backend.check_array("x0", x0, shape=(None,), contiguous=False)
        self.f, self.args, self.n, self.dtype = f, tuple(args), len(x0), x0.dtype
        self.m: int | None = None
        self.first = self.residuals(x0)
        self.m = len(self.first)
        if weights is not None:
            backend.check_array("weights", weights, dtype=self.dtype, shape=(self.m,), contiguous=False)
            if not (np.isfinite(weights) & (weights >= 0)).all():
                raise OptionError("weights are not weights", expected="finite numbers of 0 or more", got=shown(weights))
        self.root = None if weights is None else np.sqrt(weights)
        self.loss, self.f_scale = loss, self.dtype.type(check_number("f_scale", f_scale, np.finfo(self.dtype).tiny))

        if jac is None or isinstance(jac, SparsityPattern):
            jac = sparse_jacobian(f, x0, *self.args, pattern=jac)
        elif not callable(jac):
            raise OptionError("jac is neither a function nor a pattern", got=shown(jac),
                              expected="a function, a SparsityPattern, or None for exact derivatives")  # fmt: skip
        self.jac, self.njev, self.matrix = jac, 0, None
        if isinstance(jac, SparseJacobian):
            pattern = jac.pattern
        else:
            self.matrix = self._matrix(x0)  # for the first `linearise`
            pattern = SparsityPattern.from_scipy(self.matrix)
        if pattern.shape != (self.m, self.n):
            raise ShapeError("The Jacobian does not fit f and x0", expected=(self.m, self.n), got=pattern.shape)
        if pattern.kind == "identity":  # whose values do not count
            pattern = SparsityPattern.diagonal(self.n)
        self.pattern = pattern
        self.padded, self.product, self.diagonal, self.factor = plan_normal_equations(pattern)
        self.normal = np.empty(self.product.pattern.nnz, self.dtype)
        self.squares = np.zeros(self.n, self.dtype)

    def residuals(self, x: Array) -> Array:
        """Return f(x), an own copy."""
        y = np.array(self.f(x.copy(), *self.args))
        if y.dtype != self.dtype:
            raise DTypeError("f returns another dtype than x", expected=self.dtype, got=y.dtype)
        if y.ndim != 1 or (self.m is not None and len(y) != self.m):
            raise ShapeError("f returns the wrong shape", expected="(m,)" if self.m is None else (self.m,), got=y.shape)
        return y

    def cost(self, raw: Array) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            weighted = raw if self.root is None else self.root * raw
            if self.loss == "linear":
                return float(0.5 * (weighted * weighted).sum())
            rho = LOSSES[self.loss]((weighted / self.f_scale) ** 2)[0]
            return float(0.5 * self.f_scale**2 * rho.sum())

    def linearise(self, x: Array, raw: Array) -> None:
        """Compute J, the gradient, the scaling D and Jᵀ J at x, where f is `raw`."""
        values, self.njev = self._values(x), self.njev + 1
        factor = self.root
        weighted = raw if factor is None else factor * raw
        if self.loss != "linear":
            root = np.sqrt(LOSSES[self.loss]((weighted / self.f_scale) ** 2)[1])
            weighted, factor = root * weighted, root if factor is None else factor * root
        if factor is not None:
            values = values * factor[self.pattern.row_of_entry]
        self.values, padded = values, self.padded
        if padded.nnz > len(values):
            values, weighted = (np.append(a, np.zeros(size - len(a), self.dtype))
                                for a, size in ((values, padded.nnz), (weighted, padded.shape[0])))  # fmt: skip
        transposed = values[padded.transpose_permutation]
        self.product(transposed, values, out=self.normal)
        self.gradient = np.empty(self.n, self.dtype)
        kernels.get(np).csr_matvec(padded.T.indptr, padded.T.indices, transposed[:, None], weighted[:, None],
                                   self.gradient[:, None])  # fmt: skip
        self.optimality, self.sums = float(abs(self.gradient).max(initial=0)), self.normal[self.diagonal]
        if not np.isfinite(self.optimality) or not np.isfinite(self.sums).all():
            raise NonFiniteError("The derivatives are not finite, or their squares overflow",
                                 expected="finite numbers", got=shown(float(abs(values).max())))  # fmt: skip
        self.squares = np.maximum(self.squares, self.sums)

    def step(self, damping: float) -> tuple[Array, float] | None:
        """Return h and the gain that the model foretells, or None where the matrix has no factors."""
        damped = damping * np.where(self.squares == 0, 1, self.squares)
        self.normal[self.diagonal] = self.sums + damped
        try:
            factors = self.factor(self.normal)
        except PivotError:
            if damping > 1:  # larger than anything else in the matrix
                raise
            return None
        step = factors.solve(-self.gradient)
        return step, float(0.5 * (step * (damped * step - self.gradient)).sum())

    def _values(self, x: Array) -> Array:
        if isinstance(self.jac, SparseJacobian):
            values = self.jac.values(x, *self.args)
        else:
            matrix, self.matrix = self._matrix(x) if self.matrix is None else self.matrix, None
            same = matrix.shape == self.pattern.shape and np.array_equal(matrix.indptr, self.pattern.indptr)
            if not same or not np.array_equal(matrix.indices, self.pattern.indices):
                raise PatternError("jac returned a matrix on another pattern", expected=self.pattern, got=matrix.nnz,
                                   remedy="Keep entries that happen to be zero")  # fmt: skip
            values = matrix.data.copy()  # which may be the caller's own, and written at the next call of f or jac
        backend.check_array("the values of jac", values, dtype=self.dtype)
        return values

    def _matrix(self, x: Array) -> Any:
        """Return what a function `jac` returns, as canonical CSR."""
        from scipy.sparse import csr_array, issparse

        matrix = self.jac(x.copy(), *self.args)
        if not issparse(matrix):
            raise OptionError("jac does not return a sparse matrix", expected="a matrix of scipy.sparse",
                              got=type(matrix).__name__,
                              remedy="For dense ones, use scipy.optimize.least_squares")  # fmt: skip
        matrix = csr_array(matrix)
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        return matrix


# Losses ρ(z) of squares of residuals z, and ρ'(z).


def _huber(z: Array) -> tuple[Array, Array]:
    root = np.sqrt(np.maximum(z, 1))
    return np.where(z <= 1, z, 2 * root - 1), 1 / root


LOSSES: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "linear": lambda z: (z, np.ones_like(z)),
    "soft_l1": lambda z: (2 * (np.sqrt(1 + z) - 1), 1 / np.sqrt(1 + z)),
    "huber": _huber,
    "cauchy": lambda z: (np.log1p(z), 1 / (1 + z)),
    "arctan": lambda z: (np.arctan(z), 1 / (1 + z**2)),
}
