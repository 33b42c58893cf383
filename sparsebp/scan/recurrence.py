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
from sparsebp.core.check import Array, check_flag
from sparsebp.core.errors import DTypeError, OptionError, ShapeError

_REALS = {
    np.dtype(np.float32): np.dtype(np.float32), np.dtype(np.float64): np.dtype(np.float64),
    np.dtype(np.complex64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.float64),
}  # fmt: skip
"""Each dtype, and the dtype of its real part."""


class RecurrenceGrads(NamedTuple):
    """Gradients of a linear recurrence, each of the shape and dtype of its argument; that at h0 is None without h0."""

    a: Array
    b: Array
    h0: Array | None


def linear_recurrence(
    a: Array, b: Array, h0: Array | None = None, *, reverse: bool = False, lengths: Any = None
) -> Array:
    """Return h with ``h[t] = a[t] * h[t-1] + b[t]``, element by element.

    Parameters
    ----------
    a
        Factors: the shape (T, B, H) of b, where any axis may be 1, and then all share its factors.
    b
        Terms (T, B, H), float32, float64, complex64 or complex128; all arrays have one dtype.
    h0
        The state before the first step (B, H); None for zeros.
    reverse
        Go from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.
    lengths
        Steps of each sample (B,), integers from 0 to T: a sequence or an array; one on a device is copied to the host.
        Beyond them h is zero, and `reverse` begins at a sample's last step. None: all have T.

    Returns
    -------
    Array
        h (T, B, H).

    Raises
    ------
    DeviceError, DTypeError, ShapeError
        An array is not one of NumPy or CuPy, or does not fit the others.
    OptionError
        A length is not from 0 to T.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> b = np.ones((4, 1, 1))
    >>> sb.linear_recurrence(np.full((1, 1, 1), 0.5), b).ravel()
    array([1.   , 1.5  , 1.75 , 1.875])
    """
    xp = _check(a, ("b", b), h0)
    reverse, steps_of = check_flag("reverse", reverse), _lengths(lengths, b.shape, xp)
    h = host_pool.empty(xp, b.shape, b.dtype)
    factors, terms, start = _reals(a), _reals(b), _reals(_start(h0, b, xp))
    pairs = b.dtype.kind == "c"
    kernels.get(xp).linear_recurrence(factors, terms, start, steps_of, pairs, reverse, _reals(h))
    return h


def linear_recurrence_vjp(
    a: Array, h: Array, grad_h: Array, h0: Array | None = None, *, reverse: bool = False, lengths: Any = None
) -> RecurrenceGrads:
    """Return the gradients at the arguments of `linear_recurrence`, from the gradient at its result.

    Parameters
    ----------
    a, h0, reverse, lengths
        As they were passed to `linear_recurrence`.
    h
        Its result (T, B, H).
    grad_h
        The gradient at h (T, B, H), at every step. Beyond a sample's length it is not read.

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
    xp = _check(a, ("h", h), h0, ("grad_h", grad_h))
    reverse, steps_of = check_flag("reverse", reverse), _lengths(lengths, h.shape, xp)
    grad_a = host_pool.empty(xp, (len(a), *h.shape[1:]), h.dtype)
    grad_b, grad_h0 = host_pool.empty(xp, h.shape, h.dtype), host_pool.empty(xp, h.shape[1:], h.dtype)
    given = (_reals(array) for array in (a, h, grad_h, _start(h0, h, xp)))
    written = (_reals(array) for array in (grad_a, grad_b, grad_h0))
    kernels.get(xp).linear_recurrence_grad(*given, steps_of, h.dtype.kind == "c", reverse, *written)
    shared = tuple(axis for axis in (1, 2) if a.shape[axis] != h.shape[axis])
    grad_a = grad_a.sum(axis=shared, keepdims=True) if shared else grad_a
    return RecurrenceGrads(grad_a, grad_b, None if h0 is None else grad_h0)


def _check(a: Array, full: tuple[str, Array], h0: Array | None, *others: tuple[str, Array]) -> ModuleType:
    """Check the arrays against the one in `full`, named, of shape (T, B, H); return their namespace."""
    name, array = full
    xp = backend.namespace(**backend.given(a=a, **dict([full, *others]), h0=h0))
    if array.dtype not in _REALS:
        expected = "float32, float64, complex64 or complex128"
        raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=array.dtype)
    backend.check_array(name, array, shape=(None, None, None), contiguous=False)
    steps, batch, hidden = array.shape
    for other, of in others:
        backend.check_array(other, of, dtype=array.dtype, shape=array.shape, contiguous=False)
    if h0 is not None:
        backend.check_array("h0", h0, dtype=array.dtype, shape=(batch, hidden), contiguous=False)
    backend.check_array("a", a, dtype=array.dtype, shape=(None, None, None), contiguous=False)
    if any(n not in (1, whole) for n, whole in zip(a.shape, array.shape, strict=True)):
        expected = f"({steps}, {batch}, {hidden}), or 1 for any of them"
        raise ShapeError("a has the wrong shape", expected=expected, got=a.shape)
    return xp


def _lengths(lengths: Any, shape: tuple[int, ...], xp: ModuleType) -> Array | None:
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


def _start(h0: Array | None, h: Array, xp: ModuleType) -> Array:
    return xp.zeros(h.shape[1:], h.dtype) if h0 is None else h0


def _reals(array: Array) -> Array:
    """Return the array C-contiguous, and complex numbers as pairs of reals in a last axis of twice the length."""
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return array.view(_REALS[array.dtype])
