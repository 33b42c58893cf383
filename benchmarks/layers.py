"""Every layer and loss of `sparsebp.nn` that torch.nn has, forward and backward, against its twin.

``python -m benchmarks layers``. A run is a forward and all gradients: at the input, and at the weights where there are
some. PyTorch's twin has the same weights; of images it runs in both memory layouts, and the faster one counts, round by
round. Outputs and gradients are compared before they are timed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Row, Run, columns, refuse_difference
from sparsebp import nn
from sparsebp.core import timing
from sparsebp.nn.gradients import gradients_of
from sparsebp.nn.loss import Loss

TARGET = 0.8
"""Times PyTorch's speed, of its faster layout."""

LINES, IMAGES, VOLUMES = (32, 64, 256), (32, 64, 16, 16), (32, 8, 8, 16, 16)
ROWS, TOKENS, SEQUENCES = (256, 1000), (32, 64, 256), (64, 32, 64)
SMALL_IMAGES = (32, 32, 14, 14)


class Case(NamedTuple):
    """A class of both libraries, its arguments, and the shape of its input."""

    name: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 - never written

    @property
    def label(self) -> str:
        """The call that makes the layer."""
        named = (f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({', '.join([*map(repr, self.args), *named])})"


_POINTWISE = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh",
)  # fmt: skip
CASES = (
    *(Case(name, (), IMAGES) for name in _POINTWISE),
    Case("GELU", ("tanh",), IMAGES),
    Case("PReLU", (64,), IMAGES),
    Case("Softmax", (-1,), TOKENS),
    Case("LogSoftmax", (-1,), ROWS),
    Case("Softmax", (1,), IMAGES),
    Case("Dropout", (0.1,), TOKENS),
    Case("Dropout2d", (0.1,), IMAGES),
    Case("Flatten", (), IMAGES),
    Case("Unflatten", (1, (8, 8)), IMAGES),
    Case("ZeroPad2d", (1,), IMAGES),
    Case("BatchNorm1d", (64,), LINES),
    Case("BatchNorm2d", (64,), IMAGES),
    Case("BatchNorm3d", (8,), VOLUMES),
    Case("InstanceNorm1d", (64,), LINES),
    Case("InstanceNorm2d", (64,), IMAGES),
    Case("InstanceNorm3d", (8,), VOLUMES),
    Case("GroupNorm", (8, 64), IMAGES),
    Case("LayerNorm", (256,), TOKENS),
    Case("RMSNorm", (256,), TOKENS),
    Case("MaxPool1d", (2,), LINES),
    Case("MaxPool2d", (2,), IMAGES),
    Case("MaxPool2d", (3, 2, 1), IMAGES),
    Case("MaxPool3d", (2,), VOLUMES),
    Case("AvgPool1d", (2,), LINES),
    Case("AvgPool2d", (2,), IMAGES),
    Case("AvgPool2d", (3, 2, 1), IMAGES),
    Case("AvgPool3d", (2,), VOLUMES),
    *(Case(f"Adaptive{kind}Pool{axes}d", (size,), shape) for kind in ("Avg", "Max")
      for axes, size, shape in ((1, 8, LINES), (2, 1, IMAGES), (2, 7, IMAGES), (3, 2, VOLUMES))),
    Case("Upsample", (), IMAGES, {"scale_factor": 2}),
    Case("Upsample", (), IMAGES, {"scale_factor": 2, "mode": "bilinear"}),
    Case("Linear", (256, 256), TOKENS),
    Case("Embedding", (1000, 256), (32, 64)),
    Case("MultiheadAttention", (256, 4), TOKENS, {"batch_first": True}),
    Case("TransformerEncoderLayer", (256, 4, 512), TOKENS, {"batch_first": True, "dropout": 0.0}),
    Case("Conv1d", (64, 64, 3), LINES, {"padding": 1}),
    Case("Conv2d", (64, 64, 3), IMAGES, {"padding": 1}),
    Case("Conv2d", (32, 32, 3), SMALL_IMAGES, {"padding": 1}),
    Case("Conv3d", (8, 8, 3), VOLUMES, {"padding": 1}),
    Case("ConvTranspose1d", (64, 64, 2, 2), LINES),
    Case("ConvTranspose2d", (64, 64, 2, 2), IMAGES),
    Case("ConvTranspose3d", (8, 8, 2, 2), VOLUMES),
    *(Case(name, (64, 64), SEQUENCES) for name in ("RNN", "GRU", "LSTM")),
    *(Case(f"{name}Cell", (64, 64), SEQUENCES[1:]) for name in ("RNN", "GRU", "LSTM")),
    *(Case(name, (), ROWS) for name in ("CrossEntropyLoss", "NLLLoss", "BCEWithLogitsLoss", "MSELoss", "L1Loss",
                                        "SmoothL1Loss", "HuberLoss", "KLDivLoss", "TripletMarginLoss")),
)  # fmt: skip
FEW = ("ReLU()", "Softmax(-1)", "BatchNorm2d(64)")
"""Shown on the page beside the layers that miss the target."""
QUICK = ("SiLU", "GroupNorm", "Embedding", "MSELoss")

