"""Linear recurrences in JAX: the forward and the gradients are one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters import ad

from sparsebp import kernels
from sparsebp.core.check import check_flag, check_integer
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.jax.arrays import arrays_of
from sparsebp.jax.operations import Native, Operation, Shapes, Tangent, derivative, fits, register, sum_to
from sparsebp.kernels.host import xla

Shape = tuple[int, ...]


def linear_recurrence(
    a: Any, b: Any, h0: Any = None, *, dim: int = 0, reverse: bool = False, lengths: Any = None, reset: Any = None
) -> jax.Array:
    """Return h with ``h[t] = a[t] * h[t-1] + b[t]``, element by element, in one pass over memory.

    Parameters
    ----------
    a
        Factors: of the shape of b, or 1 along any axis, where all share its factors.
    b
        Terms (T,), (T, B) or (T, B, H), or with the steps along another axis `dim`: float32, float64, complex64 or
        complex128; all arrays have one dtype.
    h0
        The state before the first step, of b's shape without the axis of the steps; None for zeros.
    dim
        The axis of the steps: 0 for (T, B, H), 1 for (B, T, H), -1 for (B, H, T). Kernels have them first.
    reverse
        Go from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.
    lengths
        Steps of each sample (B,), integers from 0 to T: a sequence or an array. Beyond them h is zero, and `reverse`
        begins at a sample's last step. None: all have T.
    reset
        Booleans of the shape of b, where any axis may be 1: where one is true, the state before that step is cleared,
        also of NaN and infinity, and ``h[t] = b[t]``.

    Returns
    -------
    jax.Array
        h, of b's shape.

    Raises
    ------
    DTypeError, ShapeError
        An array does not fit.
    OptionError
        `dim` is not an axis of b, or a length is not from 0 to T; under `jax.jit`, a length's message arrives in an
        error of JAX.

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
    a, b, *start = arrays_of(dtypes=("float32", "float64", "complex64", "complex128"), **given)
    if not 1 <= b.ndim <= 3:
        raise ShapeError("b has the wrong shape", expected="one to three axes", got=b.shape)
    at = check_integer("dim", dim, -b.ndim, b.ndim - 1) % b.ndim
    full: dict[str, Any] = {"b": b, "a": _shared("a", a, b)}
    if reset is not None:
        (given_reset,) = arrays_of(dtypes=("bool",), reset=reset)
        full["reset"] = _shared("reset", given_reset, b)
    of_state = (*b.shape[:at], *b.shape[at + 1 :])
    if start and start[0].shape != of_state:
        raise ShapeError("h0 has the wrong shape", expected=of_state, got=start[0].shape)
    first = {name: _three_axes(jnp.moveaxis(array, at, 0)) for name, array in full.items()}
    terms, cleared = first["b"], (first["reset"],) if reset is not None else ()
    h0 = start[0].reshape(terms.shape[1:]) if start else jnp.zeros(terms.shape[1:], terms.dtype)
    steps_of = () if lengths is None else (_lengths(lengths, *terms.shape[:2]),)
    h = _recurrence(first["a"], terms, h0, *steps_of, *cleared, reverse=reverse)[0]
    return jnp.moveaxis(h.reshape(b.shape[at], *of_state), 0, at)


def _shared(name: str, array: jax.Array, full: jax.Array) -> jax.Array:
    """Return an array after checking that it has the shape of another one, or 1 for any axis."""
    if array.ndim != full.ndim or any(n not in (1, whole) for n, whole in zip(array.shape, full.shape, strict=True)):
        raise ShapeError(f"{name} has the wrong shape", expected=f"{full.shape}, or 1 for any axis", got=array.shape)
    return array


def _three_axes(array: jax.Array) -> jax.Array:
    return array.reshape(*array.shape, *(1,) * (3 - array.ndim))


