"""Cascades of second-order sections, as `scipy.signal.sosfilt` runs them, and their gradients.

A complex pair of poles as two complex recurrences costs four times the products of the real 2 × 2 step of a section.

Reference: Oppenheim and Schafer, "Discrete-Time Signal Processing", section 6.3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array, check_integer
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError

_DTYPES = np.dtype(np.float32), np.dtype(np.float64)


class Filtered(NamedTuple):
    """A filtered signal, the last states of the sections, and the states that the way back needs."""

    y: Array
    zf: Array
    saved: Array


class FilterGrads(NamedTuple):
    """Gradients at the arguments of `sosfilt`."""

    sos: Array
    x: Array
    zi: Array


def sosfilt(sos: Array, x: Array, axis: int = -1, zi: Array | None = None) -> Filtered:
    """Filter along one axis by a cascade of second-order sections, as `scipy.signal.sosfilt` does.

    Parameters
    ----------
    sos
        Coefficients (S, 6), rows b0, b1, b2, a0, a1, a2 with a0 = 1, float64.
    x
        The signal, NumPy, float32 or float64, of any shape. It is read where it lies, whatever its strides, and summed
        in float64.
    axis
        The axis of the steps.
    zi
        States before the first step, float64: (S, …, 2, …), of x's shape with 2 in place of the steps. None for zeros.

    Returns
    -------
    Filtered
        ``(y, zf, saved)``: y of x's shape and dtype, zf as zi; `saved` is for `sosfilt_vjp`.

    Raises
    ------
    DeviceError, DTypeError, ShapeError
        An array is not NumPy's, or does not fit.
    OptionError
        `axis` is not one of x, or a0 is not 1.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> sb.sosfilt(np.array([[1.0, 0, 0, 1, -0.5, 0]]), np.ones(4)).y
    array([1.   , 1.5  , 1.75 , 1.875])
    """
    frame = _check(sos, x, axis, zi=zi)
    saved = np.empty(frame.shape_of_saved(len(sos)))
    saved[:, 0] = 0 if zi is None else frame.to_lanes(zi)
    y = host_pool.empty(np, x.shape, x.dtype)
    kernels.on_host().sections.run(frame.of(x), np.ascontiguousarray(sos), saved, frame.of(y))
    return Filtered(y, frame.of_lanes(saved[:, -1]).copy(), saved)


def sosfilt_vjp(
    sos: Array, x: Array, saved: Array, grad_y: Array, axis: int = -1, grad_zf: Array | None = None
) -> FilterGrads:
    """Return the gradients at the arguments of `sosfilt`, from those at its results.

    Parameters
    ----------
    sos, x, axis
        As they were passed to `sosfilt`.
    saved
        As it returned them.
    grad_y
        The gradient at y, of its shape and dtype.
    grad_zf
        The gradient at the last states, or None for zero.

    Returns
    -------
    FilterGrads
        ``(sos, x, zi)``. The gradient at a0, which is 1, is 0.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, OptionError
        As `sosfilt`.
    """
    frame, sections = _check(sos, x, axis, grad_zf=grad_zf), len(sos)
    of_saved = frame.shape_of_saved(sections)
    backend.check_array("grad_y", grad_y, dtype=x.dtype, shape=x.shape, contiguous=False)
    backend.check_array("saved", saved, dtype=np.float64, shape=of_saved)
    adjoint = np.zeros((frame.groups, sections, 2, frame.lanes))
    if grad_zf is not None:
        adjoint[...] = frame.to_lanes(grad_zf)
    grad_x, sums = host_pool.empty(np, x.shape, x.dtype), np.zeros((frame.groups, sections, 5, frame.lanes))
    of_sos, arrays = np.ascontiguousarray(sos), map(frame.of, (grad_y, x))
    kernels.on_host().sections.run_back(*arrays, of_sos, saved, adjoint, frame.of(grad_x), sums)
    grad_sos, each = np.zeros((sections, 6)), frame.of_chains(sums).sum(axis=(2, 3))
    grad_sos[:, :3], grad_sos[:, 4:] = each[:, :3], each[:, 3:]
    return FilterGrads(grad_sos, grad_x, frame.of_lanes(adjoint))


def shape_of_saved(sections: int, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of `Filtered.saved`, for x of a shape with its steps on an axis, counted from 0."""
    return _frame(shape, axis).shape_of_saved(sections)


