"""The transposed Jacobian of an operator: a sparsity pattern and its values, shared by the batch or per sample.

Products raise `ShapeError`, `DTypeError`, `LayoutError` or `DeviceError` for an array that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from operator import index
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs
from sparsebp.core.check import Array, check_integer
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError, within_memory
from sparsebp.core.shortcuts import batch_axes_of, forward_of, is_unbatched, may_be_unbatched, says, shortcuts_of
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.pattern import check_patterns, values_on
from sparsebp.products import plan_product


class TransposedJacobian:
    """The matrix (∂y/∂x)ᵀ of an operator y = f(x), of shape (n_in, n_out): it maps ∇y to ∇x (BPPSA Eq. 3).

    Parameters
    ----------
    pattern
        Where the entries are; shape (n_in, n_out).
    data
        Their values: (nnz,) if shared by the batch (a linear layer: they depend on the weights only), or (nnz, B) per
        sample. float32 or float64, C-contiguous, of NumPy or CuPy; kept, not copied. Or a sparse matrix, as
        `SparsityPattern.values_of` takes it.
    input_shape, output_shape
        Shapes of one sample of x and of y, as `vjp` and `jvp` take and return them. None: (n_in,) and (n_out,).
    batch_axes
        Batch axis of x and of y: 0 for (B, *shape), 1 for the time-major (T, B, …) of recurrent layers.

    Raises
    ------
    PatternError
        `pattern` is not a pattern.
    ShapeError, DTypeError, LayoutError, DeviceError
        `data` does not fit the pattern, or a shape does not.
    OptionError
        A batch axis is out of range.
    """

    __array_ufunc__ = None  # so that NumPy refuses array @ J instead of treating J as an object array

    def __init__(
        self, pattern: SparsityPattern, data: Array, *, input_shape: tuple[int, ...] | None = None,
        output_shape: tuple[int, ...] | None = None, batch_axes: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        check_patterns(pattern=pattern)
        data = values_on(pattern, data)
        backend.namespace(data=data)
        backend.float_dtype(data.dtype)
        if data.ndim not in (1, 2) or data.shape[0] != pattern.nnz:
            raise ShapeError("data does not fit the pattern",
                             expected=f"({pattern.nnz},) shared by the batch, or ({pattern.nnz}, B)",
                             got=data.shape)  # fmt: skip
        backend.check_array("data", data)
        self.pattern, self.data = pattern, data
        n_in, n_out = pattern.shape
        self.input_shape = _sample_shape("input_shape", input_shape, n_in)
        self.output_shape = _sample_shape("output_shape", output_shape, n_out)
        ends = [range(1 + len(shape)) for shape in (self.input_shape, self.output_shape)]
        fits = isinstance(batch_axes, tuple) and len(batch_axes) == 2
        if not fits or any(axis not in end for axis, end in zip(batch_axes, ends, strict=True)):
            raise OptionError("batch_axes does not fit the samples", got=repr(batch_axes),
                              expected=f"an axis of x, 0 to {ends[0][-1]}, and of y, 0 to {ends[1][-1]}")  # fmt: skip
        self.batch_axes = batch_axes

    @classmethod
    def _unchecked(
        cls, pattern: SparsityPattern, data: Array, input_shape: tuple[int, ...] | None = None,
        output_shape: tuple[int, ...] | None = None, batch_axes: tuple[int, int] = (0, 0),
    ) -> TransposedJacobian:  # fmt: skip
        """Make a Jacobian of arguments that are known to fit."""
        made = cls.__new__(cls)
        made.pattern, made.data, made.batch_axes = pattern, data, batch_axes
        made.input_shape = pattern.shape[:1] if input_shape is None else input_shape
        made.output_shape = pattern.shape[1:] if output_shape is None else output_shape
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """(n_in, n_out)."""
        return self.pattern.shape

    @property
    def batch(self) -> int | None:
        """Number of samples, None if they share the values."""
        return self.data.shape[1] if self.data.ndim == 2 else None

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return self.data.dtype

    @property
    def T(self) -> TransposedJacobian:
        """The transpose: the Jacobian ∂y/∂x itself. Values are copied into the order of the transposed pattern."""
        data = self.data
        if self.pattern.T is not self.pattern:
            data = data[graphs.constant(backend.namespace(data), self.pattern.transpose_permutation)]
        shapes = self.output_shape, self.input_shape
        return TransposedJacobian._unchecked(self.pattern.T, data, *shapes, self.batch_axes[::-1])

    def to_scipy(self, sample: int | None = None, *, copy: bool = False) -> Any:
        """Return one sample as a `scipy.sparse.csr_array`. Device values are copied to the host, which synchronises.

        Parameters
        ----------
        sample
            Number of the sample. May be None if there is only one, or if the batch shares the values.
        copy
            False: index arrays are the pattern's, read-only, which SciPy's in-place methods refuse, and host values are
            a view of `data`. True: the matrix owns its arrays, and they may be written to.

        Raises
        ------
        OptionError
            The sample does not exist, or there are several and `sample` is None.
        """
        return self.pattern.to_scipy(backend.to_host(self.values_of(sample)), copy=copy)  # synchronize!

    def to_dense(self, sample: int | None = None) -> Array:
        """Return one sample, as for `to_scipy`, as a dense (n_in, n_out) array of the same library."""
        xp = backend.namespace(self.data)
        with within_memory(f"A dense matrix of shape {self.shape} does not fit in memory", "Use to_scipy(sample)"):
            dense = xp.zeros(self.shape, dtype=self.dtype)
        rows = xp.asarray(self.pattern.row_of_entry)
        dense[rows, self.pattern.device_arrays(xp)[1]] = self.values_of(sample)
        return dense

    def values_of(self, sample: int | None = None) -> Array:
        """Return the (nnz,) values of one sample, as for `to_scipy`; a view."""
        batch = self.batch
        if batch is None:
            return self.data
        if sample is None and batch > 1:
            raise OptionError("Every sample has its own Jacobian", expected=f"sample=0 to sample={batch - 1}",
                              got=f"no sample=, of a batch of {batch}")  # fmt: skip
        if not 0 <= (sample or 0) < batch:
            raise OptionError("The sample does not exist", expected=f"0 <= sample < {batch}", got=sample)
        return self.data[:, sample or 0]

    def __matmul__(self, other: TransposedJacobian | Array) -> TransposedJacobian | Array:
        """Multiply by another transposed Jacobian, or by a gradient.

        Parameters
        ----------
        other
            A `TransposedJacobian` of shape (n_out, p), multiplied by a cached plan; or a gradient (n_out,)
            or (n_out, B) of the same dtype, C-contiguous.

        Returns
        -------
        TransposedJacobian or Array
            Shape (n_in, p); or (n_in,) if neither has a batch, else (n_in, B).
        """
        if isinstance(other, TransposedJacobian):
            plan = plan_product(self.pattern, other.pattern)
            axes = self.batch_axes[0], other.batch_axes[1]
            data = plan(self.data, other.data)
            return TransposedJacobian._unchecked(plan.pattern, data, self.input_shape, other.output_shape, axes)
        return self._apply(other)

    def _apply(self, g: Array) -> Array:
        xp = backend.namespace(self.data, g=g)
        n_in, n_out = self.shape
        if g.ndim not in (1, 2) or g.shape[0] != n_out:
            raise ShapeError("The gradient does not fit the Jacobian", expected=f"({n_out},) or ({n_out}, B)",
                             got=g.shape)  # fmt: skip
        if self.batch is not None and g.ndim == 2 and g.shape[1] != self.batch:
            raise ShapeError("The gradient has another batch size than the Jacobian",
                             expected=f"({n_out}, {self.batch})", got=g.shape)  # fmt: skip
        backend.check_array("g", g, dtype=self.dtype)
        columns = g if g.ndim == 2 else g[:, None]
        if self.batch is not None and columns.shape[1] != self.batch:  # one gradient for all samples
            columns = xp.ascontiguousarray(xp.broadcast_to(columns, (n_out, self.batch)))
        with within_memory(f"A gradient of {n_in} elements does not fit in memory", "Use a smaller batch"):
            out = xp.empty((n_in, columns.shape[1]), dtype=self.dtype)
        if self.pattern.kind == "identity":
            out[...] = columns
        else:
            values = self.data if self.data.ndim == 2 else self.data[:, None]
            kernels.get(xp).csr_matvec(*self.pattern.device_arrays(xp), values, columns, out)
        return out if self.batch is not None or g.ndim == 2 else out[:, 0]

    # ---- in the layer's shapes --------------------------------------------------------------------------------------

    def vjp(self, g: Array) -> Array:
        """Map the gradient at y to the gradient at x, as the layer's backward pass does.

        Parameters
        ----------
        g
            (B, *output_shape), with the batch on `batch_axes[1]`, or flat, (B, n_out); of the values' dtype, with any
            strides. B is the Jacobian's batch size; any if its values are shared.

        Returns
        -------
        Array
            (B, *input_shape), with the batch on `batch_axes[0]`; new and C-contiguous.
        """
        return self._mapped("g", g)

    def jvp(self, v: Array) -> Array:
        """Map a direction at x to the change of y: forward-mode differentiation, `vjp` with x and y swapped.

        Parameters
        ----------
        v
            (B, *input_shape), with the batch on `batch_axes[0]`, or flat, (B, n_in).

        Returns
        -------
        Array
            (B, *output_shape), with the batch on `batch_axes[1]`; new and C-contiguous.
        """
        return self.T._mapped("v", v)

    def _mapped(self, name: str, array: Array) -> Array:
        """Multiply this matrix by every sample, from and to the layer's layout."""
        xp = backend.namespace(self.data, **{name: array})
        shape, axis = self.output_shape, self.batch_axes[1]
        if array.ndim == len(shape) + 1:
            rows = xp.moveaxis(array, axis, 0)
            fits = rows.shape[1:] == shape
        else:
            rows = array
            fits = array.shape[1:] == (prod(shape),)
        if not fits or self.batch not in (None, rows.shape[0]):
            batch = "B" if self.batch is None else self.batch
            layouts = [with_batch(shape, batch, axis)] + [(batch, prod(shape))] * (len(shape) != 1)
            raise ShapeError(f"{name} does not fit the Jacobian",
                             expected=" or ".join("(" + ", ".join(map(str, layout)) + ")" for layout in layouts),
                             got=array.shape)  # fmt: skip
        backend.check_array(name, array, dtype=self.dtype, contiguous=False)
        columns = xp.ascontiguousarray(rows.reshape(len(rows), prod(shape)).T)
        mapped = (self @ columns).T.reshape(len(rows), *self.input_shape)
        return xp.ascontiguousarray(xp.moveaxis(mapped, 0, self.batch_axes[0]))

    def __repr__(self) -> str:
        batch = "shared" if self.batch is None else f"batch={self.batch}"
        return f"TransposedJacobian({self.pattern!r}, {self.dtype}, {batch})"


