"""Linear recurrences, element by element: ``h[t] = a[t] * h[t-1] + b[t]``, and their gradients.

The Jacobian of a step is the diagonal matrix of ``a[t]``, so the gradient obeys a linear recurrence too, from the last
step to the first: ``gb[t] = gh[t] + conj(a[t+1]) * gb[t+1]``. Each is one kernel, one pass over memory: as fast as the
arrays can be read and written, so a scan of logarithmic depth, which passes over them log T times, does not pay.

References: Blelloch, "Prefix sums and their applications", 1990, section 1.4; Martin and Cundy, "Parallelizing Linear
Recurrent Neural Nets Over Sequence Length", ICLR 2018.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs, host_pool
from sparsebp.core.check import Array, check_flag, check_integer
from sparsebp.core.errors import DTypeError, OptionError, ShapeError

_DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "complex64", "complex128"))


class RecurrenceGrads(NamedTuple):
    """Gradients of a linear recurrence, each of the shape and dtype of its argument; that at h0 is None without h0."""

    a: Array
    b: Array
    h0: Array | None


def linear_recurrence(
    a: Array, b: Array, h0: Array | None = None, *, dim: int = 0, reverse: bool = False, lengths: Any = None,
    reset: Array | None = None,
) -> Array:  # fmt: skip
    """Return h with ``h[t] = a[t] * h[t-1] + b[t]``, element by element.

    Parameters
    ----------
    a
        Factors: the shape of b, where any axis may be 1, and then all share its factors.
    b
        Terms, float32, float64, complex64 or complex128: (T,), (T, B) or (T, B, H), or with the steps along another
        axis `dim`. All arrays have one dtype. They are read where they lie, whatever their strides.
    h0
        The state before the first step, of b's shape without the axis of the steps; None for zeros.
    dim
        The axis of the steps: 0 for (T, B, H), 1 for (B, T, H), -1 for (B, H, T).
    reverse
        Go from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.
    lengths
        Steps of each sample (B,), integers from 0 to T: a sequence or an array; one on a device is copied to the host.
        Beyond them h is zero, and `reverse` begins at a sample's last step. None: all have T.
    reset
        Booleans of the shape of b, where any axis may be 1: where one is true, the state before that step is cleared,
        also of NaN and infinity, and ``h[t] = b[t]``. So episodes and packed sequences do not reach into each other.

    Returns
    -------
    Array
        h, of b's shape.

    Raises
    ------
    DeviceError, DTypeError, ShapeError
        An array is not one of NumPy or CuPy, or does not fit the others.
    OptionError
        `dim` is not an axis of b, or a length is not from 0 to T.

    Notes
    -----
    Up to eight states, ``B * H``, are summed in float64, also of float32. Of more, rounding errors of ε relative to a
    state are multiplied by a at each step: where \\|a| is below 1 they stay below ``ε / (1 - |a|)``, and where it is 1
    they grow with T.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> sb.linear_recurrence(np.full(1, 0.5), np.ones(4))
    array([1.   , 1.5  , 1.75 , 1.875])
    >>> sb.linear_recurrence(np.ones((1, 1)), np.ones((2, 3)), dim=-1, reset=np.array([[False, False, True]]))
    array([[1., 2., 1.],
           [1., 2., 1.]])
    """
    xp, axes = _check(a, ("b", b), h0, dim, reset)
    terms, factors, start, resets = axes.of(b), axes.of(a), axes.of_state(h0, b, xp), axes.of(reset)
    reverse, steps_of = check_flag("reverse", reverse), checked_lengths(lengths, terms.shape, xp)
    h = host_pool.empty(xp, b.shape, b.dtype)
    kernels.get(xp).linear_recurrence(factors, terms, start, steps_of, resets, reverse, axes.of(h))
    return h


def linear_recurrence_vjp(
    a: Array, h: Array, grad_h: Array, h0: Array | None = None, *, dim: int = 0, reverse: bool = False,
    lengths: Any = None, reset: Array | None = None,
) -> RecurrenceGrads:  # fmt: skip
    """Return the gradients at the arguments of `linear_recurrence`, from the gradient at its result.

    Parameters
    ----------
    a, h0, dim, reverse, lengths, reset
        As they were passed to `linear_recurrence`.
    h
        Its result.
    grad_h
        The gradient at h, of its shape, at every step. Beyond a sample's length it is not read.

    Returns
    -------
    RecurrenceGrads
        ``(a, b, h0)``. Where a was shared, its gradients are summed. Gradients at complex arrays follow PyTorch's
        convention: they point in the direction in which a real loss grows.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, OptionError
        As `linear_recurrence`.
    """
    xp, axes = _check(a, ("h", h), h0, dim, reset, ("grad_h", grad_h))
    states, factors, start, resets = axes.of(h), axes.of(a), axes.of_state(h0, h, xp), axes.of(reset)
    reverse, steps_of = check_flag("reverse", reverse), checked_lengths(lengths, states.shape, xp)
    of_a = list(h.shape)
    of_a[axes.dim] = a.shape[axes.dim]
    grad_a, grad_b = (host_pool.empty(xp, tuple(shape), h.dtype) for shape in (of_a, h.shape))
    grad_h0 = host_pool.empty(xp, (*h.shape[: axes.dim], *h.shape[axes.dim + 1 :]), h.dtype)
    given, written = (factors, states, axes.of(grad_h), start), map(axes.of, (grad_a, grad_b))
    at_h0 = axes.of_state(grad_h0, h, xp)
    kernels.get(xp).linear_recurrence_grad(*given, steps_of, resets, reverse, *written, at_h0)
    shared = tuple(axis for axis, n in enumerate(a.shape) if n != grad_a.shape[axis])
    grad_a = grad_a.sum(axis=shared, keepdims=True) if shared else grad_a
    return RecurrenceGrads(grad_a, grad_b, None if h0 is None else grad_h0)


class _Axes(NamedTuple):
    """The axis of the steps, and the number of axes."""

    dim: int
    ndim: int

    def of(self, array: Any) -> Any:
        """Return a view of an array as (T, B, H); None for None."""
        if array is None:
            return None
        array = _with_whole_strides(array)
        if self.dim:
            array = array.transpose(self.dim, *(axis for axis in range(self.ndim) if axis != self.dim))
        return array.reshape(*array.shape, *(1,) * (3 - self.ndim)) if self.ndim < 3 else array

    def of_state(self, h0: Array | None, h: Array, xp: ModuleType) -> Array:
        """Return a view of a state as (B, H); zeros of h's shape without steps for None."""
        shape = (*h.shape[: self.dim], *h.shape[self.dim + 1 :], 1, 1)[:2]
        return xp.zeros(shape, h.dtype) if h0 is None else _with_whole_strides(h0).reshape(shape)