Arrays = tuple[np.ndarray, ...]
Side = Callable[[], Any]
RANDOM = ("Dropout", "Dropout2d")
"""Layers whose results are not compared."""


def twins() -> set[str]:
    """Return the names of all layers and losses of `sparsebp.nn` that torch.nn has too."""
    theirs = vars(harness.import_torch().nn)
    return {name for name in nn.__all__ if name in theirs and inspect.isclass(getattr(nn, name))}


def measure_layers(run: Run) -> Iterator[Row]:
    harness.import_torch()  # refused before anything is measured
    for count in run.threads():
        for case in CASES:
            if not run.quick or case.name in QUICK:
                yield measure_layer(case, run.rounds) | {"threads": count}


def measure_layer(case: Case, rounds: Any) -> Row:
    """Time a layer and its twin, after comparing outputs and gradients."""
    layer = getattr(nn, case.name)(*case.args, **case.options)
    of_ours, of_torch = (our_loss, torch_loss) if isinstance(layer, Loss) else (our_layer, torch_layer)
    (ours, found), (theirs, wanted) = of_ours(layer, case), of_torch(layer, case)
    for got, want in zip(found, wanted, strict=True):
        if case.name not in RANDOM:
            scale = max(float(np.abs(want).max()), 1e-6)
            refuse_difference(
                f"{case.label}: an output or a gradient", "PyTorch", float(np.abs(got - want).max()) / scale
            )
    timings = timing.measure({"ours": ours, **theirs}, **rounds)
    best = timing.Timing(tuple(map(min, *(timings[name].seconds for name in theirs), timings["torch"].seconds)))
    row: Row = {"layer": case.label, "input": "×".join(map(str, case.shape)), **timing.side_by_side(timings)}
    row |= {"best_ratio": timing.ratio(best, timings["ours"])}
    return row | harness.reaches(row, "best_ratio", TARGET)


def inputs(case: Case) -> np.ndarray:
    """Return the input: normal numbers, or those of rows of a table."""
    rng = np.random.default_rng(0)
    if case.name == "Embedding":
        return rng.integers(case.args[0], size=case.shape)
    return rng.standard_normal(case.shape, np.float32)