def with_batch(shape: tuple[Any, ...], batch: Any, axis: int) -> tuple[Any, ...]:
    """Return the shape of a batch of samples of `shape`, the batch at `axis`."""
    return (*shape[:axis], batch, *shape[axis:])


def _sample_shape(name: str, shape: tuple[int, ...] | None, size: int) -> tuple[int, ...]:
    """Return `shape` as integers, checked to have `size` elements; None: flat."""
    if shape is None:
        return (size,)
    try:
        lengths = tuple(map(index, shape))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0 or prod(lengths) != size:
        raise ShapeError(f"{name} does not fit the pattern", expected=f"lengths whose product is {size}", got=shape)
    return lengths


# The transposed Jacobian of a layer or model at an input: its own method, or a dense one from its input gradient.

DEFAULT_MEMORY_LIMIT = 2 << 30
"""Most bytes of a materialised Jacobian if no limit is given."""


def jacobian_t(layer: Any, x: Array) -> TransposedJacobian:
    """Run `layer` forward on `x` and return its transposed Jacobian there.

    Parameters
    ----------
    layer
        A layer or model of `sparsebp.nn`, or any object with `forward` and one of `jacobian_t`, `input_grad` and
        `gradients`. Without a `jacobian_t` that matches its other methods, the Jacobian is dense and takes one
        backward pass per output.
    x
        Input, batch first as in torch.nn (recurrent layers: as their `batch_first` says).

    Returns
    -------
    TransposedJacobian
        Shape (n_in, n_out) for one flattened sample; its `vjp` and `jvp` take and return the layer's own shapes.

    Raises
    ------
    OptionError
        `layer` is not such an object, or its samples may depend on each other.
    ShapeError, DTypeError, DeviceError
        `x` has no batch axis, or does not fit the layer.
    MemoryLimitError
        A dense Jacobian would take more than 2 GiB, or there is no memory for one.
    """
    ways = ("jacobian_t", "input_grad", "gradients")
    if not _has(layer, "forward") or not any(_has(layer, way) for way in ways):
        raise OptionError("This object has no transposed Jacobian", got=type(layer).__qualname__,
                          expected="a layer or model with forward and one of " + ", ".join(ways))  # fmt: skip
    backend.namespace(x=x)
    with within_memory(
        f"The transposed Jacobian of {type(layer).__qualname__} does not fit in memory",
        "Use input_grad, which multiplies with it without building it, or pass fewer or smaller samples",
    ):
        return _jacobian_t(layer, x)


