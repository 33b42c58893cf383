"""LU and Cholesky factors of many matrices on one pattern, against SciPy's SuperLU and, if klujax is installed, KLU.

``python -m benchmarks factor``. A matrix with new values is factorised and one system solved with it. The order is
planned once, outside of the time that is compared; the table gives that time too. SciPy's ``splu`` orders and analyses
every matrix anew, on one thread, and has no batch: a sample of ours stands against one matrix of its. KLU keeps its
order and its pivots, as we do: its ``refactor`` and solve, for one matrix or a batch. Against Cholesky factors ``splu``
runs in its symmetric mode.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Row, Run, columns, fits, refuse_difference
from sparsebp.core import timing
from sparsebp.patterns import SparsityPattern
from sparsebp.products import plan_factor

TARGET = 5.0
"""For batches of 8 or more."""
CHOLESKY = ", Cholesky"
SYMMETRIC: dict[str, Any] = {
    "permc_spec": "MMD_AT_PLUS_A",
    "diag_pivot_thresh": 0.0,
    "options": {"SymmetricMode": True},
}
SAMPLES = 4
"""Different matrices that SciPy takes in turn."""


def measure_factor(run: Run) -> Iterator[Row]:
    plan_factor(SparsityPattern.diagonal(2), np.ones(2))  # compiles
    for count in run.threads():
        for name, matrix in matrices(run.settings["sides"]).items():
            for batch in run.settings["batches"]:
                pattern = SparsityPattern.from_scipy(matrix)
                start = time.perf_counter()
                definite = name.endswith(CHOLESKY)
                plan = plan_factor(pattern, kind="cholesky") if definite else plan_factor(pattern, matrix.data)
                row: Row = {"matrix": name, "n": matrix.shape[0], "entries": pattern.nnz, "fill": plan.fill,
                            "batch": batch, "threads": count, "plan": time.perf_counter() - start}  # fmt: skip
                if fits(f"{name}, batch {batch}", 2 * plan.fill * batch * matrix.data.itemsize, run.note):
                    yield row | measure_factor_row(name, plan, matrix.data, batch, run.rounds)


def matrices(sides: Mapping[str, int]) -> dict[str, Any]:
    """Return CSR matrices in float64, the same ones at every call, with coefficients that vary."""
    import scipy.sparse as sp

    rng = np.random.default_rng(0)

    def grid(*shape: int) -> Any:
        total = sp.csr_array((1, 1))
        for n in shape:
            line = sp.diags_array([2.0, -1.0, -1.0], offsets=[0, 1, -1], shape=(n, n))
            total = sp.kron(total, sp.eye_array(n)) + sp.kron(sp.eye_array(total.shape[0]), line)
        return total

    def circuit(n: int) -> Any:
        """A random network, mostly a tree with few branches at each node, with a conductance to ground."""
        near = np.arange(1, n) - rng.integers(1, 30, n - 1).clip(max=np.arange(1, n))
        a, b = rng.integers(n, size=n // 10), rng.integers(1, 30, n // 10)
        ends = np.concatenate([np.arange(1, n), a]), np.concatenate([near, (a + b).clip(max=n - 1)])
        network = sp.coo_array((-rng.random(len(ends[0])), ends), shape=(n, n)).tocsr()
        network = network + network.T
        return network - sp.diags_array(network.sum(axis=1) - 0.01)

    def vary(matrix: Any) -> Any:
        matrix.sum_duplicates()
        matrix.data *= 1 + 0.1 * rng.random(matrix.nnz)
        return matrix

    line, square, cube = sides["line"], sides["square"], sides["cube"]
    offsets = [-2, -1, 0, 1, 2]
    found = {
        f"band of 5, {line}": sp.diags_array([-1.0, -1.0, 5.0, -1.0, -1.0], offsets=offsets, shape=(line, line)),
        f"grid, {square} × {square}": grid(square, square),
        f"grid, {2 * square} × {2 * square}": grid(2 * square, 2 * square),
        f"grid, {cube} × {cube} × {cube}": grid(cube, cube, cube),
        f"circuit, {line} nodes": circuit(line),
    }
    found = {name: vary(sp.csr_array(matrix)) for name, matrix in found.items()}
    definite = {f"grid, {2 * square} × {2 * square}": grid(2 * square, 2 * square),
                f"grid, {cube} × {cube} × {cube}": grid(cube, cube, cube)}  # fmt: skip
    return found | {name + CHOLESKY: sp.csr_array(matrix) for name, matrix in definite.items()}


def measure_factor_row(name: str, plan: Any, data: np.ndarray, batch: int, rounds: Mapping[str, Any]) -> Row:
    from scipy.sparse.linalg import splu

    rng, n = np.random.default_rng(1), plan.pattern.shape[0]
    values, b = data[:, None] * (1 + 0.05 * rng.random((len(data), batch))), rng.standard_normal((n, batch))
    options: dict[str, Any] = {}
    if plan.kind == "cholesky":
        scale, options = 1 + 0.05 * rng.random((n, batch)), SYMMETRIC
        values = data[:, None] * (scale[plan.pattern.row_of_entry] * scale[plan.pattern.indices])
    theirs = [(plan.pattern.to_scipy(values[:, s].copy()).tocsc(), b[:, s].copy()) for s in range(min(batch, SAMPLES))]
    x = plan(values).solve(b)
    for s, (matrix, right) in enumerate(theirs):
        expected = splu(matrix, **options).solve(right)
        refuse_difference(f"{name}: a solution", "SciPy", float(abs(x[:, s] - expected).max() / abs(expected).max()))
    turns = cycle(theirs)
    scipy = timing.Call(lambda given: splu(given[0], **options).solve(given[1]), lambda: next(turns))
    sides: dict[str, Any] = {"ours": lambda: plan(values).solve(b), "scipy": scipy}
    if importlib.util.find_spec("klujax") is not None:
        sides["klu"] = klu(plan.pattern, values, b)
        gap = abs(np.asarray(sides["klu"]()) - x.T).max() / abs(x).max()
        refuse_difference(f"{name}: a solution", "KLU", float(gap))
    timings = timing.measure(sides, **rounds)
    timings |= {side: harness.each(timings[side], batch) for side in timings if side != "scipy"}
    row = timing.side_by_side(timings)
    reached = harness.reaches(row, "scipy_ratio", TARGET) if batch >= 8 else {"target": None, "met": None}
    return row | reached


def klu(pattern: SparsityPattern, values: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """Return a call of KLU that factorises a batch with the pivots of the first call, and solves: (B, n)."""
    import jax
    import klujax

    with jax.enable_x64(True):
        data, right = jax.numpy.asarray(values.T.copy()), jax.numpy.asarray(b.T[:, :, None].copy())
        where = jax.numpy.asarray(pattern.row_of_entry, np.int32), jax.numpy.asarray(pattern.indices, np.int32)
        symbolic = klujax.analyze(*where, pattern.shape[0])
        numeric = klujax.factor(*where, data, symbolic)
        handles = [klujax._get_symbolic_handle(symbolic), klujax._get_numeric_handle(numeric)]
        handles = [handle.astype(np.uint64) for handle in handles]
        # without klujax's own wrapper, which sorts the entries at every call
        run = jax.jit(lambda *arrays: klujax.refactor_and_solve_f64.bind(*arrays)[0])

    def call(kept: Any = (symbolic, numeric)) -> Any:  # they free what the handles stand for
        with jax.enable_x64(True):
            return run(*where, data, right, *handles).block_until_ready()[:, :, 0]

    return call


FACTOR = Benchmark(
    name="factor",
    title="A matrix with new values, factorised, and one system solved: float64, CPU, time per matrix",
    leaves_out="ordering and symbolic phase of ours (column 'plan once') and of KLU; SciPy's are in every call",
    settings={"dtype": "float64", "target": TARGET},
    sizes={"batches": (1, 8, 16, 64), "sides": {"line": 10_000, "square": 40, "cube": 14}},
    quick={"batches": (1, 9), "sides": {"line": 60, "square": 5, "cube": 4}},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 6.0},
    measure=measure_factor,
    columns=columns(
        words={"matrix": "matrix"},
        numbers={"n": "rows", "entries": "entries", "fill": "entries of L and U"},
        seconds={"plan": "plan once"},
        times={"scipy_ratio": "over SciPy", "klu_ratio": "over KLU"},
    ),
    short=("matrix", "batch", "threads", "ours", "scipy", "scipy_ratio", "klu_ratio", "plan"),
    in_short=lambda row: row["batch"] in (1, 16) and row["threads"] == 1 and row["matrix"] != "grid, 40 × 40",
    overview=Overview(task="LU factors of a matrix with new values", peer="SciPy", ratio="scipy_ratio",
                      label="{matrix}, batch {batch}", page="products.md#lu-factors"),
    picture=harness.bars("{matrix}; batch {batch}", {"klu_ratio": "over KLU", "scipy_ratio": "over SciPy"},
                         harness.SPEED_UP, (harness.OTHER_PEER[1], harness.SCIPY), log=True, line=1.0),
)  # fmt: skip
