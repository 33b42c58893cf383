"""Products, solves and linear recurrences in JAX, by the kernels of this library on the host.

``import sparsebp.jax as sj``. The functions work under `jax.jit`, `vmap` and reverse mode of any order: each gradient
is made of the same functions. They are `jax.custom_vjp` functions of one matrix or sequence; batches are `jax.vmap` of
them, and `jax.pure_callback` gives the kernels all samples at once. JAX has no forward mode (`jvp`, `jacfwd`) for such
functions.

On one core JAX's callbacks can wait for the thread that dispatches the next call, and that for them. There, the import
sets JAX's option ``jax_cpu_enable_async_dispatch`` to False; it must come before the first array of JAX.

float32, or float64 with JAX's option ``jax_enable_x64``; nothing is converted. Arrays on an accelerator travel to the
host and back. The message of a `PivotError` arrives within the error that JAX raises in its place.

Raises
------
MissingDependencyError
    On import: JAX is not installed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core.check import check_flag
from sparsebp.core.errors import DTypeError, MissingDependencyError, OptionError, ShapeError
from sparsebp.patterns.pattern import values_on
from sparsebp.products import FactorPlan, ProductPlan
from sparsebp.products.factor import Trans, solve_columns
from sparsebp.products.product import OPERANDS, Role
from sparsebp.scan import linear_recurrence as recurrence_of_arrays

try:
    import jax
except ImportError as error:
    raise MissingDependencyError("JAX is not installed, and sparsebp.jax is for its arrays",
                                 remedy="Install the extra: pip install 'sparsebp[jax]'") from error  # fmt: skip
if len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) == 1:
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # JAX's callbacks wait for the only thread, for ever
from jax import lax
from jax import numpy as jnp

__all__ = ["linear_recurrence", "product", "solve"]


def __dir__() -> list[str]:
    return sorted(__all__)


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
    a, b = _arrays(_NUMBERS, a_values=values_on(plan.a, a_values), b_values=values_on(plan.b, b_values))
    _check_values("a_values", a, plan.a.nnz)
    _check_values("b_values", b, plan.b.nnz)
    if a.ndim == b.ndim == 2 and a.shape[1] != b.shape[1]:
        raise ShapeError("The values have different batch sizes", expected="one, or (nnz,) for all",
                         got=f"{a.shape}, {b.shape}")  # fmt: skip
    return _by_column(partial(_form, plan, "c"), a, b)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _form(plan: ProductPlan, role: Role, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return one of A, B and C from the other two, in the order of `OPERANDS`; all of them (nnz,)."""
    size = {"a": plan.a, "b": plan.b, "c": plan.pattern}[role].nnz
    return _on_host(_form_of_arrays, (plan, role), (size,), x, y)