def _first(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


def at_output(layer: Any, x: np.ndarray) -> np.ndarray:
    """Return a gradient at the layer's output."""
    return np.random.default_rng(1).standard_normal(_first(layer.forward(x)[0]).shape, np.float32)


def our_layer(layer: Any, case: Case) -> tuple[Side, Arrays]:
    """Return a forward and backward of ours, and its output and gradients."""
    x = inputs(case)
    gy, floats = at_output(layer, x), x.dtype.kind == "f"

    def run() -> tuple[Any, ...]:  # as training does it: `vjp` copies, so that its caller may write to the arrays
        y, saved = layer.forward(x)
        grads = gradients_of(layer, gy, saved)
        at_weights = grads.weight_grad() if layer.params or layer.children else {}
        return y, grads.input_grad() if floats else None, at_weights

    y, at_input, at_weights = run()
    arrays = [_first(y), *((at_input,) if floats else ()), *(at_weights[name] for name in layer.parameters())]
    return run, tuple(array.copy() for array in arrays)


def torch_layer(layer: Any, case: Case) -> tuple[dict[str, Side], Arrays]:
    """Return the same of the twin, in each layout that it has."""
    torch, x = harness.import_torch(), inputs(case)
    twin = getattr(torch.nn, case.name)(*case.args, **case.options)
    state = {name: torch.from_numpy(array.copy()) for name, array in layer.state_dict().items()}
    twin.load_state_dict(state)
    gy, names = at_output(layer, x), list(layer.parameters())

    def side(layout: Any) -> Side:
        own, given, incoming = twin, torch.from_numpy(x), torch.from_numpy(gy)
        if layout is not None:
            own, given = copy.deepcopy(twin).to(memory_format=layout), given.contiguous(memory_format=layout)
            incoming = incoming.contiguous(memory_format=layout) if gy.ndim == 4 else incoming
        if x.dtype.kind == "f":
            given.requires_grad_()
        params = dict(own.named_parameters())
        wanted = [*((given,) if x.dtype.kind == "f" else ()), *(params[name] for name in names)]

        def run() -> list[Any]:
            y = own(given, given, given, need_weights=False) if case.name == "MultiheadAttention" else own(given)
            return [_first(y), *torch.autograd.grad(_first(y), wanted, incoming)]

        return run

    plain = side(None)
    results = tuple(array.detach().numpy().copy() for array in plain())
    if len(case.shape) != 4 or case.name in ("Flatten", "Unflatten"):
        return {"torch": plain}, results
    return {"torch": plain, "channels_last": side(torch.channels_last)}, results


def _targets(case: Case) -> Arrays:
    """Return prediction and target, or three arrays of vectors."""
    rng = np.random.default_rng(0)
    x, other, third = rng.standard_normal((3, *case.shape), np.float32)
    if case.name == "TripletMarginLoss":
        return x, other, third
    if case.name in ("CrossEntropyLoss", "NLLLoss"):
        return x, rng.integers(case.shape[1], size=case.shape[0])
    if case.name in ("BCEWithLogitsLoss", "KLDivLoss"):
        return x, rng.random(case.shape, np.float32)
    return x, other


def our_loss(loss: Any, case: Case) -> tuple[Side, Arrays]:
    """Return a loss and its gradient by ours, and what they are."""
    arrays = _targets(case)

    def run() -> tuple[Any, Any]:
        value, saved = loss.forward(*arrays)
        return value, loss.input_grad(saved)

    value, grads = run()
    return run, (np.asarray(value, np.float32), *(grads if isinstance(grads, tuple) else (grads,)))


def torch_loss(_: Any, case: Case) -> tuple[dict[str, Side], Arrays]:
    """Return the same by PyTorch."""
    torch = harness.import_torch()
    loss, arrays = getattr(torch.nn, case.name)(), [torch.from_numpy(array) for array in _targets(case)]
    wanted = arrays if case.name == "TripletMarginLoss" else arrays[:1]
    for array in wanted:
        array.requires_grad_()

    def run() -> list[Any]:
        value = loss(*arrays)
        return [value, *torch.autograd.grad(value, wanted)]

    return {"torch": run}, tuple(array.detach().numpy().copy() for array in run())


LAYERS = Benchmark(
    name="layers",
    title="Forward and backward of every layer and loss that torch.nn has too: float32, CPU",
    leaves_out="nothing; a run is a forward, the gradient at the input, and those at the weights",
    settings={"target": TARGET, "dtype": "float32"},
    rounds={"rounds": 9, "least_rounds": 5, "budget": 2.0},
    threads=(1,),
    measure=measure_layers,
    columns=columns(
        words={"layer": "layer", "input": "input"},
        seconds={"torch": "torch", "channels_last": "torch, channels last"},
        times={
            "torch_ratio": "over torch", "channels_last_ratio": "over channels last", "best_ratio": "over the faster",
        },
    ),
    short=("layer", "input", "ours", "torch", "channels_last", "best_ratio", "target", "met"),
    in_short=lambda row: row["met"] != "met" or row["layer"] in FEW,
    overview=Overview(task="A layer, forward and backward", peer="PyTorch, its faster layout", ratio="best_ratio",
                      label="{layer}", page="layers.md"),
    picture=harness.bars("{layer}, {input}", {"best_ratio": "over PyTorch, its faster layout"}, harness.SPEED_UP,
                         (harness.TORCH,), line=1.0),
)  # fmt: skip