def steps_first(array: Array, axis: int) -> Array:
    """Return a view (T, B, W), W the longer side of the axis of the steps; a copy where the strides allow no view."""
    lead, trail = math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
    array = array.reshape(lead, array.shape[axis], trail)
    return array.transpose((1, 2, 0) if lead > trail else (1, 0, 2))


class _Frame(NamedTuple):
    """Where the steps of x are, between `lead` and `trail` numbers in all axes before and behind them.

    Kernels run groups of `lanes` chains over blocks of `block` steps.
    """

    shape: tuple[int, ...]
    axis: int
    lead: int
    trail: int
    lanes: int
    block: int

    @property
    def blocks(self) -> int:
        """Blocks of steps."""
        return -(-self.shape[self.axis] // self.block)

    @property
    def inner(self) -> int:
        """Chains next to each other: groups are of these."""
        return max(self.lead, self.trail)

    @property
    def groups(self) -> int:
        """Groups of chains."""
        return min(self.lead, self.trail) * -(-self.inner // self.lanes)

    def shape_of_saved(self, sections: int) -> tuple[int, ...]:
        """Return the shape of the states before all blocks, and of the last ones."""
        return self.groups, self.blocks + 1, sections, 2, self.lanes

    def of(self, array: Array) -> Array:
        """Return x, or an array of its shape, as `steps_first` does."""
        return steps_first(array, self.axis)

    def to_lanes(self, state: Array) -> Array:
        """Return a state (S, …, 2, …) as (groups, S, 2, lanes), zero where there is no chain."""
        state = state.reshape(len(state), self.lead, 2, self.trail)
        state = state.transpose((0, 2, 3, 1) if self.lead > self.trail else (0, 2, 1, 3))
        wide = np.zeros((*state.shape[:3], -(-self.inner // self.lanes) * self.lanes))
        wide[..., : self.inner] = state
        return wide.reshape(*wide.shape[:2], -1, self.lanes).transpose(2, 0, 1, 3)

    def of_chains(self, found: Array) -> Array:
        """Return (groups, S, n, lanes) as (S, n, B, W)."""
        sections, numbers = found.shape[1:3]
        wide = (sections, numbers, min(self.lead, self.trail), -(-self.inner // self.lanes) * self.lanes)
        return found.transpose(1, 2, 0, 3).reshape(wide)[..., : self.inner]

    def of_lanes(self, found: Array) -> Array:
        """Return (groups, S, 2, lanes) as a state (S, …, 2, …)."""
        state = self.of_chains(found).transpose((0, 3, 1, 2) if self.lead > self.trail else (0, 2, 1, 3))
        shape = (found.shape[1], *self.shape[: self.axis], 2, *self.shape[self.axis + 1 :])
        return np.ascontiguousarray(state).reshape(shape)


def _check(sos: Array, x: Array, axis: int, **states: Array | None) -> _Frame:
    """Check the arrays; return how x is laid out."""
    if backend.namespace(**backend.given(sos=sos, x=x, **states)) is not np:
        raise DeviceError("Sections run on the CPU", expected="NumPy arrays", got="CuPy arrays")
    if x.dtype not in _DTYPES:
        raise DTypeError("x has the wrong dtype", expected="float32 or float64", got=x.dtype)
    if x.ndim == 0:
        raise ShapeError("x has the wrong shape", expected="at least one axis", got=())
    axis = check_integer("axis", axis, -x.ndim, x.ndim - 1) % x.ndim
    backend.check_array("sos", sos, dtype=np.float64, shape=(None, 6), contiguous=False)
    if not (sos[:, 3] == 1).all():
        raise OptionError("a0 is not 1", expected="sections divided by their a0", got=sos[:, 3])
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    for name, state in states.items():
        if state is not None:
            shape = (len(sos), *before, 2, *behind)
            backend.check_array(name, state, dtype=np.float64, shape=shape, contiguous=False)
    return _frame(x.shape, axis)


def _frame(shape: tuple[int, ...], axis: int) -> _Frame:
    sections = kernels.on_host().sections
    return _Frame(shape, axis, math.prod(shape[:axis]), math.prod(shape[axis + 1 :]), sections.LANES, sections.BLOCK)
