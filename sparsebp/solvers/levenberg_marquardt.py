"""`least_squares`: Levenberg-Marquardt with a sparse Jacobian, whose normal equations are planned once.

Each step h solves

    (Jᵀ J + C + μ D²) h = -Jᵀ f,    D² = the diagonal of Jᵀ J, at least half of the last D²,    C = |g| / v

for residuals f and their Jacobian J, both already with weights and loss. C stands for bounds: v is the distance to the
bound that the negative gradient -g points to, and C is 0 where there is none: see `sparsebp.solvers.normal_equations`.
The patterns of J, Jᵀ J and its factors never change, so an iteration computes values only. Unknowns that meet few
others are eliminated first: in bundle adjustment these are the points, and what is left is the Schur complement of the
cameras.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_integer, check_number, check_positive, shown
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, ShapeError, TracingError
from sparsebp.jacobians.function import SparseJacobian, sparse_jacobian
from sparsebp.patterns.pattern import SparsityPattern
from sparsebp.solvers.box import START, Box, best_within
from sparsebp.solvers.derivatives import SCHEMES, Differences, Exact, Matrices, pattern_of
from sparsebp.solvers.normal_equations import Factored, Iterated

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

FIRST_DAMPING = 1e-3
"""μ at the start, Madsen's τ for a start that is not close."""
FADING = 0.5
"""How much of D² is left in the next step at least. With 1, Moré's rule, points of bundle adjustment whose distance is
badly known and grows take 8 times as many steps; with 0, small curve fits take up to 1.6 times as many."""
EASE = 1 / 3
"""The least factor by which a good step changes μ."""

LossName = Literal["linear", "soft_l1", "huber", "cauchy", "arctan"]
LOSS_NAMES: tuple[LossName, ...] = ("linear", "soft_l1", "huber", "cauchy", "arctan")
SOLVERS = ("exact", "lsmr")
LSMR_OPTIONS = ("atol", "btol", "conlim", "maxiter")
MESSAGES = {
    -2: "Stopped because `callback` function raised `StopIteration` or returned `True`",
    0: "The maximum number of function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
    3: "`xtol` termination condition is satisfied.",
    4: "Both `ftol` and `xtol` termination conditions are satisfied.",
}


