"""LDLᵀ, Cholesky and complex factors against the solvers that people have for them.

``python -m benchmarks factor-kinds``. A matrix with new values is factorised and one system solved with it; the order
is planned once on all sides but SciPy's. KKT matrices of quadratic programmes stand against qdldl, whose `update` keeps
its order; Helmholtz equations against SuperLU of SciPy; all of one matrix against PARDISO of MKL (numeric phase and
solve); definite ones against CHOLMOD. Those that are not installed are left out, with a note.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.factor import SYMMETRIC
from benchmarks.harness import Benchmark, Row, Run, columns, refuse_difference
from benchmarks.spgemm import load
from sparsebp.core import timing
from sparsebp.core.errors import SparseBPError
from sparsebp.patterns import SparsityPattern
from sparsebp.products import plan_factor
from sparsebp.products.factor import Kind

Targets = Mapping[str, float]


class System(NamedTuple):
    """Matrices of one pattern, as a SciPy CSR array."""

    kind: Kind
    name: str
    matrix: Any
    signs: np.ndarray | None
    batches: tuple[int, ...]


def systems(sizes: Mapping[str, Any]) -> Iterator[System]:
    """Yield the systems, the same ones at every call."""
    import scipy.sparse as sp

    for name, (hessian, constraints) in programmes(sizes):
        n, m = hessian.shape[0], constraints.shape[0]
        matrix = sp.block_array([
            [hessian + 1e-6 * sp.eye_array(n), constraints.T], [constraints, -10.0 * sp.eye_array(m)],
        ])  # fmt: skip
        yield System("ldlt", name, sp.csr_array(matrix), np.repeat([1, -1], [n, m]), (1, sizes["batch"]))
    for n in sizes["waves"]:
        line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
        damped = sp.csr_array(sp.kronsum(line, line) - (0.3 + 0.02j) * sp.eye_array(n * n))
        yield System("lu", f"Helmholtz, {n} × {n}", damped, None, (1,))
    for n in sizes["cubes"]:
        line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
        cube = sp.csr_array(sp.kronsum(line, sp.kronsum(line, line)))
        for kind in ("lu", "cholesky"):
            yield System(kind, f"grid, {n} × {n} × {n}", cube, None, (1,))


def programmes(sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield Hessian and constraints of quadratic programmes: model predictive control, support vectors, random ones."""
    import scipy.sparse as sp

    rng = np.random.default_rng(0)
    for states, steps in sizes["control"]:
        inputs = states // 2
        dynamics = np.eye(states) + 0.1 * rng.standard_normal((states, states)) * (rng.random((states, states)) < 0.4)
        weights = np.concatenate((np.tile(rng.random(states) + 0.5, steps + 1), np.full(steps * inputs, 0.1)))
        ahead = sp.kron(sp.eye_array(steps + 1, k=-1), dynamics) - sp.eye_array((steps + 1) * states)
        driven = sp.kron(sp.eye_array(steps + 1, steps, k=-1), rng.standard_normal((states, inputs)))
        limits = sp.vstack([sp.hstack([ahead, driven]), sp.eye_array(len(weights))])
        yield f"control, {steps} steps", (sp.diags_array(weights), limits)
    for n in sizes["vectors"]:
        m = 10 * n
        data = sp.random_array((m, n), density=0.15, rng=rng)
        limits = sp.block_array([[data, -sp.eye_array(m)], [None, sp.eye_array(m)]])
        yield f"support vectors, {n}", (sp.diags_array(np.repeat([1.0, 0.0], [n, m])), limits)
    for n, density in sizes["random"]:
        root = sp.random_array((n, n), density=density, rng=rng)
        limits = sp.random_array((2 * n, n), density=density, rng=rng)
        yield f"random programme, {n}", (root @ root.T + 0.01 * sp.eye_array(n), limits)


