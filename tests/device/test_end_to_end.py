"""What a user does on a GPU, from end to end, next to PyTorch in float64 on the host or to the host's own results.

Each test records by how much results differ at worst. Sizes are those of a user on a GPU, and small on the stand-in.
PyTorch's tensors are on the GPU too; on the stand-in, CPU tensors are taken for such (`strict_cupy.tensors`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import sparsebp as sb
import sparsebp.torch as st
import strict_cupy
from backends import make_backend, needs_numba
from benchmarks.workloads import torch_twin
from matrices import csr, dense, disjoint, of_blocks, of_runs, random_pattern
from sparsebp import SparsityPattern, models, nn, optim
from sparsebp.core.backend import to_device, to_host
from sparsebp.interop import torch as bridge
from sparsebp.torch.rule import way_of
from sparsebp.train import Callback, Trainer
from torch_twins import loaded, recurrent_twin

pytestmark = pytest.mark.gpu

STANDIN = strict_cupy.installed()
F8 = {"dtype": np.float64}
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
real_gpu = pytest.mark.real_gpu


def sized(full: int, small: int) -> int:
    """Return a size: on a GPU, on the stand-in."""
    return small if STANDIN else full


@pytest.fixture(autouse=True)
def cupy() -> Any:
    return make_backend("gpu").xp


@pytest.fixture
def hold(record_property: Any) -> Callable[[float, float], None]:
    """``hold(worst, limit)`` records the worst difference and asserts that it is within its limit."""

    def hold(worst: float, limit: float) -> None:
        record_property("worst", float(worst))
        assert worst <= limit

    return hold


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def classes(count: int, batch: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, count, batch)


def values(array: Any) -> np.ndarray:
    """Return an array of any library and device as NumPy's."""
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(to_host(array))


def relative(got: Any, want: Any, floor: float = 1e-30) -> float:
    """Return the norm of the difference by that of `want`, or by `floor` if that is larger."""
    got, want = values(got), values(want)
    assert got.shape == want.shape
    return float(np.linalg.norm((got - want).ravel()) / max(float(np.linalg.norm(want.ravel())), floor))


def worst_of(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """Return the largest relative difference; what is tiny beside all others is compared with a thousandth of them.

    A bias before a batch normalization has a gradient of rounding alone.
    """
    assert got.keys() == want.keys() and got
    floor = 1e-3 * max(float(np.linalg.norm(values(array).ravel())) for array in want.values())
    return max(relative(got[name], want[name], floor) for name in want)


# ---- training: losses of five steps of Adam, and the first gradients -------------------------------------------------


class Classifier(torch.nn.Module):
    """The twin of `SequenceClassifier`."""

    def __init__(self, rnn: torch.nn.Module, head: torch.nn.Linear) -> None:
        super().__init__()
        self.rnn, self.head = rnn, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.rnn(x)[1]
        last = last[0] if isinstance(last, tuple) else last
        directions = self.head.in_features // last.shape[2]
        return self.head(torch.cat(list(last[-directions:]), 1))


class Minimal(torch.nn.Module):
    """The twins of `MinGRU` and `MinLSTM`, of one layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        rows, features = layer.params["weight_ih_l0"].shape
        self.weight_ih_l0 = torch.nn.Parameter(torch.empty(rows, features))
        self.bias_ih_l0 = torch.nn.Parameter(torch.empty(rows))
        self.gates, self.hidden = rows // layer.hidden_size, layer.hidden_size

    def forward(self, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        *gates, v = (x @ self.weight_ih_l0.T + self.bias_ih_l0).split(self.hidden, 2)
        gates = [gate.sigmoid() for gate in gates]
        z = gates[0] / sum(gates) if len(gates) == 2 else gates[0]
        h = x.new_zeros(x.shape[1], self.hidden)
        for z_t, v_t in zip(z, v, strict=True):
            h = (1 - z_t) * h + z_t * v_t
        return None, h[None]


def classifier(kind: str, hidden: int, **options: Any) -> Callable[[Any], nn.SequenceClassifier]:
    directions = 1 + options.get("bidirectional", False)

    def make(dtype: Any) -> nn.SequenceClassifier:
        rnn = getattr(nn, kind)(38, hidden, dtype=dtype, rng=0, **options)
        return nn.SequenceClassifier(rnn, nn.Linear(directions * hidden, 10, dtype=dtype, rng=1))

    return make


DEEP = {"num_layers": 2, "bidirectional": True}
CELLS = ("RNN", "GRU", "LSTM")
STEPS, BATCH = sized(60, 9), sized(6, 2)
SEQUENCES, IMAGES = (STEPS, BATCH, 38), (4, 3, sized(32, 16), sized(32, 16))
SMALL: dict[str, Any] = {"width": 0.125} if STANDIN else {}
NETWORKS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    **{kind: (classifier(kind, 20), SEQUENCES) for kind in CELLS},
    **{f"{kind}, 2 layers, both ways": (classifier(kind, 70, **DEEP), SEQUENCES) for kind in CELLS},
    **{kind: (classifier(kind, 24), SEQUENCES) for kind in ("MinGRU", "MinLSTM")},
    "LeNet-5": (lambda dtype: models.lenet5(dtype=dtype, rng=0), (4, 1, 28, 28)),
    "VGG-11": (lambda dtype: models.vgg11(dtype=dtype, rng=0, **SMALL), (4, 3, 32, 32)),
    "MobileNetV2": (lambda dtype: models.mobilenetv2(dtype=dtype, rng=0, stages=sized(7, 2), **SMALL), IMAGES),
    "DenseNet": (lambda dtype: models.densenet(dtype=dtype, rng=0, depth=sized(40, 10), growth=sized(12, 4)), IMAGES),
}
"""Of each network, what makes it and the shape of its input."""


def twin_of(model: Any) -> torch.nn.Module:
    """Return the network in PyTorch, on the host in float64."""
    if not isinstance(model, nn.SequenceClassifier):
        return torch_twin(model).double()
    rnn = model.rnn
    twin = loaded(Minimal(rnn), rnn) if isinstance(rnn, (nn.MinGRU, nn.MinLSTM)) else recurrent_twin(rnn)
    return Classifier(twin, loaded(torch.nn.Linear(*model.head.params["weight"].shape[::-1]), model.head)).double()


def trained(model: Any, x: Any, target: Any, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Return the losses, and the first gradients."""
    run, adam = sb.value_and_grad(model, nn.CrossEntropyLoss()), optim.Adam(model.parameters(), lr=1e-3)
    losses, first = [], {}
    for _ in range(steps):
        loss, grads = run(x, target)
        first = first or {name: values(grad).copy() for name, grad in grads.items()}
        adam.step(grads)
        losses.append(float(loss))
    return losses, first


def trained_in_torch(module: torch.nn.Module, x: np.ndarray, target: np.ndarray, steps: int) -> Any:
    adam, losses, first = torch.optim.Adam(module.parameters(), lr=1e-3), [], {}
    for _ in range(steps):
        adam.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        first = first or {name: values(p.grad).copy() for name, p in module.named_parameters()}
        adam.step()
        losses.append(loss.item())
    return losses, first


# On the stand-in, images in float64 alone: float32 differs there by the CPU's rounding.
TRAININGS = {
    f"{name}-{dtype}": (name, np.dtype(dtype)) for name, (_, shape) in NETWORKS.items()
    for dtype in (("float64", "float32") if len(shape) == 3 or not STANDIN else ("float64",))
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), TRAININGS.values(), ids=TRAININGS)
def test_training_is_pytorchs(name: str, dtype: Any, hold: Any, record_property: Any) -> None:
    make, shape = NETWORKS[name]
    x, target, steps = normal(*shape), classes(10, shape[0 if len(shape) == 4 else 1]), sized(5, 2)
    model = make(dtype)
    want_losses, want = trained_in_torch(twin_of(model), x, target, steps)
    losses, first = trained(model.to("cuda"), to_device(x.astype(dtype), "cuda"), to_device(target, "cuda"), steps)
    differ = max(abs(a - b) for a, b in zip(losses, want_losses, strict=True))
    record_property("worst loss", differ)
    if dtype == np.float64 or len(shape) == 3:
        assert differ <= (1e-7 if dtype == np.float64 else 1e-4)
        hold(worst_of(first, want), 1e-8 if dtype == np.float64 else 1e-4)
        return
    # In float32 a ReLU next to its kink may be on where it is off in float64: PyTorch's float32 differs as much.
    assert differ <= 5e-2
    got, wanted = (np.concatenate([grads[name].ravel() for name in want]) for grads in (first, want))
    hold(relative(got, wanted), 3e-2)


