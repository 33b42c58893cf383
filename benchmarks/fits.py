"""Least squares with compiled Jacobians: bundle adjustment and a pose graph, against SciPy and gtsam.

``python -m benchmarks least-squares``. SciPy's trf gets the same residuals and the pattern, as in its cookbook of
bundle adjustment; gtsam the same problem in its own factors, in C++, with the better of its two orders. Our Jacobian
and plans are made before, in the time of the column "plan once"; gtsam's graphs are built before, too.
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

TARGETS = {"SciPy trf, lsmr": 5.0, "gtsam": 1.0}


class Problem(NamedTuple):
    """Residuals, where to start, the first damping, and gtsam's optimizer."""

    f: Callable[[np.ndarray], np.ndarray]
    x0: np.ndarray
    damping: float
    gtsam: Callable[[Any], tuple[Callable[[], Any], Callable[[], float]]]


def rotated(points: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Turn points by rotation vectors: Rodrigues' formula."""
    angle = np.sqrt(np.sum(turns**2, axis=1))[:, None]
    axis = turns / angle
    along = np.sum(points * axis, axis=1)[:, None]
    x, y, z = axis.T
    a, b, c = points.T
    across = np.stack([y * c - z * b, z * a - x * c, x * b - y * a], axis=1)
    return np.cos(angle) * points + np.sin(angle) * across + along * (1 - np.cos(angle)) * axis


def projected(points: np.ndarray, cameras: np.ndarray) -> np.ndarray:
    """Return pixels, by the model of S. Agarwal et al., "Bundle Adjustment in the Large", ECCV 2010."""
    seen = rotated(points, cameras[:, :3]) + cameras[:, 3:6]
    seen = -seen[:, :2] / seen[:, 2:]
    square = np.sum(seen**2, axis=1)
    return seen * ((1 + cameras[:, 7] * square + cameras[:, 8] * square**2) * cameras[:, 6])[:, None]


def street(cameras: int, points: int) -> Problem:
    """Return bundle adjustment along a street, as the Ladybug problems: a point is seen by successive cameras."""
    rng = np.random.default_rng(0)
    along = np.linspace(0, 0.6 * cameras, cameras)
    view = np.zeros((cameras, 9))
    view[:, :3] = 0.05 * rng.standard_normal((cameras, 3))
    centers = np.column_stack([0.1 * rng.standard_normal((cameras, 2)), -along])
    view[:, 3:6] = -rotated(centers, view[:, :3])
    view[:, 6:] = np.array([400, -2e-2, 2e-3])
    first = rng.integers(0, cameras - 1, points)
    views = np.minimum(1 + rng.geometric(1 / 4, points), cameras - first)
    last = first + views - 1
    places = np.column_stack([rng.uniform(-4, 4, points), rng.uniform(-2, 2, points),
                              -along[last] - rng.uniform(2, 10, points)])  # fmt: skip
    point = np.repeat(np.arange(points), views)
    camera = first[point] + np.arange(len(point)) - np.repeat(np.cumsum(views) - views, views)
    seen = projected(places[point], view[camera]) + 0.5 * rng.standard_normal((len(point), 2))
    noise = rng.standard_normal(view.shape) * [5e-3, 5e-3, 5e-3, 2e-2, 2e-2, 2e-2, 5, 1e-3, 1e-4]
    x0 = np.concatenate([(view + noise).ravel(), (places + 0.1 * rng.standard_normal(places.shape)).ravel()])

    def f(x: np.ndarray) -> np.ndarray:
        of_camera, of_point = x[: 9 * cameras].reshape(cameras, 9), x[9 * cameras :].reshape(points, 3)
        return (projected(of_point[point], of_camera[camera]) - seen).ravel()

    def by_gtsam(gtsam: Any) -> tuple[Callable[[], Any], Callable[[], float]]:
        from scipy.spatial.transform import Rotation

        graph, start, flip = gtsam.NonlinearFactorGraph(), gtsam.Values(), np.diag([1.0, -1, -1])
        unit = gtsam.noiseModel.Unit.Create(2)
        for i, j, (u, v) in zip(camera.tolist(), point.tolist(), seen, strict=True):
            graph.add(gtsam.GeneralSFMFactorCal3Bundler(np.array([u, -v]), unit, i, cameras + j))
        for i, one in enumerate(x0[: 9 * cameras].reshape(cameras, 9)):
            turn = flip @ Rotation.from_rotvec(one[:3]).as_matrix()
            pose = gtsam.Pose3(gtsam.Rot3(turn.T), -turn.T @ flip @ one[3:6])
            start.insert(i, gtsam.PinholeCameraCal3Bundler(pose, gtsam.Cal3Bundler(*one[6:], 0, 0)))
        for j, place in enumerate(x0[9 * cameras :].reshape(points, 3)):
            start.insert(cameras + j, place)
        return optimized(gtsam, graph, start, gtsam.LevenbergMarquardtParams.CeresDefaults())

    return Problem(f, x0, 1e-3, by_gtsam)


def rounds_of_a_robot(poses: int) -> Problem:
    """Return a pose graph in the plane, shaped as Manhattan 3500: a robot on a grid, and loops where it comes again."""
    rng = np.random.default_rng(0)
    steps, side = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)]), 20
    true, heading, place = np.zeros((poses, 3)), 0, np.zeros(2, int)
    for k in range(1, poses):
        heading = (heading + (rng.random() < 0.25) * rng.choice([1, 3])) % 4
        while (abs(place + steps[heading]) > side).any():
            heading = (heading + 1) % 4
        place = place + steps[heading]
        true[k] = *place, heading * np.pi / 2
    i, j = np.arange(poses - 1), np.arange(1, poses)
    near = np.argwhere(np.triu(abs(true[:, None, :2] - true[None, :, :2]).sum(axis=2) <= 1, 11))
    near = near[rng.permutation(len(near))[: poses * 3 // 5]]
    i, j = np.append(i, near[:, 0]), np.append(j, near[:, 1])

    def between(x: np.ndarray) -> np.ndarray:
        d, c, s = x[j, :2] - x[i, :2], np.cos(x[i, 2]), np.sin(x[i, 2])
        return np.stack([c * d[:, 0] + s * d[:, 1], c * d[:, 1] - s * d[:, 0], x[j, 2] - x[i, 2]], axis=1)

    sigma = np.array([0.05, 0.05, 0.02])
    measured = between(true) + sigma * rng.standard_normal((len(i), 3))
    angles = np.append(0, np.cumsum(measured[: poses - 1, 2]))
    moves = (measured[: poses - 1, 0] + 1j * measured[: poses - 1, 1]) * np.exp(1j * angles[:-1])
    path = np.append(0, np.cumsum(moves))
    x0 = np.column_stack([path.real, path.imag, angles])
    cos, sin = np.cos(measured[:, 2]), np.sin(measured[:, 2])

    def f(x: np.ndarray) -> np.ndarray:
        x = x.reshape(poses, 3)
        d = between(x) - measured
        turn = np.arctan2(np.sin(d[:, 2]), np.cos(d[:, 2]))
        off = np.stack([cos * d[:, 0] + sin * d[:, 1], cos * d[:, 1] - sin * d[:, 0], turn], axis=1)
        return np.concatenate([(off / sigma).ravel(), 1e3 * x[0]])

    def by_gtsam(gtsam: Any) -> tuple[Callable[[], Any], Callable[[], float]]:
        graph, start = gtsam.NonlinearFactorGraph(), gtsam.Values()
        noise = gtsam.noiseModel.Diagonal.Sigmas(sigma)
        for a, b, one in zip(i.tolist(), j.tolist(), measured, strict=True):
            graph.add(gtsam.BetweenFactorPose2(a, b, gtsam.Pose2(*one), noise))
        graph.add(gtsam.PriorFactorPose2(0, gtsam.Pose2(), gtsam.noiseModel.Isotropic.Sigma(3, 1e-3)))
        for k, one in enumerate(x0):
            start.insert(k, gtsam.Pose2(*one))
        return optimized(gtsam, graph, start, gtsam.LevenbergMarquardtParams())

    return Problem(f, x0.ravel(), 1e-5, by_gtsam)


def optimized(gtsam: Any, graph: Any, start: Any, options: Any) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Return gtsam's fit by the faster of its orders, and the cost that it finds."""
    took = {}
    for order in ("COLAMD", "METIS"):
        options.setOrderingType(order)
        begin = time.perf_counter()
        found = gtsam.LevenbergMarquardtOptimizer(graph, start, options).optimize()
        took[order] = time.perf_counter() - begin
    options.setOrderingType(min(took, key=lambda order: took[order]))
    return (lambda: gtsam.LevenbergMarquardtOptimizer(graph, start, options).optimize()), lambda: graph.error(found)


def measure_fits(run: Run) -> Iterator[Row]:
    gtsam = optional("gtsam")
    if gtsam is None:
        run.note("gtsam is not installed: its rows are left out")
    settings = run.settings
    for name, problem, with_scipy in (
        (f"bundle adjustment, {settings['block'][0]} cameras", street(*settings["block"]), True),
        (f"bundle adjustment, {settings['street'][0]} cameras", street(*settings["street"]), False),
        (f"pose graph, {settings['poses']} poses", rounds_of_a_robot(settings["poses"]), False),
    ):
        begin = time.perf_counter()
        jac = sb.sparse_jacobian(problem.f, problem.x0, compiled=True)
        found = sb.least_squares(problem.f, problem.x0, jac, damping=problem.damping)
        plan = time.perf_counter() - begin
        row: Row = {"case": name, "size": len(problem.x0), "residuals": len(found.fun), "plan": plan,
                    "cost": found.cost, "steps": found.nfev}  # fmt: skip
        ours = lambda problem=problem, jac=jac: sb.least_squares(  # noqa: E731
            problem.f, problem.x0, jac, damping=problem.damping)  # fmt: skip
        if with_scipy:  # of more cameras it takes minutes
            theirs = by_scipy(problem, jac.pattern)
            refuse_difference(f"{name}: the cost", "SciPy", found.cost / theirs().cost - 1)
            yield row | compared(ours, theirs, "SciPy trf, lsmr", run.rounds)
        if gtsam is not None:
            fit, cost = problem.gtsam(gtsam)
            refuse_difference(f"{name}: the cost", "gtsam", found.cost / cost() - 1)
            yield row | compared(ours, fit, "gtsam", run.rounds)


def by_scipy(problem: Problem, pattern: sb.SparsityPattern) -> Callable[[], Any]:
    """Return SciPy's fit, as in its cookbook."""
    from scipy.optimize import least_squares

    sparsity = pattern.to_scipy(np.ones(pattern.nnz))
    return lambda: least_squares(problem.f, problem.x0, jac_sparsity=sparsity, x_scale="jac", ftol=1e-6, method="trf")


def compared(ours: Callable[[], Any], peer: Callable[[], Any], against: str, rounds: Mapping[str, Any]) -> Row:
    row = timing.side_by_side(timing.measure({"ours": ours, "peer": peer}, **rounds))
    return {"against": against, **row, **harness.reaches(row, "peer_ratio", TARGETS[against])}


LEAST_SQUARES = Benchmark(
    name="least-squares",
    title="Nonlinear least squares with compiled Jacobians: float64, CPU",
    leaves_out="tracing, compiling and planning (column 'plan once', with the first fit)",
    settings={},
    sizes={"block": (12, 500), "street": (49, 7776), "poses": 3500},
    quick={"block": (3, 40), "street": (3, 40), "poses": 40},
    rounds={"rounds": 5, "least_rounds": 2, "warmup": 1, "budget": 20.0},
    measure=measure_fits,
    threads=None,
    columns=columns(
        words={"case": "problem", "against": "compared with"},
        counts={"size": "parameters", "residuals": "residuals"},
        numbers={"steps": "evaluations"},
        seconds={"plan": "plan once", "peer": "the peer"},
        times={"peer_ratio": "over the peer"},
    ),
    short=("case", "size", "against", "ours", "peer", "peer_ratio", "plan", "target", "met"),
    picture=harness.bars("{case}; {against}", {"peer_ratio": "over the peer"}, harness.SPEED_UP, line=1.0),
)  # fmt: skip
