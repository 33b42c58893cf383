"""Whole programs of other people that solve sparse systems, as they are and in a block of `used_by_scipy`.

``python -m benchmarks solvers``. A program is what the library's users call: a power flow, a Newton iteration of finite
elements, an integration; its assembly and all else count on both sides, and answers are compared first. "From nothing"
is the first time of a program, whose patterns have no plan. Libraries that are not installed are left out, with a note.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, refuse_difference
from benchmarks.others import quietly, version
from sparsebp import solvers
from sparsebp.core import timing

Settings = Mapping[str, Any]
Program = Callable[[], np.ndarray]


class Case(NamedTuple):
    """A row of the table."""

    library: str
    task: str
    make: Callable[[Settings], Program]


def power_flow(network: str, start: str) -> Callable[[Settings], Program]:
    """Return Newton's method on one of pandapower's networks; `start`: ``"flat"``, or ``"dc"`` for large ones."""

    def make(settings: Settings) -> Program:
        import pandapower
        from pandapower import networks

        net = getattr(networks, network if settings["whole"] else "case9")()

        def run() -> np.ndarray:
            pandapower.runpp(net, init=start, lightsim2grid=False)
            return net.res_bus.vm_pu.to_numpy()

        return run

    return make


def minimal_surface(settings: Settings) -> Program:
    """Return scikit-fem's Newton iteration for the minimal surface over a square."""
    import skfem
    from skfem.helpers import dot, grad

    basis = skfem.Basis(skfem.MeshTri().refined(settings["refined"]), skfem.ElementTriP1())
    edge = basis.get_dofs().flatten()
    inside = basis.complement_dofs(edge)

    @skfem.BilinearForm
    def jacobian(u: Any, v: Any, w: Any) -> Any:
        length = np.sqrt(1 + dot(grad(w["w"]), grad(w["w"])))
        return dot(grad(u), grad(v)) / length - dot(grad(u), grad(w["w"])) * dot(grad(v), grad(w["w"])) / length**3

    @skfem.LinearForm
    def residual(v: Any, w: Any) -> Any:
        return -dot(grad(w["w"]), grad(v)) / np.sqrt(1 + dot(grad(w["w"]), grad(w["w"])))

    def run() -> np.ndarray:
        x = np.zeros(basis.N)
        x[edge] = np.sin(np.pi * basis.doflocs[0, edge])
        for _ in range(8):
            w = basis.interpolate(x)
            x += skfem.solve(*skfem.condense(jacobian.assemble(basis, w=w), residual.assemble(basis, w=w), I=inside))
        return x

    return run


def nonlinear_diffusion(settings: Settings) -> Program:
    """Return ten time steps of FiPy's nonlinear diffusion with its LU solver."""
    os.environ.setdefault("FIPY_SOLVERS", "scipy")
    import fipy

    n = settings["cells"]
    mesh = fipy.Grid2D(nx=n, ny=n, dx=1.0, dy=1.0)

    def run() -> np.ndarray:
        u = fipy.CellVariable(mesh=mesh, value=0.0, hasOld=True)
        u.constrain(1.0, mesh.facesLeft)
        equation, solver = fipy.TransientTerm() == fipy.DiffusionTerm(coeff=1 + u), fipy.LinearLUSolver()
        for _ in range(10):
            u.updateOld()
            equation.sweep(u, dt=10.0, solver=solver)
        return np.array(u.value)

    return run


def reaction_diffusion(method: str) -> Callable[[Settings], Program]:
    """Return SciPy's integration of an Allen-Cahn equation on a square by a stiff method."""

    def make(settings: Settings) -> Program:
        import scipy.sparse as sp
        from scipy.integrate import solve_ivp

        n = settings["cells"]
        line = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)) * n**2 * 0.01
        laplacian = sp.csc_array(sp.kronsum(line, line))
        start = np.random.default_rng(0).standard_normal(n * n)

        def run() -> np.ndarray:
            found = solve_ivp(
                lambda t, u: laplacian @ u + u - u**3, (0, 2), start, method=method,
                jac=lambda t, u: laplacian + sp.diags_array(1 - 3 * u * u, format="csc"),
            )  # fmt: skip
            end: np.ndarray = found.y[:, -1]
            return end

        return run

    return make


def thermal_block(settings: Settings) -> Program:
    """Return pyMOR's solutions of a heat equation for twenty conductivities of its four blocks."""
    from pymor.basic import set_log_levels
    from pymor.models.examples import thermal_block_example

    set_log_levels({"pymor": "ERROR"})
    model, rng = thermal_block_example(diameter=1 / settings["cells"]), np.random.default_rng(0)
    parameters = [model.parameters.parse(rng.uniform(0.1, 1, 4)) for _ in range(20)]

    def run() -> np.ndarray:
        return np.concatenate([model.solve(one).to_numpy() for one in parameters])

    return run


