"""What stands on kept patterns: assembly from triplets, multigrid set-up, and least squares, against SciPy and pyamg.

``python -m benchmarks kept-pattern``. Assembly and multigrid take new values on a pattern that was planned outside of
the time that is compared; SciPy and pyamg find it anew in every call. So does a fit, with new data; both sides get the
same functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import sparsebp as sb
from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, optional, refuse_difference
from sparsebp.core import timing
from sparsebp.solvers.normal_equations import plan_normal_equations

SET_UP_TARGET, FIT_TARGET = 15.0, 5.0
NO_PYAMG = "pyamg is not installed (pip install 'sparsebp[peers]'): multigrid is left out"


def measure_kept_pattern(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for name, elements in meshes(run.settings["sides"]).items():
            for row in measure_assembly(name, elements, run.rounds):
                yield row | {"threads": count}
        if optional("pyamg") is None:
            run.note(NO_PYAMG)
        else:
            for name, shape in run.settings["grids"].items():
                for way in ("smoothed_aggregation", "ruge_stuben"):
                    yield measure_multigrid(name, shape, way, run.rounds) | {"threads": count}
        for scene in run.settings["scenes"]:
            yield measure_fit(bundle(*scene), run.rounds) | {"threads": count}


def planned(make: Callable[[], Any]) -> tuple[Any, float]:
    """Return a plan, and the seconds that it took."""
    start = time.perf_counter()
    plan = make()
    return plan, time.perf_counter() - start


# Assembly of element matrices: triangles and hexahedra.


def meshes(sides: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the nodes of every element, (elements, k)."""
    n, m = sides["triangles"], sides["hexahedra"]
    corner = (np.arange(n)[:, None] * (n + 1) + np.arange(n)).reshape(-1, 1)
    triangles = np.concatenate([corner + np.array(three) for three in ([0, 1, n + 1], [1, n + 2, n + 1])])
    steps = np.array([0, 1, m + 1, m + 2])
    line = np.arange(m)
    first = (line[:, None, None] * (m + 1) ** 2 + line[:, None] * (m + 1) + line).reshape(-1, 1)
    hexahedra = np.concatenate([first + steps, first + steps + (m + 1) ** 2], axis=1)
    return {f"triangles, {len(triangles)}": triangles, f"hexahedra, {len(hexahedra)}": hexahedra}


def measure_assembly(name: str, elements: np.ndarray, rounds: Mapping[str, Any]) -> Iterator[Row]:
    import scipy.sparse as sp

    size, k = int(elements.max()) + 1, elements.shape[1]
    rows, cols = np.repeat(elements, k, axis=1).ravel(), np.tile(elements, (1, k)).ravel()
    values = np.random.default_rng(0).standard_normal(len(rows))
    plan, seconds = planned(lambda: sb.plan_assembly(rows, cols, (size, size)))
    plan.vjp(plan(values))  # compiles

    def scipy() -> Any:
        return sp.coo_array((values, (rows, cols)), shape=(size, size)).tocsr()

    def add_at() -> Any:
        data = np.zeros(plan.pattern.nnz)
        np.add.at(data, plan.places, values)
        return data

    expected = scipy()
    expected.sort_indices()
    refuse_difference(f"{name}: a matrix", "SciPy", float(abs(plan(values) - expected.data).max()))
    sides = {"ours": lambda: plan(values), "coo_array.tocsr": scipy, "np.add.at": add_at}
    timings = timing.measure(sides, **rounds)
    for peer in ("coo_array.tocsr", "np.add.at"):
        row = timing.side_by_side({"ours": timings["ours"], "peer": timings[peer]})
        yield row | {"task": "assembly", "case": name, "size": len(rows), "against": peer, "plan": seconds,
                     "target": None, "met": None}  # fmt: skip


# Multigrid with new coefficients.


