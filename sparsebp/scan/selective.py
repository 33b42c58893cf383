"""The selective scan of Mamba, and its gradients.

Every channel has N states, each a linear recurrence ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]``, and
``y[t] = Σ c[t] h[t] + d x[t]``. The states (T, B, E, N) are never in memory: the forward keeps one in 32 steps, and
the way back runs each such chunk again.

Reference: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, sections 2, 3.2 and
3.3.2; `selective_scan_ref` in its code, without the gate and the softplus around it.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.kernels.spec import CHUNK


class SelectiveScan(NamedTuple):
    """Result of `selective_scan`.

    Attributes
    ----------
    y
        The output (T, B, E).
    states
        The states before the steps 0, 32, 64, …, (⌈T / 32⌉, B, N, E): what `selective_scan_vjp` begins with.
    """

    y: Array
    states: Array


class SelectiveScanGrads(NamedTuple):
    """Gradients of `selective_scan`, each of the shape of its argument; that at d is None without d."""

    x: Array
    dt: Array
    a: Array
    b: Array
    c: Array
    d: Array | None


def selective_scan(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None = None) -> SelectiveScan:
    """Return y with ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]`` and ``y[t] = Σ_n c[t, n] h[t, n] + d x[t]``.

    Parameters
    ----------
    x
        The input (T, B, E), float32 or float64; all arrays have one dtype. h begins at zero.
    dt
        Step sizes (T, B, E), positive in Mamba: after its softplus.
    a
        Rates of the states (E, N), negative in Mamba.
    b, c
        What the states take in and give out (T, B, N), the same for all channels.
    d
        The skip connection's weights (E,); None for none.

    Returns
    -------
    SelectiveScan
        ``(y, states)``.

    Raises
    ------
    DeviceError, DTypeError, ShapeError
        An array is not one of NumPy or CuPy, or does not fit the others.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> ones = np.ones((3, 1, 1))
    >>> sb.selective_scan(ones, ones, np.zeros((1, 1)), ones, ones).y.ravel()  # a = 0: sums
    array([1., 2., 3.])
    """
    xp = _check(x, dt, a, b, c, d)
    steps, batch, channels = x.shape
    y = backend.empty(xp, x.shape, x.dtype)
    states = backend.empty(xp, (-(-steps // CHUNK), batch, a.shape[1], channels), x.dtype)
    kernels.get(xp).selective_scan(*_operands(x, dt, a, b, c, d), y, states)
    return SelectiveScan(y, states)


def selective_scan_vjp(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None, states: Array, grad_y: Array
) -> SelectiveScanGrads:
    """Return the gradients at the arguments of `selective_scan`, from the gradient at y.

    Parameters
    ----------
    x, dt, a, b, c, d
        As they were passed to `selective_scan`.
    states
        What it returned.
    grad_y
        The gradient at y (T, B, E).

    Returns
    -------
    SelectiveScanGrads
        ``(x, dt, a, b, c, d)``.

    Raises
    ------
    DeviceError, DTypeError, ShapeError
        As `selective_scan`.
    """
    xp = _check(x, dt, a, b, c, d, states=states, grad_y=grad_y)
    _, batch, channels = x.shape
    gx, gdt = (backend.empty(xp, x.shape, x.dtype) for _ in range(2))
    ga, gd = xp.empty((batch, a.shape[1], channels), x.dtype), xp.empty((batch, channels), x.dtype)
    gb, gc = (backend.empty(xp, b.shape, x.dtype) for _ in range(2))
    given = *_operands(x, dt, a, b, c, d), _contiguous(grad_y), _contiguous(states)
    kernels.get(xp).selective_scan_grad(*given, gx, gdt, ga, gb, gc, gd)
    return SelectiveScanGrads(
        gx, gdt, _contiguous(ga.sum(axis=0).T), gb, gc, None if d is None else gd.sum(axis=0)
    )  # fmt: skip


def _check(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None, **others: Array) -> ModuleType:
    """Check all arrays against x and a; return their namespace."""
    xp = backend.namespace(**backend.given(x=x, dt=dt, a=a, b=b, c=c, d=d, **others))
    dtype = backend.float_dtype(x.dtype)
    backend.check_array("x", x, shape=(None, None, None), contiguous=False)
    steps, batch, channels = x.shape
    backend.check_array("a", a, dtype=dtype, shape=(channels, None), contiguous=False)
    order = a.shape[1]
    shapes = {
        "dt": x.shape, "b": (steps, batch, order), "c": (steps, batch, order), "d": (channels,), "grad_y": x.shape,
        "states": (-(-steps // CHUNK), batch, order, channels),
    }  # fmt: skip
    for name, array in backend.given(dt=dt, b=b, c=c, d=d, **others).items():
        backend.check_array(name, array, dtype=dtype, shape=shapes[name], contiguous=False)
    return xp


def _operands(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None) -> tuple[Array, ...]:
    """Return the arguments as the kernels take them: C-contiguous, a with the states first."""
    skip = backend.namespace(x).zeros(x.shape[2], x.dtype) if d is None else d
    return tuple(_contiguous(array) for array in (x, dt, a.T, b, c, skip))


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else array.copy(order="C")
