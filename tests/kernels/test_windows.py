"""Kernels over sliding windows on every backend, against plain loops over windows."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import normal, reals, seeds, sizes, tolerance


@st.composite
def geometries(draw, axes):
    """Return (inputs, kernel, stride, before, dilation, outputs) on each axis; every window meets the input."""
    found = []
    for _ in range(axes):
        kernel, stride, dilation, inputs = (draw(st.integers(1, n)) for n in (3, 3, 2, 6))
        before = draw(st.integers(0, (kernel - 1) * dilation))
        starts = [o * stride - before for o in range(7)]
        meets = [any(0 <= s + t * dilation < inputs for t in range(kernel)) for s in starts]
        outputs = meets.index(False) if False in meets else len(meets)
        if outputs == 0:
            before, outputs = 0, 1
        found.append((inputs, kernel, stride, before, dilation, draw(st.integers(1, outputs))))
    return [tuple(values) for values in zip(*found, strict=True)]


def taken(geometry):
    """Yield (tap, window, input) for every tap of every window that lies in the input."""
    inputs, kernel, stride, before, dilation, outputs = geometry
    for tap, window in product(product(*map(range, kernel)), product(*map(range, outputs))):
        at = tuple(o * s + t * d - b for o, s, t, d, b in zip(window, stride, tap, dilation, before, strict=True))
        if all(0 <= i < n for i, n in zip(at, inputs, strict=True)):
            yield tap, window, at


def table(axis):
    """Return start, first tap and end of the taps of every window on an axis."""
    inputs, kernel, stride, before, dilation, outputs = axis
    found = []
    for start in np.arange(outputs) * stride - before:
        taps = [tap for tap in range(kernel) if 0 <= start + tap * dilation < inputs]
        found.append((start, taps[0], taps[-1] + 1))
    return np.array(found)


@given(
    geometry=geometries(3), batch=sizes(0, 5), groups=sizes(1, 2), inputs=sizes(1, 2), rows=sizes(1, 2), dtype=reals,
    seed=seeds,
)  # fmt: skip
def test_convolutions(backend, geometry, batch, groups, inputs, rows, dtype, seed):
    rng, (lengths, kernel, *options, outputs) = np.random.default_rng(seed), geometry
    x, y = normal(rng, (batch, groups * inputs, *lengths), dtype), normal(rng, (batch, groups * rows, *outputs), dtype)
    weight = normal(rng, (groups * rows, inputs, *kernel), dtype)
    expected = np.zeros(y.shape), np.zeros(x.shape), np.zeros(weight.shape)
    wide, grouped = x.reshape(batch, groups, inputs, *lengths), y.reshape(batch, groups, rows, *outputs)
    weights = weight.reshape(groups, rows, inputs, *kernel)
    forward, back, grad = (e.reshape(a.shape) for e, a in zip(expected, (grouped, wide, weights), strict=True))
    every = (slice(None), slice(None), slice(None))
    for tap, window, at in taken(geometry):
        w, at_x, at_y = weights[(*every, *tap)], wide[(*every, *at)], grouped[(*every, *window)]
        forward[(*every, *window)] += np.einsum("goc,bgc->bgo", w, at_x)
        back[(*every, *at)] += np.einsum("goc,bgo->bgc", w, at_y)
        grad[(*every, *tap)] += np.einsum("bgo,bgc->goc", at_y, at_x)
    for name, arrays, want in zip(
        ("convolve", "convolve_t", "correlate"), ((weight, x), (weight, y), (y, x)), expected, strict=True
    ):
        out = backend.empty(want.shape, dtype)
        getattr(backend.kernels, name)(*map(backend.array, arrays), *options, groups, out)
        np.testing.assert_allclose(backend.numpy(out), want, **tolerance(dtype))


@given(
    geometry=geometries(2), planes=sizes(0, 3), nans=st.booleans(), winners=st.sampled_from([np.uint8, np.int32]),
    dtype=reals, seed=seeds,
)  # fmt: skip
def test_max_pool_and_its_gradient(backend, geometry, planes, nans, winners, dtype, seed):
    rng, (inputs, kernel, *options, outputs) = np.random.default_rng(seed), geometry
    x = rng.integers(-2, 3, (planes, *inputs)).astype(dtype)  # with ties
    if nans:
        x[rng.random(x.shape) < 0.2] = np.nan
        x[rng.random(x.shape) < 0.2] = -np.inf
    gy = normal(rng, (planes, *outputs), dtype)
    y, place, gx = np.full(gy.shape, np.nan), np.full(gy.shape, -1), np.zeros(x.shape)
    where = {}
    for tap, window, at in taken(geometry):
        for p in range(planes):
            value, key = x[(p, *at)], (p, *window)
            if place[key] < 0 or value > y[key] or np.isnan(value):
                y[key], place[key], where[key] = value, tap[0] * kernel[1] + tap[1], (p, *at)
    for key, at in where.items():
        gx[at] += gy[key]
    tables = [backend.array(table(axis)) for axis in zip(*geometry, strict=True)]
    windows = *tables, kernel, options[2]
    got, winner = backend.empty(gy.shape, dtype), backend.zeros(gy.shape, winners)
    backend.kernels.max_pool(backend.array(x), *windows, got, winner)
    np.testing.assert_array_equal(backend.numpy(got), y)
    np.testing.assert_array_equal(backend.numpy(winner), place)
    out = backend.empty(x.shape, dtype)
    backend.kernels.max_pool_grad(backend.array(gy), winner, *windows, out)
    np.testing.assert_allclose(backend.numpy(out), gx, **tolerance(dtype))


def test_wrong_arguments_are_refused(backend):
    one, none, x = (1, 1, 1), (0, 0, 0), backend.array(np.ones((2, 4, 1, 4, 4)))
    weight, out = backend.array(np.ones((6, 2, 1, 2, 2))), backend.empty((2, 6, 1, 3, 3), np.float64)
    for options in (((1, 1), none, one), ((1, 0, 1), none, one), (one, (0, 0, -1), one), (one, none, (0, 1, 1))):
        with pytest.raises(OptionError, match="does not fit the windows"):
            backend.kernels.convolve(weight, x, *options, 2, out)
        with pytest.raises(OptionError, match="does not fit the windows"):
            backend.kernels.convolve_t(weight, out, *options, 2, x)
        with pytest.raises(OptionError, match="does not fit the windows"):
            backend.kernels.correlate(out, x, *options, 2, weight)
    with pytest.raises(ShapeError, match="weight"):
        backend.kernels.convolve(weight, x, one, none, one, 1, out)
    with pytest.raises(OptionError, match="groups"):
        backend.kernels.convolve(weight, x, one, none, one, 4, out)
    plane, y = backend.array(np.ones((2, 4, 4))), backend.empty((2, 3, 3), np.float64)
    windows = backend.array(np.stack([np.arange(3), np.zeros(3, int), np.ones(3, int)], axis=1))
    with pytest.raises(DTypeError, match="cannot hold"):
        backend.kernels.max_pool(plane, windows, windows, (20, 20), (1, 1), y, backend.zeros((2, 3, 3), np.uint8))
    with pytest.raises(OptionError, match="does not fit the windows"):
        backend.kernels.max_pool(plane, windows, windows, (2, 2), (1, 0), y, backend.zeros((2, 3, 3), np.uint8))
