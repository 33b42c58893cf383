"""Small computations that between them call every kernel of the CPU, so that all are compiled and kept on disk."""

from __future__ import annotations

import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp import kernels, nn, optim
from sparsebp.core.check import BACKWARDS, SCAN_ALGORITHMS
from sparsebp.core.machine import host_memory
from sparsebp.core.threads import get_threads
from sparsebp.jacobians import jacobian_t
from sparsebp.kernels.checks import UPDATE_OPTIONS
from sparsebp.patterns.pattern import SparsityPattern, color_columns, color_symmetric
from sparsebp.products.factor import plan_factor
from sparsebp.products.product import ProductPlan, candidates_of_structure, plan_addition, plan_by, plan_product
from sparsebp.scan import (
    linear_recurrence,
    linear_recurrence_vjp,
    plan_scan,
    selective_scan,
    selective_scan_vjp,
    sosfilt,
    sosfilt_vjp,
)

# Small computations that between them call every kernel of the CPU, so that all are compiled and kept on disk.

_SAMPLES = 3


def jobs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield all computations, in float32 and in float64, by name."""
    for dtype in (np.float32, np.float64):
        for name, job in _JOBS.items():
            yield f"{name}, {np.dtype(dtype).name}", functools.partial(job, np.dtype(dtype))


def compile_all(told: Callable[[str, int, int], None]) -> None:
    """Run all of them, on as many processes as kernels have threads; `told` learns how far it is."""
    names = [name for name, _ in jobs()]
    workers = min(get_threads(), len(names), max(1, host_memory() >> 31))  # each takes about 1 GB
    if workers == 1:
        for number, name in enumerate(names):
            told(name, number, len(names))
            _run(name)
        return
    spawn = multiprocessing.get_context("spawn")  # a child after a fork would wait for threads that it has not
    with ProcessPoolExecutor(workers, spawn, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            told(names[0], 0, len(names))
            for number, done in enumerate(as_completed([pool.submit(_run, name) for name in names])):
                told(done.result(), number + 1, len(names))
        except BaseException:
            for process in list(pool._processes.values()):
                process.kill()
            raise


def _run(name: str) -> str:
    """Run one of them by name; return it."""
    from sparsebp.kernels.host.engine.compile import NOTICE

    NOTICE.told = True  # the command tells of it
    dict(jobs())[name]()
    return name


def folder() -> Path:
    """Return the folder below which Numba keeps compiled kernels."""
    from sparsebp.kernels.host.sparse.csr import _csr_matvec

    kept, package = Path(_csr_matvec.stats.cache_path), Path(kernels.__file__).parents[1]
    return package if kept.is_relative_to(package) else kept.parent


def _train(model: nn.Layer, shape: tuple[int, ...], dtype: np.dtype, *optimizers: optim.Optimizer) -> None:
    x, target = np.random.default_rng(0).standard_normal(shape).astype(dtype), np.arange(_SAMPLES)
    _, gradients = nn.value_and_grad(model, nn.CrossEntropyLoss())(x, target)
    for optimizer in optimizers:
        optimizer.step(gradients)


def _recurrent(kind: type[nn.RNN] | type[nn.GRU] | type[nn.LSTM], dtype: np.dtype) -> None:
    for backward in BACKWARDS:
        cell = kind(2, 5, backward=backward, dtype=dtype, rng=0)
        _train(nn.SequenceClassifier(cell, nn.Linear(5, 4, dtype=dtype, rng=0)), (9, _SAMPLES, 2), dtype)
    layer = kind(2, 5, dtype=dtype, rng=0)
    y, saved = layer.forward(np.zeros((9, _SAMPLES, 2), dtype))
    layer.cell.reduced(kernels.get(np).unchecked, saved.runs[0], layer.params["weight_hh_l0"], y)
    with nn.inference_mode():
        layer.forward(np.zeros((9, _SAMPLES, 2), dtype))


def _one_step(dtype: np.dtype) -> None:
    nn.GRU(2, 5, dtype=dtype, rng=0).stream().step(np.ones(2, dtype))
    host, room = kernels.on_host().one_step, np.zeros(200, dtype)
    at, table = room.ctypes.data, host.table_of("gru", 1, 1, 2, 5, [room.ctypes.data] * 4)
    host.forward(room, table, *(at,) * 7)
    host.backward(room, table, *(at,) * 12)


def _convolutions(dtype: np.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "rng": 0}
    layers = (
        nn.Conv2d(2, 4, 3, padding=1, **options), nn.BatchNorm2d(4, dtype=dtype), nn.Hardtanh(),
        nn.Conv2d(4, 4, 3, stride=2, groups=4, **options), nn.ReLU(), nn.Conv2d(4, 6, 2, **options), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(6, 5, **options),
    )  # fmt: skip
    _train(nn.Sequential(*layers), (_SAMPLES, 2, 9, 9), dtype)
    nn.AvgPool2d(2).forward(np.ones((_SAMPLES, 2, 4, 4), dtype))
    nn.ReLU().forward(np.ones(_SAMPLES, dtype))  # alone: not in the pass of the layer before
    evaluated = nn.BatchNorm2d(2, dtype=dtype).eval()
    evaluated.vjp(np.ones((_SAMPLES, 2, 3, 3), dtype))[1](np.ones((_SAMPLES, 2, 3, 3), dtype)).weights  # noqa: B018


def _sequences(dtype: np.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "rng": 0}
    encoder = nn.TransformerEncoderLayer(6, 2, 5, activation="gelu", batch_first=True, **options)
    _train(nn.Sequential(encoder, nn.MeanOverSteps(True)), (_SAMPLES, 4, 6), dtype)
    words = nn.Embedding(5, 3, **options)
    y, numbers = words.forward(np.arange(5))
    words.weight_grad(y, numbers)
    x = np.ones((_SAMPLES, 3, 4), dtype)
    for layer in (nn.Softmax(-1), nn.Softmax(1), nn.PReLU(dtype=dtype)):
        _, gradients = layer.vjp(x)
        gradients(x).input, gradients(x).weights
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()):
        loss.forward(x, x)


def _scans(dtype: np.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "rng": 0}
    layers = (
        nn.Conv2d(1, 2, 3, **options), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 6, **options), nn.Tanh(),
        nn.Linear(6, 6, **options), nn.Sigmoid(), nn.Linear(6, 4, **options),
    )  # fmt: skip
    for backward in BACKWARDS:
        _train(nn.Sequential(*layers, backward=backward), (_SAMPLES, 1, 6, 6), dtype)
    jacobian_t(layers[0], np.ones((_SAMPLES, 1, 6, 6), dtype))
    dense, g = [SparsityPattern.dense(3, 3)] * 7, np.ones((3, _SAMPLES), dtype)
    for algorithm in SCAN_ALGORITHMS:
        chunks = 3 if algorithm == "chunked" else None
        plan = plan_scan(dense, algorithm, chunks=chunks, batch=_SAMPLES, dtype=dtype)
        plan(g, np.ones((len(dense), 9, _SAMPLES), dtype))


def _linear_recurrences(dtype: np.dtype) -> None:
    k, h, x, h0 = kernels.get(np), *(np.ones((_SAMPLES, 2, size), dtype) for size in (5, 10)), np.ones((2, 5), dtype)
    out, back, none = np.empty_like(h), np.empty_like(x), np.empty_like(h0)
    for one in (h[:, :1, :1], h, x):  # few states, chains and rows
        linear_recurrence_vjp(one, linear_recurrence(one, one), one)
    section = np.eye(1, 6, 3)
    sosfilt_vjp(section, h, sosfilt(section, h).saved, h)
    kernels.on_host().averages.run(h, 0.5, True, True, 0, out)
    k.min_gru_forward(x, h0, None, "tanh", False, out)
    k.min_gru_backward(x, out, h, h0, None, "tanh", False, back, none)
    states, w = np.zeros((_SAMPLES + 1, 2, 5), dtype), np.ones((10, 5), dtype)
    kernels.on_host().gated_forward(h, w, None, "identity", back, states)
    kernels.on_host().gated_backward(h, back, states, h, "identity", none, None, (w, None))
    layer = nn.LRU(5, 3, dtype=dtype, rng=0)
    y, saved = layer.forward(h)
    _ = layer.gradients(y, saved).weights
    rates = -np.ones((5, 10), dtype)
    selective_scan_vjp(h, h, rates, x, x, None, selective_scan(h, h, rates, x, x).states, h)
    kernels.on_host().xla.forward_handler(np.dtype(dtype))
    kernels.on_host().xla.backward_handler(np.dtype(dtype))


def _sparse_products(dtype: np.dtype) -> None:
    rows, columns = np.indices((12, 24))
    scattered, selected = (rows + columns**2) % 5 == 0, columns == rows // 2 * 2
    runs, apart = abs(columns - rows) < 11, columns // 2 == rows
    for left in (scattered[:, :12], selected[:, :12]):
        for right in (scattered, selected, runs, apart):
            for strategy in candidates_of_structure(_pattern(left), _pattern(right)):
                _multiply(plan_by(strategy), dtype)
    blocks = _pattern(np.ones((26, 26), bool))  # are of 2 by 2
    _multiply(plan_by(next(way for way in candidates_of_structure(blocks, blocks) if way.name == "blocks")), dtype)
    full = _pattern(np.indices((64, 64)).sum(axis=0) % 9 > 0)
    _multiply(plan_product(full, full), dtype)
    diagonal, square = SparsityPattern.diagonal(12), _pattern(scattered[:, :12])
    moved = -np.subtract(*np.indices((256, 330)))  # 65 a row, one further than in the row before
    band = _pattern((moved >= 0) & (moved < 65))
    for plan in (
        plan_product(diagonal, square), plan_product(square, diagonal),
        plan_product(band, SparsityPattern.diagonal(band.shape[1])), plan_product(blocks, blocks, mask=blocks),
    ):  # fmt: skip
        _multiply(plan, dtype)
    plan_addition(square, diagonal)
    color_columns(_pattern(np.eye(5, dtype=bool) | np.roll(np.eye(5, dtype=bool), 1, axis=1)))  # in both orders
    color_symmetric(blocks)


def _multiply(plan: ProductPlan, dtype: np.dtype) -> None:
    for batch in (1, _SAMPLES):
        plan(np.ones((plan.a.nnz, batch), dtype), np.ones((plan.b.nnz, batch), dtype))


def _pattern(mask: np.ndarray) -> SparsityPattern:
    return SparsityPattern(np.append(0, np.cumsum(mask.sum(axis=1))), np.nonzero(mask)[1], mask.shape)


def _factors(dtype: np.dtype) -> None:
    plan = plan_factor(SparsityPattern.diagonal(3))
    plan_factor(SparsityPattern([0, 2, 3], [0, 1, 0], (2, 2)), np.ones(3))  # not symmetric: from all entries
    for kind in (dtype, np.result_type(dtype, np.complex64)):
        for shape in ((3,), (3, _SAMPLES)):
            factors, b = plan(np.ones(shape, kind)), np.ones((3, _SAMPLES), kind)
            factors.refine(b, factors.solve(b))
        plan_factor(SparsityPattern.diagonal(3), kind="cholesky")(np.ones(3, kind))


def _dense_products(dtype: np.dtype) -> None:
    host, thin, large = kernels.on_host(), np.ones((16, 1024), dtype), np.ones((1024, 1024), dtype)
    host.matmul(thin, large, np.empty((16, 1024), dtype))
    host.matmul_many([(thin[:, :16], thin[:, 16:32])])
    _train(nn.Sequential(nn.Linear(5, 4, dtype=dtype, rng=0), nn.ReLU()), (_SAMPLES, 5), dtype)
    sgd = np.ones((1, len(UPDATE_OPTIONS["sgd"])))
    host.update_by_product("sgd", large, thin.T, thin, [None], sgd, np.ones(1, np.int64))


def _optimizers(dtype: np.dtype) -> None:
    kinds: tuple[Any, ...] = (
        optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    )  # fmt: skip
    for kind in kinds:
        model = nn.Linear(4, 3, dtype=dtype, rng=0)
        _train(model, (_SAMPLES, 4), dtype, kind(model.parameters(), lr=0.1))
    gradients = {"weight": np.ones((3, 4), dtype)}
    optim.clip_grad_norm(gradients, 0.1)
    optim.clip_grad_value(gradients, 0.1)


_JOBS: dict[str, Callable[[np.dtype], None]] = {
    "factors": _factors, "sparse products": _sparse_products, "LSTM": functools.partial(_recurrent, nn.LSTM),
    "GRU": functools.partial(_recurrent, nn.GRU), "RNN": functools.partial(_recurrent, nn.RNN),
    "convolutions": _convolutions, "linear recurrences": _linear_recurrences, "sequences": _sequences, "scans": _scans,
    "one step": _one_step, "dense products": _dense_products, "optimizers": _optimizers,
}  # fmt: skip
"""The longest come first, so that all processes end at about the same time."""
