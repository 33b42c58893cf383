"""Measures the price list of this machine (`sparsebp.core.machine`), in about half a minute.

What is measured is what is estimated: kernels, products and whole backwards of recurrent layers, on one thread, by that
thread's own clock, so that a process that takes the core meanwhile does not count. Rates come from single calls; the
prices of a recurrent backward are those that describe a set of shapes best, by non-negative least squares of the
relative errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import copy_bandwidth
from benchmarks.workloads import convolution_t, finite_elements, max_pool_t
from sparsebp import kernels, nn
from sparsebp.core.errors import OptionError
from sparsebp.core.files import prepare_folder
from sparsebp.core.machine import CELLS, STRATEGIES, VARIABLE, CellPrices, Prices, now_and_here, price_path, save
from sparsebp.core.threads import most_threads, one_core
from sparsebp.patterns import SparsityPattern
from sparsebp.products import ProductPlan, plan_product
from sparsebp.products.product import candidates, candidates_of_structure, plan_by
from sparsebp.scan import plan_scan
from sparsebp.scan.recurrent import chunked_units, recursion_units, spent, weights_units

BATCH = 16
LEAST = 1e-13
"""Seconds that a price is at least: of what is hidden behind what is counted apart."""

_HIDDEN = (8, 16, 20, 32, 64, 128)
_SHAPES = ((10, 1), (10, 16), (100, 16), (1000, 1), (1000, 16), (10_000, 1), (10_000, 16), (30_000, 16))
_MOST = 150e6
"""Bytes of the largest recurrent backward that is measured."""
_CACHES = tuple(1 << k for k in range(19, 27))
"""Bytes: sizes of the cache that are tried."""
_SHARED = ("stream", "gradient", "gradient_value", "gradient_weight")
_LATER = ("operation", "array", "value", "states_cache", *_SHARED)
_OWN = ("call", "step", "tail", "unit", "multiply_add")
_CHUNKED = ((500, 2, 8), (500, 2, 32), (300, 2, 64))
"""T, B and H of the chunked scans that are measured, in 8 chunks."""
_CHUNKS = 8

Clock = Callable[[], float]
Told = Callable[[str], None]


def calibrate(told: Told = lambda what: None) -> Prices:
    """Measure and return the prices of this machine; `told` hears what is measured next.

    Everything runs on one thread, but for the memory that all threads share.
    """
    told("memory")
    threads = most_threads()
    sharing = copy_bandwidth(threads) / copy_bandwidth(1) if threads > 1 else 1.0
    with one_core():
        found = _rates(min(max(sharing, 1.0), float(threads)))
        told("sparse products")
        found = replace(found, products=_products(found))
        told("layers")
        found = replace(found, **_layers())
        return _recurrent(found, told)


def call_seconds(
    run: Callable[[], object], budget: float = 0.08, least: int = 5, clock: Clock = time.perf_counter
) -> list[float]:
    """Return the seconds of calls, one after the other, until `budget` seconds are over."""
    run()
    seconds: list[float] = []
    end = clock() + budget
    while len(seconds) < least or (len(seconds) < 1000 and clock() < end):
        start = clock()
        run()
        seconds.append(clock() - start)
    return seconds


def fastest(run: Callable[[], object], budget: float = 0.08) -> float:
    """Return the seconds of a call where nothing else wants the core."""
    return _low(call_seconds(run, budget, clock=time.thread_time))


def _low(seconds: list[float]) -> float:
    """Return the lower quartile; the least ones may be slips of a thread's clock, which jumps at times."""
    return max(float(np.quantile(seconds, 0.25)), 1e-9)


