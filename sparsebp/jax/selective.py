"""The selective scan of Mamba in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad

from sparsebp import kernels
from sparsebp.core.errors import ShapeError
from sparsebp.jax.arrays import arrays_of
from sparsebp.jax.operations import Operation, Shapes, Tangent, derivative, no_tangent
from sparsebp.jax.recurrence import kept, linear_recurrence, mapped
from sparsebp.kernels.checks import kept_states
from sparsebp.scan.selective import check_reset_shape, shapes_of

Shape = tuple[int, ...]


def selective_scan(
    x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any = None, h0: Any = None, *, reset: Any = None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return y with ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]`` and ``y[t] = Σ_n c[t, n] h[t, n] + d x[t]``.

    Mapped by `jax.vmap`, samples are one batch; with a mapped `a` or `d`, one call follows the other.

    Parameters
    ----------
    x
        The input (T, B, E), float32 or float64; all arrays have one dtype.
    dt
        Step sizes (T, B, E), positive in Mamba: after its softplus.
    a
        Rates of the states (E, N), negative in Mamba.
    b, c
        What the states take in and give out (T, B, N), the same for all channels.
    d
        The skip connection's weights (E,); None for none.
    h0
        The state before the first step (B, E, N); None for zeros.
    reset
        Booleans (T, B), or (T,) for all samples: where one is true, the states before that step are cleared, also of
        NaN and infinity, and ``h[t] = dt[t] b[t] x[t]``.

    Returns
    -------
    tuple of jax.Array
        y (T, B, E), and the state after the last step (B, E, N).

    Raises
    ------
    DTypeError, ShapeError
        An array does not fit.

    Examples
    --------
    >>> import jax, sparsebp.jax as sj
    >>> ones = jax.numpy.ones((3, 1, 1))
    >>> sj.selective_scan(ones, ones, jax.numpy.zeros((1, 1)), ones, ones)[0].ravel().tolist()  # a = 0: sums
    [1.0, 2.0, 3.0]
    """
    optional = {name: array for name, array in (("d", d), ("h0", h0)) if array is not None}
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c} | optional
    arrays = dict(zip(given, arrays_of(**given), strict=True))
    shapes = shapes_of(arrays["x"].shape, arrays["a"].shape)
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ShapeError(f"{name} has the wrong shape", expected=shapes[name], got=array.shape)
    x, dt, a, b, c = (arrays[name] for name in ("x", "dt", "a", "b", "c"))
    d, h0 = (arrays[name] if name in arrays else jnp.zeros(shapes[name], x.dtype) for name in ("d", "h0"))
    flags: tuple[jax.Array, ...] = ()
    if reset is not None:
        (found,) = arrays_of(dtypes=("bool",), reset=reset)
        check_reset_shape(found.shape, x.shape)
        flags = (found[:, None] if found.ndim == 1 else found,)
    y, _, last = _scan(x, dt, a.T, b, c, d, h0.swapaxes(1, 2), *flags)
    return y, last.swapaxes(1, 2)


# The operations: rates (N, E) and states (B, N, E) have the channels last. The second result of the forward, the kept
# states, is for the way back alone and counts as a constant. The last operand may be resets (T, B), or (T, 1) for all.


def _scan_shape(x: Shape, dt: Shape, a: Shape, b: Shape, c: Shape, d: Shape, h0: Shape, *reset: Shape) -> Shapes:
    return x, (kept_states(x[0]), *h0), h0