def _lengths(lengths: Any, steps: int, batch: int) -> jax.Array:
    """Return the lengths as int32; those whose values are not known yet are checked by the kernel's caller."""
    known = not isinstance(lengths, jax.core.Tracer)
    found = np.asarray(lengths) if known else lengths
    if known and not found.size:
        found = found.astype(np.int32)
    if found.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=found.dtype)
    if found.shape != (batch,):
        raise ShapeError("lengths has the wrong shape", expected=(batch,), got=found.shape)
    if known and batch and not 0 <= found.min() <= found.max() <= steps:
        raise OptionError("A length is out of range", expected=f"integers from 0 to {steps}",
                          got=int(found.min() if found.min() < 0 else found.max()))  # fmt: skip
    if known or found.dtype.itemsize < 4:
        return jnp.asarray(found.astype(np.int32))
    fitting = jnp.where(found > steps, steps + 1, found.astype(np.int32))  # a wrong one stays wrong
    return jnp.where(found < 0, -1, fitting)


# The operations. Of a batch, mapped samples come before those of one call. After their arrays, linear recurrences may
# have lengths (B,), integers, and resets (T or 1, B or 1, H or 1), booleans.


class _Extra(NamedTuple):
    """Lengths and resets, or None."""

    lengths: Any
    reset: Any


def _extra(given: Sequence[Any]) -> _Extra:
    """Return the lengths and resets among these."""
    by_kind = {array.dtype.kind == "b": array for array in given}
    return _Extra(by_kind.get(False), by_kind.get(True))


def _fold(v: Any, axis: int | None, place: int, count: int, batch: int, shared: bool) -> Any:
    """Return an operand whose samples lie along `place`, with its mapped axis joined to them."""
    if axis is None and shared and v.shape[place] == 1:
        return v
    wide = jnp.broadcast_to(v, (count, *v.shape)) if axis is None else jnp.moveaxis(v, axis, 0)
    before, behind = wide.shape[1 : place + 1], wide.shape[place + 2 :]
    wide = jnp.broadcast_to(wide, (count, *before, batch, *behind))
    return jnp.moveaxis(wide, 0, place).reshape(*before, count * batch, *behind)


def mapped(
    operation: Callable[..., list[Any]], samples: Sequence[int], results: Sequence[int], shared: Sequence[int],
    whole: int,
) -> Callable[..., Any]:  # fmt: skip
    """Return the rule for mapped axes.

    Parameters
    ----------
    operation
        Computes on the operands of one call.
    samples, results
        The axes of the samples, in every operand except lengths and resets, and in every result.
    shared
        Operands that may have one sample for all, as resets may.
    whole
        An operand that has all.
    """

    def rule(operands: Sequence[Any], axes: Sequence[int | None], **options: Any) -> tuple[list[Any], list[int]]:
        count = next(v.shape[axis] for v, axis in zip(operands, axes, strict=True) if axis is not None)
        batch = [n for axis, n in enumerate(operands[whole].shape) if axis != axes[whole]][samples[whole]]
        places = [*samples, *(int(v.dtype == bool) for v in operands[len(samples) :])]
        folded = [_fold(v, axis, places[k], count, batch, k in shared or v.dtype == bool)
                  for k, (v, axis) in enumerate(zip(operands, axes, strict=True))]  # fmt: skip
        found = operation(*folded, **options)
        split = [v.reshape(*v.shape[:place], count, batch, *v.shape[place + 1 :])
                 for v, place in zip(found, results, strict=True)]  # fmt: skip
        return split, list(results)

    return rule