def measure_multigrid(name: str, shape: tuple[int, ...], way: str, rounds: Mapping[str, Any]) -> Row:
    import pyamg
    import scipy.sparse as sp

    matrix = sp.csr_array(pyamg.gallery.poisson(shape, format="csr"))
    matrix.sum_duplicates()
    make = getattr(pyamg, f"{way}_solver")
    mg, seconds = planned(lambda: sb.multigrid.from_pyamg(make(matrix)))
    scale = sp.diags_array(np.exp(0.1 * np.random.default_rng(0).standard_normal(matrix.shape[0])))
    new = sp.csr_array(scale @ matrix @ scale)
    new.sum_duplicates()
    mg.update(new.data)
    coarse = new
    for ours, level in zip(mg.matrices[1:], mg.solver.levels, strict=False):
        coarse = sp.csr_array(level.R) @ (coarse @ sp.csr_array(level.P))
        refuse_difference(f"{name}: a coarse matrix", "SciPy", abs(ours - coarse).max() / abs(coarse).max())
    timings = timing.measure({"ours": lambda: mg.update(new.data), "peer": lambda: make(new)}, **rounds)
    row = timing.side_by_side(timings)
    return {"task": "multigrid set-up", "case": f"{name}, {way.replace('_', ' ')}", "size": matrix.shape[0],
            "against": "pyamg", "plan": seconds, **row,
            **harness.reaches(row, "peer_ratio", SET_UP_TARGET)}  # fmt: skip


# Bundle adjustment: cameras and points from where the cameras see the points.


class Fit(NamedTuple):
    """A least-squares problem: residuals, their Jacobian in CSR, and where to start."""

    name: str
    f: Callable[[np.ndarray], np.ndarray]
    jac: Callable[[np.ndarray], Any]
    x0: np.ndarray


def bundle(cameras: int, points: int, views: int) -> Fit:
    """Return synthetic bundle adjustment: each point is seen by `views` cameras.

    A camera has a rotation vector w, a translation t, a focal length and two coefficients of distortion, as in
    S. Agarwal et al., "Bundle Adjustment in the Large", ECCV 2010; x holds the cameras (9 numbers), then the points.
    """
    import scipy.sparse as sp

    rng = np.random.default_rng(0)
    camera = np.argsort(rng.random((points, cameras)), axis=1)[:, :views].ravel()
    point = np.repeat(np.arange(points), views)
    true = np.zeros((cameras, 9))
    true[:, 1], true[:, 3:5], true[:, 5], true[:, 6] = (
        np.linspace(-0.6, 0.6, cameras), 0.3 * rng.standard_normal((cameras, 2)), -8, 500)  # fmt: skip
    true[:, 0] = 0.05  # rotation vectors are never zero
    places = rng.uniform(-1, 1, (points, 3))

    def parts(x: np.ndarray) -> Any:
        of_camera, p = x[: 9 * cameras].reshape(cameras, 9), x[9 * cameras :].reshape(points, 3)[point]
        turn = rotation(of_camera[:, :3])
        q = np.einsum("kij,kj->ki", turn[camera], p) + of_camera[camera, 3:6]
        u = -q[:, :2] / q[:, 2:]
        n = (u * u).sum(axis=1)
        focal, first, second = of_camera[camera, 6:].T
        return of_camera, p, turn, q, u, n, focal, first, second, 1 + first * n + second * n * n

    def project(x: np.ndarray) -> np.ndarray:
        *_, u, _, focal, _, _, distortion = parts(x)
        return u * (focal * distortion)[:, None]

    truth = np.concatenate([true.ravel(), places.ravel()])
    seen = project(truth) + 0.5 * rng.standard_normal((len(camera), 2))

    columns_ = np.concatenate([9 * camera[:, None] + np.arange(9), 9 * cameras + 3 * point[:, None] + np.arange(3)], 1)
    indices, indptr = np.repeat(columns_, 2, axis=0).ravel(), 12 * np.arange(2 * len(camera) + 1)

    def jac(x: np.ndarray) -> Any:
        of_camera, p, turn, q, u, n, focal, first, second, distortion = parts(x)
        w = of_camera[:, :3]
        # how w turns a point: -R [p]x (w wᵀ + (Rᵀ - I) [w]x) / |w|², G. Gallego, A. Yezzi, 2015, eq. 8
        inner = w[:, :, None] * w[:, None] + (turn.swapaxes(1, 2) - np.eye(3)) @ cross(w)
        by_w = -turn[camera] @ cross(p) @ (inner / (w * w).sum(axis=1)[:, None, None])[camera]
        by_u = focal[:, None, None] * (
            distortion[:, None, None] * np.eye(2) + u[:, :, None] * (2 * (first + 2 * second * n)[:, None] * u)[:, None]
        )
        u_by_q = np.zeros((len(q), 2, 3))
        u_by_q[:, 0, 0] = u_by_q[:, 1, 1] = -1 / q[:, 2]
        u_by_q[:, :, 2] = -u / q[:, 2:]
        by_q = by_u @ u_by_q
        lens = u[:, :, None] * np.stack([distortion, focal * n, focal * n * n], axis=1)[:, None]
        blocks = np.concatenate([by_q @ by_w, by_q, lens, by_q @ turn[camera]], axis=2)
        return sp.csr_array((blocks.ravel(), indices, indptr), shape=(2 * len(camera), len(x)))

    start = truth + np.concatenate([
        (1e-2 * rng.standard_normal((cameras, 9)) * [1, 1, 1, 1, 1, 1, 100, 1, 1]).ravel(),
        0.05 * rng.standard_normal(3 * points),
    ])  # fmt: skip
    return Fit(f"{cameras} cameras, {points} points", lambda x: (project(x) - seen).ravel(), jac, start)