def _form_forward(plan: ProductPlan, role: Role, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    return _form(plan, role, x, y), (x, y)


def _form_backward(plan: ProductPlan, role: Role, operands: Any, grad: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients at both operands by the form itself: the product is linear in both."""
    names = OPERANDS[role]
    values = {**dict(zip(names, operands, strict=True)), role: grad}
    return tuple(_form(plan, name, *(values[other] for other in OPERANDS[name])) for name in names)


_form.defvjp(_form_forward, _form_backward)


def _form_of_arrays(plan: ProductPlan, role: Role, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute the form for all samples: the axes before the last."""
    mapped = np.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    columns = [_columns(v, mapped) for v in (x, y)]
    found = plan.form(role, *columns)
    return found.T.reshape(*mapped, found.shape[0])


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
    values, b = _arrays(_NUMBERS, values=values, b=b)
    _check_values("values", values, plan.pattern.nnz)
    n = plan.pattern.shape[0]
    if b.ndim not in (1, 2) or b.shape[0] != n or (values.ndim == b.ndim == 2 and b.shape[1] != values.shape[1]):
        wanted = f"({n},), or ({n}, {'K' if values.ndim == 1 else values.shape[1]})"
        raise ShapeError("b does not fit the matrices", expected=wanted, got=b.shape)

    def one(values: jax.Array, b: jax.Array) -> jax.Array:
        factors = _on_host(_factors_of_arrays, (plan,), (plan.fill,), lax.stop_gradient(values))
        if plan.kind != "lu":
            values = values[plan.read]
            values = jnp.where(plan.across, values.conj(), values) if jnp.iscomplexobj(values) else values
        return _solve(plan, transposed, values, factors, b)

    return _by_column(one, values, b)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve(plan: FactorPlan, transposed: bool, values: jax.Array, factors: jax.Array, b: jax.Array) -> jax.Array:
    """Solve for one matrix; its factors are a function of its values and count as constant."""
    return _on_host(_solve_of_arrays, (plan, transposed), b.shape, factors, b)


def _solve_forward(
    plan: FactorPlan, transposed: bool, values: jax.Array, factors: jax.Array, b: jax.Array
) -> tuple[jax.Array, Any]:  # fmt: skip
    x = _solve(plan, transposed, values, factors, b)
    return x, (values, factors, x)


def _solve_backward(plan: FactorPlan, transposed: bool, saved: Any, grad: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients: ``Aᵀ gb = gx``, and ``-gb[i] * x[j]`` at A's entry (i, j)."""
    values, factors, x = saved
    gb = _solve(plan, not transposed, values, factors, grad)
    outer = (x, gb) if transposed else (gb, x)
    return -_form(plan.times_vector, "a", *outer), jnp.zeros_like(factors), gb


_solve.defvjp(_solve_forward, _solve_backward)


def _factors_of_arrays(plan: FactorPlan, values: np.ndarray) -> np.ndarray:
    """Return L and U, a row for each matrix; the kernels hold a few matrices side by side."""
    data = kernels.on_host().factor.by_sample(plan(_columns(values, values.shape[:-1]))._data)
    rows = data.swapaxes(1, 2).reshape(data.shape[0] * data.shape[2], plan.fill)
    return rows[: math.prod(values.shape[:-1])].reshape(*values.shape[:-1], plan.fill)


def _solve_of_arrays(plan: FactorPlan, transposed: bool, factors: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve with the matrices that the factors' axes before the last count, and all right-hand sides of each."""
    kernel, own, n = kernels.on_host().factor, factors.shape[:-1], b.shape[-1]
    trans: Trans = "T" if transposed else "N"
    mapped = np.broadcast_shapes(own, b.shape[:-1])
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
    return x.reshape(shape).transpose(*np.argsort(order), len(mapped))


# ---- linear recurrences ----------------------------------------------------------------------------------------------


def linear_recurrence(a: Any, b: Any, h0: Any = None, *, reverse: bool = False) -> jax.Array:
    """Return h with ``h[t] = a[t] * h[t-1] + b[t]``, element by element, in one pass over memory.

    Parameters
    ----------
    a
        Factors: of the shape of b, or 1 along any axis, where all share its factors.
    b
        Terms (T, B, H): float32, float64, complex64 or complex128; all arrays have one dtype.
    h0
        The state before the first step (B, H); None for zeros.
    reverse
        Go from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.

    Returns
    -------
    jax.Array
        h (T, B, H).

    Raises
    ------
    DTypeError, ShapeError
        An array does not fit.

    Examples
    --------
    >>> import jax, sparsebp.jax as sj
    >>> a, b = jax.numpy.full((1, 1, 1), 0.5), jax.numpy.ones((4, 1, 1))
    >>> sj.linear_recurrence(a, b).ravel().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> jax.grad(lambda b: sj.linear_recurrence(a, b)[-1].sum())(b).ravel().tolist()
    [0.125, 0.25, 0.5, 1.0]
    """
    reverse = check_flag("reverse", reverse)
    given = {"a": a, "b": b} | ({} if h0 is None else {"h0": h0})
    a, b, *start = _arrays(_NUMBERS, **given)
    if b.ndim != 3:
        raise ShapeError("b has the wrong shape", expected="(T, B, H)", got=b.shape)
    if a.ndim != 3 or any(size not in (1, full) for size, full in zip(a.shape, b.shape, strict=True)):
        raise ShapeError("a has the wrong shape", expected=f"{b.shape}, or 1 for any of them", got=a.shape)
    if start and start[0].shape != b.shape[1:]:
        raise ShapeError("h0 has the wrong shape", expected=b.shape[1:], got=start[0].shape)
    return _recurrence(reverse, a, b, start[0] if start else jnp.zeros(b.shape[1:], b.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(reverse: bool, a: jax.Array, b: jax.Array, h0: jax.Array) -> jax.Array:
    return _on_host(_recurrence_of_arrays, (reverse,), b.shape, a, b, h0)


def _recurrence_forward(reverse: bool, a: jax.Array, b: jax.Array, h0: jax.Array) -> tuple[jax.Array, Any]:
    h = _recurrence(reverse, a, b, h0)
    return h, (a, h, h0)


def _recurrence_backward(reverse: bool, saved: Any, grad: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients: ``g[t] = a[t+1] * g[t+1] + grad[t]`` at b, ``g[t] * h[t-1]`` at a."""
    a, h, h0 = saved
    factors = a
    if len(a) > 1:  # those of the step after
        none = jnp.zeros_like(a[:1])
        factors = jnp.concatenate([none, a[:-1]] if reverse else [a[1:], none])
    g = _recurrence(not reverse, factors, grad, jnp.zeros_like(h0))
    if len(h) == 0:
        return jnp.zeros_like(a), g, jnp.zeros_like(h0)
    before = jnp.concatenate([h[1:], h0[None]] if reverse else [h0[None], h[:-1]])
    shared = tuple(axis for axis in range(3) if a.shape[axis] != h.shape[axis])
    first = -1 if reverse else 0
    return (g * before).sum(shared, keepdims=True), g, a[first] * g[first]


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def _recurrence_of_arrays(reverse: bool, a: np.ndarray, b: np.ndarray, h0: np.ndarray) -> np.ndarray:
    """Take the mapped axes, before those of one call, as more samples."""
    mapped = np.broadcast_shapes(a.shape[:-3], b.shape[:-3], h0.shape[:-2])
    count, (steps, batch, hidden) = math.prod(mapped), b.shape[-3:]

    def joined(v: np.ndarray, *shape: int) -> np.ndarray:
        """Return v, of this shape in one call, with its mapped axes joined to the one before the last."""
        wide = np.broadcast_to(v, (*mapped, *shape)).reshape(count, *shape)
        wide = np.moveaxis(wide, 0, -3)
        return wide.reshape(*shape[:-2], count * shape[-2], shape[-1])

    if math.prod(a.shape[:-3]) == 1 and (count == 1 or a.shape[-2] == 1):
        factors = a.reshape(a.shape[-3:])
    else:
        factors = joined(a, a.shape[-3], batch, a.shape[-1])
    h = recurrence_of_arrays(factors, joined(b, steps, batch, hidden), joined(h0, batch, hidden), reverse=reverse)
    return np.moveaxis(h.reshape(steps, count, batch, hidden), 1, 0).reshape(*mapped, steps, batch, hidden)


# ---- the host, and checks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A function of arrays; equal ones are one for JAX, which compiles each once."""

    function: Callable[..., np.ndarray]
    options: tuple[Any, ...]

    def __call__(self, *arrays: Any) -> np.ndarray:
        return self.function(*self.options, *map(np.asarray, arrays))


def _on_host(
    function: Callable[..., np.ndarray], options: tuple[Any, ...], shape: tuple[int, ...], *arrays: jax.Array
) -> jax.Array:  # fmt: skip
    """Call a function of NumPy arrays; mapped axes are its first ones, of size 1 where an array is not mapped."""
    result = jax.ShapeDtypeStruct(shape, arrays[0].dtype)
    found: jax.Array = jax.pure_callback(_Call(function, options), result, *arrays, vmap_method="expand_dims")
    return found


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


_NUMBERS = ("float32", "float64", "complex64", "complex128")


def _arrays(dtypes: tuple[str, ...] = ("float32", "float64"), **given: Any) -> list[jax.Array]:
    """Return arrays of NumPy or JAX as JAX's, of one dtype."""
    dtype = None
    for name, array in given.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise DTypeError(f"{name} is not an array", expected="an array of JAX or NumPy", got=type(array).__name__)
        dtype = dtype or array.dtype
        if array.dtype.name not in dtypes or array.dtype != dtype:
            expected = f"{dtype}, as of {next(iter(given))}" if array.dtype.name in dtypes else " or ".join(dtypes)
            raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=array.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise DTypeError(f"{name} is {dtype}, which JAX would convert", expected="float32 or complex64", got=dtype,
                             remedy='Call jax.config.update("jax_enable_x64", True) first')  # fmt: skip
    return [jnp.asarray(array) for array in given.values()]