class Pardiso:
    """MKL's direct solver on one pattern: ordered once, then numeric phase and solve."""

    TYPES: Mapping[str, int] = {"lu": 11, "cholesky": 2, "ldlt": -2}

    def __init__(self, system: System) -> None:
        import scipy.sparse as sp

        half = system.kind != "lu"
        matrix = sp.csr_array(sp.triu(system.matrix) if half else system.matrix)
        matrix.sort_indices()
        self._mkl, self._n = load(), matrix.shape[0]
        self._type = 13 if matrix.dtype.kind == "c" else self.TYPES[system.kind]
        self._handle, self._options = np.zeros(64, np.int64), np.zeros(64, np.int32)
        self._options[[0, 1, 34]] = 1, 2, 1  # own options, METIS, indices from 0
        self._options[[9, 10, 12]] = (
            (8, 0, 0) if half else (13, 1, 1)
        )  # perturbation, scaling, matching: MKL's defaults
        self.data, self._ptr, self._columns = matrix.data.copy(), *(
            array.astype(np.int32) for array in (matrix.indptr, matrix.indices)
        )  # fmt: skip
        self._x = np.zeros(self._n, matrix.dtype)
        self._phase(11, self._x)

    def solve(self, b: np.ndarray) -> np.ndarray:
        """Factorise `data`, and solve."""
        self._phase(23, b)
        return self._x

    def _phase(self, phase: int, b: np.ndarray) -> None:
        def one(value: int) -> Any:
            return ctypes.byref(ctypes.c_int(value))

        error = ctypes.c_int(0)
        handle, data, ptr, found, options, right, x = (
            ctypes.c_void_p(array.ctypes.data)
            for array in (self._handle, self.data, self._ptr, self._columns, self._options, b, self._x)
        )
        self._mkl.pardiso(handle, one(1), one(1), one(self._type), one(phase), one(self._n), data, ptr, found, None,
                          one(1), options, one(0), right, x, ctypes.byref(error))  # fmt: skip
        if error.value:
            raise SparseBPError("PARDISO failed", expected="error 0", got=error.value)

    def __del__(self) -> None:
        if self._mkl is not None:
            self._phase(-1, self._x)


def measure_factor_kinds(run: Run) -> Iterator[Row]:
    qdldl, cholmod = harness.optional("qdldl"), harness.optional("sksparse.cholmod")
    for name, found in (("qdldl", qdldl), ("PARDISO", load()), ("CHOLMOD", cholmod)):
        if found is None:
            run.note(f"{name}: not compared, it is not installed")
    for count in run.threads():
        for system in systems(run.settings):
            for batch in system.batches:
                row: Row = {"kind": "complex" if system.matrix.dtype.kind == "c" else system.kind, "batch": batch,
                            "name": system.name, "n": system.matrix.shape[0], "threads": count}  # fmt: skip
                yield row | measure_system(system, batch, run, qdldl, cholmod)