def backward_seconds(
    layer: nn.RNN | nn.GRU | nn.LSTM,
    x: np.ndarray,
    gy: np.ndarray,
    budget: float = 0.08,
    least: int = 3,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Return the seconds of a layer's backward at its weights, each right after a forward, as in training."""
    seconds: list[float] = []
    end = clock() + budget
    while len(seconds) < least + 1 or (len(seconds) < 200 and clock() < end):
        _, saved = layer.forward(x)
        start = clock()
        layer.weight_grad(gy, saved)
        seconds.append(clock() - start)
    return seconds[1:]


# ---- rates ---------------------------------------------------------------------------------------------------------


def _rates(sharing: float) -> Prices:
    """Return the prices of calls, bytes and multiply-adds that have a kernel of their own; all others are 0."""
    rng = np.random.default_rng(0)
    scaling = plan_product(SparsityPattern.diagonal(4), SparsityPattern.dense(4, 4))
    a, b, out = np.ones(4, np.float32), np.ones(16, np.float32), np.empty(16, np.float32)
    k, indptr = kernels.get(np), scaling.b.indptr
    call = fastest(lambda: k.scale_rows(indptr, b[:, None], a[:, None], out[:, None]))
    chain = plan_scan([SparsityPattern.dense(1, 1)] * 2000, "linear")
    g, blocks = np.ones((1, 1), np.float32), np.ones((2000, 1, 1), np.float32)
    square = rng.standard_normal((384, 384), dtype=np.float32)
    blas = fastest(lambda: square @ square) / square.shape[0] ** 3
    copies = {size: _copy_seconds(size) for size in _CACHES}
    near, far = min(copies.values()), max(min(copies.values()), _copy_seconds(4 * _CACHES[-1]))
    cached = [size for size, seconds in copies.items() if seconds < 2 * near]
    single, double = (_dense_seconds(dtype) for dtype in (np.float32, np.float64))
    return Prices(
        call=call,
        plan_call=max(LEAST, fastest(lambda: scaling(a, b, out=out)) - call),
        step=fastest(lambda: chain(g, blocks)) / len(blocks),
        near=near,
        far=far,
        cache=float(max(cached)),
        blas=blas,
        double=max(1.0, double / single),
        sharing=sharing,
        products={},
        recurrent={},
        calibrated=True,
        measured=now_and_here(),
        **dict.fromkeys(_LATER, 0.0),
    )


def _copy_seconds(size: int) -> float:
    """Return the seconds of a byte in a copy that reads and writes `size` bytes, over and over."""
    room = np.ones(size // 8 + 100)  # its halves lie apart by no power of two: caches do not like that
    half = size // 16
    return fastest(lambda: np.copyto(room[-half:], room[:half]), 0.03) / size


def _dense_seconds(dtype: Any) -> float:
    k, size, count = kernels.get(np), 20, 8
    a = np.random.default_rng(0).standard_normal((count, size, size, BATCH)).astype(dtype)
    out, index = np.empty_like(a), np.arange(count)
    return fastest(lambda: k.dense_matmul(a, index, a, index, out, index)) / (count * size**3 * BATCH)


# ---- sparse products -----------------------------------------------------------------------------------------------


def _products(known: Prices) -> dict[str, tuple[float, float]]:
    """Return the price of each strategy's product: what is left of a call without its own price and its bytes'."""
    found = dict.fromkeys(STRATEGIES, (LEAST, LEAST))
    for plan in _plans():
        prices = []
        for batch in (1, BATCH):
            a, b = (np.ones((p.nnz, batch), np.float32) for p in (plan.a, plan.b))
            out = np.empty((plan.pattern.nnz, batch), np.float32)
            own = sum(array.nbytes for array in plan.arrays.values())
            columns = plan.a.indices.nbytes if plan.how.reads_columns or batch > 1 else 0
            moved = a.nbytes + b.nbytes + out.nbytes + columns + plan.b.indptr.nbytes + own
            rest = fastest(partial(plan, a, b, out=out)) - known.call - known.plan_call - known.moved(moved)
            prices.append(max(LEAST, rest / (plan.products * batch)))
        found[plan.strategy] = (prices[0], prices[1])
    found["matvec"] = _matvec(known)
    return found


def _plans() -> Iterator[ProductPlan]:
    """Yield a plan of each strategy, of some 500 000 products: kernels take far longer than the call then."""
    rng = np.random.default_rng(0)
    convolution, pool, hwc, after = (
        SparsityPattern.from_scipy(matrix)
        for matrix in (
            convolution_t(3, 32, 24), max_pool_t(32, 24),
            convolution_t(4, 16, 8, layout="hwc"), convolution_t(16, 16, 8, layout="hwc"),
        )
    )  # fmt: skip
    a, b = _scattered(rng, 2000, 2000, 16), _scattered(rng, 2000, 2000, 16)
    for strategy in candidates_of_structure(a, b):  # pairs, positions and the last resort
        yield plan_by(strategy)
    yield plan_product(SparsityPattern.diagonal(convolution.shape[0]), convolution)
    yield from map(plan_by, candidates(convolution, SparsityPattern.diagonal(convolution.shape[1]), None))
    yield plan_product(_selection(rng, 2000, convolution.shape[0]), convolution)
    yield plan_product(convolution, pool)
    n = 400
    pairs = np.arange(2 * n).reshape(2, n).T.ravel()  # two columns a row, none of them twice
    yield plan_product(_scattered(rng, 60 * n, n, 8), SparsityPattern(np.arange(n + 1) * 2, pairs, (n, 2 * n)))
    yield plan_product(hwc, after)
    yield plan_product(*[SparsityPattern.from_scipy(finite_elements(600, unknowns=3))] * 2)
    yield plan_product(SparsityPattern.dense(96, 96), SparsityPattern.dense(96, 96))
    yield plan_product(*[_scattered(rng, 128, 128, 80)] * 2)


def _scattered(rng: np.random.Generator, rows: int, columns: int, each: int) -> SparsityPattern:
    indices = np.concatenate([np.sort(rng.choice(columns, each, replace=False)) for _ in range(rows)])
    return SparsityPattern(np.arange(rows + 1) * each, indices, (rows, columns))


def _selection(rng: np.random.Generator, rows: int, columns: int) -> SparsityPattern:
    return SparsityPattern(np.arange(rows + 1), rng.integers(0, columns, rows), (rows, columns))


def _matvec(known: Prices) -> tuple[float, float]:
    pattern, k = _scattered(np.random.default_rng(1), 8000, 8000, 40), kernels.get(np)
    indptr, indices = pattern.indptr, pattern.indices
    prices = []
    for batch in (1, BATCH):
        data, x = (np.ones((size, batch), np.float32) for size in (pattern.nnz, pattern.shape[1]))
        y = np.empty_like(x)
        moved = data.nbytes + x.nbytes + y.nbytes + indices.nbytes + indptr.nbytes
        took = fastest(partial(k.csr_matvec, indptr, indices, data, x, y))
        prices.append(max(LEAST, (took - known.call - known.moved(moved)) / (pattern.nnz * batch)))
    return prices[0], prices[1]


# ---- layers --------------------------------------------------------------------------------------------------------


def _layers() -> dict[str, Any]:
    """Return the prices of what happens between a chain's matrix products, and of Jacobians' values."""
    x = np.ones((2, 6), np.float32)
    seconds, calls = 0.0, 0
    for small in (nn.Linear(6, 6, rng=0), nn.Tanh(), nn.Sigmoid()):
        y, saved = small.forward(x)
        seconds += fastest(partial(small.input_grad, y, saved))
        calls += small.input_grad_work(x.shape, saved).calls
    large, other = np.ones(1 << 23, np.float32), np.ones(1 << 23, np.float32)  # far more than a cache holds
    pruned = nn.Conv2d(16, 32, 3, padding=1, rng=0)
    pruned.keep_weights(np.random.default_rng(0).random(pruned.params["weight"].shape) < 0.1)
    entries, written, values = 0, 0.0, np.ones((BATCH, 16, 24, 24), np.float32)
    for layer in (pruned, nn.ReLU(), nn.MaxPool2d(2)):
        values, kept = layer.forward(values)
        entries += layer.jacobian_t(kept).data.size
        written += fastest(partial(layer.jacobian_t, kept))
    return {
        "operation": seconds / calls,
        "array": fastest(lambda: large * other) / (3 * large.nbytes),
        "value": written / (12 * entries),
    }


# ---- recurrent layers ----------------------------------------------------------------------------------------------


def _recurrent(found: Prices, told: Told) -> Prices:
    """Return the prices with those of recurrent layers."""
    measured: list[tuple[str, int, int, int, float]] = []
    for cell, kind, width in (("rnn", nn.RNN, 4), ("gru", nn.GRU, 11), ("lstm", nn.LSTM, 12)):
        for hidden in _HIDDEN:
            told(f"{cell.upper()}, hidden size {hidden}")
            layer = kind(hidden, hidden, backward="bp", rng=0)
            for steps, batch in _SHAPES:
                if 4 * steps * batch * hidden * width <= _MOST:
                    seconds = backward_seconds(layer, *_sequence(steps, batch, hidden), clock=time.thread_time)
                    measured.append((cell, steps, batch, hidden, _low(seconds)))
    fits = [_fit(replace(found, states_cache=float(size)), measured) for size in _CACHES]
    _, found = min(fits, key=lambda pair: pair[0])
    told("chunked scans")
    return replace(found, recurrent={cell: _with_maps(found, cell) for cell in CELLS})


def _sequence(steps: int, batch: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((steps, batch, hidden), dtype=np.float32)
    return x, np.ascontiguousarray(x[::-1])


def _fit(found: Prices, measured: list[tuple[str, int, int, int, float]]) -> tuple[float, Prices]:
    """Return the mean square of the logarithmic errors, and the prices that make it small."""
    from scipy.optimize import nnls

    names = [*_SHARED, *(f"{cell}.{own}" for cell in CELLS for own in _OWN)]
    rows = []
    for cell, T, B, H, seconds in measured:
        units = dict(weights_units(cell, T, B, H, 4, 1, found, H))
        for name, count in recursion_units(cell, T, B, H, 4, 1, found).items():
            units[name] = units.get(name, 0.0) + count
        rows.append([units.get(name, 0.0) / seconds for name in names])
    said = np.ones(len(rows))
    matrix = np.array(rows)
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    for _ in range(20):  # weighted so that half and twice count alike
        weight = 1 / np.sqrt(np.clip(said, 0.05, 20.0))
        solution, _ = nnls(matrix / scale * weight[:, None], weight, maxiter=1000)
        said = matrix @ (solution / scale)
    error = float(np.mean(np.log(np.maximum(said, 1e-9)) ** 2))
    price: dict[str, Any] = dict(zip(names, map(float, solution / scale), strict=True))
    cells = {
        cell: CellPrices(**{own: price[f"{cell}.{own}"] for own in _OWN}, map_multiply_add=LEAST) for cell in CELLS
    }
    return error, replace(found, recurrent=cells, **{name: price[name] for name in _SHARED})


def _with_maps(found: Prices, cell: str) -> CellPrices:
    """Return a cell's prices with that of a chunked scan's matrices: what the rest of such scans leaves unexplained."""
    kind, own = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell], found.recurrent[cell]
    without = replace(found, recurrent={cell: replace(own, map_multiply_add=0.0)})
    rest = products = 0.0
    for T, B, H in _CHUNKED:
        layer = kind(H, H, backward="chunked", chunks=_CHUNKS, rng=0)
        seconds = _low(backward_seconds(layer, *_sequence(T, B, H), clock=time.thread_time))
        units = chunked_units(cell, T, B, H, 4, 1, found, _CHUNKS)
        known = spent(units, without) + spent(weights_units(cell, T, B, H, 4, 1, found, H), without)
        rest += seconds - known
        products += units[f"{cell}.map_multiply_add"]
    return replace(own, map_multiply_add=max(LEAST, rest / products))


def main() -> None:
    """Measure the prices and write them at the end: an interruption leaves the file as it was."""
    path = price_path()
    if path is None:
        raise OptionError("There is no file for the prices", expected=f"{VARIABLE}, a file's name, or a home folder",
                          got=f"{VARIABLE}=''" if VARIABLE in os.environ else "no home folder")  # fmt: skip
    path = Path(os.path.realpath(path))  # a link stays one
    prepare_folder(path.parent)  # refused now rather than after the measurement
    start = time.perf_counter()
    save(calibrate(lambda what: print(f"{time.perf_counter() - start:5.1f} s  measuring: {what}")), path)
    print(f"{time.perf_counter() - start:5.1f} s  written: {path}")


if __name__ == "__main__":
    main()
