"""Products and solves on a plan in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters.ad import Zero, is_undefined_primal

from sparsebp import kernels
from sparsebp.core.check import check_flag
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.jax.arrays import arrays_of
from sparsebp.jax.operations import Operation, Shapes, no_tangent, sum_to
from sparsebp.patterns.pattern import values_on
from sparsebp.products import FactorPlan, ProductPlan
from sparsebp.products.factor import Trans, solve_columns
from sparsebp.products.product import OPERANDS, Role

NUMBERS = ("float32", "float64", "complex64", "complex128")

# ---- products --------------------------------------------------------------------------------------------------------


def product(plan: ProductPlan, a_values: Any, b_values: Any) -> jax.Array:
    """Return the values of C = A @ B on a kept pattern.

    Parameters
    ----------
    plan
        From `sparsebp.plan_product`.
    a_values, b_values
        Values on the patterns of A and B: (nnz,), shared by the samples, or (nnz, B), of one dtype; or sparse matrices
        of SciPy.

    Returns
    -------
    jax.Array
        Values on ``plan.pattern``: (nnz,) if both are shared, else (nnz, B).

    Raises
    ------
    OptionError
        `plan` is not a ProductPlan, or one of an identity, which has no values.
    DTypeError, ShapeError
        The values do not fit.

    Examples
    --------
    >>> import jax, sparsebp as sb, sparsebp.jax as sj
    >>> pattern = sb.SparsityPattern.dense(2, 2)
    >>> plan = sb.plan_product(pattern, pattern)
    >>> a, b = jax.numpy.arange(4.0), jax.numpy.ones(4)
    >>> jax.grad(lambda a: sj.product(plan, a, b).sum())(a).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    _check_plan(plan, ProductPlan, "plan_product")
    if plan.strategy == "identity":
        raise OptionError("An identity has no values", expected="patterns whose values count",
                          got=f"{plan.a} @ {plan.b}", remedy="Use SparsityPattern.diagonal(n) for values")  # fmt: skip
    a, b = arrays_of(NUMBERS, a_values=values_on(plan.a, a_values), b_values=values_on(plan.b, b_values))
    _check_values("a_values", a, plan.a.nnz)
    _check_values("b_values", b, plan.b.nnz)
    if a.ndim == b.ndim == 2 and a.shape[1] != b.shape[1]:
        raise ShapeError("The values have different batch sizes", expected="one, or (nnz,) for all",
                         got=f"{a.shape}, {b.shape}")  # fmt: skip
    return _by_column(partial(_form, plan, "c"), a, b)


def _form(plan: ProductPlan, role: Role, x: Any, y: Any) -> Any:
    """Return one of A, B and C from the other two, in the order of `OPERANDS`; all of them (nnz,)."""
    return _forms(x, y, plan=plan, role=role)[0]


def _form_shape(x: tuple[int, ...], y: tuple[int, ...], *, plan: ProductPlan, role: Role) -> Shapes:
    size = {"a": plan.a, "b": plan.b, "c": plan.pattern}[role].nnz
    return ((*np.broadcast_shapes(x[:-1], y[:-1]), size),)


def _run_form(given: Sequence[np.ndarray], results: Sequence[np.ndarray], plan: ProductPlan, role: Role) -> None:
    """Compute the form for all samples: the axes before the last."""
    mapped = results[0].shape[:-1]
    if not mapped:
        results[0][...] = plan.form(role, *given)
        return
    found = plan.form(role, *(_columns(v, mapped) for v in given))
    results[0][...] = found.T.reshape(results[0].shape)


_forms = Operation("product", _form_shape, _run_form)


@_forms.jvp
def _form_jvp(primals: Any, tangents: Any, *, plan: ProductPlan, role: Role) -> Any:
    """The product is linear in both."""
    (x, y), (dx, dy) = primals, tangents
    parts = [_form(plan, role, *operands) for operands, own in (((dx, y), dx), ((x, dy), dy)) if type(own) is not Zero]
    return _forms(x, y, plan=plan, role=role), [sum(parts[1:], parts[0])]


@_forms.transpose
def _form_transpose(grads: Any, x: Any, y: Any, *, plan: ProductPlan, role: Role) -> Any:
    """Return the gradient at the operand that is not known, by the form itself."""
    names = OPERANDS[role]
    unknown = 0 if is_undefined_primal(x) else 1
    if type(grads[0]) is Zero:
        return [Zero(v.aval) if is_undefined_primal(v) else None for v in (x, y)]
    values = {**dict(zip(names, (x, y), strict=True)), role: grads[0]}
    wanted = names[unknown]
    found = _form(plan, wanted, *(values[other] for other in OPERANDS[wanted]))
    found = sum_to((x, y)[unknown].aval.shape, found)
    return [found if k == unknown else None for k in range(2)]


