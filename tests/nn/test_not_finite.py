"""Numbers that are not finite, against torch.nn: no NaN where PyTorch has a number, and the same numbers elsewhere."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from strategies import reals, seeds

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


def spoil(draw, rng, huge, *arrays):
    """Put one to three special numbers into the arrays, or `huge` into one of them, if not None.

    A product that overflows is infinite to PyTorch, but not inside a fused multiply-add: the largest number and an
    infinity, or two such numbers, make NaN in one order of operations and not in another.
    """
    if huge is not None and draw(st.integers(0, 3)) == 0:
        array = draw(st.sampled_from(arrays))
        array.flat[rng.integers(array.size)] = huge
        return
    for _ in range(draw(st.integers(1, 3))):
        array = draw(st.sampled_from(arrays))
        array.flat[rng.integers(array.size)] = draw(st.sampled_from([np.inf, -np.inf, np.nan, -0.0]))


def compare(name, ours, theirs, dtype, *, nan_as_in_torch=True):
    """Compare the places of NaN and of infinities, and all other numbers."""
    theirs = theirs.detach().numpy()
    assert ours.dtype == dtype and ours.shape == theirs.shape
    nan = np.isnan(ours)
    spurious = nan & np.isfinite(theirs)
    assert not spurious.any(), f"{name}: {spurious.sum()} NaN where PyTorch has {theirs[spurious][:3]}"
    if nan_as_in_torch:
        np.testing.assert_array_equal(nan, np.isnan(theirs), err_msg=name)
    there = ~nan & ~np.isnan(theirs)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(ours[there], theirs[there], rtol=2e3 * eps, atol=1e3 * eps, err_msg=name)


def backward(layer, twin, x, gy):
    """Return (name, ours, theirs) of the output and of all gradients."""
    tx = torch.from_numpy(x.copy()).requires_grad_()
    twin.zero_grad()
    with torch.backends.mkldnn.flags(enabled=False):  # whose float32 convolutions have NaN of their own
        ty = twin(tx)
        ty.backward(torch.from_numpy(gy))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        y, saved = layer.forward(x.copy())
        gx = layer.input_grad(gy, saved)
        grads = layer.weight_grad(gy, saved) if layer.parameters() else {}
    theirs = dict(twin.named_parameters())
    return [("y", y, ty), ("gx", gx, tx.grad), *((name, g, theirs[name].grad) for name, g in grads.items())]


@st.composite
def convolutions(draw):
    """A layer, its twin, and the length of its input's axes: every kernel of convolutions is among them."""
    axes, transposed, groups = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.sampled_from([1, 1, 2, 4]))
    kernel = [draw(st.sampled_from([1, 2, 3, 3, 5]))] * axes
    if draw(st.booleans()):
        kernel[-1] = draw(st.integers(1, 3))
    depthwise, tiles = draw(st.booleans()), axes == 2 and draw(st.booleans())
    counts = st.sampled_from([1, 2, 3, 8, 13])
    inputs, outputs = groups * draw(counts), groups * draw(counts)
    stride, dilation, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    if tiles:  # as Winograd's algorithm takes them
        inputs, outputs, groups, kernel, stride, dilation = 32, 33, 1, [3, 3], 1, 1
    elif depthwise:
        groups, outputs = inputs, inputs * draw(st.sampled_from([1, 2]))
    sizes = [draw(st.integers(1, 14 if axes < 3 else 6)) for _ in range(axes)]
    if tiles:
        sizes = [12, 14]
    name = f"Conv{'Transpose' if transposed else ''}{axes}d"
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return name, (inputs, outputs, tuple(kernel)), options, sizes