def least_squares(
    fun: Callable[..., Any], x0: Any, jac: Any = None, bounds: Any = (-np.inf, np.inf),
    method: Literal["trf", "lm"] = "trf", ftol: float | None = 1e-8, xtol: float | None = 1e-8,
    gtol: float | None = 1e-8, x_scale: Any = None, loss: LossName | Callable[[Array], Array] = "linear",
    f_scale: float = 1.0, diff_step: Any = None, tr_solver: Literal["exact", "lsmr"] | None = None,
    tr_options: dict[str, Any] | None = None, jac_sparsity: Any = None, max_nfev: int | None = None,
    verbose: Literal[0, 1, 2] = 0, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None,
    callback: Callable[..., Any] | None = None, workers: int | None = None, *, weights: Array | None = None,
    damping: float = FIRST_DAMPING,
) -> OptimizeResult:  # fmt: skip
    """Minimise ``½ Σ wᵢ fᵢ(x)²`` by the Levenberg-Marquardt method. Arguments and result as in `scipy.optimize`.

    Parameters
    ----------
    fun
        ``fun(x, *args, **kwargs)`` returns the residuals f, (m,) of the dtype of x, or a single one.
    x0
        Where to start: (n,), or a number. float32 stays float32; integers and lists count as float64. Use float64: Jᵀ J
        has the square of J's condition.
    jac
        None: exact, by `sparsebp.sparse_jacobian`, which traces `fun`. A `SparsityPattern` (m, n): the same, without
        tracing. ``"2-point"``, ``"3-point"`` or ``"cs"``: by differences, for functions that cannot be traced; give
        `jac_sparsity` too unless n is small. Else a function ``jac(x, *args, **kwargs)`` that returns a sparse matrix
        of SciPy or a dense array, (m, n): a `SparseJacobian`, say. Its matrices have the entries of the first one, or
        those of `jac_sparsity`; others must be zero.
    bounds
        Lower and upper bounds, a pair of numbers or (n,), or `scipy.optimize.Bounds`. All points are strictly between
        them, as SciPy's ``"trf"`` keeps them; x0 is moved off a bound by 1e-10.
    method
        ``"trf"`` and ``"lm"`` are names of the one method here; ``"lm"`` takes no bounds.
    ftol, xtol, gtol
        Stop if a step lowers the cost by less than ``ftol * cost``, and as its model foretells; if it is shorter than
        ``xtol * (xtol + norm(x))``; or if the largest element of the gradient, times the distance to the bound that it
        points to, is less than `gtol`. None: never.
    x_scale
        D: ``"jac"`` or None for the norms of J's columns, which shrink by √2 in a step at most. Else the size of each
        unknown, above 0, (n,) or a number: steps are damped in ``x / x_scale``.
    loss
        ρ of the cost ``½ Σ f_scale² ρ(wᵢ fᵢ² / f_scale²)``: ``"linear"`` (z), ``"soft_l1"`` (2 (√(1 + z) - 1)),
        ``"huber"`` (z up to 1, then 2 √z - 1), ``"cauchy"`` (log(1 + z)) or ``"arctan"``. All but the first limit the
        influence of outliers. Or a function of z, (m,), that returns ρ, ρ' and ρ'', (3, m).
    f_scale
        Size of a residual from which it counts as an outlier.
    diff_step
        Step of differences, relative to x: a number or (n,). With ``jac=None`` it means ``"2-point"``, as in SciPy.
    tr_solver
        How steps are computed: None or ``"exact"``, by factors of Jᵀ J; ``"lsmr"``, by iterations on J, which take less
        memory and more time.
    tr_options
        For ``"lsmr"``: ``atol``, ``btol`` (both 1e-10 here, 1e-5 for float32), ``conlim`` and ``maxiter`` of
        `scipy.sparse.linalg.lsmr`.
    workers
        Only None or 1: steps are taken one by one.
    jac_sparsity
        The pattern of the Jacobian for differences, (m, n): a `SparsityPattern`, a sparse matrix, or an array whose
        elements other than zero count. With ``jac=None`` it means ``"2-point"``, as in SciPy: for exact derivatives,
        pass the pattern as `jac`.
    max_nfev
        Most evaluations of `fun`, None for ``100 * n``; those for differences do not count.
    verbose
        1 prints how the fit ended, 2 each iteration too.
    args, kwargs
        Further arguments of `fun` and `jac`.
    callback
        Called after each iteration, as ``callback(intermediate_result=result)`` with ``x``, ``fun``, ``cost``, ``nit``
        and ``nfev`` if that is the name of its only argument, else as ``callback(x)``. The fit ends if it raises
        StopIteration or returns True.
    weights
        (m,) weights w of the residuals, 0 or more, of the dtype of x; None for ones.
    damping
        μ of the first step, over the largest diagonal of Jᵀ J in ``x / x_scale``. Less than 1e-8 begins with a
        Gauss-Newton step, which is best near the solution.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``, ``cost``, ``fun`` (residuals without weights), ``jac`` (with weights and loss, so that ``jac.T @ jac``
        approximates the Hessian of the cost; `scipy.sparse.csr_array`, or an array if `jac` returns arrays or is a
        scheme without `jac_sparsity`), ``grad``, ``optimality`` (what `gtol` is compared with), ``active_mask`` (-1 and
        1 at a lower and upper bound, else 0), ``nfev``, ``njev``, ``status`` (-2: `callback`, 0: `max_nfev` reached,
        1: `gtol`, 2: `ftol`, 3: `xtol`, 4: both), ``message``, ``success`` (``status > 0``).

    Raises
    ------
    OptionError, ShapeError, DTypeError
        An argument does not fit, or `fun` or `jac` do not return what they should.
    PatternError
        The pattern does not fit, or `jac` returned an entry outside it.
    TracingError
        `fun` cannot be followed; pass ``jac="2-point"``, or a function.
    NonFiniteError
        Residuals at x0, or derivatives, are not finite. Elsewhere the step is shortened.

    See Also
    --------
    sparsebp.solvers.covariance : of the result.
    scipy.optimize.least_squares : with ``"dogbox"``, and linear operators as `jac`.

    Notes
    -----
    Plans of the last 8 patterns are kept, so further fits of one model plan nothing.

    K. Madsen, H. B. Nielsen, O. Tingleff, "Methods for Non-Linear Least Squares Problems", 2nd ed., IMM DTU 2004,
    algorithm 3.16, with Nielsen's rule (eq. 2.21) for μ. D is Moré's, but fades: J. J. Moré, "The Levenberg-Marquardt
    algorithm: implementation and theory", 1978, section 6. C is the Newton term of Coleman and Li's scaled gradient,
    see `sparsebp.solvers.box`; a step that would leave the bounds is cut in its elements or as a whole, whichever the
    model prefers. A loss multiplies each residual and its row of J by √ρ', which leaves out ρ'' of the Hessian: it is
    negative, and could make Jᵀ J singular far from the minimum (B. Triggs et al., "Bundle Adjustment - A Modern
    Synthesis", 2000, section 4.3).

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> found = sb.least_squares(lambda x: np.concatenate([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]]), np.zeros(1000))
    >>> found.success, bool(abs(found.x - 1).max() < 1e-6)
    (True, True)
    """
    from scipy.optimize import OptimizeResult

    if check_choice("method", method, ("trf", "lm", "dogbox")) == "dogbox":
        raise OptionError("The method 'dogbox' is not available", expected="'trf' or 'lm'", got="'dogbox'",
                          remedy="Leave out method=, or use scipy.optimize.least_squares")  # fmt: skip
    if workers not in (None, 1):
        raise OptionError("workers is out of range", expected="None or 1: steps are taken one by one",
                          got=shown(workers))  # fmt: skip
    iterates = _iterations(tr_solver, tr_options)
    ftol, xtol, gtol = (0.0 if tol is None else check_number(name, tol, 0)
                        for name, tol in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol)))  # fmt: skip
    if verbose not in (0, 1, 2):
        raise OptionError("verbose is out of range", expected="0, 1 or 2", got=shown(verbose))
    if callback is not None and not callable(callback):
        raise OptionError("callback is not a function", expected="a function of x, or None", got=shown(callback))
    problem = _Problem(fun, x0, jac, jac_sparsity, diff_step, bounds, args, kwargs, weights, loss, f_scale, x_scale,
                       iterates)  # fmt: skip
    if method == "lm" and problem.box is not None:
        raise OptionError("The method 'lm' takes no bounds", expected="bounds=(-inf, inf)", got=shown(bounds),
                          remedy='Pass method="trf"')  # fmt: skip
    most = max(1, 100 * problem.n) if max_nfev is None else check_integer("max_nfev", max_nfev, 1)

    x, raw, eps = problem.start, problem.first, np.finfo(problem.dtype).eps  # below eps, damping is lost in rounding
    damping, growth = max(eps, check_positive("damping", damping)), 2.0
    cost = first_cost = problem.cost(raw)
    if not np.isfinite(cost):
        raise NonFiniteError("The residuals at x0 are not finite", expected="finite numbers", got=f"cost {cost}")
    problem.linearise(x, raw)
    nfev, iteration, status = 1, 0, 0
    last: tuple[float | None, float | None] = (None, None)
    if verbose == 2:
        print(("{:^15}" * 6).format("Iteration", "Total nfev", "Cost", "Cost reduction", "Step norm", "Optimality"))
    while True:
        if problem.optimality < gtol:
            status = 1
        if verbose == 2:
            print(_row(iteration, nfev, cost, *last, problem.optimality))
        if status or nfev >= most:
            break
        last = (0.0, 0.0)
        while not status and nfev < most:  # shorter and shorter steps
            ratio, found = -1.0, problem.step(x, damping)
            if found is not None:
                trial, foretold = found
                length = _norm(trial - x)
                if not length:  # shorter than rounding
                    status = 3
                    break
                raw_there = problem.residuals(trial)
                there, nfev = problem.cost(raw_there), nfev + 1
                short = xtol > 0 and length < xtol * (xtol + _norm(x))
                status = 3 if short else 0
                if np.isfinite(there):
                    gain = cost - there
                    ratio = gain / foretold if foretold > 0 else -1.0
                    small = gain < ftol * cost and ratio > 0.25
                    status = 4 if small and short else 2 if small else status
            if ratio > 0:
                last = (gain, length)
                x, raw, cost = trial, raw_there, there
                problem.linearise(x, raw)
                damping, growth = max(eps, damping * max(EASE, 1 - (2 * ratio - 1) ** 3)), 2.0
                break
            damping, growth = damping * growth, growth * 2
            if damping > float(np.finfo(problem.dtype).max):  # steps of any length have failed
                status = 3
        iteration += 1
        if callback is not None and _stops(callback, x=x, fun=raw, cost=cost, nit=iteration, nfev=nfev):
            status = -2
            break
    if verbose:
        print(MESSAGES[status])
        print(f"Function evaluations {nfev}, initial cost {first_cost:.4e}, final cost {cost:.4e}, first-order "
              f"optimality {problem.optimality:.2e}.")  # fmt: skip
    active = np.zeros(problem.n, int) if problem.box is None else problem.box.active(x, xtol)
    return OptimizeResult(
        x=x, cost=cost, fun=raw, jac=problem.jacobian(), grad=problem.gradient, optimality=problem.optimality,
        active_mask=active, nfev=nfev, njev=problem.njev, status=status, message=MESSAGES[status], success=status > 0,
    )  # fmt: skip


