"""The transposed Jacobian of a layer or a whole model at an input: its own, or a dense one from its input gradient."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from sparsebp import backend
from sparsebp.core.arguments import forward_of
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError, within_memory
from sparsebp.core.shortcuts import belongs, is_lone
from sparsebp.core.types import Array
from sparsebp.jacobians.transposed import TransposedJacobian, with_batch
from sparsebp.patterns import SparsityPattern

DEFAULT_MEMORY_LIMIT = 2 << 30
"""Bytes that a materialised Jacobian may take when nobody said otherwise."""


def jacobian_t(layer: Any, x: Array) -> TransposedJacobian:
    """Run `layer` forward on `x` and return its transposed Jacobian there.

    Parameters
    ----------
    layer
        A layer or model of `sparsebp.nn`, or any object with `forward` and one of `jacobian_t`, `input_grad` and
        `gradients`. Without `jacobian_t`, or where it was inherited and `input_grad` or `gradients` overridden, the
        Jacobian is dense, of one backward pass an output.
    x
        Input, batch first as in torch.nn (recurrent layers: as their `batch_first` says).

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out), the sizes of one flattened sample of `x` and of the output; its `vjp` and `jvp` take and
        return the layer's own shapes.

    Raises
    ------
    OptionError
        `layer` is not such an object, or its samples depend on each other, or may do so.
    ShapeError, DTypeError, DeviceError
        `x` has no batch axis, or does not fit the layer.
    MemoryLimitError
        A dense Jacobian would take more than 2 GiB, or there is no memory for one.
    """
    ways = ("jacobian_t", "input_grad", "gradients")
    if not _has(layer, "forward") or not any(_has(layer, way) for way in ways):
        raise OptionError(
            "There is no transposed Jacobian of this object",
            expected="a layer or model with forward and one of " + ", ".join(ways),
            got=type(layer).__qualname__,
            remedy="Pass a layer of sparsebp.nn",
        )
    backend.namespace(x=x)
    with within_memory(
        f"The transposed Jacobian of {type(layer).__qualname__} does not fit in memory",
        "Use input_grad, which multiplies with it without building it, or pass fewer or smaller samples",
    ):
        return _jacobian_t(layer, x)


def _jacobian_t(layer: Any, x: Array) -> TransposedJacobian:
    if x.ndim == 0:
        raise _no_batch_axis(x)
    y, saved = forward_of(layer, x)
    axes = getattr(layer, "batch_axes", (0, 0))
    batch, *input_shape = _moved(x, axes[0])
    out_batch, *output_shape = _moved(y, axes[1])
    own = belongs(layer, "jacobian_t")
    if is_lone(layer, saved, x.shape) or out_batch != batch or (x.ndim == 1 and not own):
        raise _no_batch_axis(x)
    samples: dict[str, Any] = {
        "input_shape": tuple(input_shape), "output_shape": tuple(output_shape), "batch_axes": axes,
    }  # fmt: skip
    if not own:
        return dense_jacobian_t(_input_grad(layer, saved), batch=batch, like=y, **samples)
    try:
        jacobian = layer.jacobian_t(saved)
    except ShapeError as error:
        raise _no_batch_axis(x) if x.ndim == 1 else error from error
    sizes = (prod(input_shape), prod(output_shape))
    if jacobian.shape == sizes and jacobian.batch in (None, batch):
        return TransposedJacobian(jacobian.pattern, jacobian.data, **samples)
    raise _no_batch_axis(x) if x.ndim == 1 else ShapeError(
        "The layer's Jacobian does not fit x", expected=f"shape {sizes}, {batch} samples or shared values",
        got=repr(jacobian), remedy="Let jacobian_t return the Jacobian of y with respect to x, a sample by itself",
    )  # fmt: skip


def _input_grad(layer: Any, saved: Any) -> Callable[[Array], Array]:
    """Return the layer's input gradient as a function of gy alone."""
    if _has(layer, "couples_samples") and not belongs(layer, "couples_samples"):
        raise OptionError(
            f"{type(layer).__qualname__} overrides the way back, and does not say whether samples depend on each other",
            expected="couples_samples(saved) beside it", got="an inherited couples_samples",
            remedy="Define it, or restate the inherited one in the class",
        )  # fmt: skip
    if _has(layer, "couples_samples") and layer.couples_samples(saved):
        raise OptionError(
            "The samples of this layer depend on each other, so no sample has a Jacobian of its own",
            expected="a layer that maps each sample by itself", got=type(layer).__qualname__,
            remedy="Use its input gradient",
        )  # fmt: skip
    if belongs(layer, "gradients"):
        return lambda gy: layer.gradients(gy, saved).input
    return lambda gy: layer.input_grad(gy, saved)


