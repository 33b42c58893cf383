"""Random operators and chains of them for hypothesis, each with its twin in torch.nn."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.nn.basic import dropout_mask
from strategies import seeds

ACTIVATIONS = (
    "ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Softplus", "Hardtanh", "Tanh", "Sigmoid", "Identity", "Mish",
    "Hardswish", "CELU", "LogSigmoid",
)  # fmt: skip
ANYWHERE = (*ACTIVATIONS, "Softmax", "LayerNorm", "Linear", "Dropout")
ON_IMAGES = (
    "Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "BatchNorm", "InstanceNorm",
    "Upsample", "Flatten",
)  # fmt: skip
NESTED = ("Residual", "Sum", "Concat", "Sequential", "Stage")


class Masked(torch.nn.Module):
    """The twin of ``Dropout(p, rng=seed)`` that has run once."""

    def __init__(self, p: float, seed: int) -> None:
        super().__init__()
        self.p, self.seed = p, seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        like = np.empty(x.shape)
        return x * torch.from_numpy(dropout_mask(np.random.default_rng(self.seed), like, self.p))


class TorchResidual(torch.nn.Module):
    """The twin of Residual."""

    def __init__(self, body: torch.nn.Module, shortcut: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut or torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.body(x)


class TorchSum(torch.nn.ModuleList):
    """The twin of Sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(branch(x) for branch in self)