def _run_scan(given: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    y, states, last = results
    kernels.get(np).selective_scan(*given[:7], _resets(given[7:], given[0]), y, states)
    last[...] = states[-1]


def _resets(given: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray | None:
    """Return resets as kernels take them."""
    return np.ascontiguousarray(np.broadcast_to(given[0], x.shape[:2])) if given else None


_scan = Operation("selective_scan", _scan_shape, _run_scan)


def _in_jax(reset: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, h0: Any) -> list[Any]:
    """Return y and the last state, with all states in memory."""
    steps, batch, channels = x.shape
    flags = None if reset is None else reset[:, :, None]
    # before and after the product with a: its derivatives, zero at resets, meet no NaN
    exponents = kept(kept(dt, flags)[:, :, None] * a, None if flags is None else flags[..., None])
    factors = jnp.exp(exponents)
    terms = (dt * x)[:, :, None] * b[..., None]
    wide = (steps, batch, len(a) * channels)
    h = linear_recurrence(factors.reshape(wide), terms.reshape(wide), h0.reshape(wide[1:]), reset=flags)
    h = h.reshape(factors.shape)
    return [(c[..., None] * h).sum(2) + d * x, h[-1] if steps else h0]


def _tangent(*operands: Any) -> list[Any]:
    """Return the derivatives at ``operands[:7]`` along ``operands[8:15]``; between them are the kept states."""
    function = partial(_in_jax, operands[15] if operands[15:] else None)
    derivatives: list[Any] = jax.jvp(function, operands[:7], operands[8:15])[1]
    return derivatives


def _gradients_shape(*shapes: Shape) -> Shapes:
    x, dt, a, b, c, _, h0 = shapes[:7]
    batch = x[1]
    return x, dt, (batch, *a), b, c, (batch, x[2]), h0


def _run_gradients(given: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """The gradients at a and d are those of every sample."""
    x, *others, _, states, grad_y, grad_last = given[:10]
    flags = _resets(given[10:], x)
    kernels.get(np).selective_scan_grad(x, *others, grad_y, grad_last, states, flags, *results)


_gradients = Operation("selective_scan_grad", _gradients_shape, _run_gradients)


@_gradients.jvp
@derivative
def _gradients_again(*operands: Any) -> list[Any]:
    """Return what `_gradients` does, for derivatives."""
    x, dt, a, b, c, d, h0, _, *grads = operands[:10]
    # without resets, none of any step: mapped as they are
    reset = jnp.broadcast_to(operands[10] if operands[10:] else False, x.shape[:2])
    each = jnp.zeros((x.shape[1], 1, 1), x.dtype)  # sums over the samples are taken by the caller

    def of_samples(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, h0: Any) -> list[Any]:
        def one(reset: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, h0: Any) -> list[Any]:
            y, last = _in_jax(reset[:, None], x[:, None], dt[:, None], a, b[:, None], c[:, None], d, h0[None])
            return [y[:, 0], last[0]]

        found: list[Any] = jax.vmap(one, (1, 1, 1, 0, 1, 1, 0, 0), [1, 0])(reset, x, dt, a, b, c, d, h0)
        return found

    _, back = jax.vjp(of_samples, x, dt, each + a, b, c, each[:, 0] + d, h0)
    return list(back(grads))


def _tangent_transpose(grads: Any, *given: Any) -> list[Any]:
    operands, linear, reset = given[:8], given[8:15], given[15:]
    if all(type(grad) is ad.Zero for grad in grads):
        return [None] * 8 + [ad.Zero(v.aval) for v in linear] + [None] * len(reset)
    found = _gradients(*operands, *map(ad.instantiate_zeros, grads), *reset)
    found[2], found[5] = found[2].sum(0), found[5].sum(0)
    return [None] * 8 + found + [None] * len(reset)


_tangents = Tangent("selective_scan_jvp", _tangent, _tangent_transpose)


@_scan.jvp
def _scan_jvp(primals: Any, tangents: Any) -> Any:
    y, states, last = _scan(*primals)
    of_y, of_last = _tangents(*primals[:7], states, *map(ad.instantiate_zeros, tangents[:7]), *primals[7:])
    return [y, states, last], [of_y, no_tangent(states), of_last]


_SAMPLES = (1, 1, None, 1, 1, None, 0)
"""The axes of the samples; rates and the skip connection's weights have none."""


def _one_batch_or_in_turn(operation: Any, samples: Sequence[Any], results: Sequence[int]) -> Any:
    """Return the rule for mapped axes: samples of one call, or one call after the other where weights are mapped."""

    def rule(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], list[int]]:
        if any(place is None and axis is not None for place, axis in zip(samples, axes, strict=False)):
            moving = [k for k, axis in enumerate(axes) if axis is not None]

            def one(values: Sequence[Any]) -> list[Any]:
                given = dict(zip(moving, values, strict=True))
                return operation(*(given.get(k, v) for k, v in enumerate(operands)))

            found = lax.map(one, [jnp.moveaxis(operands[k], axes[k], 0) for k in moving])
            return found, [0] * len(found)
        at = [k for k in range(len(operands)) if k >= len(samples) or samples[k] is not None]

        def of_samples(*values: Any) -> list[Any]:
            given = dict(zip(at, values, strict=True))
            return operation(*(given.get(k, v) for k, v in enumerate(operands)))

        fold = mapped(of_samples, [place for place in samples if place is not None], results, shared=(), whole=0)
        return fold([operands[k] for k in at], [axes[k] for k in at])

    return rule


_scan.batch(_one_batch_or_in_turn(_scan, _SAMPLES, (1, 1, 0)))
_gradients.batch(_one_batch_or_in_turn(_gradients, (*_SAMPLES, 1, 1, 0), (1, 1, 0, 1, 1, 0, 0)))
_tangents.batch(_one_batch_or_in_turn(_tangents, (*_SAMPLES, 1, *_SAMPLES), (1, 0)))
