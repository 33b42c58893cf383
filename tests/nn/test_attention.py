"""Self-attention and the Transformer's encoder layer against torch.nn: outputs, gradients, masks, padding, errors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_twins
from sparsebp import jacobian_t, nn
from strategies import reals, seeds, sizes
from torch_twins import assert_gradients, loaded

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LOOSE = {"rtol": 2e-4, "atol": 2e-5}


class Attends(torch.nn.Module):
    """Torch's attention of a sequence to itself, a layer of one input."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, padding=None):
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def padding_of(lengths, steps):
    return None if lengths is None else torch.from_numpy(np.arange(steps) >= np.array(lengths)[:, None])


def check(layer, run, twin, x, rng, lengths=None):
    close = CLOSE if x.dtype == np.float64 else LOOSE
    assert_gradients(layer, run, x, rng, close, dict(twin.named_parameters()), lengths=lengths)


@st.composite
def sequences(draw):
    """Heads, their width, batch_first, steps, batch, and lengths of padded sequences or none."""
    steps, batch = draw(sizes(1, 7)), draw(sizes(1, 5))
    lengths = draw(st.none() | st.lists(st.integers(1, steps), min_size=batch, max_size=batch))
    return draw(sizes(1, 3)), draw(sizes(1, 5)), draw(st.booleans()), steps, batch, lengths


@given(given=sequences(), bias=st.booleans(), dtype=reals, seed=seeds)
def test_attention(given, bias, dtype, seed):
    heads, width, batch_first, steps, batch, lengths = given
    rng, options = np.random.default_rng(seed), {"bias": bias, "batch_first": batch_first}
    layer = nn.MultiheadAttention(heads * width, heads, dtype=dtype, rng=rng, **options)
    if bias:
        layer.params["in_proj_bias"][...] = rng.standard_normal(3 * heads * width)  # zeros at first
    twin = loaded(torch.nn.MultiheadAttention(heads * width, heads, **options), layer)
    x = rng.standard_normal((batch, steps, heads * width) if batch_first else (steps, batch, heads * width))
    padding = padding_of(lengths, steps)
    check(layer, lambda tx: Attends(twin)(tx, padding), twin, x.astype(dtype), rng, lengths)


@given(
    given=sequences(), between=sizes(1, 9), activation=st.sampled_from(["relu", "gelu"]), norm_first=st.booleans(),
    bias=st.booleans(), dtype=reals, seed=seeds,
)  # fmt: skip
def test_encoder_layer(given, between, activation, norm_first, bias, dtype, seed):
    heads, width, batch_first, steps, batch, lengths = given
    rng = np.random.default_rng(seed)
    options = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias, "layer_norm_eps": 1e-3}
    arguments = (heads * width, heads, between, 0.0, activation)
    layer = nn.TransformerEncoderLayer(*arguments, dtype=dtype, rng=rng, **options)
    twin = loaded(torch.nn.TransformerEncoderLayer(*arguments, **options), layer)
    x = rng.standard_normal((batch, steps, heads * width) if batch_first else (steps, batch, heads * width))
    padding = padding_of(lengths, steps)
    check(layer, lambda tx: twin(tx, src_key_padding_mask=padding), twin, x.astype(dtype), rng, lengths)


def test_options_are_torchs():
    layer = nn.TransformerEncoderLayer(60, 5)
    assert layer.children["linear1"].out_features == 2048
    assert {child.p for child in layer.children.values() if isinstance(child, nn.Dropout)} == {0.1}
    assert layer.children["self_attn"].dropout == 0.1 and layer.batch_axes == (1, 1)