def _with_whole_strides(array: Array) -> Array:
    """Return an array whose neighbours are whole numbers apart: a copy of a field of a packed record."""
    apart = all(step % array.itemsize == 0 for step in array.strides) and getattr(array.flags, "aligned", True)
    return array if apart else array.copy()


def _check(
    a: Array, full: tuple[str, Array], h0: Array | None, dim: int, reset: Array | None, *others: tuple[str, Array]
) -> tuple[ModuleType, _Axes]:  # fmt: skip
    """Check the arrays against the one in `full`, named; return their namespace, and where the steps are."""
    name, array = full
    xp = backend.namespace(**backend.given(a=a, **dict([full, *others]), h0=h0, reset=reset))
    if array.dtype not in _DTYPES:
        expected = "float32, float64, complex64 or complex128"
        raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=array.dtype)
    if not 1 <= array.ndim <= 3:
        raise ShapeError(f"{name} has the wrong shape", expected="one to three axes", got=array.shape)
    at = check_integer("dim", dim, -array.ndim, array.ndim - 1) % array.ndim
    for other, of in others:
        backend.check_array(other, of, dtype=array.dtype, shape=array.shape, contiguous=False)
    if h0 is not None:
        of_state = (*array.shape[:at], *array.shape[at + 1 :])
        backend.check_array("h0", h0, dtype=array.dtype, shape=of_state, contiguous=False)
    backend.check_array("a", a, dtype=array.dtype, contiguous=False)
    _check_shared("a", a, array)
    if reset is not None:
        backend.check_array("reset", reset, dtype=np.bool_, contiguous=False)
        _check_shared("reset", reset, array)
    return xp, _Axes(at, array.ndim)


def _check_shared(name: str, shared: Array, full: Array) -> None:
    if shared.ndim != full.ndim or any(n not in (1, whole) for n, whole in zip(shared.shape, full.shape, strict=True)):
        raise ShapeError(f"{name} has the wrong shape", expected=f"{full.shape}, or 1 for any axis", got=shared.shape)


def checked_lengths(lengths: Any, shape: tuple[int, ...], xp: ModuleType) -> Array | None:
    """Return the lengths as int64 where the arrays are, after checking them."""
    if lengths is None:
        return None
    steps, batch = shape[:2]
    backend.check_plain(lengths, "lengths")
    if hasattr(lengths, "dtype"):
        lengths = backend.to_host(lengths)  # synchronize!
    found = np.asarray(lengths) if batch or np.size(lengths) else np.zeros(np.shape(lengths), np.int64)
    if found.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=found.dtype)
    if found.shape != (batch,):
        raise ShapeError("lengths has the wrong shape", expected=(batch,), got=found.shape)
    if batch and not 0 <= found.min() <= found.max() <= steps:
        raise OptionError("A length is out of range", expected=f"integers from 0 to {steps}",
                          got=int(found.min() if found.min() < 0 else found.max()))  # fmt: skip
    return graphs.constant(xp, found.astype(np.int64))