def _iterations(tr_solver: Any, tr_options: Any) -> dict[str, Any] | None:
    """Return the options of iterations, or None for factors."""
    iterates = tr_solver is not None and check_choice("tr_solver", tr_solver, SOLVERS) == "lsmr"
    known = LSMR_OPTIONS if iterates else ()
    options = {} if tr_options is None else tr_options
    if not isinstance(options, dict) or options.keys() - known:
        raise OptionError("tr_options are not known", expected=", ".join(known) or "none but for tr_solver='lsmr'",
                          got=shown(tr_options))  # fmt: skip
    return dict(options) if iterates else None


def _row(iteration: int, nfev: int, cost: float, gain: float | None, length: float | None, optimality: float) -> str:
    """Return a line as SciPy prints it."""
    numbers = ("" if number is None else f"{number:.2e}" for number in (gain, length, optimality))
    return f"{iteration:^15}{nfev:^15}{cost:^15.4e}" + "".join(f"{number:^15}" for number in numbers)


def _stops(callback: Callable[..., Any], **state: Any) -> bool:
    """Call a callback as SciPy does, with copies, and return whether it ends the fit."""
    from scipy.optimize import OptimizeResult

    state |= {"x": state["x"].copy(), "fun": state["fun"].copy()}
    named = set(inspect.signature(callback).parameters) == {"intermediate_result"}
    try:
        return bool(callback(intermediate_result=OptimizeResult(state)) if named else callback(state["x"]))
    except StopIteration:
        return True


