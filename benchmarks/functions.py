"""Sparse Jacobians of plain functions: a call against SciPy's differences, asdex, and directions one by one.

``python -m benchmarks function-jacobian``. The pattern is found and coloured once, outside of the time that is
compared. SciPy's ``approx_derivative`` gets our pattern and differences it by groups: a colour costs an evaluation, and
half of the digits. The last column divides the time of a derivative along one direction, run once for each colour, by
ours: what is gained, or lost, by computing directions together and by picking entries out of them.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, refuse_difference
from sparsebp.core import timing
from sparsebp.jacobians import sparse_jacobian

TARGET = 1 / 1.2
"""Of directions one by one: a call takes at most 1.2 times as long."""


def brusselator(xp: Any, x: Any) -> Any:
    """Two reacting species on a periodic square grid (E. Hairer, G. Wanner, "Solving ODEs II", IV.10)."""
    side = round((x.size / 2) ** 0.5)
    u, v = x.reshape(2, side, side)
    lap = [sum(xp.roll(w, step, axis) for step in (1, -1) for axis in (0, 1)) - 4 * w for w in (u, v)]
    reaction = u * u * v
    return xp.stack([1 + reaction - 4.4 * u + lap[0], 3.4 * u - reaction + lap[1]]).ravel()


def minimal_surface(xp: Any, x: Any) -> Any:
    """Mean curvature of a surface over a square grid, 0 at the boundary."""
    side = round(x.size**0.5)
    z = xp.pad(x.reshape(side, side), 1)
    dx, dy = xp.diff(z, axis=0)[:, 1:-1], xp.diff(z, axis=1)[1:-1]
    fx, fy = dx / xp.sqrt(1 + dx**2), dy / xp.sqrt(1 + dy**2)
    return (xp.diff(fx, axis=0) + xp.diff(fy, axis=1)).ravel()


def burgers(xp: Any, x: Any) -> Any:
    """Burgers' equation on a line."""
    z = xp.pad(x, 1)
    return 0.1 * (z[2:] - 2 * x + z[:-2]) - x * (z[2:] - z[:-2]) / 2


FUNCTIONS = {"Brusselator": (brusselator, 2), "minimal surface": (minimal_surface, 1), "Burgers": (burgers, 1)}


def measure_functions(run: Run) -> Iterator[Row]:
    libraries = [("NumPy", np)]
    if all(importlib.util.find_spec(name) is not None for name in ("jax", "asdex")):
        import jax

        libraries.append(("JAX", jax.numpy))
    for side in run.settings["sides"]:
        for name, (function, species) in FUNCTIONS.items():
            for library, xp in libraries:
                x = np.random.default_rng(0).uniform(0.2, 0.9, species * side * side).astype(np.float32)
                f = lambda x, function=function, xp=xp: function(xp, x)  # noqa: E731
                row: Row = {"function": name, "n": x.size, "library": library}
                yield row | measure_function(f, x.astype(float) if library == "NumPy" else xp.asarray(x), run.rounds)


def measure_function(f: Callable[[Any], Any], x: Any, rounds: Mapping[str, Any]) -> Row:
    start = time.perf_counter()
    jac = sparse_jacobian(f, x)
    plan, one = time.perf_counter() - start, np.ones((1, x.size))
    sides: dict[str, Any] = {
        "ours": lambda: jac.values(x),
        "directions": lambda: [jac._function.forward((x,), one) for _ in range(jac.colors)],
    }
    if isinstance(x, np.ndarray):
        from scipy.optimize._numdiff import approx_derivative, group_columns

        found = jac(x)
        groups = group_columns(found)
        sides["scipy"] = lambda: approx_derivative(f, x, method="2-point", sparsity=(found, groups))
        other = sides["scipy"]()
    else:
        import asdex
        import jax
        from scipy.sparse import csr_array

        found, of = jac(x), jax.jit(asdex.jacobian_from_coloring(f, asdex.jacobian_coloring(f, x)))
        sides["asdex"] = lambda: of(x).block_until_ready()
        theirs = of(x)
        other = csr_array((np.asarray(theirs.data), np.asarray(theirs.indices).T), theirs.shape)
    refuse_difference("A Jacobian", "the peer", float(abs(found - other).max() / abs(found).max()))
    row = timing.side_by_side(timing.measure(sides, **rounds))
    row |= {"nnz": jac.pattern.nnz, "colors": jac.colors, "plan": plan}
    return row | harness.reaches(row, "directions_ratio", TARGET)


FUNCTION_JACOBIAN = Benchmark(
    name="function-jacobian",
    title="The values of a sparse Jacobian of a plain function: NumPy in float64, JAX in float32, CPU",
    leaves_out="finding the pattern and colouring it, on all sides (column 'plan once' has ours)",
    settings={"target": TARGET},
    sizes={"sides": (32, 316)},
    quick={"sides": (8,)},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 4.0},
    measure=measure_functions,
    threads=None,
    columns=columns(
        words={"function": "function", "library": "written in"},
        numbers={"n": "inputs", "nnz": "entries", "colors": "colours"},
        seconds={"plan": "plan once"},
        times={"scipy_ratio": "over SciPy's differences", "asdex_ratio": "over asdex",
               "directions_ratio": "over directions one by one"},
    ),
    short=("function", "n", "library", "colors", "ours", "scipy_ratio", "asdex_ratio", "plan"),
    picture=harness.bars("{function}, {n} inputs; {library}", {"scipy_ratio": "over SciPy's differences",
                         "asdex_ratio": "over asdex"}, harness.SPEED_UP, line=1.0),
)  # fmt: skip