def _jacobian_t(layer: Any, x: Array) -> TransposedJacobian:
    if x.ndim == 0:
        raise _no_batch_axis(x.shape)
    y, saved = forward_of(layer, x)
    return jacobian_of(layer, saved, x.shape, y.shape, y)


def jacobian_of(
    layer: Any, saved: Any, shape: tuple[int, ...], out_shape: tuple[int, ...], like: Array, coupled: bool = False
) -> TransposedJacobian:
    """Return the transposed Jacobian of the forward that saved `saved`."""
    # shape, out_shape: of the input and the output. like: an array of their dtype, on their device. coupled: whether
    # layers inside may have coupled samples in the mode of that forward.
    own = "jacobian_t" in shortcuts_of(layer)
    axes = getattr(layer, "batch_axes", (0, 0)) if own else batch_axes_of(layer)  # a chain's layers may disagree
    coupled = coupled or (not own and _couples(layer, saved))
    # A layer of layers that says nothing itself may have an unbatched sample, or couple samples, by what these say.
    unbatched_inside = not own and may_be_unbatched(layer, shape)
    may_couple = coupled and bool(getattr(layer, "children", None)) and not says(layer, "couples_samples")
    in_axis, out_axis = axes or (0, 0)
    batch, *input_shape = _moved(shape, in_axis)
    out_batch, *output_shape = _moved(out_shape, out_axis)
    if is_unbatched(layer, saved, shape) or out_batch != batch or (len(shape) == 1 and not own):
        raise _no_batch_axis(shape)
    samples: dict[str, Any] = {
        "input_shape": tuple(input_shape), "output_shape": tuple(output_shape), "batch_axes": (in_axis, out_axis),
    }  # fmt: skip
    if not own:
        back = _input_grad(layer, saved)
        if unbatched_inside or may_couple or (axes is None and not coupled):
            coupled = not _stand_apart(back, batch, out_shape, (in_axis, out_axis), like)
            if coupled and unbatched_inside:
                raise _no_batch_axis(shape)
        if coupled:
            where = "" if axes else "; or say batch_axes in the class, if the batch is not on axis 0"
            raise OptionError("The samples of this layer depend on each other, so no sample has its own Jacobian",
                              expected="a layer that maps each sample separately", got=type(layer).__qualname__,
                              remedy=f"Use its input gradient{where}")  # fmt: skip
        return dense_jacobian_t(back, batch=batch, like=like, **samples)
    try:
        jacobian = layer.jacobian_t(saved)
    except ShapeError as error:
        raise _no_batch_axis(shape) if len(shape) == 1 else error from error
    sizes = (prod(input_shape), prod(output_shape))
    if jacobian.shape == sizes and jacobian.batch in (None, batch):
        return TransposedJacobian(jacobian.pattern, jacobian.data, **samples)
    raise _no_batch_axis(shape) if len(shape) == 1 else ShapeError(
        "The layer's Jacobian does not fit x", expected=f"shape {sizes}, {batch} samples or shared values",
        got=repr(jacobian),
    )  # fmt: skip


