"""Layers against torch.nn: options, shapes, layouts, dtypes, odd values, gradients with buffers that are used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fuzz.case import Wrong, accepted, expect, refused, same
from fuzz.draw import JUNK, WRONG_DTYPES, chance, laid_out, normal, one_of, real, size
from sparsebp import nn
from sparsebp.core.errors import ShapeError

POINTWISE = {
    "ReLU": {},
    "LeakyReLU": {"negative_slope": (0.01, -1, 2.0, 0)},
    "ELU": {"alpha": (1.0, 0.5, -1, 0)},
    "Tanh": {},
    "GELU": {"approximate": ("none", "tanh")},
    "SiLU": {},
    "Sigmoid": {},
    "Identity": {},
    "Dropout": {"p": (0.0,)},
    "Softplus": {"beta": (1, 2.5, 0.1), "threshold": (20, 1, -2.0)},
    "Hardtanh": {"min_val": (-1.0, -3, 0.25), "max_val": (0.5, 6, 2.0)},
    "ReLU6": {},
    "Mish": {},
    "SELU": {},
}
EDGES = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 6.0, 1e-30, -1e30)


def case(rng: np.random.Generator) -> None:
    dtype = real(rng)
    layer, twin, x, loose = one_of(rng, _pointwise, _linear, _norm, _conv, _conv, _pool, _pool, _other)(rng, dtype)
    if layer is None:
        return
    twin = twin.to(getattr(torch, dtype.name))
    for name, array in layer.state_dict().items():
        if name in twin.state_dict():
            twin.state_dict()[name].copy_(torch.from_numpy(array))
    if chance(rng, 0.5):
        layer = nn.Sequential(nn.Identity(), layer)
    try:
        compare(rng, layer, twin, x, dtype, loose)
    except Wrong as error:
        raise Wrong(f"{_shown(layer)}: {error}") from error


def compare(rng: np.random.Generator, layer: nn.Layer, twin: Any, x: np.ndarray, dtype: Any, loose: float) -> None:
    """Run both forward and back; where torch refuses x, so must we, unless it is empty."""
    given = torch.from_numpy(x.copy()).requires_grad_()
    try:
        wanted = twin(given)
    except (RuntimeError, ValueError, IndexError) as error:
        try:
            found = layer.forward(x)[0]
        except ShapeError:
            return
        if x.size and found.size and not isinstance(twin, torch.nn.BatchNorm2d):  # of one value in evaluation
            raise Wrong(f"torch refuses: {error}; we do not: x {x.shape}, y {found.shape}") from error
        return
    layout = laid_out(rng, x)
    try:
        y, saved = layer.forward(layout)
    except ShapeError as error:
        if x.size and wanted.numel() and not wanted.isneginf().any():  # a window of padding alone
            raise Wrong(f"x {x.shape} was refused: {error}") from error
        return
    if chance(rng, 0.1):
        _bad(rng, layer, x, saved, y)
    finite = bool(np.isfinite(x).all())
    same(f"y of x {x.shape}", y, wanted.detach().numpy(), dtype, loose)
    gy = normal(rng, y.shape, dtype)
    if not finite:
        return
    wanted.backward(torch.from_numpy(gy.copy()))
    prefix = "1." if isinstance(layer, nn.Sequential) else ""
    grads = {prefix + name: p.grad.numpy() for name, p in twin.named_parameters() if p.grad is not None}
    gx = np.zeros(x.shape, dtype) if given.grad is None else given.grad.numpy()
    buffer = np.full_like(gy, 7)  # a buffer of the caller's that held another gradient before
    for scale in (1, 2):
        if scale == 1 and chance(rng, 0.5):
            layer.input_grad(buffer, saved), layer.weight_grad(buffer, saved)
        buffer[...] = gy * scale
        handed = buffer if chance(rng, 0.6) else laid_out(rng, buffer)
        with accepted(f"gy of {gy.shape}"):
            if chance(rng, 0.5):
                found, own = layer.input_grad(handed, saved), layer.weight_grad(handed, saved)
            else:
                own, found = layer.weight_grad(handed, saved), layer.input_grad(handed, saved)
        same(f"gx of x {x.shape}", found, gx * scale, dtype, 4 * loose)
        expect(own.keys() == layer.parameters().keys(), f"gradients of {list(own)}")
        for name, grad in own.items():
            right = grads.get(name)
            expect(right is not None or not grad.any(), f"a gradient of {name} that torch has not")
            if right is not None:
                same(name, grad, right * scale, dtype, 8 * loose)


def _shown(layer: nn.Layer) -> str:
    inside = layer[len(layer) - 1] if isinstance(layer, nn.Sequential) else layer
    kept = {k: v for k, v in vars(inside).items() if k not in ("params", "buffers", "children", "device", "training")}
    return f"{type(inside).__name__} {kept}"[:300]


def _bad(rng: np.random.Generator, layer: nn.Layer, x: np.ndarray, saved: Any, y: np.ndarray) -> None:
    """What does not fit: x or gy of another dtype or shape, or no array at all; a parameter in another's place."""
    call = one_of(rng, "forward", "input_grad", "weight_grad")
    if call == "weight_grad" and not layer.parameters():
        return
    like = x if call == "forward" else y
    way = int(rng.integers(4))
    if way == 0:
        wrong: Any = one_of(rng, *(j for j in JUNK if not isinstance(j, (np.ndarray, np.floating))))
    elif way == 1:
        wrong = np.zeros(like.shape, one_of(rng, *WRONG_DTYPES))
    elif way == 2:
        wrong = like.tolist()
    elif call != "forward":
        wrong = np.zeros((*like.shape, 1) if chance(rng, 0.5) else (like.shape[0] + 1, *like.shape[1:]), like.dtype)
    else:
        wrong = np.zeros((), like.dtype)
        inside = layer[len(layer) - 1] if isinstance(layer, nn.Sequential) else layer
        of_any_shape = isinstance(inside, nn.PReLU) and inside.num_parameters == 1  # as PyTorch's
        if of_any_shape or (not layer.parameters() and not isinstance(layer, nn.Flatten)):
            return
    if call == "forward":
        refused(f"x {wrong!r}", layer.forward, wrong)
    else:
        refused(f"{call} of {wrong!r}", getattr(layer, call), wrong, saved)
    for part in (part for _, part in layer.modules() if part.params):
        name = one_of(rng, *part.params)
        old = part.params[name]
        other: Any = one_of(
            rng,
            np.zeros((*old.shape, 1), old.dtype),
            np.zeros(1, old.dtype),
            None,
            old.tolist(),
            old.astype("f2"),
            old[..., None],
            np.float64(0.5),
            3,
        )
        if getattr(other, "shape", None) == old.shape and other.dtype == old.dtype:
            continue
        refused(f"{name} of {other!r}", part.params.__setitem__, name, other)