def _no_batch_axis(x: Array) -> ShapeError:
    return ShapeError(
        "x has no batch axis that the layer keeps", expected="a batch of samples, (B, …)", got=x.shape,
        remedy="Pass x[None] for a single sample, x[:, None] for samples of one number each",
    )  # fmt: skip


def _has(layer: Any, method: str) -> bool:
    return callable(getattr(layer, method, None))


def _moved(array: Array, axis: int) -> tuple[int, ...]:
    """Return the lengths of the axes, the batch's first."""
    return (array.shape[axis], *array.shape[:axis], *array.shape[axis + 1 :])


def dense_jacobian_t(
    input_grad: Callable[[Array], Array],
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    batch: int,
    like: Array,
    *,
    batch_axes: tuple[int, int] = (0, 0),
    memory_limit: int | None = None,
) -> TransposedJacobian:
    """Return the transposed Jacobian of an operator that gives nothing but its input gradient.

    Parameters
    ----------
    input_grad
        Maps the gradient at the output to the one at the input, a sample by itself (not as batch statistics do).
    input_shape, output_shape
        Shapes of one sample of the input and of the output.
    batch
        Number of samples B.
    like
        An array of the gradients' dtype (float32 or float64) and library.
    batch_axes
        Where the batch is in the gradients at the input and at the output: 0 for (B, *shape), 1 for time-major ones.
    memory_limit
        Most bytes that the result may take; None: 2 GiB.

    Returns
    -------
    TransposedJacobian
        Every entry, per sample, with the shapes of a sample.

    Raises
    ------
    MemoryLimitError
        The result would take more than `memory_limit`; said before anything is allocated.
    ShapeError
        `input_grad` gives another shape.
    """
    xp, dtype = backend.namespace(like=like), backend.float_dtype(like.dtype)
    n_in, n_out = prod(input_shape), prod(output_shape)
    need = n_in * n_out * (batch * dtype.itemsize + 4) + 4 * n_in
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else memory_limit
    if need > limit:
        raise MemoryLimitError(
            "The dense Jacobian would need too much memory", expected=f"at most {limit} bytes",
            got=f"{need} bytes for {batch} samples of {n_in} x {n_out}",
            remedy="Use input_grad, which multiplies with it without building it, or pass fewer samples",
        )  # fmt: skip
    in_axis, out_axis = batch_axes
    expected = with_batch(input_shape, batch, in_axis)
    data = xp.empty((n_in, n_out, batch), dtype=dtype)
    for output in range(n_out):
        gy = xp.zeros((batch, n_out), dtype=dtype)
        gy[:, output] = 1
        gx = input_grad(xp.moveaxis(gy.reshape(batch, *output_shape), 0, out_axis))
        if gx.shape != expected:
            raise ShapeError(
                "input_grad returns another shape than the input's", expected=expected, got=gx.shape,
                remedy="Return the gradient with respect to the input, in its shape",
            )  # fmt: skip
        data[:, output] = xp.moveaxis(gx, in_axis, 0).reshape(batch, n_in).T
    return TransposedJacobian(
        SparsityPattern.dense(n_in, n_out), data.reshape(n_in * n_out, batch),
        input_shape=input_shape, output_shape=output_shape, batch_axes=batch_axes,
    )  # fmt: skip
