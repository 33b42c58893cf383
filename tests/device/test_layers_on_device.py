"""Layers, plans, scans and whole training steps on the device kernels give what they give on the host.

On CuPy's arrays. What is compared is everything above the kernels: which of them a layer calls, and with what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from backends import Backend, make_backend, needs_numba
from cuda_on_cpu.loader import ExecutorLoader
from cuda_on_cpu.memory import CheckedNumpy, uninitialised
from sparsebp import jacobian_t, models, nn, optim, plan_scan
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.backend import to_host
from sparsebp.jacobians import TransposedJacobian
from sparsebp.kernels.device import DeviceKernels, Launcher
from sparsebp.kernels.spec import Kernels
from sparsebp.patterns import SparsityPattern
from sparsebp.runtime.time_parallel import TimeParallel, stretch
from strategies import tolerance

ALGORITHMS = ("linear", "chunked", "blelloch", "hybrid")
CELLS: dict[str, Callable[..., Any]] = {
    "tanh": nn.RNN,
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
    "gru": nn.GRU,
}
MAKE = CELLS | {"lstm": nn.LSTM, "mingru": nn.MinGRU, "minlstm": nn.MinLSTM}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Backend:
    """The kernels through CuPy; tests of the kernels run their sources with every check."""
    return make_backend(request.param)


def both(device: Backend, run: Callable[[Callable[[Any], Any], Callable[[Any], Any]], dict[str, Any]]) -> None:
    """Run on the host and on the device, and compare all that is returned.

    `run` gets two functions: one moves an array, the other a layer.
    """
    needs_numba("results are compared with those of the host kernels")
    expected = run(np.asarray, lambda layer: layer)
    result = run(device.array, lambda layer: layer.to("cuda"))
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        got = to_host(result[name]) if not np.isscalar(result[name]) else result[name]
        dtype = np.asarray(value).dtype
        np.testing.assert_allclose(got, value, **tolerance(dtype, 20), err_msg=name)


ONE, DEEP = LAYOUTS
CASES = [(*case, dtype) for case in product(CELLS, ("bp", *ALGORITHMS), LAYOUTS) for dtype in (np.float32, np.float64)]
CASES += [
    ("lstm", "bp", ONE, np.float32), ("lstm", "chunked", ONE, np.float32), ("lstm", "blelloch", ONE, np.float64),
    ("lstm", "bp", DEEP, np.float64), ("lstm", "chunked", DEEP, np.float64),
    ("mingru", "auto", ONE, np.float32), ("mingru", "blelloch", DEEP, np.float64),
    ("minlstm", "auto", DEEP, np.float32),
]  # fmt: skip


def recurrent(
    cell: str, algorithm: str, options: dict[str, Any], dtype: Any, steps: int, array: Callable[[Any], Any]
) -> tuple[Any, Any, Any, list[Any], Any]:
    """Return a layer, its input, the gradient at its output, four states, and lengths where `options` are given."""
    rng, batch, features, hidden = np.random.default_rng(0), 3, 2, 5
    layer = MAKE[cell](features, hidden, backward=algorithm, chunks=3, dtype=dtype, rng=1, **options)
    sizes = (batch, steps) if layer.batch_first else (steps, batch)
    state = (layer.num_layers * layer.directions, batch, hidden)
    shapes = [(*sizes, features), (*sizes, layer.directions * hidden), *[state] * 4]
    x, gy, *states = (array(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
    return layer, x, gy, states, np.array([steps, 1, steps // 2 + 1]) if options else None


@pytest.mark.parametrize(("cell", "algorithm", "layout", "dtype"), CASES)
def test_recurrent_layer(device: Backend, cell: str, algorithm: str, layout: str, dtype: Any) -> None:
    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        layer, x, gy, states, lengths = recurrent(cell, algorithm, LAYOUTS[layout], dtype, 6, array)
        layer = place(layer)
        if cell != "lstm":
            y, saved = layer.forward(x, states[0], lengths)
            g = layer.gradients(gy, saved, states[2])
            return {"y": y, "h_n": saved.h_n, "gx": g.input, "gh0": g.h0, **g.weights}
        y, saved = layer.forward(x, tuple(states[:2]), lengths)
        g = layer.gradients(gy, saved, *states[2:])
        last = {"h_n": saved.h_n, "c_n": saved.c_n, "gh0": g.h0, "gc0": g.c0}
        return {"y": y, "gx": g.input, **last, **g.weights}

    both(device, run)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lru(device: Backend, dtype: Any) -> None:
    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        layer = place(nn.LRU(3, 5, batch_first=True, dtype=dtype, rng=1))
        x, gy = (array(rng.standard_normal((4, 7, 3)).astype(dtype)) for _ in range(2))
        h0, gh = (
            array(np.array(1j * rng.standard_normal((1, 4, 5)), np.result_type(dtype, np.complex64))) for _ in "hg"
        )
        y, saved = layer.forward(x, h0, [7, 1, 4, 7])
        g = layer.gradients(gy, saved, gh)
        return {"y": y, "h_n": saved.h_n, "gx": g.input, "gh0": g.h0, **g.weights}

    both(device, run)


ORDERS = (("weights", "input", "h0", "weights"), ("input", "weights", "h0"), ("h0", "weights"), ("weights", "weights"))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["bp", "chunked"])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_in_every_order(
    device: Backend, cell: str, algorithm: str, layout: str, order: tuple[str, ...]
) -> None:
    """Weights asked for first are summed on the way back; what is asked for later is right all the same."""

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        layer, x, gy, states, lengths = recurrent(cell, algorithm, LAYOUTS[layout], np.float32, 17, array)
        layer = place(layer)
        _, saved = layer.forward(x, lengths=lengths)
        g = layer.gradients(gy, saved, grad_h_n=states[0])
        found: dict[str, Any] = {}
        for i, name in enumerate(order):
            if name == "weights":  # computed anew each time; what was handed out belongs to the caller
                grads = g.weight_grad()
                found |= {f"{i} {key}": array(to_host(grad).copy()) for key, grad in grads.items()}
                for grad in grads.values():
                    grad[...] = np.nan
            else:
                found[f"{i} {name}"] = getattr(g, name)
        return found

    both(device, run)


def test_training_writes_no_gradient_at_the_gates(device: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights alone: one way back, whose first layer sums them and stores nothing else."""
    calls: list[tuple[bool, bool]] = []
    backward = type(device.kernels).rnn_backward

    def noted(self: Any, h: Any, w: Any, gy: Any, last: Any, f: Any, gz: Any, gh0: Any, *rest: Any) -> None:
        calls.append((gz is not None, rest[1:] != () and rest[1] is not None))
        backward(self, h, w, gy, last, f, gz, gh0, *rest)

    monkeypatch.setattr(type(device.kernels), "rnn_backward", noted)
    layer = nn.RNN(2, 5, num_layers=2, backward="bp", rng=1).to("cuda")
    y, saved = layer.forward(device.array(np.ones((8, 3, 2), np.float32)))
    g = layer.gradients(y, saved)
    assert g.weights.keys() == layer.params.keys()
    assert calls == [(True, False), (False, True)]
    assert g.input.shape == (8, 3, 2)
    assert calls[2:] == [(True, False)]