def _couples(layer: Any, saved: Any) -> bool:
    if _has(layer, "couples_samples") and "couples_samples" not in shortcuts_of(layer):
        raise OptionError(f"{type(layer).__qualname__} overrides the backward pass, but not couples_samples",
                          expected="couples_samples(saved) defined or restated in the class",
                          got="an inherited couples_samples")  # fmt: skip
    return _has(layer, "couples_samples") and bool(layer.couples_samples(saved))


def _input_grad(layer: Any, saved: Any) -> Callable[[Array], Array]:
    """Return the layer's input gradient as a function of gy alone."""
    if "gradients" in shortcuts_of(layer):
        return lambda gy: layer.gradients(gy, saved).input
    return lambda gy: layer.input_grad(gy, saved)


def _stand_apart(
    input_grad: Callable[[Array], Array], batch: int, out_shape: tuple[int, ...], axes: tuple[int, int], like: Array
) -> bool:
    """Whether a gradient at the output of some samples reaches the input of those alone, tried with all pairs."""
    # The samples whose number has a bit, then the others: two samples differ in one bit at least. Random gradients do
    # not cancel.
    xp, rng = backend.namespace(like), np.random.default_rng(0)
    gy = xp.moveaxis(xp.asarray(rng.standard_normal(out_shape).astype(like.dtype)), axes[1], 0)
    numbers = np.arange(batch)
    for bit in range((batch - 1).bit_length()):
        for wanted in (0, 1):
            at = xp.asarray((numbers >> bit) & 1 == wanted)
            given = xp.where(at.reshape(-1, *[1] * (gy.ndim - 1)), gy, gy.dtype.type(0))
            gx = xp.moveaxis(input_grad(xp.ascontiguousarray(xp.moveaxis(given, 0, axes[1]))), axes[0], 0)
            if bool(gx[~at].any()):  # synchronize!
                return False
    return True