def _x(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    x = normal(rng, shape, dtype)
    if x.size and chance(rng, 0.15):
        x.reshape(-1)[rng.integers(0, x.size, 2)] = one_of(rng, *EDGES)
    return x


def _pointwise(rng: np.random.Generator, dtype: Any) -> tuple:
    name = one_of(rng, *POINTWISE)
    options = {key: one_of(rng, *values) for key, values in POINTWISE[name].items() if key == "p" or chance(rng, 0.6)}
    shape = tuple(size(rng, 0, 7) for _ in range(int(rng.integers(1, 4))))
    with accepted(f"{name} {options}"):
        layer = getattr(nn, name)(**options)
    x = _x(rng, shape, dtype)
    if name in ("ELU", "LeakyReLU") and options and next(iter(options.values())) in (0, 0.0):
        x[~np.isfinite(x)] = 0  # torch says 0 · inf = NaN at another place
    x[(np.abs(x) > 1e20)] = 1
    return layer, getattr(torch.nn, name)(**options), x, 2


def _linear(rng: np.random.Generator, dtype: Any) -> tuple:
    a, b, bias = size(rng, 0, 13), size(rng, 0, 13), chance(rng, 0.7)
    with accepted(f"Linear({a}, {b}, {bias})"):
        layer = nn.Linear(one_of(rng, a, np.int64(a)), b, bias, dtype=dtype, rng=int(rng.integers(99)))
    shape = (*(size(rng, 0, 5) for _ in range(int(rng.integers(0, 4)))), a + (1 if chance(rng, 0.1) else 0))
    return layer, torch.nn.Linear(a, b, bias), _x(rng, shape, dtype), 1


def _norm(rng: np.random.Generator, dtype: Any) -> tuple:
    if chance(rng, 0.5):
        shape = tuple(size(rng, 1, 5) for _ in range(int(rng.integers(1, 4))))
        normalized = shape[int(rng.integers(len(shape))) :]
        options = {"eps": one_of(rng, 1e-5, 0.1, 1), "elementwise_affine": chance(rng, 0.7), "bias": chance(rng, 0.7)}
        layer: Any = nn.LayerNorm(
            normalized if len(normalized) > 1 or chance(rng, 0.5) else normalized[0], **options, dtype=dtype
        )
        twin: Any = torch.nn.LayerNorm(normalized, **options)
        shape = (size(rng, 0, 5), *shape)
        loose = 1 if options["eps"] > 0.01 else 500  # a variance of nearly 0 is divided by
    else:
        channels = size(rng, 1, 5)
        options = {
            "eps": one_of(rng, 1e-3, 0.1),
            "momentum": one_of(rng, 0.1, None, 0.0, 1),
            "affine": chance(rng, 0.7),
            "track_running_stats": chance(rng, 0.7),
        }
        layer, twin = nn.BatchNorm2d(channels, **options, dtype=dtype), torch.nn.BatchNorm2d(channels, **options)
        shape = (
            size(rng, 0, 5),
            channels + int(options["affine"] and chance(rng, 0.1)),
            size(rng, 0, 3),
            size(rng, 1, 3),
        )
        if chance(rng, 0.5):
            layer.eval(), twin.eval()
        loose = 50
    for _, part in layer.modules():
        for array in part.params.values():
            array[...] = rng.standard_normal(array.shape)
        if "running_var" in part.buffers:
            part.buffers["running_var"][...] = rng.uniform(0.5, 2, part.num_features)
    x = normal(rng, shape, dtype)
    return layer, twin, x, loose


def _conv(rng: np.random.Generator, dtype: Any) -> tuple:
    axes, transposed = int(rng.integers(1, 4)), chance(rng, 0.35)
    groups = one_of(rng, 1, 1, 1, 2, 3)
    channels = groups * size(rng, 1, 3), groups * size(rng, 1, 3)

    def each(low: int, high: int) -> Any:
        return (
            tuple(int(rng.integers(low, high + 1)) for _ in range(axes))
            if chance(rng, 0.5)
            else int(rng.integers(low, high + 1))
        )

    options: dict[str, Any] = {
        "kernel_size": each(1, 3),
        "stride": each(1, 3),
        "dilation": each(1, 2),
        "groups": groups,
        "padding": each(0, 2),
        "bias": chance(rng, 0.6),
    }
    if transposed:
        options["output_padding"] = each(0, 1)
    elif chance(rng, 0.2):
        options["padding"] = one_of(rng, "same", "valid")
    if not transposed and chance(rng, 0.3):
        options["padding_mode"] = one_of(rng, "reflect", "replicate", "circular")
    name = f"Conv{'Transpose' if transposed else ''}{axes}d"
    try:
        layer: Any = getattr(nn, name)(*channels, **options, dtype=dtype, rng=int(rng.integers(99)))
    except Exception as error:
        if options["padding"] == "same" and np.max(options["stride"]) > 1:
            return None, None, None, None
        if transposed and np.any(
            np.asarray(options["output_padding"]) >= np.maximum(options["stride"], options["dilation"])
        ):
            return None, None, None, None
        raise Wrong(f"{name}{channels} {options} was refused") from error
    shape = (
        size(rng, 0 if chance(rng, 0.1) else 1, 3),
        channels[0],
        *(size(rng, 0 if chance(rng, 0.1) else 1, 7) for _ in range(axes)),
    )
    return layer, getattr(torch.nn, name)(*channels, **options), _x(rng, shape, dtype), 2


def _pool(rng: np.random.Generator, dtype: Any) -> tuple:
    axes, kind = int(rng.integers(1, 3)), one_of(rng, "MaxPool", "AvgPool", "AdaptiveAvgPool")
    shape = (
        size(rng, 0 if chance(rng, 0.1) else 1, 3),
        size(rng, 1, 3),
        *(size(rng, 0 if chance(rng, 0.05) else 1, 11) for _ in range(axes)),
    )
    name = f"{kind}{axes}d"
    if kind == "AdaptiveAvgPool":
        want = (
            tuple(one_of(rng, None, 1, 2, 3, 7) for _ in range(axes))
            if chance(rng, 0.5) and axes > 1
            else size(rng, 1, 7)
        )
        x = normal(rng, shape, dtype)
        return getattr(nn, name)(want), getattr(torch.nn, name)(want), x, 1
    kernel = tuple(int(n) for n in rng.integers(1, 5, axes))
    options: dict[str, Any] = {
        "stride": one_of(rng, None, tuple(int(n) for n in rng.integers(1, 4, axes))),
        "padding": tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel),
        "ceil_mode": chance(rng, 0.5),
    }
    if kind == "MaxPool":
        options["dilation"] = one_of(rng, 1, tuple(int(n) for n in rng.integers(1, 4, axes)))
    else:
        options["count_include_pad"] = chance(rng, 0.5)
        if axes == 2 and chance(rng, 0.3):
            options["divisor_override"] = one_of(rng, 1, 3, -2)
    x = normal(rng, shape, dtype) if kind == "AvgPool" else _x(rng, shape, dtype)
    return getattr(nn, name)(kernel, **options), getattr(torch.nn, name)(kernel, **options), x, 1


def _other(rng: np.random.Generator, dtype: Any) -> tuple:
    shape = tuple(size(rng, 0 if chance(rng, 0.2) else 1, 5) for _ in range(int(rng.integers(2, 5))))
    if chance(rng, 0.5):
        name = one_of(rng, "Softmax", "LogSoftmax")
        ours, theirs = getattr(nn, name)(one_of(rng, -1, len(shape) - 1)), getattr(torch.nn, name)(-1)
        return ours, theirs, normal(rng, shape, dtype), 1
    if len(shape) == 4 and chance(rng, 0.5):
        padding = one_of(rng, 0, 1, 2, tuple(int(n) for n in rng.integers(0, 3, 4)))
        return nn.ZeroPad2d(padding), torch.nn.ZeroPad2d(padding), _x(rng, shape, dtype), 1
    if chance(rng, 0.3):
        channels = one_of(rng, 1, shape[1]) or 1
        return nn.PReLU(channels, dtype=dtype), torch.nn.PReLU(channels), normal(rng, shape, dtype), 1
    return nn.Flatten(), torch.nn.Flatten(), _x(rng, shape, dtype), 1