def learned(model: Any, update: Any, batches: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the losses of a step with each batch, and the parameters after them."""
    loss, found = nn.CrossEntropyLoss(), {}
    for step, (x, target) in enumerate(batches):
        logits, saved = model.forward(x)
        found[f"loss {step}"], loss_saved = loss.forward(logits, target)
        update.step(model.weight_grad(loss.input_grad(loss_saved), saved))
    return found | model.state_dict()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("cell", [*CELLS, "lstm"])
def test_training_steps(device: Backend, cell: str, optimizer: str) -> None:
    """Forward, loss, backward and update, twice: losses and parameters agree."""
    make = {
        "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    }[optimizer]

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        rnn = MAKE[cell](2, 5, backward="chunked", chunks=3, dtype=np.float64, rng=1)
        model = place(nn.SequenceClassifier(rnn, nn.Linear(5, 4, dtype=np.float64, rng=2)))
        batches = [(array(rng.standard_normal((7, 3, 2))), array(rng.integers(0, 4, 3))) for _ in range(2)]
        return learned(model, make(model.parameters()), batches)

    both(device, run)


def test_hidden_jacobians(device: Backend) -> None:
    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        found = {}
        for name, make in CELLS.items():
            layer = place(make(2, 5, dtype=np.float64, rng=1))
            _, saved = layer.forward(array(np.random.default_rng(0).standard_normal((4, 3, 2))))
            for t, element in enumerate(layer.hidden_jacobians_t(saved)):
                found[f"{name} {t}"] = element.data
        return found

    both(device, run)


def test_jacobian_of_a_model(device: Backend) -> None:
    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        linear = [nn.Linear(4, 5, dtype=np.float64, rng=1), nn.Linear(5, 3, dtype=np.float64, rng=2)]
        model = place(nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.Tanh()))
        jacobian = jacobian_t(model, array(np.random.default_rng(0).standard_normal((2, 4))))
        return {"data": jacobian.data, "product": jacobian @ array(np.ones((3, 2)))}

    both(device, run)


PATTERNS = [
    SparsityPattern([0, 2, 2, 3, 5], [0, 2, 1, 0, 1], (4, 3)),
    SparsityPattern([0, 2, 3, 5], [0, 3, 1, 2, 3], (3, 4)),
    SparsityPattern.diagonal(4),
    SparsityPattern.dense(3, 4),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scan_of_sparse_elements(device: Backend, algorithm: str) -> None:
    needs_numba("products are planned on the host")
    # y[i] = J_i @ y[i-1]: 3 -> 4 -> 4 -> 3 -> 4 -> 4 -> 4 -> 3 entries
    order = [PATTERNS[0], PATTERNS[2], PATTERNS[1], PATTERNS[0], PATTERNS[2], PATTERNS[2], PATTERNS[3]]
    options = {"hybrid": {"up_levels": 1}, "chunked": {"chunks": 2}}.get(algorithm, {})
    scan = plan_scan(order, algorithm=algorithm, **options)

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        g = array(rng.standard_normal((order[0].shape[1], 3)))
        data = [array(rng.standard_normal((p.nnz, 3) if i % 2 else p.nnz)) for i, p in enumerate(order)]
        injections = [array(rng.standard_normal((p.shape[0], 3))) for p in order]
        return {str(i): y for i, y in enumerate(scan(g, data, injections))}

    both(device, run)


def test_jacobian_product_keeps_its_arrays_on_the_device(device: Backend) -> None:
    pattern = PATTERNS[0]
    jacobian = TransposedJacobian(pattern, device.array(np.arange(5.0)))
    result = jacobian @ device.array(np.ones((3, 2)))
    assert isinstance(result, device.xp.ndarray)
    np.testing.assert_array_equal(device.numpy(result), np.array([[1, 1], [0, 0], [2, 2], [7, 7]], float))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chain_of_layers(device: Backend, algorithm: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 1, 6, 6)).astype(np.float32)

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        layers = [
            nn.Conv2d(1, 2, 3, rng=rng), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4, rng=rng), nn.Tanh(),
            nn.Linear(4, 3, rng=rng),
        ]  # fmt: skip
        model = place(nn.Sequential(*layers, backward=algorithm))
        y, saved = model.forward(array(x))
        return {"gx": model.input_grad(y, saved), **model.weight_grad(y, saved)}

    both(device, run)


POOLS: dict[str, Callable[[Any], Any]] = {
    "max": lambda _: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "average": lambda _: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "adaptive": lambda _: nn.AdaptiveAvgPool2d((2, None)),
    "adaptive max": lambda _: nn.AdaptiveMaxPool2d((4, 3)),
    "max on three axes": lambda _: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.MaxPool3d((2, 3, 2), 1, 1)),
    "average on three axes": lambda _: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.AvgPool3d(2, 1)),
}
LAYERS: dict[str, Callable[[Any], Any]] = POOLS | {  # of (3, 4, 6, 5); the argument is the dtype
    **{name: lambda _, name=name: getattr(nn, name)() for name in (
        "ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Softplus", "Tanh", "Sigmoid", "Hardtanh", "Identity", "Flatten",
        "Mish", "CELU", "Hardsigmoid", "Hardswish", "LogSigmoid", "Softsign",
    )},
    "nearest": lambda _: nn.Upsample(scale_factor=(2, 1.5)),
    "bilinear": lambda _: nn.Upsample((7, 9), mode="bilinear"),
    "InstanceNorm2d": lambda d: nn.InstanceNorm2d(4, affine=True, dtype=d),
    "sum": lambda d: nn.Sum(nn.Identity(), nn.Conv2d(4, 4, 1, dtype=d, rng=0), nn.Tanh()),
    "projection": lambda d: nn.Residual(
        nn.Conv2d(4, 2, 3, 2, 1, dtype=d, rng=0), nn.Conv2d(4, 2, 1, 2, dtype=d, rng=1)
    ),
    "LayerNorm": lambda d: nn.LayerNorm((6, 5), dtype=d),
    "GroupNorm": lambda d: nn.GroupNorm(2, 4, dtype=d),
    "RMSNorm": lambda d: nn.RMSNorm(5, dtype=d),
    "PReLU": lambda d: nn.PReLU(4, dtype=d),
    "ZeroPad2d": lambda d: nn.ZeroPad2d((1, 2, 0, -1)),
    "LogSoftmax": lambda d: nn.LogSoftmax(1),
    "BatchNorm2d": lambda d: nn.BatchNorm2d(4, dtype=d).eval(),
    "convolution": lambda d: nn.Conv2d(4, 6, (3, 2), 2, ((1, 0), (2, 1)), groups=2, dtype=d, rng=0),
    "depthwise": lambda d: nn.Conv2d(4, 4, 3, padding=1, groups=4, dtype=d, rng=0),
    "reflect": lambda d: nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="reflect", dtype=d, rng=0),
    "replicate": lambda d: nn.Conv2d(4, 4, 2, 2, 3, 1, 4, padding_mode="replicate", dtype=d, rng=0),
    "circular": lambda d: nn.Conv2d(4, 2, (2, 3), padding=((0, 2), (3, 0)), padding_mode="circular", dtype=d, rng=0),
    "transposed": lambda d: nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, groups=2, dtype=d, rng=0),
    "residual": lambda d: nn.Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, dtype=d, rng=0), nn.ReLU())),
    "branches": lambda d: nn.Concat(nn.Identity(), nn.Conv2d(4, 3, 1, dtype=d, rng=0), nn.MaxPool2d(3, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_image_layers(device: Backend, name: str, dtype: Any) -> None:
    """F, I, W and the Jacobian's values of everything that LeNet-5, VGG-11 and MobileNetV2 are made of."""
    x = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype(dtype)
    if name in POOLS:
        x = np.round(x)  # with ties
        x[0, 0, 0, :2] = np.nan

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        layer = place(LAYERS[name](dtype))
        y, saved = layer.forward(array(x))
        gy = array(np.random.default_rng(1).standard_normal(y.shape).astype(dtype))
        jacobian, columns = layer.jacobian_t(saved), array(np.ascontiguousarray(to_host(gy).reshape(3, -1).T))
        found = {"y": y, "gx": layer.input_grad(gy, saved), "data": jacobian.data, "J @ g": jacobian @ columns}
        return found | layer.weight_grad(gy, saved)

    both(device, run)


ENCODER = {"batch_first": True, "dim_feedforward": 9}
OF_SEQUENCES: dict[str, Callable[[Any], Any]] = {  # of (3, 5, 6); the argument is the dtype
    "attention": lambda d: nn.MultiheadAttention(6, 2, batch_first=True, dtype=d, rng=0),
    "encoder": lambda d: nn.TransformerEncoderLayer(6, 2, activation="gelu", dropout=0, dtype=d, rng=0, **ENCODER),
    "norm first": lambda d: nn.TransformerEncoderLayer(6, 3, norm_first=True, dtype=d, rng=0, **ENCODER).eval(),
    "positions": lambda d: nn.PositionalEmbedding(7, 6, True, dtype=d, rng=0),
    "mean": lambda d: nn.MeanOverSteps(True),
}


def test_skip_connections(device: Backend) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 6, 5))

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        layer = place(nn.Sequential(
            nn.Stash("a"), nn.Conv2d(4, 4, 1, dtype=float, rng=0), nn.Stash("b"), nn.Tanh(), nn.Pop("a", "concat"),
            nn.Conv2d(8, 4, 1, dtype=float, rng=1), nn.Pop("b"),
        ))  # fmt: skip
        y, saved = layer.forward(array(x))
        g = layer.gradients(array(np.random.default_rng(1).standard_normal(y.shape)), saved)
        return {"y": y, "gx": g.input_grad(), **g.weight_grad()}

    both(device, run)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_layers_of_sequences(device: Backend, name: str, dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 6)).astype(dtype)

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        layer = place(OF_SEQUENCES[name](dtype))
        found = {}
        for lengths in (None, [5, 2, 3]) if name in ("attention", "encoder", "norm first") else (None,):
            y, saved = layer.forward(array(x), **({} if lengths is None else {"lengths": lengths}))
            gy = array(np.random.default_rng(1).standard_normal(y.shape).astype(dtype))
            g = layer.gradients(gy, saved)
            found |= {f"{key} {lengths}": a for key, a in {"y": y, "gx": g.input_grad(), **g.weight_grad()}.items()}
        return found | {"jacobian": jacobian_t(layer, array(x)).data}

    both(device, run)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_embedding(device: Backend, integer: Any) -> None:
    x = np.random.default_rng(0).integers(0, 9, (4, 7)).astype(integer)

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        layer = place(nn.Embedding(9, 5, 3, dtype=np.float64, rng=0))
        y, saved = layer.forward(array(x))
        gy = array(np.random.default_rng(1).standard_normal(y.shape))
        return {"y": y, **layer.weight_grad(gy, saved)}

    both(device, run)