def test_the_seed_decides_the_weights_and_the_masks():
    x = np.random.default_rng(0).standard_normal((4, 3, 6)).astype(np.float32)
    first, same, other = (nn.TransformerEncoderLayer(6, 2, 8, 0.5, rng=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first(x), same(x))
    assert not np.array_equal(first(x), first(x))  # a new mask
    # None of them shared: what a layer drops does not depend on when others run.
    generators = list(first.generators().values())
    assert len(generators) == len({id(generator) for generator in generators}) == 4
    rng = np.random.default_rng(7)
    pair = [nn.TransformerEncoderLayer(6, 2, 8, 0.5, rng=rng) for _ in range(2)]
    alone = pair[1](x)
    rng = np.random.default_rng(7)
    pair = [nn.TransformerEncoderLayer(6, 2, 8, 0.5, rng=rng) for _ in range(2)]
    pair[0](x)
    np.testing.assert_array_equal(pair[1](x), alone)
    np.testing.assert_array_equal(first.eval()(x), same.eval()(x))
    assert not np.array_equal(first(x), other.eval()(x))


def with_masks(layer, saved, tx, named):
    """The encoder layer in torch, with the dropout masks that a forward of ours drew."""
    children, masks, t = layer.children, saved.parts, torch.nn.functional
    attention, (batch, steps, width) = children["self_attn"], tx.shape

    def dropped(name, at):
        return at * torch.from_numpy(masks[name][1])

    def looked(x):
        q, k, v = t.linear(x, named["self_attn.in_proj_weight"], named["self_attn.in_proj_bias"]).chunk(3, dim=-1)
        q, k, v = (a.reshape(batch, steps, attention.num_heads, -1).transpose(1, 2) for a in (q, k, v))
        p = torch.softmax(q @ k.transpose(2, 3) / np.sqrt(attention.head_dim), -1)
        p = p * torch.from_numpy(masks["self_attn"].mask).reshape(p.shape)
        merged = (p @ v).transpose(1, 2).reshape(batch, steps, width)
        return t.linear(merged, named["self_attn.out_proj.weight"], named["self_attn.out_proj.bias"])

    def norm(name, x):
        return t.layer_norm(x, (width,), named[f"{name}.weight"], named[f"{name}.bias"])

    def feedforward(x):
        inner = dropped("dropout", t.relu(t.linear(x, named["linear1.weight"], named["linear1.bias"])))
        return dropped("dropout2", t.linear(inner, named["linear2.weight"], named["linear2.bias"]))

    if layer.norm_first:
        y = tx + dropped("dropout1", looked(norm("norm1", tx)))
        return y + feedforward(norm("norm2", y))
    y = norm("norm1", tx + dropped("dropout1", looked(tx)))
    return norm("norm2", y + feedforward(y))


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout(norm_first):
    rng = np.random.default_rng(3)
    layer = nn.TransformerEncoderLayer(6, 2, 9, 0.4, batch_first=True, norm_first=norm_first, dtype=np.float64, rng=0)
    x = rng.standard_normal((3, 5, 6))
    y, saved = layer.forward(x)
    for name in ("self_attn", "dropout", "dropout1", "dropout2"):
        mask = saved.parts[name].mask if name == "self_attn" else saved.parts[name][1]
        assert set(np.unique(mask)) == {0, 1 / 0.6}
    named = {name: torch.from_numpy(a).requires_grad_() for name, a in layer.parameters().items()}
    tx = torch.from_numpy(x).requires_grad_()
    want = with_masks(layer, saved, tx, named)
    gy = rng.standard_normal(y.shape)
    want.backward(torch.from_numpy(gy))
    g = layer.gradients(gy, saved)
    np.testing.assert_allclose(y, want.detach().numpy(), **CLOSE)
    np.testing.assert_allclose(g.input, tx.grad.numpy(), **CLOSE)
    for name, grad in g.weights.items():
        np.testing.assert_allclose(grad, named[name].grad.numpy(), err_msg=name, **CLOSE)
    assert layer.children["self_attn"].capture_obstacle() is not None
    assert layer.eval().children["self_attn"].capture_obstacle() is None
    assert nn.MultiheadAttention(4, 2, 1.0)(np.ones((2, 1, 4), np.float32)).tolist() == [[[0] * 4]] * 2  # all dropped


def test_forwards_in_flight_do_not_meet():
    """Micro-batches: several forwards, then their ways back in any order, W long after I."""
    rng = np.random.default_rng(0)
    layer = nn.TransformerEncoderLayer(6, 3, 8, 0.3, batch_first=True, norm_first=True, dtype=np.float64, rng=1)
    again = nn.TransformerEncoderLayer(6, 3, 8, 0.3, batch_first=True, norm_first=True, dtype=np.float64, rng=1)
    xs, gys = rng.standard_normal((2, 3, 2, 4, 6))
    expected = []
    for x, gy in zip(xs, gys, strict=True):
        y, saved = again.forward(x)
        expected.append((y, again.input_grad(gy, saved), again.weight_grad(gy, saved)))
    forwards = [layer.forward(x.copy()) for x in xs]
    ways = [layer.gradients(gy, saved) for gy, (_, saved) in zip(gys, forwards, strict=True)]
    inputs = [ways[i].input_grad() for i in (2, 0, 1)]
    for place, i in enumerate((2, 0, 1)):
        np.testing.assert_array_equal(forwards[i][0], expected[i][0])
        np.testing.assert_array_equal(inputs[place], expected[i][1])
    for i in (1, 2, 0):
        for name, grad in ways[i].weight_grad().items():
            np.testing.assert_array_equal(grad, expected[i][2][name], err_msg=name)


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_jacobian_is_dense_and_torchs(batch_first):
    rng = np.random.default_rng(0)
    layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=batch_first, dtype=np.float64, rng=0)
    twin = loaded(torch.nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=batch_first), layer)
    x = rng.standard_normal((2, 3, 4) if batch_first else (3, 2, 4))
    jacobian = jacobian_t(layer, x)
    assert jacobian.pattern.kind == "dense" and jacobian.shape == (12, 12)
    axis = 0 if batch_first else 1
    for b in range(2):
        want = torch_twins.jacobian_t(lambda s: twin(s.unsqueeze(axis)).squeeze(axis), x.take(b, axis=axis))
        np.testing.assert_allclose(jacobian.to_dense(b), want, **CLOSE)