# ---- solves ----------------------------------------------------------------------------------------------------------


def solve(plan: FactorPlan, values: Any, b: Any, transposed: bool = False) -> jax.Array:
    """Solve A x = b, or Aᵀ x = b, for matrices on the pattern of a plan.

    Each matrix is factorised once; the gradients are solves with the same factors.

    Parameters
    ----------
    plan
        From `sparsebp.plan_factor`.
    values
        Values on the plan's pattern: (nnz,), or (nnz, B) for B matrices; or a sparse matrix of SciPy. Of a plan of
        Cholesky or LDLᵀ factors with both triangles, those below the diagonal do not count, and their gradients are 0.
    b
        Right-hand sides, of the dtype of `values`. For one matrix (n,), or (n, K). For B matrices (n, B), one for
        each, or (n,) for all.
    transposed
        Solve with Aᵀ.

    Returns
    -------
    jax.Array
        x: (n,) or (n, K) for one matrix, (n, B) for B.

    Raises
    ------
    OptionError
        `plan` is not a FactorPlan, or one that regularises: its solutions are of other matrices.
    DTypeError, ShapeError
        An array does not fit.

    Examples
    --------
    >>> import jax, sparsebp as sb, sparsebp.jax as sj
    >>> plan = sb.plan_factor(sb.SparsityPattern.dense(2, 2))
    >>> values, b = jax.numpy.array([2.0, 0.0, 1.0, 4.0]), jax.numpy.array([2.0, 9.0])
    >>> sj.solve(plan, values, b).tolist()
    [1.0, 2.0]
    >>> jax.grad(lambda v: sj.solve(plan, v, b).sum())(values).tolist()
    [-0.375, -0.75, -0.25, -0.5]
    """
    _check_plan(plan, FactorPlan, "plan_factor")
    if plan.regularize is not None:
        raise OptionError("The plan regularises matrices", expected="regularize=None", got=plan.regularize)
    transposed = check_flag("transposed", transposed)
    given, values = values, values_on(plan.pattern, values)
    if values is not given:
        plan.check_symmetric(values)
    values, b = arrays_of(NUMBERS, values=values, b=b)
    _check_values("values", values, plan.pattern.nnz)
    n = plan.pattern.shape[0]
    if b.ndim not in (1, 2) or b.shape[0] != n or (values.ndim == b.ndim == 2 and b.shape[1] != values.shape[1]):
        wanted = f"({n},), or ({n}, {'K' if values.ndim == 1 else values.shape[1]})"
        raise ShapeError("b does not fit the matrices", expected=wanted, got=b.shape)

    def one(values: jax.Array, b: jax.Array) -> jax.Array:
        (factors,) = _factors(lax.stop_gradient(values), plan=plan)
        if plan.kind != "lu":
            values = values[plan.read]
            values = jnp.where(plan.across, values.conj(), values) if jnp.iscomplexobj(values) else values
        return _solve(plan, transposed, values, factors, b)

    return _by_column(one, values, b)


def _solve(plan: FactorPlan, transposed: bool, values: Any, factors: Any, b: Any) -> Any:
    """Solve for one matrix; its factors are a function of its values and count as constant."""
    return _solves(values, factors, b, plan=plan, transposed=transposed)[0]


def _factors_shape(values: tuple[int, ...], *, plan: FactorPlan) -> Shapes:
    return ((*values[:-1], plan.fill),)


def _run_factors(given: Sequence[np.ndarray], results: Sequence[np.ndarray], plan: FactorPlan) -> None:
    """Write L and U, a row for each matrix; the kernels hold a few matrices side by side."""
    (values,), (factors,) = given, results
    data = kernels.on_host().panels.by_sample(plan(_columns(values, values.shape[:-1]))._data)
    rows = data.swapaxes(1, 2).reshape(data.shape[0] * data.shape[2], plan.fill)
    factors[...] = rows[: math.prod(values.shape[:-1])].reshape(factors.shape)


_factors = Operation("factors", _factors_shape, _run_factors)