@pytest.mark.gpu
def test_a_number_that_is_not_there_makes_the_loss_nan() -> None:
    """The host does not look at what is on a device: it would have to wait."""
    array = make_backend("gpu").array
    model = nn.Sequential(nn.Embedding(4, 3, rng=0), nn.MeanOverSteps(True), nn.Linear(3, 2, rng=1)).to("cuda")
    for wrong in (4, -1):
        y, _ = model.forward(array(np.array([[0, 3], [1, wrong]])))
        loss, _ = nn.CrossEntropyLoss().on_device(y, array(np.array([0, 1])))
        assert np.isfinite(to_host(y)[0]).all() and np.isnan(to_host(y)[1]).all() and np.isnan(to_host(loss))


@pytest.mark.parametrize("tokens", [False, True])
def test_a_transformer_learns(device: Backend, tokens: bool) -> None:
    """Two whole steps, of words or of vectors: losses and parameters agree."""

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        options: dict[str, Any] = {"steps": 4, "width": 6, "heads": 2, "layers": 2, "dtype": np.float64}
        model = place(models.transformer_classifier(5, 3, tokens=tokens, rng=1, **options))
        inputs = [rng.integers(0, 5, (3, 4)) if tokens else rng.standard_normal((3, 4, 5)) for _ in range(2)]
        batches = [(array(x), array(rng.integers(0, 3, 3))) for x in inputs]
        return learned(model, optim.SGD(model.parameters(), lr=0.1), batches)

    both(device, run)