def _read(given: Sequence[np.ndarray], steps: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return lengths and resets as kernels take them, after checking the former's values."""
    lengths, reset = _extra(given)
    if lengths is None:
        return None, reset
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= steps:
        raise OptionError("A length is out of range", expected=f"integers from 0 to {steps}", got=lengths)
    return lengths.astype(np.int64), reset


def _forward_shape(a: Shape, b: Shape, h0: Shape, *extra: Shape, reverse: bool) -> Shapes:
    return (b,)


def _run_forward(given: Sequence[np.ndarray], results: Sequence[np.ndarray], reverse: bool) -> None:
    a, b, h0, *extra = given
    kernels.get(np).linear_recurrence(a, b, h0, *_read(extra, len(b)), reverse, results[0])


def _forward_handler(dtype: np.dtype, *, reverse: bool) -> Native:
    real = np.zeros(0, dtype).real.dtype
    return Native(f"sparsebp_recurrence_{real}", partial(xla.forward_handler, real), {"reverse": int(reverse)})


_recurrence = Operation("linear_recurrence", _forward_shape, _run_forward, _forward_handler)
_recurrence.batch(mapped(_recurrence, (1, 1, 0), (1,), shared=(0,), whole=1))


def _backward_shape(a: Shape, h: Shape, gh: Shape, h0: Shape, *extra: Shape, reverse: bool) -> Shapes:
    return (a[0], *h[1:]), h, h0


def _run_backward(given: Sequence[np.ndarray], results: Sequence[np.ndarray], reverse: bool) -> None:
    a, h, gh, h0, *extra = given
    kernels.get(np).linear_recurrence_grad(a, h, gh, h0, *_read(extra, len(h)), reverse, *results)


def _backward_handler(dtype: np.dtype, *, reverse: bool) -> Native:
    real = np.zeros(0, dtype).real.dtype
    return Native(f"sparsebp_recurrence_back_{real}", partial(xla.backward_handler, real), {"reverse": int(reverse)})


_gradients = Operation("linear_recurrence_grad", _backward_shape, _run_backward, _backward_handler)
_gradients.batch(mapped(_gradients, (1, 1, 1, 0), (1, 1, 0), shared=(0,), whole=1))


def _before(h: Any, h0: Any, extra: Sequence[Any], reverse: bool) -> Any:
    """Return the state before every step, 0 where it does not matter: after a reset, and beyond a sample's length."""
    if len(h) == 0:
        return h
    lengths, reset = _extra(extra)
    if not reverse:
        before = jnp.concatenate([h0[None], h[:-1]])
    elif lengths is None:
        before = jnp.concatenate([h[1:], h0[None]])
    else:
        before = jnp.where(_at(h, lengths - 1), h0, jnp.concatenate([h[1:], h0[None]]))
    before = kept(before, reset)
    return before if lengths is None else jnp.where(_within(h, lengths), before, 0)


def kept(x: Any, reset: Any) -> Any:
    """Return x with 0 at resets."""
    return x if reset is None else jnp.where(reset, 0, x)


def _at(h: Any, step: Any) -> Any:
    return (jnp.arange(len(h))[:, None] == step)[..., None]


def _within(h: Any, lengths: Any) -> Any:
    return (jnp.arange(len(h))[:, None] < lengths)[..., None]


def _tangent(a: Any, h: Any, h0: Any, da: Any, db: Any, dh0: Any, *extra: Any, reverse: bool) -> list[Any]:
    """Return the derivative along (da, db, dh0): ``dh[t] = a[t] * dh[t-1] + (db[t] + da[t] * h[t-1])``."""
    terms = db + kept(da, _extra(extra).reset) * _before(h, h0, extra, reverse)
    return _recurrence(a, terms, dh0, *extra, reverse=reverse)


def _tangent_transpose(grads: Any, a: Any, h: Any, h0: Any, *given: Any, reverse: bool) -> list[Any]:
    """Return the gradients, which are not conjugated: the kernel's are."""
    linear, extra = given[:3], given[3:]
    if type(grads[0]) is ad.Zero:
        return [None] * 3 + [ad.Zero(v.aval) for v in linear] + [None] * len(extra)
    found = _gradients(a, h, jnp.conj(grads[0]), h0, *extra, reverse=reverse)
    found[0] = sum_to(linear[0].aval.shape, found[0])
    return [None] * 3 + [jnp.conj(grad) for grad in found] + [None] * len(extra)


_tangents = Tangent("linear_recurrence_jvp", _tangent, _tangent_transpose)
_tangents.batch(mapped(_tangents, (1, 1, 0, 1, 1, 0), (1,), shared=(0, 3), whole=1))


@_recurrence.jvp
def _recurrence_jvp(primals: Any, tangents: Any, *, reverse: bool) -> Any:
    a, _, h0, *extra = primals
    (h,) = _recurrence(*primals, reverse=reverse)
    da, *linear = tangents[:3]
    linear = [*map(ad.instantiate_zeros, linear)]
    if type(da) is ad.Zero:  # then neither h nor gradients at a are needed on the way back
        return [h], _recurrence(a, *linear, *extra, reverse=reverse)
    return [h], _tangents(a, h, h0, da, *linear, *extra, reverse=reverse)


@_recurrence.transpose
def _recurrence_transpose(grads: Any, a: Any, b: Any, h0: Any, *extra: Any, reverse: bool) -> list[Any]:
    """Return the gradients at b and h0, where these are linear: not conjugated."""
    if ad.is_undefined_primal(a):
        raise NotImplementedError("A linear recurrence is not linear in its factors")
    linear = [ad.is_undefined_primal(x) for x in (b, h0)]
    if type(grads[0]) is ad.Zero:
        found: Sequence[Any] = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (b, h0)]
    else:
        found = _transposed(a, grads[0], extra, reverse)
    return [None, *(grad if wanted else None for grad, wanted in zip(found, linear, strict=True)), *[None] * len(extra)]


