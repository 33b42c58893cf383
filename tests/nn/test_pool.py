"""Pooling layers against torch.nn: outputs, gradients and Jacobians."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparsebp import jacobian_t, nn
from sparsebp.core.errors import ShapeError
from strategies import seeds
from torch_twins import assert_gradients, assert_like_torch

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


@st.composite
def pooling(draw, dims, dilated):
    """Sizes of an input and arguments of a layer, one value for each axis."""
    size = [draw(st.integers(1, 8 if dims < 3 else 5)) for _ in range(dims)]
    kernel = [draw(st.integers(1, 4)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 3)) if dilated else 1 for _ in range(dims)]
    options = {
        "kernel_size": tuple(kernel),
        "stride": draw(st.none() | st.tuples(*[st.integers(1, 4)] * dims)),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in kernel),
        "ceil_mode": draw(st.booleans()),
    }
    if dilated:
        options["dilation"] = tuple(dilation)
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *size), options


def values(rng, shape, kind):
    """Values in general position, or with ties, or with NaN and infinities."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "ties":
        return rng.integers(-1, 2, shape).astype(float)
    return rng.choice([np.nan, -np.inf, np.inf, 0.0, 1.0, 2.0], shape, p=[0.2, 0.3, 0.1, 0.1, 0.2, 0.1])


def run(layer, x):
    try:
        return layer.forward(x)
    except ShapeError:
        assume(False)


def check(layer, twin, x, rng):
    """Compare all with torch, unbatched too, and the Jacobian's product with I."""
    y, saved = run(layer, x)
    assert_gradients(layer, twin, x[0], rng, CLOSE)
    jacobian = assert_like_torch(layer, twin, x, rng, CLOSE)
    gy = rng.standard_normal(y.shape)
    gx = layer.input_grad(gy, saved)
    assert gx.flags.c_contiguous
    flat = np.ascontiguousarray(gy.reshape(len(gy), -1).T)
    np.testing.assert_allclose((jacobian @ flat).T.reshape(x.shape), gx, **CLOSE)


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data(), kind=st.sampled_from(["normal", "ties", "special"]), seed=seeds)
def test_max_pool(dims, data, kind, seed):
    rng = np.random.default_rng(seed)
    shape, options = data.draw(pooling(dims, dilated=True))
    layer, twin = (getattr(space, f"MaxPool{dims}d")(**options) for space in (nn, torch.nn))
    x = values(rng, shape, kind)
    check(layer, twin, x, rng)
    check_indices(layer, twin, x)


def check_indices(layer, twin, x):
    """Compare where the maxima are."""
    layer.return_indices = twin.return_indices = True
    for sample in (x, x[0]):
        for found, want in zip(layer(sample), twin(torch.from_numpy(sample)), strict=True):
            np.testing.assert_array_equal(found, want.numpy())


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data(), include=st.booleans(), divisor=st.none() | st.integers(1, 5), seed=seeds)
def test_avg_pool(dims, data, include, divisor, seed):
    rng = np.random.default_rng(seed)
    shape, options = data.draw(pooling(dims, dilated=False))
    options["count_include_pad"] = include
    if dims > 1:
        options["divisor_override"] = divisor
    if dims == 3:  # torch refuses what it takes on two axes
        assume(all(length >= kernel for length, kernel in zip(shape[2:], options["kernel_size"], strict=True)))
    layer, twin = (getattr(space, f"AvgPool{dims}d")(**options) for space in (nn, torch.nn))
    check(layer, twin, rng.standard_normal(shape), rng)
    assert layer.jacobian_t(layer.forward(np.zeros(shape))[1]).batch is None