@pytest.mark.parametrize("backward", ["blelloch", "chunked", "linear", "hybrid"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_backward_gives_the_gradients_of_backpropagation(cell: str, backward: str, hold: Any) -> None:
    if cell == "LSTM" and backward != "chunked":
        needs_numba("products of its Jacobians are planned with it, on the host")
    x, target = to_device(normal(sized(64, 8), 5, 7), "cuda"), to_device(classes(10, 5), "cuda")
    grads = []
    for algorithm in ("bp", backward):
        rnn = getattr(nn, cell)(7, 12, backward=algorithm, rng=0, **F8)
        model = nn.SequenceClassifier(rnn, nn.Linear(12, 10, rng=1, **F8)).to("cuda")
        grads.append(trained(model, x, target, 1)[1])
    hold(worst_of(grads[1], grads[0]), 1e-10)


# ---- layers and losses that `test_layers_on_device` does not have ----------------------------------------------------

ON_IMAGES, ON_LINES, ON_VOLUMES = (3, 4, 6, 5), (3, 4, 9), (2, 4, 5, 6, 4)
LAYERS: dict[str, tuple[Callable[[], Any], Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "SELU": (nn.SELU, torch.nn.SELU, ON_IMAGES),
    "ReLU6": (nn.ReLU6, torch.nn.ReLU6, ON_IMAGES),
    "Softmax": (lambda: nn.Softmax(1), lambda: torch.nn.Softmax(1), ON_IMAGES),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4, **F8), lambda: torch.nn.BatchNorm1d(4), ON_LINES),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4, **F8), lambda: torch.nn.BatchNorm2d(4), ON_IMAGES),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4, **F8), lambda: torch.nn.BatchNorm3d(4), ON_VOLUMES),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4), lambda: torch.nn.InstanceNorm1d(4), ON_LINES),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4), lambda: torch.nn.InstanceNorm3d(4), ON_VOLUMES),
    "MaxPool1d": (lambda: nn.MaxPool1d(3, 2, 1), lambda: torch.nn.MaxPool1d(3, 2, 1), ON_LINES),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1), lambda: torch.nn.AvgPool1d(3, 2, 1), ON_LINES),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(4), lambda: torch.nn.AdaptiveAvgPool1d(4), ON_LINES),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(4), lambda: torch.nn.AdaptiveMaxPool1d(4), ON_LINES),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(3), lambda: torch.nn.AdaptiveAvgPool3d(3), ON_VOLUMES),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(3), lambda: torch.nn.AdaptiveMaxPool3d(3), ON_VOLUMES),
    "linear": (
        lambda: nn.Upsample(scale_factor=1.5, mode="linear"), lambda: torch.nn.Upsample(None, 1.5, "linear"), ON_LINES
    ),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, 2, 1, rng=0, **F8), lambda: torch.nn.Conv1d(4, 6, 3, 2, 1), ON_LINES),
    "Conv3d": (lambda: nn.Conv3d(4, 3, 3, 1, 1, rng=0, **F8), lambda: torch.nn.Conv3d(4, 3, 3, 1, 1), ON_VOLUMES),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(4, 2, 3, 2, rng=0, **F8), lambda: torch.nn.ConvTranspose1d(4, 2, 3, 2), ON_LINES
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(4, 2, 2, 2, rng=0, **F8), lambda: torch.nn.ConvTranspose3d(4, 2, 2, 2), ON_VOLUMES
    ),
}  # fmt: skip
"""Of each layer: ours, PyTorch's, and the shape of the input."""


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, hold: Any) -> None:
    make, make_twin, shape = LAYERS[name]
    layer = make()
    twin, tx = make_twin().double(), torch.from_numpy(normal(*shape)).requires_grad_()
    state = {key: torch.from_numpy(np.array(array)) for key, array in layer.state_dict().items()}
    twin.load_state_dict(state)
    want = twin(tx)
    gy = normal(*want.shape, seed=1)
    want.backward(torch.from_numpy(gy))
    layer = layer.to("cuda")
    y, saved = layer.forward(to_device(normal(*shape), "cuda"))
    g = layer.gradients(to_device(gy, "cuda"), saved)
    got = {"y": y, "gx": g.input_grad(), **g.weight_grad()}
    got |= {f"of {key}": array for key, array in layer.state_dict().items()}  # running statistics among them
    expected = {"y": want, "gx": tx.grad} | {key: p.grad for key, p in twin.named_parameters()}
    hold(worst_of(got, expected | {f"of {key}": array for key, array in twin.state_dict().items()}), 1e-11)