def _no_batch_axis(shape: tuple[int, ...]) -> ShapeError:
    return ShapeError("x has no batch axis that the layer keeps", expected="a batch of samples, (B, …)", got=shape,
                      remedy="Pass x[None] for a single sample, x[:, None] for samples of one number each")  # fmt: skip


def _has(layer: Any, method: str) -> bool:
    return callable(getattr(layer, method, None))


def _moved(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the lengths of the axes, the batch's first."""
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])


def dense_jacobian_t(
    input_grad: Callable[[Array], Array], input_shape: tuple[int, ...], output_shape: tuple[int, ...], batch: int,
    like: Array, *, batch_axes: tuple[int, int] = (0, 0), memory_limit: int | None = None,
) -> TransposedJacobian:  # fmt: skip
    """Return the dense transposed Jacobian of an operator that only has an input gradient.

    Parameters
    ----------
    input_grad
        Maps the gradient at the output to the gradient at the input, each sample separately (no batch statistics).
    input_shape, output_shape
        Shapes of one sample of the input and of the output.
    batch
        Number of samples B.
    like
        An array of the gradients' dtype (float32 or float64) and library.
    batch_axes
        Batch axis of the gradients at the input and at the output: 0 for (B, *shape), 1 for time-major ones.
    memory_limit
        Most bytes of the result; None: 2 GiB.

    Returns
    -------
    TransposedJacobian
        Every entry, per sample, with the shapes of a sample.

    Raises
    ------
    MemoryLimitError
        The result would exceed `memory_limit`; raised before anything is allocated.
    ShapeError
        `input_grad` returns another shape.
    """
    xp, dtype = backend.namespace(like=like), backend.float_dtype(like.dtype)
    n_in, n_out = prod(input_shape), prod(output_shape)
    need = n_in * n_out * (batch * dtype.itemsize + 4) + 4 * n_in
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    if need > limit:
        raise MemoryLimitError("The dense Jacobian would need too much memory", expected=f"at most {limit} bytes",
                               got=f"{need} bytes for {batch} samples of {n_in} x {n_out}", remedy="Use input_grad, "
                               "which multiplies with it without building it, or pass fewer samples")  # fmt: skip

    def gradient(output: int) -> Array:
        gy = xp.zeros((batch, n_out), dtype=dtype)
        gy[:, output] = 1
        return gy

    shapes = with_batch(input_shape, batch, batch_axes[0]), (batch, *output_shape)
    data = _side_by_side(input_grad, gradient, (n_in, n_out), like, *shapes, batch_axes)
    return TransposedJacobian(
        SparsityPattern.dense(n_in, n_out), data,
        input_shape=input_shape, output_shape=output_shape, batch_axes=batch_axes,
    )  # fmt: skip