def measure_system(system: System, batch: int, run: Run, qdldl: Any, cholmod: Any) -> Row:
    import scipy.sparse as sp
    from scipy.sparse.linalg import splu

    matrix, rng = system.matrix, np.random.default_rng(1)
    whole, half, n = sp.csc_array(matrix), sp.csc_array(sp.triu(matrix)), matrix.shape[0]
    half.sort_indices()
    if system.kind == "lu":
        pattern = SparsityPattern.from_scipy(matrix)
        plan, one = plan_factor(pattern, np.ascontiguousarray(matrix.data)), matrix.data
    else:
        triangle = sp.csr_array(half) if system.kind == "ldlt" else matrix
        triangle.sort_indices()
        pattern, one = SparsityPattern.from_scipy(triangle), triangle.data
        plan = plan_factor(pattern, kind=system.kind, signs=system.signs)
    b = rng.standard_normal(n).astype(matrix.dtype)
    values = np.ascontiguousarray(one if batch == 1 else np.repeat(one[:, None], batch, axis=1))
    right = b if batch == 1 else np.repeat(b[:, None], batch, axis=1)
    factors, options = plan(values), SYMMETRIC if system.kind == "cholesky" else {}
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: plan(values, out=factors).solve(right),
        "scipy": lambda: splu(whole, **options).solve(b),
    }
    if system.kind == "ldlt" and qdldl is not None:
        solver = qdldl.Solver(half, upper=True)
        sides["qdldl"] = lambda: (solver.update(half, upper=True), solver.solve(b))[1]
    if load() is not None:
        pardiso = Pardiso(system)
        sides["pardiso"] = lambda: pardiso.solve(b)
    if system.kind == "cholesky" and cholmod is not None:
        factor = cholmod.analyze(whole)
        sides["cholmod"] = lambda: (factor.cholesky_inplace(whole), factor(b))[1]
    expected = splu(whole).solve(b)
    for side, call in sides.items():
        x = call() if side != "ours" or batch == 1 else call()[:, 0]
        gap = float(abs(x - expected).max() / abs(expected).max())
        refuse_difference(f"{system.name}: a solution of {side}", "SciPy", gap)
    timings = timing.measure(sides, **run.rounds)
    timings["ours"] = harness.each(timings["ours"], batch)
    row = timing.side_by_side(timings) | {"fill": plan.fill}
    wanted = TARGETS["complex" if matrix.dtype.kind == "c" else system.kind, batch > 1]
    targets = {} if run.quick else {side: least for side, least in wanted.items() if side in sides}
    missed = [side for side, least in targets.items() if row[f"{side}_ratio"]["median"] < least]
    said = ", ".join(f"≥ {least:g}× {side}" for side, least in targets.items())
    return row | {"targets": said or None, "met": harness.outcome(missed) if targets else None}


TARGETS: Mapping[tuple[str, bool], Targets] = {
    ("ldlt", False): {"qdldl": 0.8}, ("ldlt", True): {"qdldl": 3.0}, ("complex", False): {"scipy": 1.5},
    ("lu", False): {"pardiso": 0.8}, ("cholesky", False): {"pardiso": 0.8, "cholmod": 1.0},
}  # fmt: skip
"""By kind, and for a batch."""

FACTOR_KINDS = Benchmark(
    name="factor-kinds",
    title="LDLᵀ, complex and Cholesky factors with new values, and one system solved: CPU, time per matrix",
    leaves_out="ordering and symbolic phase of all but SciPy, whose are in every call",
    sizes={
        "control": ((8, 10), (10, 50)),
        "vectors": (20, 100),
        "random": ((50, 0.1), (200, 0.05), (1000, 0.003)),
        "waves": (40, 100, 200),
        "cubes": (20, 26),
        "batch": 64,
    },
    quick={"control": ((4, 3),), "vectors": (3,), "random": ((8, 0.3),), "waves": (4,), "cubes": (3,), "batch": 9},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 6.0},
    measure=measure_factor_kinds,
    columns=columns(
        words={"kind": "factors", "name": "matrix", "targets": "targets", "met": "met"},
        numbers={"n": "rows", "fill": "entries of the factors"},
        times={
            "qdldl_ratio": "over qdldl",
            "scipy_ratio": "over SciPy",
            "pardiso_ratio": "over PARDISO",
            "cholmod_ratio": "over CHOLMOD",
        },
    ),
    short=("kind", "name", "threads", "ours", "qdldl_ratio", "scipy_ratio", "pardiso_ratio"),
    in_short=lambda row: (row["threads"], row["batch"]) == (1, 1) and not row["name"].endswith(("40 × 40", "20 × 20")),
    picture=harness.bars("{kind}: {name}", {"qdldl_ratio": "over qdldl", "pardiso_ratio": "over PARDISO",
                         "scipy_ratio": "over SciPy"}, harness.SPEED_UP,
                         (harness.OTHER_PEER[1], harness.MKL, harness.SCIPY), log=True, line=1.0),
)  # fmt: skip