@pytest.mark.parametrize("name", ["Dropout", "Dropout2d"])
def test_dropout_keeps_what_it_says(name: str, hold: Any) -> None:
    """Random numbers are the device's: scaled, as many as asked for, of whole channels; the gradient has the same."""
    shape, p = (sized(64, 20), sized(200, 30), 3, 2), 0.3
    layer = getattr(nn, name)(p, rng=0).to("cuda")
    y, saved = layer.forward(to_device(np.ones(shape), "cuda"))
    assert (values(layer.input_grad(to_device(np.ones(shape), "cuda"), saved)) == values(y)).all()
    drawn = values(y) if name == "Dropout" else values(y)[..., 0, 0]
    assert (values(y) == (drawn if name == "Dropout" else drawn[..., None, None])).all()
    np.testing.assert_allclose(np.unique(values(y)), [0, 1 / (1 - p)])
    hold(abs(float((drawn == 0).mean()) - p) / np.sqrt(p * (1 - p) / drawn.size), 5)  # standard deviations
    again = values(layer.forward(to_device(np.ones(shape), "cuda"))[0])
    assert (again != values(y)).any()
    assert (values(layer.eval().forward(to_device(np.ones(shape), "cuda"))[0]) == 1).all()


LOSSES: dict[str, tuple[dict[str, Any], Callable[[], tuple[np.ndarray, ...]]]] = {  # options, prediction and targets
    "BCEWithLogitsLoss": ({}, lambda: (normal(7, 5), np.random.default_rng(0).random((7, 5)))),
    "CrossEntropyLoss": ({"label_smoothing": 0.1, "ignore_index": 2}, lambda: (normal(7, 5), classes(5, 7))),
    "HuberLoss": ({"delta": 0.7}, lambda: (normal(7, 5), normal(7, 5, seed=1))),
    "KLDivLoss": ({"log_target": True}, lambda: (normal(7, 5), normal(7, 5, seed=1))),
    "L1Loss": ({}, lambda: (normal(7, 5), normal(7, 5, seed=1))),
    "MSELoss": ({}, lambda: (normal(7, 5), normal(7, 5, seed=1))),
    "NLLLoss": ({}, lambda: (normal(7, 5), classes(5, 7))),
    "SmoothL1Loss": ({"beta": 0.5}, lambda: (normal(7, 5), normal(7, 5, seed=1))),
    "TripletMarginLoss": ({}, lambda: (normal(7, 5), normal(7, 5, seed=1), normal(7, 5, seed=2))),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, reduction: str, hold: Any) -> None:
    options, make = LOSSES[name]
    arrays = make()
    tensors = [torch.from_numpy(array) for array in arrays]
    tensors[0].requires_grad_()
    want = getattr(torch.nn, name)(reduction=reduction, **options)(*tensors)
    want.backward()
    loss = getattr(nn, name)(reduction=reduction, **options)
    value, saved = loss.forward(*(to_device(array, "cuda") for array in arrays))
    grad = loss.input_grad(saved)
    grad = grad[0] if isinstance(grad, tuple) else grad
    hold(max(abs(float(value) - want.item()), relative(grad, tensors[0].grad)), 1e-11)


@pytest.mark.parametrize("kind", ["RNNCell", "GRUCell", "LSTMCell"])
def test_cells(kind: str, hold: Any) -> None:
    cell, x = getattr(nn, kind)(9, 20, rng=0, **F8), normal(5, 9)
    twin, tx = loaded(getattr(torch.nn, kind)(9, 20), cell), torch.from_numpy(x).requires_grad_()
    lstm = kind == "LSTMCell"
    starts = [normal(5, 20, seed=seed) for seed in (1, 2)[: 1 + lstm]]
    th = [torch.from_numpy(start).requires_grad_() for start in starts]
    want = twin(tx, tuple(th) if lstm else th[0])
    want = want[0] if lstm else want
    want.backward(torch.from_numpy(normal(5, 20, seed=3)))
    cell = cell.to("cuda")
    sent = [to_device(start, "cuda") for start in starts]
    h, saved = cell.forward(to_device(x, "cuda"), tuple(sent) if lstm else sent[0])
    g = cell.gradients(to_device(normal(5, 20, seed=3), "cuda"), saved)
    got = {"h": h, "gx": g.input, "gh": g.hidden, **g.weights}
    expected = {"h": want, "gx": tx.grad, "gh": th[0].grad}
    hold(worst_of(got, expected | {name: p.grad for name, p in twin.named_parameters()}), 1e-11)