def resistivity(settings: Settings) -> Program:
    """Return SimPEG's voltages over a half-space in 3-D for four pairs of electrodes, and their gradient."""
    from discretize import TensorMesh
    from pymatsolver import SolverLU
    from simpeg import maps
    from simpeg.electromagnetics.static import resistivity as dc

    n = settings["cells"] // 6
    mesh = TensorMesh([[(10, 4, -1.3), (10, n), (10, 4, 1.3)]] * 2 + [[(10, 4, -1.3), (10, n // 2 + 1)]], "CCN")
    places = 10 * np.linspace(-n / 2, n / 2, 7)[:, np.newaxis] * [1, 0, 0]
    receivers = dc.receivers.Dipole(places[:-1], places[1:])
    sources = [dc.sources.Dipole([receivers], place - [5, 0, 0], place) for place in places[:4]]
    simulation = dc.Simulation3DNodal(
        mesh, survey=dc.Survey(sources), sigmaMap=maps.ExpMap(mesh), solver=SolverLU
    )  # fmt: skip
    conductivity = np.log(0.01) + 0.3 * np.random.default_rng(0).standard_normal(mesh.nC)

    def run() -> np.ndarray:
        simulation.model = None
        voltages = simulation.dpred(conductivity)
        return np.concatenate([voltages, simulation.Jtvec(conductivity, voltages)])

    return run


CASES = (
    Case("pandapower", "power flow, 118 buses", power_flow("case118", "flat")),
    Case("pandapower", "power flow, 1888 buses", power_flow("case1888rte", "dc")),
    Case("pandapower", "power flow, 9241 buses", power_flow("case9241pegase", "dc")),
    Case("skfem", "minimal surface, Newton", minimal_surface),
    Case("fipy", "nonlinear diffusion", nonlinear_diffusion),
    Case("pymor", "thermal block, 20 conductivities", thermal_block),
    Case("simpeg", "direct currents in 3-D, with gradient", resistivity),
    Case("scipy", "solve_ivp, BDF", reaction_diffusion("BDF")),
    Case("scipy", "solve_ivp, Radau", reaction_diffusion("Radau")),
)


def measure_solvers(run: Run) -> Iterator[Row]:
    missing = {case.library for case in CASES if importlib.util.find_spec(case.library) is None}
    for library in sorted(missing):
        run.note(f"{library}: left out, not installed")
    for count in run.threads():
        for case in CASES:
            if case.library not in missing:
                row: Row = {"library": case.library, "task": case.task, "threads": count}
                try:
                    with quietly():
                        row |= measure_program(case, run)
                except Exception as error:  # of a library that does not work here; the others do
                    row["error"] = f"{type(error).__name__}: {error}"
                yield row


def measure_program(case: Case, run: Run) -> Row:
    """Time a program both ways, after comparing the answers."""
    program = case.make(run.settings)

    def ours() -> np.ndarray:
        with solvers.used_by_scipy():
            return program()

    expected = program()
    ours()  # compiles
    solvers.cache_clear()
    start = time.perf_counter()
    found = ours()
    first = time.perf_counter() - start
    refuse_difference(f"{case.library}, {case.task}", "the program as it is", float(abs(found - expected).max()))
    info = solvers.cache_info()
    sides: dict[str, Any] = {"ours": ours, "scipy": program}
    return {
        "package": f"{case.library} {version(case.library)}", "solves": info.hits + info.misses, "first": first,
        "patterns": info.misses, "passed_on": info.passed_on,
    } | timing.side_by_side(timing.measure(sides, **run.rounds))  # fmt: skip


SOLVERS = Benchmark(
    name="solvers",
    title="Programs of other libraries on the CPU with SciPy's sparse solver and with used_by_scipy",
    leaves_out="nothing; the library's own loop and assembly count on both sides; 'from nothing' has the planning too",
    sizes={"whole": True, "refined": 6, "cells": 80},
    quick={"whole": False, "refined": 2, "cells": 6},
    rounds={"rounds": 9, "least_rounds": 5, "budget": 10.0, "warmup": 1},
    quick_rounds={"rounds": 1, "least_rounds": 1, "warmup": 1},
    threads=(1,),
    measure=measure_solvers,
    columns=columns(
        words={"package": "library", "task": "program"},
        numbers={"solves": "factorisations", "patterns": "patterns"},
        seconds={"ours": "used_by_scipy", "scipy": "as it is", "first": "from nothing"},
        times={"scipy_ratio": "over the library as it is"},
    ),
    short=("package", "task", "solves", "patterns", "scipy", "ours", "scipy_ratio", "first"),
    in_readme=lambda row: row["library"] not in ("pandapower", "scipy") or row["task"] in ("power flow, 9241 buses",
                                                                                           "solve_ivp, BDF"),
    picture=harness.bars("{package}: {task}", {"scipy_ratio": "over the library as it is"}, harness.SPEED_UP,
                         (harness.SCIPY,), line=1.0),
)  # fmt: skip