def _norm(x: Array) -> float:
    """Return the Euclidean norm, without BLAS, whose sums depend on its threads, and without overflow."""
    largest = float(abs(x).max(initial=0))
    return largest * float(np.sqrt(((x / largest) ** 2).sum())) if 0 < largest < np.inf else largest


_ONE = np.int8(1)
"""The unit of all unknowns, which leaves arrays in their dtype."""


class _Problem:
    """The residuals with weights and loss, the planned Jacobian, and the steps at the point of the last `linearise`."""

    def __init__(
        self, fun: Any, x0: Any, jac: Any, sparsity: Any, diff_step: Any, bounds: Any, args: Any, kwargs: Any,
        weights: Any, loss: Any, f_scale: Any, x_scale: Any, iterates: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        if not callable(fun):
            raise OptionError("f is not a function", expected="fun, a function of arrays", got=shown(fun))
        if not isinstance(args, (tuple, list)):
            raise OptionError("args is not a tuple", expected="further arguments of fun", got=shown(args))
        if kwargs is not None and not isinstance(kwargs, dict):
            raise OptionError("kwargs is not a dict", expected="further arguments of fun by name", got=shown(kwargs))
        x0 = _vector(x0)
        self.f, self.args, self.n, self.dtype = (
            partial(fun, **kwargs) if kwargs else fun,
            tuple(args),
            len(x0),
            x0.dtype,
        )
        box = Box(bounds, x0)
        self.box = box if box.bounded else None
        self.start = x0.copy() if self.box is None else self.box.inside(x0, START)
        self.m: int | None = None
        self.first = self.residuals(self.start)
        self.m = len(self.first)
        if weights is not None:
            backend.check_array("weights", weights, dtype=self.dtype, shape=(self.m,), contiguous=False)
            if not (np.isfinite(weights) & (weights >= 0)).all():
                raise OptionError("weights are not weights", expected="finite numbers of 0 or more", got=shown(weights))
        self.root = None if weights is None else np.sqrt(weights)
        self.loss = loss if callable(loss) else LOSSES[check_choice("loss", loss, LOSS_NAMES)]
        self.f_scale = self.dtype.type(check_number("f_scale", f_scale, np.finfo(self.dtype).tiny))
        by_columns = x_scale is None or (isinstance(x_scale, str) and x_scale == "jac")
        self.x_scale = None if by_columns else self._per_unknown("x_scale", x_scale)

        pattern = None if sparsity is None else pattern_of(sparsity)
        if jac is None and (diff_step is not None or pattern is not None):
            jac = "2-point"  # as SciPy means it
        if jac is None or isinstance(jac, SparsityPattern):
            self.source: Any = Exact(self._traced(jac), self.args)
        elif isinstance(jac, SparseJacobian):
            if kwargs:
                raise OptionError("kwargs do not reach a SparseJacobian", expected="no kwargs", got=shown(kwargs),
                                  remedy="Leave out jac=, or bind them: functools.partial(fun, **kwargs)")  # fmt: skip
            self.source = Exact(jac, self.args)
        elif isinstance(jac, str):
            scheme: Any = check_choice("jac", jac, SCHEMES)
            relative = None if diff_step is None else self._per_unknown("diff_step", diff_step)
            dtype = np.result_type(self.dtype, 1j) if scheme == "cs" else self.dtype
            self.source = Differences(partial(self.residuals, dtype=dtype), scheme, (self.m, self.n), pattern,
                                      relative, box.low, box.high)  # fmt: skip
        elif callable(jac):
            self.source = Matrices(partial(jac, **kwargs) if kwargs else jac, self.args, self.start, pattern)
        else:
            raise OptionError("jac is neither a function nor a pattern", expected="one of them, None for exact "
                              f"derivatives, or {', '.join(map(repr, SCHEMES))}", got=shown(jac))  # fmt: skip
        pattern = self.source.pattern
        if pattern.shape != (self.m, self.n):
            raise ShapeError("The Jacobian does not fit f and x0", expected=(self.m, self.n), got=pattern.shape)
        self.pattern = SparsityPattern.diagonal(self.n) if pattern.kind == "identity" else pattern  # it has no values
        self.equations: Any = (Factored(self.pattern, self.dtype) if iterates is None else
                               Iterated(self.pattern, self.dtype, iterates))  # fmt: skip
        self.njev = 0
        self.squares: Any = None
        self.unit: Any = None  # of the unknowns in the normal equations

    def _traced(self, pattern: SparsityPattern | None) -> SparseJacobian:
        """Return the exact Jacobian of f."""

        def vector(*given: Any) -> Any:
            return np.reshape(self.f(*given), 1)

        try:
            return sparse_jacobian(vector if self.scalar else self.f, self.start, *self.args, pattern=pattern)
        except TracingError as error:
            raise TracingError(str(error), remedy='Or pass jac="2-point", or a function') from error

    def _per_unknown(self, name: str, given: Any) -> Array:
        """Return a number above 0 for each unknown."""
        try:
            found = np.broadcast_to(np.asarray(given, self.dtype), (self.n,))
        except (TypeError, ValueError):
            found = np.zeros(1)
        if not (np.isfinite(found) & (found > 0)).all():
            raise OptionError(f"{name} does not fit x0", expected=f"finite numbers above 0: one, or ({self.n},)",
                              got=shown(given))  # fmt: skip
        return found

    def jacobian(self) -> Any:
        """Return the Jacobian with weights and loss: an array if it was found as one, else a SciPy matrix."""
        if self.source.dense:
            return self.values.reshape(self.pattern.shape)
        return self.pattern.to_scipy(self.values, copy=True)

    def residuals(self, x: Array, dtype: Any = None) -> Array:
        """Return f(x), an own copy; `dtype`: of the result, if it is not that of x0."""
        dtype = self.dtype if dtype is None else dtype
        y = np.array(self.f(x.copy(), *self.args))
        y = y.astype(dtype) if y.dtype.kind in "biu" else y
        if y.dtype != dtype:
            raise DTypeError("f returns another dtype than x", expected=dtype, got=y.dtype,
                             remedy="Return real and imaginary parts" if y.dtype.kind == "c" else None)  # fmt: skip
        self.scalar = y.ndim == 0
        y = np.atleast_1d(y)
        if y.ndim != 1 or (self.m is not None and len(y) != self.m):
            raise ShapeError("f returns the wrong shape", expected="(m,)" if self.m is None else (self.m,), got=y.shape)
        return y

    def cost(self, raw: Array) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            weighted = raw if self.root is None else self.root * raw
            if self.loss is LOSSES["linear"]:
                return float(0.5 * (weighted * weighted).sum())
            return float(0.5 * self.f_scale**2 * self._rho(weighted)[0].sum())

    def _rho(self, weighted: Array) -> Array:
        """Return ρ and ρ', and whatever follows them."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = self.loss((weighted / self.f_scale) ** 2)
        if np.shape(found)[1:] != (self.m,) or len(found) < 2:
            raise ShapeError("loss returns the wrong shape", expected=(3, self.m), got=np.shape(found))
        return found

    # ---- the normal equations ----------------------------------------------------------------------------------------

    def linearise(self, x: Array, raw: Array) -> None:
        """Compute J, the gradient, the scaling D, the bounds' C and Jᵀ J at x, where f is `raw`."""
        values, self.njev = self.source.values(x, raw), self.njev + 1
        backend.check_array("the values of jac", values, dtype=self.dtype)
        factor = self.root
        weighted = raw if factor is None else factor * raw
        if self.loss is not LOSSES["linear"]:
            root = np.sqrt(self._rho(weighted)[1])
            weighted, factor = root * weighted, root if factor is None else factor * root
        if factor is not None:
            values = values * factor[self.pattern.row_of_entry]
        self.values = values
        if self.unit is None:
            self.unit = self._units(values)
        scaled = values if self.unit is _ONE else values * self.unit[self.pattern.indices]
        self.scaled_gradient, self.sums = self.equations.update(scaled, weighted)
        self.gradient = g = self.scaled_gradient / self.unit
        self.barrier: Any = self.dtype.type(0)
        if self.box is not None:
            v, towards = self.box.distances(x, g)
            self.barrier, g = np.where(towards, abs(self.scaled_gradient), 0) / (v / self.unit), g * v
        self.optimality = float(abs(g).max(initial=0))
        if not np.isfinite(self.gradient).all() or not np.isfinite(self.sums).all():
            raise NonFiniteError("The derivatives are not finite, or their squares overflow",
                                 expected="finite numbers", got=shown(float(abs(values).max())))  # fmt: skip
        if self.x_scale is None:
            self.squares = self.sums if self.squares is None else np.maximum(FADING * self.squares, self.sums)
        elif self.squares is None:  # the first damping is in proportion to the largest diagonal here too
            scale = self.x_scale / self.unit
            self.squares = scale**-2 * ((self.sums * scale**2).max(initial=0) or 1)

    def _units(self, values: Array) -> Any:
        """Return what unknowns are divided by in the normal equations, so that squares neither vanish nor overflow.

        They are powers of two, which change no digit: 1 but for columns of extreme numbers.
        """
        largest, info = np.zeros(self.n, self.dtype), np.finfo(self.dtype)
        with np.errstate(invalid="ignore"):
            np.maximum.at(largest, self.pattern.indices, abs(values))
        exponents = np.where(np.isfinite(largest) & (largest > 0), np.frexp(largest)[1], 0)
        exponents[abs(exponents) <= info.maxexp // 4] = 0
        if not exponents.any():
            return _ONE
        return np.ldexp(np.ones(self.n, self.dtype), np.clip(-exponents, info.minexp + 2, info.maxexp - 2))

    def step(self, x: Array, damping: float) -> tuple[Array, float] | None:
        """Return the next point and the gain that the model foretells, or None where the matrix has no factors."""
        damped = damping * np.where(self.squares == 0, 1, self.squares)
        equations, g = self.equations, self.scaled_gradient
        equations.damp(damped + self.barrier)
        step = equations.solve()
        if step is None:
            return None
        moved = x + step * self.unit
        leaves = self.box is not None and not self.box.holds(moved)
        if not leaves and equations.exact:
            return moved, float(0.5 * (step * (damped * step - g)).sum())
        if self.box is not None and leaves:
            low, high = self.box.rest(x, self.optimality)
            diagonal = self.sums + damped + self.barrier
            step = best_within(low / self.unit, high / self.unit, step, g, diagonal, equations)
            moved = self.box.inside(x + step * self.unit)
        gain = (step * (g + (equations.times(step) - damped * step) / 2)).sum()
        return moved, -float(gain)


def _vector(x0: Any) -> Array:
    """Return x0 as a vector of floats."""
    if isinstance(x0, (list, tuple, int, float, np.generic)):
        x0 = np.asarray(x0)
    if not isinstance(x0, np.ndarray):
        raise DTypeError("x0 is not an array of NumPy", expected="float32 or float64", got=type(x0).__name__)
    x0 = backend.exact_floats("x0", x0, np.float64) if x0.dtype.kind in "biu" else x0
    backend.float_dtype(x0.dtype)
    x0 = x0.reshape(1) if x0.ndim == 0 else x0
    backend.check_array("x0", x0, shape=(None,), contiguous=False)
    return x0


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
