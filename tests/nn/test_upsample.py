"""Upsample against torch.nn: outputs, gradients and Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import OptionError, ShapeError
from strategies import reals, seeds
from torch_twins import assert_gradients, assert_like_torch

MODES = {"nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "linear": (1,), "bilinear": (2,), "trilinear": (3,)}


@st.composite
def upsamplings(draw):
    """Options of a layer, and the lengths of the input's axes."""
    mode = draw(st.sampled_from(list(MODES)))
    dims = draw(st.sampled_from(MODES[mode]))
    lengths = tuple(draw(st.integers(1, 7 if dims < 3 else 4)) for _ in range(dims))
    options = {"mode": mode}
    if not mode.startswith("nearest"):
        options["align_corners"] = draw(st.sampled_from([None, False, True]))
    if draw(st.booleans()):
        sizes = st.integers(1, 9 if dims < 3 else 5)
        options["size"] = draw(sizes | st.tuples(*[sizes] * dims))
    else:
        # 1.3 may keep a length: torch then takes the nearest by another rule in its gradients and in some layouts
        scales = st.sampled_from([1.0, 2, 2.5, 3] if mode.startswith("nearest") else [1.0, 2, 1.3, 2.5, 3])
        options["scale_factor"] = draw(scales | st.tuples(*[scales] * dims))
        options["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    return options, lengths


def transposed_jacobian(twin, lengths, dtype):
    """Return what torch maps each element of a channel to."""
    n = int(np.prod(lengths))
    basis = torch.eye(n, dtype=getattr(torch, dtype.name)).reshape(n, 1, *lengths)
    return twin(basis).numpy().reshape(n, -1)


@given(case=upsamplings(), batch=st.integers(1, 3), channels=st.integers(1, 3), dtype=reals, seed=seeds)
@settings(max_examples=100)
def test_it_is_torchs(case, batch, channels, dtype, seed):
    options, lengths = case
    layer, twin, rng = nn.Upsample(**options), torch.nn.Upsample(**options), np.random.default_rng(seed)
    close = {"rtol": 1e-11, "atol": 1e-12} if dtype == np.float64 else {"rtol": 1e-4, "atol": 1e-5}
    x = rng.standard_normal((batch, channels, *lengths)).astype(dtype)
    y, saved = layer.forward(x)
    jacobian = layer.jacobian_t(saved)
    want = np.kron(np.eye(channels), transposed_jacobian(twin, lengths, dtype))
    np.testing.assert_allclose(jacobian.to_dense(), want, **close)
    assert jacobian.batch is None and jacobian.dtype == dtype
    gy = rng.standard_normal(y.shape).astype(dtype)
    np.testing.assert_allclose(layer.input_grad(gy, saved).reshape(batch, -1), gy.reshape(batch, -1) @ want.T, **close)
    np.testing.assert_allclose(y, twin(torch.from_numpy(x)).numpy(), **close)
    if not options["mode"].startswith("nearest"):
        assert_gradients(layer, twin, x, rng, close)
        if dtype == np.float64:
            assert_like_torch(layer, twin, x, rng, close)


@pytest.mark.parametrize(("lengths", "options"), [
    ((4,), {"scale_factor": 2}), ((4,), {"scale_factor": 2, "mode": "linear"}), ((4,), {"size": 4, "mode": "linear"}),
    ((4,), {"size": 7, "mode": "linear", "align_corners": True}), ((4,), {"scale_factor": 0.5, "mode": "linear"}),
    ((2, 3), {"size": (3, 5), "mode": "bilinear", "align_corners": True}),
    ((2, 3), {"size": (2, 6), "mode": "bilinear"}),
    ((2, 1, 2), {"scale_factor": 2, "mode": "trilinear"}), ((2, 1, 2), {"scale_factor": 2}),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nan_goes_where_torch_lets_it_go(lengths, options, dtype):
    """Also to outputs in which its weight is 0."""
    for at in np.ndindex(lengths):
        x = np.ones((1, 1, *lengths), dtype)
        x[0, 0, *at] = np.nan
        y = nn.Upsample(**options)(x)
        np.testing.assert_array_equal(np.isnan(y), torch.nn.Upsample(**options)(torch.from_numpy(x)).isnan().numpy())


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_small_length(mode, dtype):
    """Sizes and scales whose positions round to either side of an element."""
    for length in range(1, 20):
        scales = [0.3, 1 / 3, 0.7, 0.9, 1.0, 1.05, 1.1, 1.3, 1.999999, 2.7, np.pi]
        for options in [*({"size": n} for n in (*range(1, 40), 49, 98)),
                        *({"scale_factor": scale} for scale in scales if length * scale >= 1)]:  # fmt: skip
            x = np.arange(1.0, 2 * length + 1, dtype=dtype).reshape(1, 2, length)
            want = torch.nn.Upsample(mode=mode, **options)(torch.from_numpy(x)).numpy()
            np.testing.assert_allclose(nn.Upsample(mode=mode, **options)(x), want, rtol=1e-5, err_msg=str(options))


def test_entries_of_the_jacobian():
    def pattern(mode, *lengths):
        layer = nn.Upsample(scale_factor=2, mode=mode)
        return layer.jacobian_t(layer.forward(np.ones((1, 3, *lengths)))[1]).pattern

    assert pattern("nearest", 4, 5).nnz == 3 * 8 * 10
    assert pattern("linear", 4).nnz == 3 * (2 * 8 - 2)  # two outputs lie beyond the outermost elements' centres
    assert pattern("bilinear", 4, 5).nnz == 3 * (2 * 8 - 2) * (2 * 10 - 2)


@pytest.mark.parametrize(("error", "text", "options", "shape"), [
    (OptionError, "one of size", {}, ()), (OptionError, "one of size", {"size": 2, "scale_factor": 2}, ()),
    (OptionError, "size", {"size": 0}, ()), (OptionError, "size", {"size": (2, 1.5)}, ()),
    (OptionError, "scale_factor", {"scale_factor": -1.0}, ()),
    (OptionError, "mode of Upsample", {"size": 2, "mode": "area"}, ()),
    (OptionError, "align_corners", {"size": 2, "align_corners": False}, ()),
    (OptionError, "align_corners", {"size": 2, "mode": "linear", "align_corners": 1}, ()),
    (OptionError, "scale factor", {"size": 2, "recompute_scale_factor": True}, ()),
    (ShapeError, "number of axes", {"size": 2}, (3, 4)), (ShapeError, "number of axes", {"size": 2}, (1,) * 6),
    (ShapeError, "number of axes", {"size": 2, "mode": "bilinear"}, (2, 3, 4)),
    (ShapeError, "does not fit size", {"size": (2, 2)}, (2, 3, 4)),
    (ShapeError, "empty", {"scale_factor": 0.2}, (2, 3, 4)), (ShapeError, "empty", {"size": 2}, (2, 3, 0)),
    (ShapeError, "empty", {"size": 2}, (2, 0, 3)),
])  # fmt: skip
def test_refusals(error, text, options, shape):
    with pytest.raises(error, match=text):
        nn.Upsample(**options).forward(np.ones(shape))
