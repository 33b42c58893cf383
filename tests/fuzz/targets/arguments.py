"""Options of layers, losses, models and pruning: one of them is junk, all others are good."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.case import accepted, expect, refused
from fuzz.draw import JUNK, NO_ARRAYS, chance, one_of
from sparsebp import models, nn

INTEGERS = (np.int64(3), np.uint8(2), 1)
SIZE, FLAG, NUMBER, SHARE, EPS, SEED, DTYPE = "size", "flag", "number", "share", "eps", "seed", "dtype"
GOOD: dict[str, tuple[Any, ...]] = {
    SIZE: INTEGERS,
    FLAG: (True, False, np.bool_(True)),
    NUMBER: (0.5, 1, np.float32(0.25), np.int8(1)),
    SHARE: (0, 0.5, np.float64(0.25)),
    EPS: (1e-5, 0.1, np.float32(0.5)),
    SEED: (None, 0, np.int64(3)),
    DTYPE: (np.float32, "float64", np.dtype("f4")),
}
CONV = {
    "in_channels": SIZE,
    "out_channels": SIZE,
    "kernel_size": SIZE,
    "stride": SIZE,
    "dilation": SIZE,
    "bias": FLAG,
    "padding_mode": ("zeros",),
    "dtype": DTYPE,
    "rng": SEED,
}
BORDERS = ("zeros", "reflect", "replicate", "circular")
RECURRENT = {"input_size": SIZE, "hidden_size": SIZE, "bias": FLAG, "dtype": DTYPE, "rng": SEED}
DEEP = RECURRENT | {
    "num_layers": SIZE,
    "batch_first": FLAG,
    "dropout": SHARE,
    "bidirectional": FLAG,
    "backward": ("auto", "linear", "chunked"),
    "chunks": SIZE,
    "workers": SIZE,
    "memory_limit": SIZE,
    "up_levels": SIZE,
}
POOL = {"kernel_size": SIZE, "stride": SIZE, "ceil_mode": FLAG}
MODEL = {"in_channels": SIZE, "classes": SIZE, "dtype": DTYPE, "rng": SEED}
NONE = {
    "dim",
    "stride",
    "chunks",
    "workers",
    "memory_limit",
    "up_levels",
    "divisor_override",
    "momentum",
    "output_size",
    "rng",
}
"""Where None is a value, somewhere."""

TABLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "Linear": (nn.Linear, {"in_features": SIZE, "out_features": SIZE, "bias": FLAG, "dtype": DTYPE, "rng": SEED}),
    **{f"Conv{n}d": (getattr(nn, f"Conv{n}d"), CONV | {"padding_mode": BORDERS}) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (getattr(nn, f"ConvTranspose{n}d"), CONV) for n in (1, 2, 3)},
    **{f"MaxPool{n}d": (getattr(nn, f"MaxPool{n}d"), POOL | {"dilation": SIZE}) for n in (1, 2)},
    **{f"AvgPool{n}d": (getattr(nn, f"AvgPool{n}d"), POOL | {"count_include_pad": FLAG}) for n in (1, 2)},
    **{f"AdaptiveAvgPool{n}d": (getattr(nn, f"AdaptiveAvgPool{n}d"), {"output_size": SIZE}) for n in (1, 2)},
    "BatchNorm2d": (
        nn.BatchNorm2d,
        {
            "num_features": SIZE,
            "eps": EPS,
            "momentum": SHARE,
            "affine": FLAG,
            "track_running_stats": FLAG,
            "dtype": DTYPE,
        },
    ),
    "LayerNorm": (
        nn.LayerNorm,
        {"normalized_shape": SIZE, "eps": EPS, "elementwise_affine": FLAG, "bias": FLAG, "dtype": DTYPE},
    ),
    "GroupNorm": (
        lambda **options: nn.GroupNorm(**{"num_groups": 1} | options),
        {"num_channels": SIZE, "eps": EPS, "affine": FLAG, "bias": FLAG, "dtype": DTYPE},
    ),
    "RMSNorm": (nn.RMSNorm, {"normalized_shape": SIZE, "elementwise_affine": FLAG, "dtype": DTYPE}),
    "PReLU": (nn.PReLU, {"num_parameters": SIZE, "init": NUMBER, "dtype": DTYPE}),
    "Dropout2d": (nn.Dropout2d, {"p": SHARE, "rng": SEED}),
    "RNN": (nn.RNN, DEEP | {"nonlinearity": ("tanh", "relu")}),
    "GRU": (nn.GRU, DEEP),
    "RNNCell": (nn.RNNCell, RECURRENT | {"nonlinearity": ("tanh", "relu")}),
    "GRUCell": (nn.GRUCell, RECURRENT),
    "LSTM": (nn.LSTM, DEEP | {"proj_size": (0,)}),
    "LSTMCell": (nn.LSTMCell, RECURRENT),
    "Dropout": (nn.Dropout, {"p": SHARE, "rng": SEED}),
    "ELU": (nn.ELU, {"alpha": NUMBER}),
    "LeakyReLU": (nn.LeakyReLU, {"negative_slope": NUMBER}),
    "GELU": (nn.GELU, {"approximate": ("none", "tanh")}),
    "Softplus": (nn.Softplus, {"beta": NUMBER, "threshold": NUMBER}),
    "Softmax": (nn.Softmax, {"dim": (-1, 1, 2)}),
    "LogSoftmax": (nn.LogSoftmax, {"dim": (-1, 1, 2)}),
    "lenet5": (models.lenet5, MODEL | {"size": (28, 32)}),
    "vgg11": (lambda **options: models.vgg11(**{"width": 0.01} | options), MODEL | {"width": (0.02,)}),
    "mobilenetv2": (
        lambda **options: models.mobilenetv2(**{"width": 0.01, "stages": 1} | options),
        MODEL | {"width": (0.02,), "stages": (1, 2)},
    ),
    "densenet": (
        lambda **options: models.densenet(**{"depth": 7, "growth": 2} | options),
        MODEL | {"width": (0.5,), "depth": (7, 10), "growth": (1, 2)},
    ),
}
NEEDED = {
    "num_channels",
    "num_parameters",
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "kernel_size",
    "num_features",
    "output_size",
    "normalized_shape",
    "input_size",
    "hidden_size",
}


def case(rng: np.random.Generator) -> None:
    one_of(rng, _options, _options, _options, _options, _loss, _prune, _containers)(rng)


def _options(rng: np.random.Generator) -> None:
    name = one_of(rng, *TABLE)
    make, kinds = TABLE[name]
    options = {
        key: one_of(rng, *(GOOD[kind] if isinstance(kind, str) else kind))
        for key, kind in kinds.items()
        if key in NEEDED or chance(rng, 0.4)
    }
    with accepted(f"{name}({options})"):
        layer = make(**options)
    expect(isinstance(layer, nn.Layer), f"{layer!r}")
    key = one_of(rng, *kinds)
    junk = one_of(rng, *JUNK)
    if (junk is None and (key in NONE or key == "dtype")) or _good(kinds[key], key, junk):
        return
    refused(f"{name}({key}={junk!r})", make, **options | {key: junk})


def _good(kind: Any, key: str, junk: Any) -> bool:
    """Whether this junk is none here."""
    if kind == FLAG:
        return isinstance(junk, (bool, np.bool_))
    if kind == DTYPE:
        return junk is None or getattr(junk, "dtype", None) == np.float64
    if kind == SEED:  # NumPy takes what can be made a sequence of numbers from 0 on
        return True
    if key in ("kernel_size", "stride", "dilation", "normalized_shape", "output_size") and isinstance(
        junk, (tuple, list, range)
    ):
        return True
    if isinstance(junk, (bool, np.bool_)) or not isinstance(junk, (int, float, np.number)) or not np.isfinite(junk):
        return False
    if kind == SIZE:
        return isinstance(junk, (int, np.integer)) and (
            junk > 0 or (junk == 0 and key in ("in_features", "out_features", "memory_limit", "up_levels"))
        )
    if kind in (SHARE, EPS):
        return junk >= 0 and (kind == EPS or junk <= 1)
    if key == "width":
        return junk > 0
    if key == "dim":  # which axes there are, the input says
        return isinstance(junk, (int, np.integer)) and -64 <= junk < 64
    return (kind == NUMBER and not (junk == 0 and key == "beta")) or (
        isinstance(kind, tuple) and isinstance(junk, (int, np.integer)) and junk >= -1
    )


def _loss(rng: np.random.Generator) -> None:
    n, classes = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    prediction = rng.standard_normal((n, classes)).astype(np.float32)
    target = rng.integers(0, classes, n).astype(one_of(rng, np.int64, np.uint8, np.int32, np.uint64))
    loss = nn.CrossEntropyLoss()
    with accepted("classes"):
        value, _ = loss.forward(prediction, target)
    shifted = prediction.astype(np.float64) - prediction.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expect(abs(value + logs[np.arange(n), target.astype(int)].mean()) < 1e-4, f"the loss {value}")
    junk = one_of(rng, *NO_ARRAYS)
    for other in (nn.MSELoss(), loss):
        refused(f"prediction {junk!r}", other.forward, junk, target)
        bad = one_of(
            rng,
            junk,
            target[:, None],
            target + classes,
            target.astype(np.int64) - classes,
            target.astype(float),
            None,
            target.tolist(),
        )
        if not (isinstance(bad, np.ndarray) and bad.shape == (n,) and bad.dtype.kind in "iu" and bad.size == 0):
            refused(f"target {bad!r}", other.forward, prediction, bad)


def _prune(rng: np.random.Generator) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2, rng=0), nn.Flatten(), nn.Linear(8, 3, rng=1))
    method, amount = one_of(rng, "class_blind", "class_uniform", "class_distribution"), float(rng.random() * 0.9)
    with accepted(f"{amount}, {method}"):
        report = nn.prune(model, amount, method)
    expect(abs(report.sparsity - amount) < 0.1, f"{report.sparsity} of {amount}")
    junk = one_of(rng, *JUNK)
    refused(f"method {junk!r}", nn.prune, model, amount, junk)
    refused(f"model {junk!r}", nn.prune, junk, amount, method)
    if junk is not None:
        refused(f"optimizer {junk!r}", nn.prune, model, amount, method, optimizer=junk)
    refused(f"a mask {junk!r}", model[2].keep_weights, junk)
    if not (isinstance(junk, (int, float, np.number)) and not isinstance(junk, (bool, np.bool_)) and 0 <= junk < 1):
        refused(f"amount {junk!r}", nn.prune, model, junk, method)


def _containers(rng: np.random.Generator) -> None:
    junk = one_of(rng, *JUNK)
    refused(f"Sequential({junk!r})", nn.Sequential, nn.ReLU(), junk)
    refused(f"Concat({junk!r})", nn.Concat, nn.ReLU(), junk)
    refused(f"Residual({junk!r})", nn.Residual, junk)
    refused(f"SequenceClassifier(…, {junk!r})", nn.SequenceClassifier, nn.GRU(1, 2), junk)
    refused(f"SequenceClassifier({junk!r}, …)", nn.SequenceClassifier, junk, nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 3, rng=0), nn.ReLU(), backward=one_of(rng, "bp", "auto", "linear"))
    state = model.state_dict()
    name = one_of(rng, *state)
    refused(f"a state with {name}={junk!r}", model.load_state_dict, state | {name: junk})
    refused(f"a state with {junk!r}", model.load_state_dict, junk)
    refused(f"a state with the name {name!r}x", model.load_state_dict, state | {name + "x": state[name]})
    refused("a state that lacks one", model.load_state_dict, {n: a for n, a in state.items() if n != name})
    expect(all((model.state_dict()[n] == a).all() for n, a in state.items()), "a refused state was loaded")
    if not isinstance(junk, (bool, np.bool_)):
        refused(f"train({junk!r})", model.train, junk)
    refused(f"set_backward({junk!r})", model.set_backward, junk)
    refused(f"to({junk!r})", model.to, one_of(rng, "gpu", 3, "cpux") if junk is None else junk)
    option = one_of(rng, "up_levels", "chunks", "workers", "memory_limit")
    if junk is not None and not _good(SIZE, option, junk):
        refused(f"{option}={junk!r}", model.set_backward, "hybrid", **{option: junk})