# ---- linear recurrences and selective scans --------------------------------------------------------------------------


def valid(steps: int, lengths: list[int] | None) -> torch.Tensor:
    """Return (T, B or 1, 1): whether a step is before its sample's end."""
    return torch.arange(steps)[:, None, None] < torch.tensor([steps] if lengths is None else lengths)[:, None]


def recurrence(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor, mask: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Return ``h[t] = a[t] h[t-1] + b[t]`` where the mask is true, and zero elsewhere."""
    states: list[Any] = [None] * len(b)
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        h = torch.where(mask[t], a[t] * h + b[t], h)
        states[t] = torch.where(mask[t], h, 0.0)
    return torch.stack(states)


def in_torch(function: Callable[..., torch.Tensor], arrays: tuple[np.ndarray, ...], gy: np.ndarray) -> list[Any]:
    """Return what the function gives, and the gradients at its arguments."""
    tensors = [torch.from_numpy(array).requires_grad_() for array in arrays]
    y = function(*tensors)
    return [y, *torch.autograd.grad(y, tensors, torch.from_numpy(gy))]


def hold_all(hold: Any, got: Any, want: Any, limit: float) -> None:
    hold(worst_of(dict(enumerate(got)), dict(enumerate(want))), limit)


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_linear_recurrence(reverse: bool, ragged: bool, hold: Any) -> None:
    steps, shape = sized(700, 70), (sized(700, 70), 3, sized(40, 5))
    lengths = [steps, 1, steps // 2] if ragged else None
    arrays = 1 / (1 + np.exp(-normal(*shape))), normal(*shape, seed=1), normal(*shape[1:])
    gy, mask = normal(*shape, seed=2), valid(steps, lengths)
    a, b, h0, sent = (to_device(array, "cuda") for array in (*arrays, gy))
    h = sb.linear_recurrence(a, b, h0, reverse=reverse, lengths=lengths)
    grads = sb.linear_recurrence_vjp(a, h, sent, h0, reverse=reverse, lengths=lengths)
    hold_all(hold, [h, *grads], in_torch(lambda *given: recurrence(*given, mask, reverse), arrays, gy), 1e-11)


def selective(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, mask: Any = None) -> torch.Tensor:
    """Return what `selective_scan` does."""
    mask = valid(len(x), None)[..., None] if mask is None else mask[..., None]
    terms = (dt * x)[..., None] * b[:, :, None]
    h = recurrence(torch.exp(dt[..., None] * a), terms, torch.zeros_like(terms[0]), mask, False)
    return (h * c[:, :, None]).sum(-1) + d * x * mask[..., 0]


def test_selective_scan(hold: Any) -> None:
    steps, batch, width, states = sized(200, 37), sized(3, 2), sized(40, 3), sized(16, 4)
    shape = steps, batch, width
    arrays = (
        normal(*shape), np.log1p(np.exp(normal(*shape, seed=1) - 3)), -np.exp(normal(width, states)),
        normal(steps, batch, states), normal(steps, batch, states, seed=1), normal(width),
    )  # fmt: skip
    gy, there = normal(*shape, seed=3), [to_device(array, "cuda") for array in arrays]
    y, kept = sb.selective_scan(*there)
    grads = sb.selective_scan_vjp(*there, kept, to_device(gy, "cuda"))
    hold_all(hold, [y, *grads[:6]], in_torch(selective, arrays, gy), 1e-10)


def test_a_selective_layer_with_lengths(hold: Any) -> None:
    steps, width, states = sized(100, 11), sized(48, 6), 8
    layer, x, lengths = nn.SelectiveScan(width, states, rng=0, **F8), normal(steps, 3, width), [steps, 1, steps // 2]
    named = {name: np.array(array) for name, array in layer.params.items()}

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        p = dict(zip(named, parameters, strict=True))
        rows = x @ p["x_proj.weight"].T
        r, b, c = rows.split([rows.shape[2] - 2 * states, states, states], 2)
        dt = torch.nn.functional.softplus(r @ p["dt_proj.weight"].T + p["dt_proj.bias"])
        return selective(x, dt, -torch.exp(p["A_log"]), b, c, p["D"], valid(steps, lengths))

    layer = layer.to("cuda")
    y, saved = layer.forward(to_device(x, "cuda"), lengths=lengths)
    gy = normal(*y.shape, seed=1)
    g = layer.gradients(to_device(gy, "cuda"), saved)
    weights = g.weight_grad()
    got = [y, g.input_grad(), *(weights[name] for name in named)]
    hold_all(hold, got, in_torch(run, (x, *named.values()), gy), 1e-10)


# ---- sparse products and Jacobians -----------------------------------------------------------------------------------

N = sized(300, 30)
PRODUCTS: dict[str, Callable[[], tuple[SparsityPattern, SparsityPattern]]] = {
    "pairs": lambda: (random_pattern(30, 40, 0.2), random_pattern(40, 20, 0.2, 1)),
    "positions": lambda: (random_pattern(N, 40, 0.2), random_pattern(40, 90, 0.5, 1)),
    "scale_columns": lambda: (random_pattern(N, 40, 0.2), SparsityPattern.diagonal(40)),
    "scale_rows": lambda: (SparsityPattern.diagonal(N), random_pattern(N, 40, 0.2)),
    "dense": lambda: (SparsityPattern.dense(N, 40), SparsityPattern.dense(40, 50)),
    "select_rows": lambda: (
        SparsityPattern(np.arange(41), np.arange(40) // 4, (40, 10)), random_pattern(10, 20, 0.4)
    ),
    "select_columns": lambda: (
        random_pattern(9, 40, 0.4), SparsityPattern(np.arange(41), np.arange(40) // 4, (40, 10))
    ),
    "runs": lambda: (random_pattern(30, 40, 0.2), of_runs(40, 20)),
    "blocks": lambda: (of_blocks(30, 40, 3, 3), of_blocks(40, 50, 3, 2)),
    "gather": lambda: (random_pattern(30, 40, 0.2), disjoint(40)),
    **({} if STANDIN else {"filled": lambda: (random_pattern(270, 280, 0.4), random_pattern(280, 290, 0.4, 1))}),
}  # fmt: skip
"""Of each strategy, two patterns whose product it computes."""


@pytest.mark.parametrize("strategy", PRODUCTS)
def test_products_are_scipys(strategy: str, hold: Any) -> None:
    """One matrix, and batches of several sizes; the gradients too."""
    needs_numba("products are planned with it, on the host")
    a, b = PRODUCTS[strategy]()
    plan = sb.plan_product(a, b)
    assert plan.strategy == strategy
    differ = []
    for batch in (None, 1, 3) if STANDIN else (None, 1, 8, 33):
        x, y, gc = (
            normal(p.nnz, *([] if batch is None else [batch]), seed=s) for s, p in enumerate((a, b, plan.pattern))
        )
        there = [to_device(array, "cuda") for array in (x, y, gc)]
        c = values(plan(*there[:2]))
        for sample in range(batch or 1):
            one = [v if batch is None else v[:, sample] for v in (x, y, c)]
            differ.append(abs(csr(plan.pattern, one[2]) - csr(a, one[0]) @ csr(b, one[1])).max())
        full_a, full_b, full_c = (dense(p, v, batch) for p, v in ((a, x), (b, y), (plan.pattern, gc)))
        at_a = (full_c @ full_b.swapaxes(-1, -2))[..., a.row_of_entry, a.indices].T
        at_b = (full_a.swapaxes(-1, -2) @ full_c)[..., b.row_of_entry, b.indices].T
        differ.append(relative(plan.gradients.at_a(there[2], there[1]), at_a))
        differ.append(relative(plan.gradients.at_b(there[0], there[2]), at_b))
    hold(max(differ), 1e-11)


@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("strategy", sorted({"positions", "filled", "select_columns", "pairs", "runs"} & {*PRODUCTS}))
def test_products_repeat_bit_by_bit(strategy: str, batch: int, hold: Any) -> None:
    """Lanes of a warp add to the same numbers, ordered by ``__syncwarp`` alone."""
    needs_numba("products are planned with it, on the host")
    a, b = PRODUCTS[strategy]()
    plan = sb.plan_product(a, b)
    x, y = (to_device(normal(p.nnz, batch, dtype=np.float32), "cuda") for p in (a, b))
    first = values(plan(x, y))
    hold(sum(not np.array_equal(values(plan(x, y)), first) for _ in range(sized(50, 2))), 0)


@pytest.mark.parametrize("name", ["Conv2d", "ReLU", "MaxPool2d"])
def test_transposed_jacobians(name: str, hold: Any) -> None:
    """Each sample's Jacobian is `torch.func.jacrev`'s."""
    ours = {"Conv2d": nn.Conv2d(3, 4, 3, padding=1, rng=0, **F8), "ReLU": nn.ReLU(), "MaxPool2d": nn.MaxPool2d(2)}[name]
    twin = torch_twin(nn.Sequential(ours)).double()
    x = normal(2, 3, sized(8, 6), 6)
    found = sb.jacobian_t(ours.to("cuda"), to_device(x, "cuda"))
    wanted = torch.func.vmap(torch.func.jacrev(lambda sample: twin(sample[None])[0].flatten()))(torch.from_numpy(x))
    want = wanted.flatten(2).detach().numpy()
    hold(max(relative(found.to_dense(b), want[b].T) for b in range(2)), 1e-12)


# ---- the whole loop: captured steps, checkpoints, streams ------------------------------------------------------------

SAMPLES = normal(64, sized(50, 6), 7, dtype=np.float32), classes(4, 64)


def trainer(device: str, **options: Any) -> Trainer:
    rnn = nn.GRU(7, 12, batch_first=True, rng=0)
    model = nn.SequenceClassifier(rnn, nn.Linear(12, 4, rng=1)).to(device)
    return Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters(), lr=1e-2), rng=2, **options)


def weights(made: Trainer) -> dict[str, np.ndarray]:
    return {name: values(array).copy() for name, array in made.model.state_dict().items()}


def test_captured_and_launched_trainings_agree(hold: Any) -> None:
    found, said = [], []

    class Told(Callback):
        def on_start(self, info: Any) -> None:
            said.append(info.graph)

    for graph in (False, True):
        made = trainer("cuda", graph=graph, callbacks=[Told()])
        made.fit(SAMPLES, epochs=3, batch_size=16, verbose=False)
        found.append(weights(made))
    assert said == [None, "Steps are captured into a CUDA graph"]
    hold(worst_of(found[1], found[0]), 1e-5)


def test_a_checkpoint_of_the_device_resumes_there_and_loads_on_the_host(tmp_path: Any, hold: Any) -> None:
    """Bit by bit as if it had not stopped."""

    def fit(device: str, epochs: int, resume: bool = False, **options: Any) -> dict[str, np.ndarray]:
        made = trainer(device, graph=False, **options)
        made.fit(SAMPLES, epochs=epochs, batch_size=16, resume=resume, verbose=False)
        return weights(made)

    whole = fit("cuda", 3)
    first = fit("cuda", 2, checkpoint_dir=tmp_path)
    on_host = fit("cpu", 2, resume=True, checkpoint_dir=tmp_path)
    resumed = fit("cuda", 3, resume=True, checkpoint_dir=tmp_path)
    assert all((whole[name] != first[name]).any() for name in whole)
    pairs = [(on_host[name], first[name]) for name in whole] + [(resumed[name], whole[name]) for name in whole]
    hold(max(float(np.abs(a - b).max()) for a, b in pairs), 0)


def test_two_streams_give_the_bits_of_one(cupy: Any, hold: Any) -> None:
    """Steps in turn on two streams, each with a model of its own; memory and handles of streams do not mix."""
    steps, x, target = sized(200, 4), SAMPLES[0][:16].swapaxes(0, 1).copy(), SAMPLES[1][:16]

    def made() -> Any:
        model = nn.SequenceClassifier(nn.GRU(7, 12, rng=0), nn.Linear(12, 4, rng=1)).to("cuda")
        return model, sb.value_and_grad(model, nn.CrossEntropyLoss()), optim.Adam(model.parameters(), lr=1e-2)

    sent = to_device(x, "cuda"), to_device(target, "cuda")
    cupy.cuda.Device().synchronize()
    alone = made()
    for _ in range(steps):
        alone[2].step(alone[1](*sent)[1])
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    runs = []
    for stream in streams:
        with stream:
            runs.append(made())
    for _ in range(steps):
        for stream, (_, run, adam) in zip(streams, runs, strict=True):
            with stream:
                adam.step(run(*sent)[1])
    for stream in streams:
        stream.synchronize()
    want = {name: values(array) for name, array in alone[0].state_dict().items()}
    hold(max(float(abs(values(array) - want[name]).max())
             for model, *_ in runs for name, array in model.state_dict().items()), 0)  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("cell", CELLS)
def test_chunked_recurrences_repeat_bit_by_bit(cell: str, batch: int, hold: Any) -> None:
    layer = getattr(nn, cell)(7, sized(32, 5), backward="chunked", rng=0).to("cuda")
    x = to_device(normal(sized(300, 20), batch, 7, dtype=np.float32), "cuda")

    def grads() -> dict[str, np.ndarray]:
        y, saved = layer.forward(x)
        g = layer.gradients(y, saved)
        return {"y": values(y), "gx": values(g.input), **{name: values(grad) for name, grad in g.weights.items()}}

    first = grads()
    hold(sum(any(not np.array_equal(again[name], first[name]) for name in first)
             for again in (grads() for _ in range(sized(50, 2)))), 0)  # fmt: skip


@pytest.mark.parametrize("options", [{}, DEEP], ids=["one layer", "2 layers, both ways"])
@pytest.mark.parametrize("cell", CELLS)
def test_lengths_are_packed_sequences(cell: str, options: dict[str, Any], hold: Any) -> None:
    """Next to PyTorch's packed sequences; what is behind a sample's end has no influence."""
    steps, hidden = sized(80, 7), sized(33, 5)
    layer, x = getattr(nn, cell)(6, hidden, rng=0, **options, **F8), normal(steps, 4, 6)
    twin, tx = recurrent_twin(layer), torch.from_numpy(x).requires_grad_()
    lengths = torch.tensor([steps, 1, steps // 2, steps])
    packed = torch.nn.utils.rnn.pack_padded_sequence(tx, lengths, enforce_sorted=False)
    want, _ = torch.nn.utils.rnn.pad_packed_sequence(twin(packed)[0], total_length=steps)
    gy = normal(*want.shape, seed=1)
    want.backward(torch.from_numpy(gy))
    layer, sent = layer.to("cuda"), x.copy()
    sent[1:, 1] = np.nan
    y, saved = layer.forward(to_device(sent, "cuda"), lengths=lengths.numpy())
    g = layer.gradients(to_device(gy, "cuda"), saved)
    expected = {"y": want, "gx": tx.grad} | {name: p.grad for name, p in twin.named_parameters()}
    hold(worst_of({"y": y, "gx": g.input, **g.weights}, expected), 1e-11)


# ---- PyTorch on the same device --------------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch: Any) -> Iterator[str]:
    """Where PyTorch's tensors are: the GPU, with all bits of float32."""
    if STANDIN:
        from strict_cupy.tensors import on_the_device

        with on_the_device():
            yield "cpu"
        return
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    yield "cuda"


def step(module: Any, x: Any, **call: Any) -> dict[str, Any]:
    """Return the output, the state and all gradients of one call."""
    module.zero_grad()
    y, state = module(x, **call)
    y = y.data if isinstance(y, torch.nn.utils.rnn.PackedSequence) else y
    states = state if isinstance(state, tuple) else (state,)
    ((y * y).sum() + sum((part**3).sum() for part in states)).backward()
    found = {"y": y} | {f"state {i}": part for i, part in enumerate(states)}
    found |= {name: p.grad for name, p in module.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.mark.parametrize("hidden", [5] if STANDIN else [20, 64, 200])
@pytest.mark.parametrize("layout", ["padded", "packed", "one step", "2 layers, both ways", "packed, 2 layers"])
@pytest.mark.parametrize("kind", CELLS)
def test_accelerated_modules_are_cudnns(kind: str, layout: str, hidden: int, place: str, hold: Any) -> None:
    steps, batch = 1 if layout == "one step" else sized(100, 6), sized(8, 3)
    module = getattr(torch.nn, kind)(38, hidden, **(DEEP if "layers" in layout else {})).to(place)
    x: Any = torch.randn(steps, batch, 38, device=place)
    if "packed" in layout:
        lengths = torch.arange(batch) * (steps - 1) // batch + 1
        x = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    want = step(module, x)
    st.accelerate(module, faster_only=False)
    counts = strict_cupy.counted() if STANDIN else contextlib.nullcontext()
    with counts as seen:
        got = step(module, x)
    assert not STANDIN or seen.ours > 0
    hold(worst_of(got, want), 1e-4)


def test_accelerated_modules_take_turns_with_pytorch_on_another_stream(place: str, hold: Any) -> None:
    """PyTorch makes the input, ours reads it, PyTorch reads the output: on whatever stream is PyTorch's."""
    module = st.accelerate(torch.nn.GRU(38, sized(64, 5)).to(place), faster_only=False)
    x = torch.randn(sized(100, 6), 4, 38, device=place)
    want = step(module, x * 2)
    streams = [torch.cuda.Stream() for _ in range(2)] if not STANDIN else [None, None]
    found = []
    for number in range(sized(20, 2)):
        stream = streams[number % 2]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(step(module, x * 2))
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
    hold(max(worst_of(got, want) for got in found), 1e-5)


def test_accelerate_runs_the_kernels_in_a_graph(place: str, hold: Any) -> None:
    """Calls in a side stream, as before a capture, load what is captured; the stand-in's stream is always such."""
    module = torch.nn.RNN(38, sized(20, 5)).to(place)
    x, other = (torch.randn(steps, 16, 38, device=place) for steps in (sized(1000, 6), 5))
    want = step(module, x)
    st.accelerate(module)
    side = None if STANDIN else torch.cuda.Stream()
    counts = strict_cupy.counted() if STANDIN else contextlib.nullcontext()
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), counts as seen:
        got = step(module, x)
        assert not STANDIN or seen.ours > 0
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            assert way_of(module, x).ours
            assert "have not run such a call" in way_of(module, other).why
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    hold(worst_of(got, want), 1e-4)


def test_gradcheck_of_the_linear_recurrence(place: str, hold: Any) -> None:
    a = torch.rand(12, 2, 3, dtype=torch.float64, device=place, requires_grad=True)
    b = torch.randn(12, 2, 3, dtype=torch.float64, device=place, requires_grad=True)
    assert torch.autograd.gradcheck(st.linear_recurrence, (a, b))
    h, want = torch.zeros(2, 3, dtype=torch.float64, device=place), []
    for a_t, b_t in zip(a, b, strict=True):
        h = a_t * h + b_t
        want.append(h)
    hold(relative(st.linear_recurrence(a, b), torch.stack(want)), 1e-13)


def dense_of(pattern: SparsityPattern, entries: torch.Tensor) -> torch.Tensor:
    """Return the matrices (B, rows, columns) of entries (B, nnz)."""
    zeros, samples = entries.new_zeros(len(entries), *pattern.shape), torch.arange(len(entries), device=entries.device)
    return zeros.index_put((samples[:, None], *places(pattern, entries)), entries)


def places(pattern: SparsityPattern, like: torch.Tensor) -> list[torch.Tensor]:
    """Return the row and the column of each entry, where `like` is."""
    return [torch.tensor(at, dtype=torch.int64, device=like.device) for at in (pattern.row_of_entry, pattern.indices)]


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "lengths"])
def test_the_minimal_gru_is_the_layer(ragged: bool, place: str, hold: Any) -> None:
    """PyTorch's module and our layer, with the same weights."""
    steps, options = sized(100, 7), {"num_layers": 2, "bidirectional": True}
    layer, module = nn.MinGRU(6, sized(40, 5), rng=0, **options).to("cuda"), st.MinGRU(6, sized(40, 5), **options)
    module = module.to(place)
    bridge.load_into_torch(module, layer)
    lengths = [steps, 1, steps // 2] if ragged else None
    x = torch.randn(steps, 3, 6, device=place)
    want = step(module, x, lengths=lengths)
    y, saved = layer.forward(bridge.from_torch(x), lengths=lengths)
    g = layer.gradients(2 * y, saved, 3 * saved.h_n**2)
    hold(worst_of({"y": y, "state 0": saved.h_n, **g.weights}, want), 1e-5)


@pytest.mark.parametrize("kind", ["GRU", "MinGRU"])
def test_a_batch_of_none(kind: str, place: str, hold: Any) -> None:
    """Arrays without elements have no memory that libraries could exchange."""
    module = getattr(st, kind)(6, 5).to(place)
    y, state = module(torch.randn(4, 0, 6, device=place, requires_grad=True))
    assert (y.shape, state.shape, y.device.type) == ((4, 0, 5), (1, 0, 5), place)
    (y.sum() + state.sum()).backward()
    hold(max(float(p.grad.abs().max()) for p in module.parameters()), 0)


def test_products_of_tensors(place: str, hold: Any) -> None:
    """Forward and backward next to PyTorch's dense product."""
    needs_numba("products are planned with it, on the host")
    n = sized(200, 20)
    patterns = [random_pattern(n, n, 0.05, seed) for seed in (1, 2)]
    plan = st.plan_product(*patterns)
    entries = [torch.randn(4, p.nnz, dtype=torch.float64, device=place, requires_grad=True) for p in patterns]
    c = plan(*entries)
    assert c.device.type == place
    rows, columns = places(plan.pattern, c)
    want = (dense_of(patterns[0], entries[0]) @ dense_of(patterns[1], entries[1]))[:, rows, columns]
    got_grads, want_grads = (torch.autograd.grad((y * y).sum(), entries) for y in (c, want))
    hold(max(relative(c, want), *map(relative, got_grads, want_grads)), 1e-12)


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "chain": (lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)), (6,)),
    "convolution": (lambda: torch.nn.Conv2d(2, 3, 3), (2, 6, 5)),
    "normalization": (lambda: torch.nn.BatchNorm2d(2).eval(), (2, 4, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_jacobians_of_modules(name: str, place: str, hold: Any) -> None:
    """The weights too are read, and copied, on PyTorch's stream."""
    make, shape = MODULES[name]
    module, x = make().double().to(place), torch.randn(3, *shape, dtype=torch.float64, device=place)
    with used_streams() as streams:
        found = st.sparse_jacobian(module, x)
    assert len(streams) <= 1
    want = torch.stack([torch.func.jacrev(lambda one: module(one[None])[0].flatten())(one) for one in x])
    hold(relative(found.to_dense(), want.flatten(2)), 1e-12)


@contextlib.contextmanager
def used_streams() -> Iterator[set[int]]:
    """Note the streams that are given work, other than arrays sent for good (`backend.kept`); on the stand-in."""
    found: set[int] = set()
    if not STANDIN:
        yield found
        return
    from strict_cupy.device import DEVICE

    submit = DEVICE.submit

    def noted(run: Any, stream: int, what: str, *about: Any) -> Any:
        if what not in ("allocation", "h2d"):
            found.add(stream)
        return submit(run, stream, what, *about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DEVICE, "submit", noted)
        yield found


@real_gpu("PyTorch's compiler does not take CPU tensors for a GPU's")
def test_compiled_modules(place: str, hold: Any) -> None:
    """A `st.GRU` stays in one graph; `torch.compile` goes around an accelerated `nn.GRU`."""
    ours = st.GRU(6, sized(40, 5), 2, bidirectional=True).to(place)
    theirs = st.accelerate(torch.nn.GRU(6, 5).to(place), faster_only=False)
    x, differ = torch.randn(sized(50, 6), 3, 6, device=place), []
    for module, options in ((ours, {"fullgraph": True}), (theirs, {})):
        want = step(module, x)
        compiled = torch.compile(lambda x, module=module: module(2 * x), backend="aot_eager", **options)
        y, state = compiled(x / 2)
        differ += [relative(y, want["y"]), relative(state, want["state 0"])]
        module.zero_grad()
        ((y * y).sum() + (state**3).sum()).backward()
        differ += [relative(p.grad, want[name]) for name, p in module.named_parameters()]
    torch._dynamo.reset()
    hold(max(differ), 1e-5)


@real_gpu("PyTorch captures CUDA graphs on a GPU alone")
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "GRU, 2 layers, both ways"])
def test_a_captured_call_gives_what_an_eager_one_does(kind: str, place: str, cupy: Any, hold: Any) -> None:
    """Replayed with other inputs, also after CuPy's pool has been emptied and its memory used for other work."""
    module = getattr(torch.nn, kind.partition(",")[0])(38, 64, **(DEEP if "layers" in kind else {})).to(place)
    st.accelerate(module, faster_only=False)
    inputs = [torch.randn(200, 8, 38, device=place) for _ in range(3)]
    want = [step(module, x) for x in inputs]
    x = inputs[0].clone()
    found: dict[str, torch.Tensor] = {}

    def call() -> None:
        module.zero_grad(set_to_none=True)
        y, state = module(x)
        states = state if isinstance(state, tuple) else (state,)
        ((y * y).sum() + sum((part**3).sum() for part in states)).backward()
        kept = {"y": y} | {f"state {i}": part for i, part in enumerate(states)}
        kept |= {name: p.grad for name, p in module.named_parameters()}
        found.update({name: tensor.detach() for name, tensor in kept.items()})  # no autograd graph of another stream

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    cupy.get_default_memory_pool().free_all_blocks()
    differ = []
    for number in (1, 2, 0):
        x.copy_(inputs[number])
        cupy.full(1 << 20, np.nan)
        graph.replay()
        torch.cuda.synchronize()
        differ.append(worst_of({name: tensor.clone() for name, tensor in found.items()}, want[number]))
    hold(max(differ), 1e-5)


