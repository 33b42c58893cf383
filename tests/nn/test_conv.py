"""Convolutions against torch: outputs, all gradients, transposed Jacobians, weights both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convolutions import configurations, torch_convolve
from sparsebp import nn, prune
from sparsebp.core.errors import MemoryLimitError, ShapeError
from sparsebp.patterns import SparsityPattern
from strategies import seeds
from torch_twins import assert_gradients, assert_like_torch, loaded

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TWINS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}


@given(c=configurations(), bias=st.booleans(), batch=st.integers(1, 3), strided=st.booleans(), seed=seeds)
def test_random_convolutions(c, bias, batch, strided, seed):
    rng = np.random.default_rng(seed)
    layer = LAYERS[len(c.size)](
        c.in_channels, c.out_channels, c.kernel, c.stride, c.padding, c.dilation, c.groups, bias,
        dtype=np.float64, rng=rng,
    )  # fmt: skip
    parameters = {name: torch.from_numpy(a).requires_grad_() for name, a in layer.state_dict().items()}
    x = rng.standard_normal((batch, c.in_channels, *c.size))
    if strided:  # channels last in memory
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    function = lambda sample: torch_convolve(c, sample, parameters["weight"], parameters.get("bias"))  # noqa: E731
    jacobian = assert_like_torch(layer, function, x, rng, CLOSE, parameters)
    assert jacobian.batch is None


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(kernel=st.integers(1, 4), dilation=st.integers(1, 3), padding=st.sampled_from(["same", "valid"]), seed=seeds)
def test_padding_by_name(kernel, dilation, padding, seed):
    rng = np.random.default_rng(seed)
    layer = nn.Conv1d(2, 3, kernel, padding=padding, dilation=dilation, dtype=np.float64, rng=rng)
    twin = loaded(torch.nn.Conv1d(2, 3, kernel, padding=padding, dilation=dilation), layer)
    assert_like_torch(layer, twin, rng.standard_normal((2, 2, 11)), rng, CLOSE)


PADS = {1: st.integers(0, 3), 2: st.integers(0, 3) | st.just("same") | st.tuples(st.integers(0, 3), st.integers(0, 3))}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(
    ndim=st.integers(1, 3), mode=st.sampled_from(["reflect", "replicate", "circular"]), data=st.data(), seed=seeds,
    dilation=st.integers(1, 2), groups=st.sampled_from([1, 2]), pruned=st.booleans(),
)  # fmt: skip
def test_padding_modes(ndim, mode, data, dilation, groups, pruned, seed):
    """Borders that repeat the input: an element that a window reads twice is one entry of the Jacobian, their sum."""
    rng = np.random.default_rng(seed)
    padding = data.draw(PADS[min(ndim, 2)] if ndim < 3 else st.sampled_from([1, "same", (2, 0, 1)]))
    size = tuple(data.draw(st.integers(1, 5)) for _ in range(ndim))
    stride = 1 if padding == "same" else data.draw(st.integers(1, 2))
    options = (2, 2 * groups, data.draw(st.integers(1, 3)), stride, padding, dilation, groups, True, mode)
    layer = LAYERS[ndim](*options, dtype=np.float64, rng=rng)
    assert layer.padding_mode == mode
    if pruned:
        prune(layer, amount=0.4)
    twin = loaded(TWINS[ndim](*options), layer)
    x = rng.standard_normal((2, 2, *size))
    try:
        twin(torch.from_numpy(x))
    except RuntimeError:  # too small for the kernel, or for its border
        with pytest.raises(ShapeError):
            layer.forward(x)
        return
    if pruned:  # the gradients of pruned weights are zero, in PyTorch they are not
        mask = torch.from_numpy(layer.buffers["weight_mask"])
        twin.weight.register_hook(lambda grad: grad * mask)
    jacobian = assert_like_torch(layer, twin, x, rng, CLOSE)
    SparsityPattern(jacobian.pattern.indptr, jacobian.pattern.indices, jacobian.shape)  # no entry is there twice
    assert jacobian.batch is None
    work = layer.input_grad_work(x.shape, layer.forward(x)[1])
    assert work.entries >= jacobian.pattern.nnz


@pytest.mark.parametrize(("mode", "smallest"), [("reflect", 3), ("circular", 2), ("replicate", 1)])
def test_borders_that_are_larger_than_what_they_repeat(mode, smallest):
    layer = nn.Conv1d(1, 1, 2, padding=2, padding_mode=mode, rng=0)
    assert layer(np.ones((1, 1, smallest), np.float32)).shape == (1, 1, smallest + 3)
    if smallest > 1:
        with pytest.raises(ShapeError, match=rf"{mode} padding is larger.*at least \({smallest},\)"):
            layer(np.ones((1, 1, smallest - 1), np.float32))


@pytest.mark.parametrize(
    ("channels", "rows", "groups", "kernel", "stride", "padding"),
    [
        (3, 6, 3, 3, 2, 1),
        (3, 3, 3, (3, 5), 1, (1, 2)),
        (2, 4, 2, 2, 3, 0),
        (5, 7, 1, 1, 1, 0),
        (3, 6, 1, (3, 5), (2, 1), 0),
    ],
)
def test_rows_of_more_than_a_vector(channels, rows, groups, kernel, stride, padding):
    """Whole vectors, and what is left of a row; every plane ends in memory that is another one's."""
    rng = np.random.default_rng(0)
    layer = nn.Conv2d(channels, rows, kernel, stride, padding, groups=groups, rng=0)
    twin = loaded(torch.nn.Conv2d(channels, rows, kernel, stride, padding, groups=groups), layer)
    x = rng.standard_normal((3, channels, 11, 37), np.float32)
    assert_gradients(layer, twin, x, rng, {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize(
    ("channels", "rows", "sizes", "kernel", "padding"),
    [
        (3, 16, (133,), 4, ((0, 2),)), (16, 8, (50,), 3, ((2, 0),)), (16, 8, (50,), 3, ((0, 2),)),
        (7, 8, (4, 4), (1, 2), ((0, 0), (0, 4))), (3, 12, (9, 9), 2, ((0, 1), (0, 1))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_padding_on_one_side(channels, rows, sizes, kernel, padding, dtype):
    """Channels that fill most of a vector have ways of their own where nothing is padded, on either side."""
    layer = nn.__dict__[f"Conv{len(sizes)}d"](channels, rows, kernel, padding=padding, dtype=dtype, rng=0)
    x = np.random.default_rng(0).standard_normal((40, channels, *sizes)).astype(dtype)
    y, saved = layer.forward(x)
    gy = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
    given, weight = (
        torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (x, layer.params["weight"])
    )
    ends = [size for pair in reversed(padding) for size in pair]
    convolve = getattr(torch.nn.functional, f"conv{len(sizes)}d")
    wanted = convolve(torch.nn.functional.pad(given, ends), weight, torch.tensor(layer.params["bias"]).double())
    wanted.backward(torch.tensor(gy).double())
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == np.float32 else {"rtol": 1e-10, "atol": 1e-10}
    np.testing.assert_allclose(y, wanted.detach(), **close)
    np.testing.assert_allclose(layer.input_grad(gy, saved), given.grad, **close)
    np.testing.assert_allclose(layer.weight_grad(gy, saved)["weight"], weight.grad, **close)


def test_an_output_beyond_all_memory():
    x = np.ones((1, 1, 2, 2), np.float32)
    for layer in (nn.ZeroPad2d(2**30), nn.Conv2d(1, 1, 1, padding=2**40), nn.Conv2d(1, 1, 1, 1, 2**30, 1, 1, True,
                                                                                      "replicate")):  # fmt: skip
        with pytest.raises(MemoryLimitError, match="does not fit in memory"):
            layer(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtypes(dtype):
    layer = nn.Conv2d(4, 6, (3, 2), groups=2, dtype=dtype, rng=0)
    y, saved = layer.forward(np.ones((2, 4, 5, 5), dtype))
    assert y.dtype == layer.input_grad(y, saved).dtype == layer.jacobian_t(saved).dtype == dtype
    assert all(grad.dtype == dtype for grad in layer.weight_grad(y, saved).values())