def cross(v: np.ndarray) -> np.ndarray:
    """Return the matrices [v]x of ``v × p``, (K, 3, 3)."""
    x, y, z, o = *v.T, np.zeros(len(v))
    return np.stack([o, -z, y, z, o, -x, -y, x, o], axis=1).reshape(-1, 3, 3)


def rotation(w: np.ndarray) -> np.ndarray:
    """Return the matrices of rotation vectors, by Rodrigues' formula."""
    angle = np.sqrt((w * w).sum(axis=1))[:, None, None]
    k = cross(w) / angle
    return np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * (k @ k)


def measure_fit(fit: Fit, rounds: Mapping[str, Any]) -> Row:
    from scipy.optimize import least_squares

    def ours() -> Any:
        return sb.least_squares(fit.f, fit.x0, fit.jac)

    def scipy() -> Any:
        return least_squares(fit.f, fit.x0, fit.jac, method="trf", tr_solver="lsmr", x_scale="jac")

    jacobian = fit.jac(fit.x0)
    _, seconds = planned(lambda: plan_normal_equations(sb.SparsityPattern.from_scipy(jacobian)))
    found, expected = ours(), scipy()
    refuse_difference(f"{fit.name}: the cost", "SciPy", found.cost / expected.cost - 1)  # a lower cost is welcome
    few = {"rounds": min(3, rounds["rounds"]), "least_rounds": 2, "warmup": 1}
    row = timing.side_by_side(timing.measure({"ours": ours, "peer": scipy}, **(dict(rounds) | few)))
    return {"task": "least squares", "case": fit.name, "size": len(fit.x0), "against": "trf, lsmr", "plan": seconds,
            "cost": found.cost, "peer_cost": expected.cost, "steps": found.nfev, "peer_steps": expected.nfev, **row,
            **harness.reaches(row, "peer_ratio", FIT_TARGET)}  # fmt: skip


KEPT_PATTERN = Benchmark(
    name="kept-pattern",
    title="Assembly, multigrid set-up and least squares on kept patterns: float64, CPU",
    leaves_out="planning (column 'plan once'; of multigrid, with pyamg's first set-up)",
    settings={"dtype": "float64", "targets": {"multigrid": SET_UP_TARGET, "least squares": FIT_TARGET}},
    sizes={
        "sides": {"triangles": 300, "hexahedra": 30},
        "grids": {"256 × 256": (256, 256), "40 × 40 × 40": (40, 40, 40)},
        "scenes": ((20, 2000, 5), (50, 8000, 4)),
    },
    quick={"sides": {"triangles": 4, "hexahedra": 2}, "grids": {"12 × 12": (12, 12)}, "scenes": ((4, 20, 3),)},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 6.0},
    measure=measure_kept_pattern,
    columns=columns(
        words={"task": "task", "case": "case", "against": "compared with"},
        counts={"size": "size"},
        seconds={"plan": "plan once", "peer": "the peer"},
        times={"peer_ratio": "over the peer"},
    ),
    short=("task", "case", "size", "against", "ours", "peer", "peer_ratio", "plan", "target", "met"),
    in_short=lambda row: row["threads"] == 1,
    picture=harness.bars("{task}: {case}; {against}", {"peer_ratio": "over the peer"}, harness.SPEED_UP,
                         line=1.0),
)  # fmt: skip