class TorchConcat(torch.nn.ModuleList):
    """The twin of Concat."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self], 1)


@dataclass
class Pair:
    """A layer and its twin (float64, evaluation mode, the same weights and statistics), and shapes of one sample."""

    layer: nn.Layer
    twin: torch.nn.Module
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]


def pair(layer: nn.Layer, twin: torch.nn.Module, shape: tuple[int, ...], rng: np.random.Generator) -> Pair:
    """Put a layer beside its twin; running statistics become random ones."""
    for _, module in layer.modules():
        if "running_var" in module.buffers and not module.buffers["running_mean"].any():
            module.buffers["running_mean"][...] = rng.standard_normal(module.num_features)
            module.buffers["running_var"][...] = rng.uniform(0.5, 2, module.num_features)
    twin = twin.double().eval().requires_grad_(False)
    twin.load_state_dict({name: torch.from_numpy(np.asarray(a)) for name, a in layer.state_dict().items()})
    with torch.no_grad():
        out_shape = tuple(twin(torch.zeros((2, *shape), dtype=torch.float64)).shape[1:])
    return Pair(layer, twin, shape, out_shape)


def _window(draw: st.DrawFn, sizes: tuple[int, ...], most: int = 3) -> dict[str, Any]:
    """Draw kernel, stride and padding that fit, the same for all axes."""
    kernel = draw(st.integers(1, min(most, min(sizes) + 1)))
    least = -(-max(kernel - min(sizes), 0) // 2)
    padding = draw(st.integers(least, max(least, kernel // 2)))
    return {"kernel_size": kernel, "stride": draw(st.integers(1, 2)), "padding": padding}


@st.composite
def operators(
    draw: st.DrawFn, shape: tuple[int, ...], rng: np.random.Generator, dtype: Any = np.float64,
    kinds: tuple[str, ...] | None = None, depth: int = 0, training: bool = False,
) -> Pair:  # fmt: skip
    """Draw one operator for samples of `shape`: (n,), (C, L), (C, H, W) or (C, D, H, W).

    `training`: normalisation may be by the batch (the twin does not follow).
    """
    axes = len(shape) - 1
    if kinds is None:
        kinds = (*ANYWHERE, *(ON_IMAGES if axes else ()), *(NESTED if depth < 2 else ()))
    kind = draw(st.sampled_from(kinds))
    layer, twin = _make(draw, kind, shape, axes, rng, dtype, depth, training)
    return pair(layer, twin, shape, rng)


def _make(
    draw: st.DrawFn, kind: str, shape: tuple[int, ...], axes: int, rng: np.random.Generator, dtype: Any, depth: int,
    training: bool,
) -> tuple[nn.Layer, torch.nn.Module]:  # fmt: skip
    def both(name: str, *args: Any, **options: Any) -> tuple[nn.Layer, torch.nn.Module]:
        return getattr(nn, name)(*args, **options), getattr(torch.nn, name)(*args, **options)

    if kind in (*ACTIVATIONS, "Flatten"):
        return both(kind)
    if kind == "Softmax":
        return both("Softmax", -1)
    if kind == "LayerNorm":
        normalized = shape[draw(st.integers(0, len(shape) - 1)) :]
        return nn.LayerNorm(normalized, 0.1, dtype=dtype), torch.nn.LayerNorm(normalized, 0.1)
    if kind == "Linear":
        out = draw(st.integers(1, 4))
        return nn.Linear(shape[-1], out, dtype=dtype, rng=rng), torch.nn.Linear(shape[-1], out)
    if kind == "Dropout":
        seed = int(rng.integers(2**31))
        return nn.Dropout(0.4, rng=seed), Masked(0.4, seed)
    if kind == "BatchNorm":
        name = f"BatchNorm{axes}d"
        layer = getattr(nn, name)(shape[0], dtype=dtype).train(training and draw(st.booleans()))
        return layer, getattr(torch.nn, name)(shape[0])
    if kind == "InstanceNorm" and prod(shape[1:]) > 1:  # torch refuses one element
        name, options = f"InstanceNorm{axes}d", {"eps": 0.1, "affine": True, "track_running_stats": draw(st.booleans())}
        return getattr(nn, name)(shape[0], **options, dtype=dtype).eval(), getattr(torch.nn, name)(shape[0], **options)
    if kind == "Upsample":
        mode = draw(st.sampled_from(["nearest", {1: "linear", 2: "bilinear", 3: "trilinear"}[axes]]))
        return both("Upsample", draw(st.integers(1, max(shape[1:]) + 1)), mode=mode)
    if kind == "Conv":
        groups = draw(st.sampled_from([1, shape[0]]))
        out = groups * draw(st.integers(1, 3 // groups if groups < 3 else 1))
        options = _window(draw, shape[1:]) | {"groups": groups, "bias": draw(st.booleans())}
        if options["kernel_size"] < min(shape[1:]) // 2:
            options["dilation"] = draw(st.integers(1, 2))
        name = f"Conv{axes}d"
        ours = getattr(nn, name)(shape[0], out, **options, dtype=dtype, rng=rng)
        return ours, getattr(torch.nn, name)(shape[0], out, **options)
    if kind == "ConvTranspose":
        out, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        options = {
            "kernel_size": kernel,
            "stride": draw(st.integers(1, 2)),
            "padding": draw(st.integers(0, kernel // 2)),
        }
        if min(shape[1:]) == 1:
            options["padding"] = 0
        name = f"ConvTranspose{axes}d"
        ours = getattr(nn, name)(shape[0], out, **options, dtype=dtype, rng=rng)
        return ours, getattr(torch.nn, name)(shape[0], out, **options)
    if kind in ("MaxPool", "AvgPool"):
        window, ceil = _window(draw, shape[1:]), draw(st.booleans())
        if axes == 3 and window["kernel_size"] > min(shape[1:]):  # torch's AvgPool3d refuses what the others take
            return both("Tanh")
        return both(f"{kind}{axes}d", **window, ceil_mode=ceil)
    if kind in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
        return both(f"{kind}{axes}d", draw(st.integers(1, max(shape[1:]) + 1)))
    if kind == "Sequential":
        inner = draw(chains(shape, rng, dtype, depth + 1, 2, training))
        return inner.layer, inner.twin
    if kind == "Stage":
        inner = draw(chains(shape, rng, dtype, depth + 1, 2, training))
        return nn.Stage(*inner.layer.children.values()), inner.twin
    if kind == "Concat":
        inner = [draw(chains(shape, rng, dtype, depth + 1, 2, training)) for _ in range(draw(st.integers(1, 2)))]
        alike = [inner[0], *(p for p in inner[1:] if p.out_shape[1:] == inner[0].out_shape[1:])]
        return nn.Concat(*(p.layer for p in alike)), TorchConcat([p.twin for p in alike])
    if kind == "Residual":
        inner, other = (draw(chains(shape, rng, dtype, depth + 1, 2, training)) for _ in range(2))
        if inner.out_shape == shape:
            return nn.Residual(inner.layer), TorchResidual(inner.twin)
        if inner.out_shape == other.out_shape:
            return nn.Residual(inner.layer, other.layer), TorchResidual(inner.twin, other.twin)
        return inner.layer, inner.twin
    if kind == "Sum":
        inner = [draw(chains(shape, rng, dtype, depth + 1, 2, training)) for _ in range(draw(st.integers(1, 3)))]
        alike = [p for p in inner if p.out_shape == inner[0].out_shape]
        if alike[0].out_shape == shape:
            alike.append(Pair(nn.Identity(), torch.nn.Identity(), shape, shape))
        return nn.Sum(*(p.layer for p in alike)), TorchSum([p.twin for p in alike])
    return both("Tanh")


@st.composite
def chains(
    draw: st.DrawFn, shape: tuple[int, ...], rng: np.random.Generator, dtype: Any = np.float64, depth: int = 0,
    most: int = 6, training: bool = False,
) -> Pair:  # fmt: skip
    """Draw a `Sequential` of operators and its twin."""
    pairs, last = [], shape
    for _ in range(draw(st.integers(1, most))):
        pairs.append(draw(operators(last, rng, dtype, depth=depth, training=training)))
        last = pairs[-1].out_shape
    twin = torch.nn.Sequential(*(p.twin for p in pairs))
    return Pair(nn.Sequential(*(p.layer for p in pairs)), twin, shape, last)


@st.composite
def sample_shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the shape of one small sample: a vector, or channels of one, two or three axes."""
    axes = draw(st.sampled_from([0, 1, 2, 2, 2, 3]))
    most = {0: 8, 1: 6, 2: 4, 3: 2}[axes]
    shape = tuple(draw(st.integers(1, most)) for _ in range(axes))
    return (draw(st.integers(1, 3)), *shape) if axes else (draw(st.integers(1, most)),)


@st.composite
def networks(draw: st.DrawFn, dtype: Any = np.float64, training: bool = False) -> tuple[Pair, np.ndarray]:
    """Draw a chain and a batch for it."""
    rng = np.random.default_rng(draw(seeds))
    shape = draw(sample_shapes())
    chain = draw(chains(shape, rng, dtype, training=training))
    batch = draw(st.integers(2 if training else 1, 3))  # statistics of a batch need two values
    return chain, rng.standard_normal((batch, *shape)).astype(dtype)


def torch_jacobians(twin: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    """Return torch's dense Jacobians, transposed: (B, n_in, n_out); checks that no sample reaches another's output."""
    batch = x.shape[0]
    full = torch.autograd.functional.jacobian(twin, torch.from_numpy(x)).numpy()
    outputs = full.size // (batch * x.size) if x.size else 0
    full = full.reshape(batch, outputs, batch, prod(x.shape[1:]))
    own = np.arange(batch)
    others = full.copy()
    others[own, :, own] = 0
    assert not others.any()
    return full[own, :, own].transpose(0, 2, 1)