@given(geometry=convolutions(), batch=st.sampled_from([1, 2, 5, 9]), dtype=reals, seed=seeds, draw=st.data())
def test_convolutions(geometry, batch, dtype, seed, draw):
    name, arguments, options, sizes = geometry
    rng = np.random.default_rng(seed)
    layer = getattr(nn, name)(*arguments, **options, dtype=dtype, rng=rng)
    twin = getattr(torch.nn, name)(*arguments, **options, dtype=getattr(torch, dtype.name))
    try:
        outputs = layer.output_size(tuple(sizes))
    except ValueError:  # the input is smaller than a window
        return
    x, gy = (rng.standard_normal((batch, n, *s)).astype(dtype)
             for n, s in ((arguments[0], sizes), (arguments[1], outputs)))  # fmt: skip
    in_tiles = sizes == [12, 14]  # whose sums round at the size of the largest number, also where it is taken off again
    huge = None if in_tiles else np.finfo(dtype).max
    spoil(draw.draw, rng, huge, x, gy, layer.params["weight"])
    twin.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in layer.state_dict().items()})
    for found in backward(layer, twin, x, gy):
        compare(*found, dtype)


def test_a_product_that_overflows_is_not_rounded_inside_a_fused_multiply_add():
    """-∞ plus a product of finite numbers is -∞, not the NaN of -∞ plus the product's overflow to ∞."""
    layer = nn.Conv1d(1, 1, 1, rng=0)
    x, gy = (np.array(a, np.float32).reshape(2, 1, 1) for a in ([np.inf, 2], [-1, np.finfo(np.float32).max]))
    with np.errstate(all="ignore"):
        assert layer.weight_grad(gy, layer.forward(x)[1])["weight"].item() == -np.inf


def test_an_infinite_pixel_stays_with_the_taps_that_meet_it():
    """Few output channels: the gradient is computed with zeros around gy, which no tap meets."""
    layer = nn.Conv2d(8, 1, 3, padding=1, rng=0)
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    x[1, 3, 0, 0] = np.inf
    y, saved = layer.forward(x)
    grad = layer.weight_grad(np.ones_like(y), saved)["weight"]
    met = np.zeros(grad.shape, bool)
    met[0, 3, :2, :2] = True
    np.testing.assert_array_equal(np.isinf(grad), met)
    assert not np.isnan(grad).any() and np.isinf(y).sum() == 4 and not np.isnan(y).any()


@pytest.mark.parametrize(("name", "groups", "length", "padding", "dilation", "place"), [
    ("Conv1d", 1, 1, 3, 3, 1), ("Conv1d", 2, 2, 3, 3, 2), ("Conv1d", 1, 5, ((0, 6),), 1, 7),
    ("ConvTranspose1d", 1, 1, 3, 3, 1), ("ConvTranspose1d", 2, 2, 3, 3, 2),
])  # fmt: skip
def test_an_infinite_gradient_of_a_window_in_the_padding_is_seen(name, groups, length, padding, dilation, place):
    """No tap of that window meets the input: ∞ times the padding's zeros is NaN at every tap, as in PyTorch."""
    channels = (groups, 8) if "Transpose" in name else (8, groups)  # inside a group, few windows' and many inputs'
    layer = getattr(nn, name)(*channels, 2, padding=padding, dilation=dilation, groups=groups, rng=0)
    windows = np.ones((2, groups, *layer.windows.output_size((length,))), np.float32)
    windows[1, 0, place] = np.inf
    x, gy = np.ones((2, 8, length), np.float32), windows
    if "Transpose" in name:
        x, gy = gy, x
    with np.errstate(all="ignore"):
        grad = layer.weight_grad(gy, layer.forward(x)[1])["weight"]
    assert np.isnan(grad[0]).all() and np.isfinite(grad[1:]).all()


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_an_infinite_weight_stays_with_the_places_that_meet_it(stride, groups):
    """The gradient at the input sums what is there; of windows that are not, there are no zeros."""
    layer = nn.Conv2d(8, 8, 3, stride=stride, groups=groups, rng=0, dtype=np.float64)
    layer.params["weight"][2, 0, 1, 1] = np.inf
    y, saved = layer.forward(np.ones((1, 8, 9, 11)))
    gx = layer.input_grad(np.ones_like(y), saved)
    met = np.zeros(gx.shape, bool)
    channel = 2 if groups == 8 else 0
    met[0, channel, 1 : 1 + stride * y.shape[2] : stride, 1 : 1 + stride * y.shape[3] : stride] = True
    np.testing.assert_array_equal(np.isinf(gx), met)
    assert not np.isnan(gx).any()


