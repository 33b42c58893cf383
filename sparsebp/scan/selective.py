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

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array
from sparsebp.core.errors import ShapeError
from sparsebp.kernels.checks import kept_states


class SelectiveScan(NamedTuple):
    """Result of `selective_scan`.

    Attributes
    ----------
    y
        The output (T, B, E).
    states
        The states before the steps 0, 32, 64, …, and after the last one, (⌈T / 32⌉ + 1, B, N, E): what
        `selective_scan_vjp` begins with.
    """

    y: Array
    states: Array

    @property
    def h_n(self) -> Array:
        """The state after the last step (B, E, N), the h0 of a sequence that goes on: a view of `states`."""
        return self.states[-1].swapaxes(1, 2)


class SelectiveScanGrads(NamedTuple):
    """Gradients of `selective_scan`, each of the shape of its argument; that at d is None without d.

    The one at h0 is there without an h0 too: the gradient at the zeros that it stands for.
    """

    x: Array
    dt: Array
    a: Array
    b: Array
    c: Array
    d: Array | None
    h0: Array


def selective_scan(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None = None, h0: Array | None = None, *,
    reset: Array | None = None,
) -> SelectiveScan:  # fmt: skip
    """Return y with ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]`` and ``y[t] = Σ_n c[t, n] h[t, n] + d x[t]``.

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
        NaN and infinity, and ``h[t] = dt[t] b[t] x[t]``. So episodes and packed sequences do not reach into each other.

    Returns
    -------
    SelectiveScan
        ``(y, states)``; its ``h_n`` is the state after the last step.

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
    xp, flags = _check(x, dt, a, b, c, d, reset, h0=h0)
    steps, batch, channels = x.shape
    y = host_pool.empty(xp, x.shape, x.dtype)
    states = host_pool.empty(xp, (kept_states(steps), batch, a.shape[1], channels), x.dtype)
    kernels.get(xp).selective_scan(*_operands(x, dt, a, b, c, d), _states_first(xp, h0, states), flags, y, states)
    return SelectiveScan(y, states)


def selective_scan_vjp(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None, states: Array, grad_y: Array,
    grad_h_n: Array | None = None, *, reset: Array | None = None,
) -> SelectiveScanGrads:  # fmt: skip
    """Return the gradients at the arguments of `selective_scan`, from those at y and at the last state.

    Parameters
    ----------
    x, dt, a, b, c, d, reset
        As they were passed to `selective_scan`.
    states
        What it returned.
    grad_y
        The gradient at y (T, B, E).
    grad_h_n
        The gradient at the state after the last step (B, E, N); None for zeros.

    Returns
    -------
    SelectiveScanGrads
        ``(x, dt, a, b, c, d, h0)``.

    Raises
    ------
    DeviceError, DTypeError, ShapeError
        As `selective_scan`.
    """
    xp, flags = _check(x, dt, a, b, c, d, reset, states=states, grad_y=grad_y, grad_h_n=grad_h_n)
    _, batch, channels = x.shape
    gx, gdt = (host_pool.empty(xp, x.shape, x.dtype) for _ in range(2))
    ga, gd = xp.empty((batch, a.shape[1], channels), x.dtype), xp.empty((batch, channels), x.dtype)
    gb, gc = (host_pool.empty(xp, b.shape, x.dtype) for _ in range(2))
    gh, gh0 = _states_first(xp, grad_h_n, states), xp.empty(states.shape[1:], x.dtype)
    given = *_operands(x, dt, a, b, c, d), _contiguous(grad_y), gh, _contiguous(states)
    kernels.get(xp).selective_scan_grad(*given, flags, gx, gdt, ga, gb, gc, gd, gh0)
    return SelectiveScanGrads(
        gx, gdt, _contiguous(ga.sum(axis=0).T), gb, gc, None if d is None else gd.sum(axis=0),
        _contiguous(gh0.swapaxes(1, 2)),
    )  # fmt: skip


def _check(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None, reset: Array | None, **others: Array | None
) -> tuple[ModuleType, Array | None]:
    """Check all arrays against x and a; return their namespace, and the resets as the kernels take them."""
    xp = backend.namespace(**backend.given(x=x, dt=dt, a=a, b=b, c=c, d=d, reset=reset, **others))
    dtype, shapes = backend.float_dtype(x.dtype), shapes_of(x.shape, a.shape)
    for name, array in backend.given(x=x, a=a, dt=dt, b=b, c=c, d=d, **others).items():
        backend.check_array(name, array, dtype=dtype, shape=shapes[name], contiguous=False)
    if reset is None:
        return xp, None
    backend.check_array("reset", reset, dtype=np.bool_, contiguous=False)
    check_reset_shape(reset.shape, x.shape)
    return xp, _contiguous(xp.broadcast_to(reset[:, None] if reset.ndim == 1 else reset, x.shape[:2]))


def check_reset_shape(reset: tuple[int, ...], x: tuple[int, ...]) -> None:
    """Check that resets are of each sample of x (T, B, E), or of all samples."""
    if reset not in (x[:1], x[:2]):
        raise ShapeError("reset has the wrong shape", expected=f"{x[:2]}, or {x[:1]} for all samples", got=reset)


def shapes_of(x: tuple[int, ...], a: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all arguments, from those of x and a; ShapeError where these do not fit."""
    if len(x) != 3:
        raise ShapeError("x has the wrong shape", expected="(T, B, E)", got=tuple(x))
    steps, batch, channels = x
    if len(a) != 2 or a[0] != channels:
        raise ShapeError("a has the wrong shape", expected=f"({channels}, N)", got=tuple(a))
    order = a[1]
    of_states, state = (kept_states(steps), batch, order, channels), (batch, channels, order)
    return {"x": x, "dt": x, "a": a, "b": (steps, batch, order), "c": (steps, batch, order), "d": (channels,),
            "h0": state, "states": of_states, "grad_y": x, "grad_h_n": state}  # fmt: skip


def _operands(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None) -> tuple[Array, ...]:
    """Return the arguments as the kernels take them: C-contiguous, a with the states first."""
    skip = backend.namespace(x).zeros(x.shape[2], x.dtype) if d is None else d
    return tuple(_contiguous(array) for array in (x, dt, a.T, b, c, skip))


def _states_first(xp: ModuleType, state: Array | None, states: Array) -> Array:
    """Return a state (B, E, N), or zeros, as the kernels take it: (B, N, E)."""
    return xp.zeros(states.shape[1:], states.dtype) if state is None else _contiguous(state.swapaxes(1, 2))


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else array.copy(order="C")