def dense_product(
    input_grad: Callable[[Array], Array], product: TransposedJacobian, shape: tuple[int, ...],
    out_shape: tuple[int, ...],
) -> TransposedJacobian:  # fmt: skip
    """Return an operator's transposed Jacobian times a full matrix, whose columns are gradients at the output.

    `shape` and `out_shape` are those of the operator's input and output, batch first.
    """
    n_in, (n_out, columns), batch = prod(shape[1:]), product.shape, shape[0]
    given, xp = product.data.reshape(n_out, columns, -1), backend.namespace(product.data)

    def gradient(column: int) -> Array:
        return xp.ascontiguousarray(xp.broadcast_to(given[:, column], (n_out, batch)).T)

    data = _side_by_side(input_grad, gradient, (n_in, columns), product.data, shape, out_shape)
    return TransposedJacobian(SparsityPattern.dense(n_in, columns), data)


def _side_by_side(
    input_grad: Callable[[Array], Array], gradient: Callable[[int], Array], sizes: tuple[int, int], like: Array,
    shape: tuple[int, ...], out_shape: tuple[int, ...], batch_axes: tuple[int, int] = (0, 0),
) -> Array:  # fmt: skip
    """Return the input gradients for gradients (batch, outputs) at the output, as the values of a dense Jacobian.

    `shape` is the input's, `out_shape` the output's, batch first; `sizes` the inputs of a sample and the gradients.
    """
    xp, (in_axis, out_axis), batch = backend.namespace(like), batch_axes, out_shape[0]
    data = xp.empty((*sizes, batch), dtype=like.dtype)
    for number in range(sizes[1]):
        gx = input_grad(xp.moveaxis(gradient(number).reshape(out_shape), 0, out_axis))
        if gx.shape != shape:
            raise ShapeError("input_grad returns another shape than the input's", expected=shape, got=gx.shape)
        data[:, number] = xp.moveaxis(gx, in_axis, 0).reshape(batch, sizes[0]).T
    return data.reshape(prod(sizes), batch)