@pytest.mark.parametrize("name", ["AdaptiveAvgPool", "AdaptiveMaxPool"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data(), kind=st.sampled_from(["normal", "ties", "special"]), seed=seeds)
def test_adaptive_pool(name, dims, data, kind, seed):
    rng = np.random.default_rng(seed)
    most = 7 if dims < 3 else 4
    shape = tuple(data.draw(st.integers(1, most)) for _ in range(2 + dims))
    want = tuple(data.draw(st.integers(1, most)) for _ in range(dims))
    if dims > 1 and data.draw(st.booleans()):
        want = (None, *want[1:])
    layer, twin = (getattr(space, f"{name}{dims}d")(want) for space in (nn, torch.nn))
    x = rng.standard_normal(shape) if name == "AdaptiveAvgPool" else values(rng, shape, kind)
    check(layer, twin, x, rng)
    if name == "AdaptiveMaxPool":
        check_indices(layer, twin, x)


@pytest.mark.parametrize("kind", ["max", "avg", "avg_without_padding"])
def test_every_small_window(kind):
    """All lengths, kernels, strides, paddings and dilations up to a few, rounded down and up: random ones miss some."""
    met = 0
    cases = itertools.product(range(1, 9), range(1, 5), (None, 1, 2, 3, 4, 5), (0, 1, 2), (1, 2, 3), (False, True))
    for size, kernel, stride, padding, dilation, ceil in cases:
        if padding > kernel // 2 or (kind != "max" and dilation > 1):
            continue
        options = {"stride": stride, "padding": padding, "ceil_mode": ceil}
        options |= {"dilation": dilation} if kind == "max" else {"count_include_pad": kind == "avg"}
        layer, twin = (getattr(space, f"{kind[:3].title()}Pool1d")(kernel, **options) for space in (nn, torch.nn))
        x = np.random.default_rng(met).permutation(2.0 * size + np.arange(2 * size)).reshape(1, 2, size) - 3 * size
        tx = torch.from_numpy(x).requires_grad_()
        try:
            want = twin(tx)
        except RuntimeError:  # the window is longer than the input
            with pytest.raises(ShapeError):
                layer.forward(x)
            continue
        if (want == -np.inf).any():  # a window of padding only
            with pytest.raises(ShapeError):
                layer.forward(x)
            continue
        y, saved = layer.forward(x)
        np.testing.assert_allclose(y, want.detach().numpy(), **CLOSE, err_msg=f"{size, kernel, options}")
        gy = np.arange(1.0, y.size + 1).reshape(y.shape)
        want.backward(torch.from_numpy(gy))
        for gx in (layer.input_grad(gy, saved), jacobian_t(layer, x).vjp(gy)):
            np.testing.assert_allclose(gx, tx.grad.numpy(), **CLOSE)
        met += 1
    assert met > 300


def test_the_first_maximum_and_the_last_nan_win():
    x = np.array([[[3.0, 3.0, 3.0, np.nan, 5.0, np.nan, -np.inf, -np.inf, -np.inf]]])
    y, saved = nn.MaxPool1d(3).forward(x)
    np.testing.assert_array_equal(y, [[[3.0, np.nan, -np.inf]]])
    np.testing.assert_array_equal(saved.choice, [[[0, 2, 0]]])
    tx = torch.from_numpy(x)
    _, index = torch.nn.functional.max_pool1d(tx, 3, return_indices=True)
    np.testing.assert_array_equal(saved.choice + np.array([0, 3, 6]), index.numpy())


@pytest.mark.parametrize(("layer", "size", "places"), [
    (nn.MaxPool2d(2), (4, 4), 4), (nn.AdaptiveMaxPool2d(2), (5, 4), 4), (nn.MaxPool3d(2), (4, 4, 4), 8),
])  # fmt: skip
def test_a_gradient_that_is_infinite_stays_where_it_belongs(layer, size, places):
    y, saved = layer.forward(np.arange(float(np.prod(size))).reshape(1, 1, *size))
    gx = layer.input_grad(np.full(y.shape, np.inf), saved)
    assert np.isinf(gx).sum() == places and not np.isnan(gx).any()


def test_a_kernel_of_more_places_than_a_byte_counts():
    x = np.random.default_rng(0).standard_normal((1, 1, 20, 20))
    y, saved = nn.MaxPool2d(20).forward(x)
    assert y.item() == x.max() and saved.choice.item() == x.argmax()
    assert nn.MaxPool2d(20).jacobian_t(saved).to_dense().sum() == 1


@pytest.mark.parametrize("name", ["AvgPool1d", "MaxPool1d", "AdaptiveAvgPool1d", "AdaptiveMaxPool1d"])
@pytest.mark.parametrize(("length", "options"), [(9001, 3), (9001, 100), (9001, 5000), (103, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_lines(name, length, options, dtype):
    """Many windows, which are taken in ranges, and long ones, which are not."""
    x = torch.randn(19, 1, length, dtype=dtype, generator=torch.Generator().manual_seed(0), requires_grad=True)
    if name.endswith("MaxPool1d"):
        with torch.no_grad():
            x[::2] = x[::2].round()  # ties
            x[3, 0, [7, 50, 90]], x[5] = torch.nan, -torch.inf
    y, saved = (layer := getattr(nn, name)(options)).forward(x.detach().numpy())
    want = getattr(torch.nn, name)(options)(x)
    gy = torch.randn(want.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    want.backward(gy)
    close = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(y, want.detach().numpy(), **close)
    np.testing.assert_allclose(layer.input_grad(gy.numpy(), saved), x.grad.numpy(), **close)


@pytest.mark.parametrize("name", ["MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"])
def test_dtype_and_layout(name):
    layer = getattr(nn, name)(2)
    x = np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype(np.float32)
    y, saved = layer.forward(x)
    assert y.dtype == np.float32 == layer.input_grad(y, saved).dtype == layer.jacobian_t(saved).dtype
    strided = np.asfortranarray(x)
    np.testing.assert_array_equal(layer.forward(strided)[0], y)
    np.testing.assert_array_equal(layer.input_grad(np.asfortranarray(y), saved), layer.input_grad(y, saved))
