"""Numbers that no machine has room for, and models that hold themselves: one clear error each."""

from __future__ import annotations

import resource

import numpy as np
import pytest

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import OptionError, SparseBPError

X = {1: (2, 3, 8), 2: (2, 3, 8, 8), 3: (1, 3, 4, 4, 4)}
HUGE = [2**50, 2**62, 2**63, 2**64, 10**30, -(2**62)]


def windows():
    for axes, shape in X.items():
        for kind in (f"Conv{axes}d", f"ConvTranspose{axes}d", f"MaxPool{axes}d", f"AvgPool{axes}d"):
            if not hasattr(nn, kind):
                continue
            fixed = {"kernel_size": 2} | ({"in_channels": 3, "out_channels": 3} if "Conv" in kind else {})
            names = ["kernel_size", "stride", "padding"] + ["dilation"] * ("Avg" not in kind)
            names += ["in_channels", "out_channels", "groups"] * ("Conv" in kind)
            for name in names + ["output_padding"] * ("Transpose" in kind):
                yield kind, fixed, name, shape


OTHERS = [
    ("AdaptiveAvgPool1d", {}, "output_size", X[1]), ("AdaptiveAvgPool2d", {}, "output_size", X[2]),
    ("AdaptiveMaxPool1d", {}, "output_size", X[1]), ("AdaptiveMaxPool2d", {}, "output_size", X[2]),
    ("Upsample", {}, "size", X[2]), ("Upsample", {}, "scale_factor", X[1]),
    ("Upsample", {"mode": "bilinear"}, "size", X[2]), ("InstanceNorm2d", {"affine": True}, "num_features", X[2]),
    ("Linear", {"out_features": 3}, "in_features", (2, 3)), ("Linear", {"in_features": 3}, "out_features", (2, 3)),
    ("Embedding", {"embedding_dim": 3}, "num_embeddings", None),
    ("Embedding", {"num_embeddings": 3}, "embedding_dim", None),
    ("Embedding", {"num_embeddings": 3, "embedding_dim": 3}, "padding_idx", None),
    ("BatchNorm2d", {}, "num_features", X[2]), ("LayerNorm", {}, "normalized_shape", (2, 3)),
    ("GroupNorm", {"num_channels": 3}, "num_groups", X[2]), ("GroupNorm", {"num_groups": 3}, "num_channels", X[2]),
    ("ZeroPad2d", {}, "padding", X[2]), ("Flatten", {}, "start_dim", (2, 3)), ("Softmax", {}, "dim", (2, 3)),
    ("MultiheadAttention", {"num_heads": 1}, "embed_dim", (2, 3, 4)),
    ("MultiheadAttention", {"embed_dim": 4}, "num_heads", (2, 3, 4)),
    ("TransformerEncoderLayer", {"d_model": 4, "nhead": 1}, "dim_feedforward", (2, 3, 4)),
    ("GRU", {"hidden_size": 3}, "input_size", (2, 3, 4)), ("GRU", {"input_size": 4}, "hidden_size", (2, 3, 4)),
    ("GRU", {"input_size": 4, "hidden_size": 3}, "num_layers", (2, 3, 4)),
    ("LSTM", {"input_size": 4, "hidden_size": 3}, "num_layers", (2, 3, 4)),
    ("LSTM", {"input_size": 4, "hidden_size": 3}, "proj_size", (2, 3, 4)),
]  # fmt: skip


@pytest.fixture
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(("kind", "fixed", "name", "shape"), [*windows(), *OTHERS])
@pytest.mark.parametrize("value", HUGE)
def test_huge_numbers(little_memory, kind, fixed, name, shape, value):
    x = np.zeros((2, 3), int) if shape is None else np.ones(shape, np.float32)
    with pytest.raises(SparseBPError) as caught:
        layer = getattr(nn, kind)(**{**fixed, name: value})
        layer.forward(x)
    assert caught.value.expected is not None and len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [1000, 2**33, 2**48])
def test_the_largest_stride_and_dilation_that_are_taken(value):
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    for layer, near in (
        (nn.Conv2d(3, 2, 2, value, rng=0), nn.Conv2d(3, 2, 2, 8, rng=0)),
        (nn.Conv2d(3, 2, 1, dilation=value, rng=0), nn.Conv2d(3, 2, 1, rng=0)),
        (nn.MaxPool2d(2, value), nn.MaxPool2d(2, 8)), (nn.AvgPool2d(2, value), nn.AvgPool2d(2, 8)),
    ):  # fmt: skip
        np.testing.assert_array_equal(layer(x), near(x))


def test_the_windows_of_an_adaptive_pool_beyond_memory(little_memory):
    with pytest.raises(sb.errors.MemoryLimitError, match="do not fit in memory"):
        nn.AdaptiveAvgPool1d(2**31 - 1)(np.ones((1, 1, 4), np.float32))


@pytest.mark.parametrize("far", [False, True])
def test_a_model_that_contains_itself(far):
    inner = nn.Sequential(nn.Linear(3, 3, rng=0))
    model = nn.Sequential(nn.Linear(3, 3, rng=1), nn.Residual(inner)) if far else inner
    inner.children["1"] = model
    x, loss = np.ones((2, 3), np.float32), nn.MSELoss()
    for use in (
        model, model.forward, model.vjp, lambda x: model.parameters(), lambda x: model.state_dict(),
        lambda x: model.train(), lambda x: model.to(dtype=np.float64), lambda x: sb.prune(model, 0.5),
        lambda x: sb.value_and_grad(model, loss)(x, x), lambda x: model.load_state_dict({}), model.explain,
        lambda x: sb.jacobian_t(model, x), lambda x: model.stages(),
    ):  # fmt: skip
        with pytest.raises(OptionError, match="inside itself"):
            use(x)


def test_a_layer_that_is_there_twice_is_not_inside_itself():
    layer = nn.Linear(3, 3, rng=0)
    model = nn.Sequential(layer, nn.Residual(layer), layer)
    assert [name for name, one in model.modules() if one is layer] == ["0", "1.body", "2"]


def test_an_identity_takes_any_arguments():
    x = np.ones((2, 3), np.float32)
    assert nn.Identity(54, unused=0.1)(x) is x