def _transposed(a: Any, gh: Any, extra: Sequence[Any], reverse: bool) -> tuple[Any, Any]:
    """Return ``g[t] = a[t+1] * g[t+1] + gh[t]``, and what arrives at the initial state."""
    if len(gh) == 0:
        return gh, jnp.zeros(gh.shape[1:], gh.dtype)
    lengths, reset = _extra(extra)
    after, cleared = _of_step_after(a, reverse), None if reset is None else _of_step_after(reset, reverse)
    if len(a) > 1 and lengths is not None and not reverse:  # after a sample's last step there is only padding
        after = jnp.where(_within(gh, lengths - 1), after, 0)
    further = [x for x in (lengths, cleared) if x is not None]
    (g,) = _recurrence(after, gh, jnp.zeros(gh.shape[1:], gh.dtype), *further, reverse=not reverse)
    if lengths is None:
        first = -1 if reverse else 0
        at = None if reset is None else reset[first]
        return g, kept(a[first], at) * kept(g[first], at)
    begins = _at(gh, lengths - 1) if reverse else _at(gh, 0) & _within(gh, lengths)
    begins = begins if reset is None else begins & ~reset
    return g, (jnp.where(begins, a, 0) * jnp.where(begins, g, 0)).sum(0)


def _of_step_after(x: Any, reverse: bool) -> Any:
    """Return x, of every step or of all, with every step's in the place of the step before; 0 comes in."""
    if len(x) == 1:
        return x
    none = jnp.zeros_like(x[:1])
    return jnp.concatenate([none, x[:-1]] if reverse else [x[1:], none])


@_gradients.jvp
@derivative
def _gradients_again(a: Any, h: Any, gh: Any, h0: Any, *extra: Any, reverse: bool) -> list[Any]:
    """Return what `_gradients` does, for derivatives."""
    g, at_h0 = _transposed(jnp.conj(a), gh, extra, reverse)
    at_a = kept(g, _extra(extra).reset) * jnp.conj(_before(h, h0, extra, reverse))
    return [at_a.sum(0, keepdims=True) if len(a) != len(h) else at_a, g, at_h0]


def custom_calls() -> list[str]:
    """Return the names by which exported linear recurrences call their kernels, which this process then knows.

    `jax.export` refuses a function that calls them unless told, for each name, ``disabled_checks=[
    jax.export.DisabledSafetyCheck.custom_call(name)]``, and a process that calls what was exported has to call this
    function first. Products, solves and selective scans cannot be exported: they call back into Python.
    """
    natives = [handler(np.dtype(real), reverse=False) for handler in (_forward_handler, _backward_handler)
               for real in ("float32", "float64") if fits()]  # fmt: skip
    for native in natives:
        register(native.name, native.handler)
    return [native.name for native in natives]