def test_memory_of_a_call_is_pytorchs(place: str, cupy: Any, monkeypatch: Any, hold: Any) -> None:
    """CuPy asks PyTorch for all memory, which a graph that is captured keeps, and gives it back to nobody else."""
    if not STANDIN:
        pytest.skip("on a GPU the captured call itself shows it")
    module = st.accelerate(torch.nn.LSTM(6, 5, 2, bidirectional=True), faster_only=False)
    x = torch.randn(7, 3, 6)
    want = step(module, x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with strict_cupy.counted() as counts:
        got = step(module, x)
        cupy.cuda.Device().synchronize()
    assert counts.ours > 0 and counts.h2d == 0
    assert "allocation" not in {what for what, *_ in counts.log}
    hold(worst_of(got, want), 1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64], ids=lambda dtype: dtype.__name__)
def test_arrays_and_tensors_share_memory(dtype: Any, place: str, cupy: Any, hold: Any) -> None:
    """Both ways, without a copy, behind each other's work; transposed too."""
    array = to_device(np.arange(12).reshape(3, 4).astype(dtype), "cuda") * 2
    tensor = bridge.to_torch(array)
    assert (tensor.device.type, tensor.data_ptr()) == (place, array.data.ptr)
    tensor += 1
    back = bridge.from_torch(tensor.T)
    assert isinstance(back, cupy.ndarray) and back.data.ptr == array.data.ptr and back.strides == array.T.strides
    hold(float(np.abs(values(back) - (2 * np.arange(12).reshape(3, 4).T + 1)).max()), 0)


def test_weights_go_both_ways(place: str, hold: Any) -> None:
    module, layer = torch.nn.GRU(6, 5, 2).to(place), nn.GRU(6, 5, 2, rng=0).to("cuda")
    bridge.load_from_torch(layer, module)
    x = torch.randn(7, 3, 6, device=place)
    first = relative(layer.forward(bridge.from_torch(x))[0], module(x)[0])
    layer = nn.GRU(6, 5, 2, rng=1).to("cuda")
    bridge.load_into_torch(module, layer)
    hold(max(first, relative(layer.forward(bridge.from_torch(x))[0], module(x)[0])), 1e-5)
