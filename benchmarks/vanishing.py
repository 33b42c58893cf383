"""Steps whose values vanish: below the smallest normal number, on which some processors take a hundred times as long.

``python -m benchmarks vanishing``. Each row runs a step with ordinary values and the same step with values, gradients
or states of about 1e-39 (float32; the factors: 1e-310 in float64), in turn, and a peer's step with the same values.
The kernels flush such numbers to zero, so that their time depends on sizes alone. Results are compared where other
benchmarks run the same steps with ordinary values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch
from sparsebp import nn, optim, products, scan
from sparsebp.core import timing

TARGET = 0.9
"""Ordinary over vanishing: the noise of two timings."""
TINY = 1e-39
Step = Callable[[], object]


class Family(NamedTuple):
    """A kind of step: what `ours` and `theirs` return for a factor of its values."""

    peer: str
    ours: Callable[[float], Step]
    theirs: Callable[[float], Step]


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# Recurrent layers: the last layer's weights make the gradients as small as they are.

CELLS = {"GRU(64, 128)": ("GRU", 64, 128), "LSTM(38, 64)": ("LSTM", 38, 64), "RNN(1, 20)": ("RNN", 1, 20)}
STEPS, BATCH, CLASSES = 200, 32, 10


def our_training(kind: str, features: int, hidden: int, factor: float) -> Step:
    layer, head = getattr(nn, kind)(features, hidden, rng=0), nn.Linear(hidden, CLASSES, rng=0)
    head.params["weight"] *= np.float32(factor)
    step = nn.value_and_grad(nn.SequenceClassifier(layer, head), nn.CrossEntropyLoss())
    return partial(step, _normal(STEPS, BATCH, features), np.arange(BATCH) % CLASSES)


def torch_training(kind: str, features: int, hidden: int, factor: float) -> Step:
    torch = import_torch()
    layer, head = getattr(torch.nn, kind)(features, hidden), torch.nn.Linear(hidden, CLASSES)
    x, target = torch.from_numpy(_normal(STEPS, BATCH, features)), torch.arange(BATCH) % CLASSES
    with torch.no_grad():
        head.weight *= factor
    weights = [*layer.parameters(), *head.parameters()]

    def step() -> object:
        return torch.autograd.grad(torch.nn.functional.cross_entropy(head(layer(x)[0][-1]), target), weights)

    return step


# A convolution of small values, forward and backward.


def our_convolution(factor: float) -> Step:
    layer, x, grad = nn.Conv2d(16, 16, 3, padding=1, rng=0), _normal(8, 16, 28, 28), _normal(8, 16, 28, 28)
    x, grad = x * np.float32(factor), grad * np.float32(factor)

    def step() -> object:
        _, saved = layer.forward(x)
        return layer.input_grad(grad, saved), layer.weight_grad(grad, saved)

    return step


def torch_convolution(factor: float) -> Step:
    torch = import_torch()
    layer = torch.nn.Conv2d(16, 16, 3, padding=1)
    x, grad = (torch.from_numpy(_normal(8, 16, 28, 28)) * factor for _ in range(2))
    x.requires_grad_()
    return lambda: torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)


# Optimizers, whose moments decay where no gradient comes.

SIZE = 1 << 20


def our_update(kind: str, options: dict[str, float], factor: float) -> Step:
    params = {"weight": _normal(SIZE)}
    optimizer = getattr(optim, kind)(params, **options)
    return partial(optimizer.step, {"weight": _normal(SIZE) * np.float32(factor)})


def torch_update(kind: str, options: dict[str, Any], factor: float) -> Step:
    torch = import_torch()
    weight = torch.nn.Parameter(torch.from_numpy(_normal(SIZE)))
    weight.grad = torch.from_numpy(_normal(SIZE)) * factor
    betas = {"betas": (options["beta1"], options["beta2"])} if "beta1" in options else {}
    others = {name: value for name, value in options.items() if not name.startswith("beta")}
    return getattr(torch.optim, kind)([weight], fused=True, **others, **betas).step


# A linear recurrence; sparse products and factors.


def our_recurrence(factor: float) -> Step:
    return partial(
        scan.linear_recurrence, _normal(1000, 16, 64) % np.float32(0.9), _normal(1000, 16, 64) * np.float32(factor)
    )


def loop_of_recurrence(factor: float) -> Step:
    a, b = _normal(1000, 16, 64) % np.float32(0.9), _normal(1000, 16, 64) * np.float32(factor)
    h = np.empty_like(b)

    def step() -> object:
        h[0] = b[0]
        for t in range(1, len(h)):
            np.multiply(a[t], h[t - 1], out=h[t])
            h[t] += b[t]
        return h

    return step


def _product(factor: float) -> tuple[Any, Any]:
    a = sparse.random_array((4000, 4000), density=2e-3, format="csr", dtype=np.float32, rng=0)
    a.data = _normal(a.nnz) * np.float32(factor) ** np.float32(0.5)
    return a, a.T.tocsr()


def our_product(factor: float) -> Step:
    a, b = _product(factor)
    return partial(products.plan_product(a, b), a.data, b.data)


def scipy_product(factor: float) -> Step:
    a, b = _product(factor)
    return lambda: a @ b


def _grid(factor: float) -> Any:
    line = sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(60, 60))
    laplacian = sparse.csc_array(sparse.kron(line, sparse.eye_array(60)) + sparse.kron(sparse.eye_array(60), line))
    off = laplacian.indices != np.repeat(np.arange(3600), np.diff(laplacian.indptr))
    laplacian.data[off] *= factor  # what is filled in has the square of it
    return laplacian


def our_factor(factor: float) -> Step:
    matrix = _grid(factor**4).tocsr()  # 1e-156: in float64 its square vanishes
    return partial(products.plan_factor(matrix), matrix.data)


def scipy_factor(factor: float) -> Step:
    matrix = _grid(factor**4)
    return lambda: splu(matrix)


SGD, ADAM = {"lr": 0.01, "momentum": 0.9}, {"lr": 1e-3}
FAMILIES = {
    **{f"training step, {name}": Family("PyTorch", partial(our_training, *cell), partial(torch_training, *cell))
       for name, cell in CELLS.items()},
    "convolution 3 × 3, 16 → 16": Family("PyTorch", our_convolution, torch_convolution),
    "SGD with momentum": Family("PyTorch, fused", partial(our_update, "SGD", SGD), partial(torch_update, "SGD", SGD)),
    "Adam": Family("PyTorch, fused", partial(our_update, "Adam", ADAM), partial(torch_update, "Adam", ADAM)),
    "linear recurrence": Family("a loop of NumPy", our_recurrence, loop_of_recurrence),
    "sparse product": Family("SciPy", our_product, scipy_product),
    "LU factors": Family("SciPy", our_factor, scipy_factor),
}  # fmt: skip


def measure_vanishing(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for name in [*FAMILIES][: run.settings["families"]]:
            yield measure_family(name, run) | {"threads": count}


def measure_family(name: str, run: Run) -> Row:
    """Time ordinary and vanishing values, ours and the peer's, in turn."""
    family, rounds = FAMILIES[name], dict(run.rounds)
    warm = rounds.pop("warmup", 2)
    steps = {"ordinary": family.ours(1.0), "ours": family.ours(TINY), "peer": family.theirs(TINY)}
    timings = timing.in_turn({side: timing.timer(step, warm) for side, step in steps.items()}, **rounds)
    row: Row = {"step": name, "compared": family.peer, **{side: found.to_dict() for side, found in timings.items()}}
    row["steady"] = timing.ratio(timings["ordinary"], timings["ours"])
    row["peer_ratio"] = timing.ratio(timings["peer"], timings["ours"])
    return row | harness.reaches(row, "steady", TARGET)


VANISHING = Benchmark(
    name="vanishing",
    title="Steps whose values vanish (about 1e-39), float32, CPU",
    leaves_out="planning of the product and the factors",
    settings={"target": TARGET},
    sizes={"families": len(FAMILIES)},
    quick={"families": 5},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 3.0},
    measure=measure_vanishing,
    columns=columns(
        words={"step": "step", "compared": "peer"},
        seconds={"ordinary": "ours, ordinary values", "peer": "the peer"},
        times={"steady": "ordinary over vanishing", "peer_ratio": "the peer over ours"},
    ),
    short=("step", "compared", "ordinary", "ours", "steady", "peer", "peer_ratio", "met"),
    in_short=lambda row: row["threads"] == 1,
    picture=harness.bars("{step}", {"ordinary": "ordinary values", "ours": "vanishing"}, "ms", unit=1e3, log=True),
)  # fmt: skip