@pytest.mark.parametrize("algorithm", ["linear", "blelloch", "hybrid", "auto"])
def test_scans_over_a_chain_give_the_same_gradients(algorithm):
    layers = [nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, dtype=np.float64, rng=i) for i in (1, 2)]
    ends = (nn.LayerNorm(4, dtype=np.float64), nn.MeanOverSteps(True), nn.Linear(4, 3, dtype=np.float64, rng=3))
    chain = nn.Sequential(*layers, *ends)
    x, gy = np.random.default_rng(0).standard_normal((2, 3, 4)), np.random.default_rng(1).standard_normal((2, 3))
    want = chain.vjp(x)[1](gy)
    chain.set_backward(algorithm, workers=64)
    found = chain.vjp(x)[1](gy)
    np.testing.assert_allclose(found.input, want.input, **CLOSE)
    for name, grad in want.weights.items():
        np.testing.assert_allclose(found.weights[name], grad, err_msg=name, **CLOSE)


def test_linear_layers_inside_are_pruned():
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, dtype=np.float64, rng=0)
    report = nn.prune(layer, 0.5)
    assert set(report.kept) == {"self_attn.out_proj", "linear1", "linear2"}
    y, saved = layer.forward(np.random.default_rng(0).standard_normal((3, 2, 6)))
    grads = layer.weight_grad(np.ones_like(y), saved)
    for name in report.kept:
        mask = dict(layer.modules())[name].buffers["weight_mask"]
        assert not grads[f"{name}.weight"][~mask].any() and grads[f"{name}.weight"][mask].all()


def test_large_scores_overflow_nowhere():
    layer = nn.MultiheadAttention(2, 1, batch_first=True, dtype=np.float64, rng=0)
    twin = Attends(loaded(torch.nn.MultiheadAttention(2, 1, batch_first=True), layer))
    x = np.array([[[1e4, -1e4], [0, 1e4], [1.0, 2.0]]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(layer(x), twin(torch.from_numpy(x)).detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_that_masks_leave_nothing_to_look_at_look_at_nothing(dtype):
    rng = np.random.default_rng(5)
    layer = nn.MultiheadAttention(6, 2, batch_first=True, dtype=dtype, rng=rng)
    twin = loaded(torch.nn.MultiheadAttention(6, 2, batch_first=True), layer)
    x = rng.normal(size=(2, 3, 6)).astype(dtype)
    padding = np.array([[False, False, True], [True, True, True]])
    run, named = Attends(twin), dict(twin.named_parameters())
    saved = assert_gradients(
        layer, lambda tx: run(tx, torch.tensor(padding)), x, rng, {"rtol": 1e-7, "atol": 1e-5}, named,
        key_padding_mask=padding,
    )  # fmt: skip
    y = layer.forward(x, key_padding_mask=padding)[0]
    assert not layer.weights(saved)[1].any()
    np.testing.assert_array_equal(y[1], np.broadcast_to(layer.children["out_proj"].params["bias"], (3, 6)))
    with np.errstate(invalid="ignore"):
        x[0, 0] = np.inf  # not hidden where nothing is left out
        assert np.isnan(layer.forward(x, key_padding_mask=padding)[0][0]).all()