LAYERS = [
    ("ReLU", (), {}), ("LeakyReLU", (), {}), ("LeakyReLU", (-0.5,), {}), ("ELU", (), {}), ("ELU", (0.5,), {}),
    ("SELU", (), {}), ("Tanh", (), {}), ("Sigmoid", (), {}), ("SiLU", (), {}), ("GELU", (), {}),
    ("GELU", ("tanh",), {}), ("Softplus", (), {}), ("Hardtanh", (), {}), ("ReLU6", (), {}), ("Mish", (), {}),
    ("Softmax", (1,), {}), ("LogSoftmax", (1,), {}), ("MaxPool2d", (3, 2, 1), {}), ("MaxPool2d", (2,), {"dilation": 2}),
    ("AvgPool2d", (3, 2, 1), {}), ("AvgPool2d", (2,), {"ceil_mode": True}), ("AdaptiveAvgPool2d", (2,), {}),
    ("AdaptiveMaxPool2d", ((4, 3),), {}), ("CELU", (), {}), ("Hardswish", (), {}),
    ("LogSigmoid", (), {}),
]  # fmt: skip
OF_VECTORS = ("ELU", "SELU", "CELU", "Hardtanh", "ReLU6", "Hardswish")
NORMS = [("BatchNorm2d", (4,), {}), ("InstanceNorm2d", (4,), {"affine": True}), ("GroupNorm", (2, 4), {}),
         ("LayerNorm", ((4, 6, 5),), {}),
         ("RMSNorm", ((4, 6, 5),), {}), ("PReLU", (4,), {}), ("Linear", (5, 3), {})]  # fmt: skip


@pytest.mark.parametrize("configuration", LAYERS + NORMS, ids=str)
@given(dtype=reals, seed=seeds, draw=st.data())
def test_other_layers(configuration, dtype, seed, draw):
    name, arguments, options = configuration
    weighted, rng = configuration in NORMS, np.random.default_rng(seed)
    layer = getattr(nn, name)(*arguments, **options, **({"dtype": dtype} if weighted else {}))
    twin = getattr(torch.nn, name)(*arguments, **options).to(getattr(torch, dtype.name))
    if weighted:
        layer.load_state_dict({key: value.numpy() for key, value in twin.state_dict().items()})
    x = rng.standard_normal((3, 4, 6, 5)).astype(dtype)
    gy = rng.standard_normal(layer.forward(x)[0].shape).astype(dtype)
    for _ in range(draw.draw(st.integers(1, 3))):  # a huge number overflows in one order of sums and not in another
        array = draw.draw(st.sampled_from([x, gy]))
        array.flat[rng.integers(array.size)] = draw.draw(st.sampled_from([np.inf, -np.inf, np.nan, -0.0]))
    if name in OF_VECTORS:  # torch's vectors and its loop for the rest differ at a NaN
        x[np.isnan(x)] = 0
    for found in backward(layer, twin, x, gy):
        compare(*found, dtype, nan_as_in_torch=False)


@pytest.mark.parametrize("name", ["ELU", "SELU", "ReLU", "LeakyReLU", "Tanh", "GELU", "SiLU", "Mish", "Hardtanh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_sign_of_a_zero_is_torchs(name, dtype):
    x = np.array([[-0.0, 0.0]] * 9, dtype)
    y = getattr(nn, name)().forward(x)[0]
    want = getattr(torch.nn, name)()(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(y, want)
    if name == "GELU":  # whose sign torch's AVX2 code for float32 loses, and no other of its codes
        want = x
    np.testing.assert_array_equal(np.signbit(y), np.signbit(want))