def _solve_shape(
    values: tuple[int, ...], factors: tuple[int, ...], b: tuple[int, ...], *, plan: FactorPlan, transposed: bool
) -> Shapes:  # fmt: skip
    return ((*np.broadcast_shapes(factors[:-1], b[:-1]), b[-1]),)


def _run_solve(given: Sequence[np.ndarray], results: Sequence[np.ndarray], plan: FactorPlan, transposed: bool) -> None:
    """Solve with the matrices that the factors' axes before the last count, and all right-hand sides of each."""
    (_, factors, b), (found,) = given, results
    kernel, own, n = kernels.on_host().panels, factors.shape[:-1], b.shape[-1]
    mapped = found.shape[:-1]
    trans: Trans = "T" if transposed else "N"
    if not mapped:
        found[...] = solve_columns(plan, factors.reshape(1, plan.fill, 1), b[:, None], trans)[:, 0]
        return
    order = sorted(range(len(mapped)), key=lambda axis: own[axis] == 1)  # those of the matrices come first
    matrices = math.prod(own)
    right = np.broadcast_to(b, (*mapped, n)).transpose(*order, len(mapped))
    shape, right = right.shape, right.reshape(matrices, math.prod(mapped) // max(matrices, 1), n)
    x = np.empty_like(right)
    if x.size and matrices == 1:
        column = np.ascontiguousarray(right[0].T)
        x[0] = solve_columns(plan, factors.reshape(1, plan.fill, 1), column, trans).T
    elif x.size:
        lanes = kernel.width(matrices, factors.dtype)
        rows = np.zeros((-(-matrices // lanes) * lanes, plan.fill), factors.dtype)
        rows[:matrices] = factors.reshape(matrices, plan.fill)
        data = kernel.side_by_side(rows.reshape(-1, lanes, plan.fill).swapaxes(1, 2))
        for number in range(right.shape[1]):
            column = np.ascontiguousarray(right[:, number].T)
            x[:, number] = solve_columns(plan, data, column, trans).T
    found[...] = x.reshape(shape).transpose(*np.argsort(order), len(mapped))


_solves = Operation("solve", _solve_shape, _run_solve)


@_solves.jvp
def _solve_jvp(primals: Any, tangents: Any, *, plan: FactorPlan, transposed: bool) -> Any:
    """``A dx = db - dA x``."""
    (values, factors, b), (of_values, _, of_b) = primals, tangents
    x = _solve(plan, transposed, values, factors, b)
    right = [] if type(of_b) is Zero else [of_b]
    if type(of_values) is not Zero:
        right.append(-_form(plan.times_vector, *(("b", of_values, x) if transposed else ("c", of_values, x))))
    dx = _solve(plan, transposed, values, factors, sum(right[1:], right[0])) if right else no_tangent(x)
    return [x], [dx]


@_solves.transpose
def _solve_transpose(grads: Any, values: Any, factors: Any, b: Any, *, plan: FactorPlan, transposed: bool) -> Any:
    """Solve with the transposed matrix; only b is linear."""
    if type(grads[0]) is Zero:
        return [None, None, Zero(b.aval)]
    return [None, None, sum_to(b.aval.shape, _solve(plan, not transposed, values, factors, grads[0]))]


# ---- the batch, and checks -------------------------------------------------------------------------------------------


def _columns(values: np.ndarray, mapped: tuple[int, ...]) -> np.ndarray:
    """Return values (…, nnz) as (nnz, samples), or as (nnz,) where all samples share them."""
    nnz = values.shape[-1]
    if math.prod(values.shape[:-1]) == 1:
        return values.reshape(nnz)
    return np.ascontiguousarray(np.broadcast_to(values, (*mapped, nnz)).reshape(math.prod(mapped), nnz).T)


def _by_column(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Call a function of vectors, once for every column of the arrays that have columns."""
    axes = [1 if array.ndim == 2 else None for array in arrays]
    if not any(axes):
        return function(*arrays)
    found: jax.Array = jax.vmap(function, axes, 1)(*arrays)
    return found


def _check_plan(plan: Any, kind: type, maker: str) -> None:
    if not isinstance(plan, kind):
        expected = f"a {kind.__name__}, from sparsebp.{maker}"
        raise OptionError("plan is not such a plan", expected=expected, got=type(plan).__name__)


def _check_values(name: str, values: jax.Array, nnz: int) -> None:
    if values.ndim not in (1, 2) or values.shape[0] != nnz:
        raise ShapeError(f"{name} does not fit the pattern", expected=f"({nnz},) or ({nnz}, B)", got=values.shape)