def test_chunks_of_a_large_lstm_are_combined() -> None:
    """From H = 513 on a thread of the combination has several values; executed without checks."""
    device_kernels = Kernels(DeviceKernels(CheckedNumpy(), ExecutorLoader(mode="fast")))
    steps, batch, hidden, dtype = 4, 1, 513, np.dtype(np.float64)
    rng = np.random.default_rng(0)
    gates, c, c0 = (
        rng.random(shape) for shape in ((steps, batch, 4 * hidden), (steps, batch, hidden), (batch, hidden))
    )
    w_hh, gy = rng.standard_normal((4 * hidden, hidden)) / hidden, rng.standard_normal(c.shape)
    found = []
    for chunks in (1, steps):
        written = [uninitialised(shape, dtype) for shape in (gates.shape, c0.shape, c0.shape)]
        device_kernels.lstm_backward(c, c0, gates, w_hh, gy, c0, c0, *written, chunks)
        found.append(written)
    for got, want in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(got, want, **tolerance(dtype, 8))


# ---- segments of a sequence on ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [*CELLS, "lstm"])
def test_stretches_on_ranks(device: Backend, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, alone = Launcher._launch, threading.Lock()  # the executor runs one launch at a time

    def one_by_one(*args: Any, **options: Any) -> None:
        with alone:
            launch(*args, **options)

    monkeypatch.setattr(Launcher, "_launch", one_by_one)
    steps, batch, features, hidden = 7, 2, 2, 5

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        x, gy = (rng.standard_normal((steps, batch, size)).astype(np.float32) for size in (features, hidden))

        def work(transport: Transport) -> dict[str, Any]:
            layer = place(MAKE[cell](features, hidden, rng=1))
            own = stretch(steps, transport)
            y, back = TimeParallel(layer, transport, "maps").vjp(array(x[own]))
            g = back(array(gy[own]))
            return {"y": y, "input": g.input, **g.weights}

        results = run_ranks(3, work)
        return {f"{name} of {rank}": value for rank, result in enumerate(results) for name, value in result.items()}

    both(device, run)
