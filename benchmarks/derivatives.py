"""Compiled derivatives of NumPy functions, against casadi's SX functions, pandapower's Numba code, and our own colours.

``python -m benchmarks derivatives``. casadi's functions write into a buffer, without its conversion of matrices;
pandapower's makes a matrix of SciPy, whose values alone are compared. Planning and compiling are outside of the times
that are compared: "first use" is ours, with machine code from the disk if it is there. Cases whose peers are not
installed are left out, with a note.
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


class Case(NamedTuple):
    """A derivative: of `f` at `args` by the first of them, the peer's, which returns values, and those as a matrix."""

    prepare: Callable[..., Any]  # sparse_jacobian or sparse_hessian
    f: Callable[..., Any]
    args: tuple[Any, ...]
    peer: Callable[[], Any]
    matrix: Callable[[], Any]


def by_casadi(make: Callable[[Any, list[Any]], Any], *args: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return casadi's values of a matrix, and the matrix; `make`: of casadi and symbols like the arguments."""
    import casadi

    symbols = [casadi.SX.sym(f"x{k}", len(arg)) for k, arg in enumerate(args)]
    function = casadi.Function("f", symbols, [make(casadi, symbols)])
    buffer: Any
    buffer, run = function.buffer()
    values: Any = np.zeros(function.nnz_out(0))
    given: list[Any] = [np.array(arg) for arg in args]
    for k, arg in enumerate(given):
        buffer.set_arg(k, memoryview(arg))
    buffer.set_res(0, memoryview(values))
    kept = function, buffer, given, values

    def call() -> np.ndarray:
        run()
        return kept[-1]

    def matrix() -> Any:
        return function(*args).sparse()

    return call, matrix


def rosenbrock(n: int) -> Case:
    """Return the Hessian of the chained Rosenbrock function."""

    def f(x: Any, total: Any = np.sum) -> Any:
        return total(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    x = np.random.default_rng(0).standard_normal(n)
    return Case(sb.sparse_hessian, f, (x,), *by_casadi(lambda ca, s: ca.hessian(f(s[0], ca.sum1), s[0])[0], x))


def defects(z: Any, join: Callable[[list[Any]], Any] = np.concatenate) -> Any:
    """Return the defects of Hermite-Simpson collocation of van der Pol's oscillator with a control."""
    count = z.shape[0] // 3
    x, y, u = z[:count], z[count : 2 * count], z[2 * count :]
    step = 10 / (count - 1)

    def slope(x: Any, y: Any, u: Any) -> tuple[Any, Any]:
        return (1 - y**2) * x - y + u, x

    ends = slope(x, y, u)
    a, b, c = ((w[1:] + w[:-1]) / 2 for w in (x, y, u))
    bent = [step / 8 * (w[:-1] - w[1:]) for w in ends]
    middle = slope(a + bent[0], b + bent[1], c)
    return join([w[1:] - w[:-1] - step / 6 * (g[:-1] + 4 * m + g[1:])
                 for w, g, m in zip((x, y), ends, middle, strict=True)])  # fmt: skip


def collocation(intervals: int) -> Case:
    """Return the Jacobian of the defects."""
    z = np.random.default_rng(0).standard_normal(3 * intervals + 3)
    peer = by_casadi(lambda ca, s: ca.jacobian(defects(s[0], lambda parts: ca.vertcat(*parts)), s[0]), z)
    return Case(sb.sparse_jacobian, defects, (z,), *peer)


def lagrangian(intervals: int) -> Case:
    """Return the Hessian of the Lagrangian, with multipliers as an argument."""
    rng = np.random.default_rng(0)
    z, weights, step = rng.standard_normal(3 * intervals + 3), rng.standard_normal(2 * intervals), 10 / intervals

    def make(ca: Any, s: list[Any]) -> Any:
        of = defects(s[0], lambda parts: ca.vertcat(*parts))
        return ca.hessian(ca.dot(s[1], of) + step * ca.sumsqr(s[0]), s[0])[0]

    return Case(sb.sparse_hessian, lambda z, weights: weights @ defects(z) + step * np.sum(z**2), (z, weights),
                *by_casadi(make, z, weights))  # fmt: skip


def minimal_surface(side: int) -> Case:
    """Return the Hessian of the area of a surface over a square, two triangles on each of its cells."""

    def area(z: Any, root: Any, total: Any) -> Any:
        a, b = z[1:, :-1] - z[:-1, :-1], z[:-1, 1:] - z[:-1, :-1]
        c, e = z[1:, 1:] - z[:-1, 1:], z[1:, 1:] - z[1:, :-1]
        return sum(total(root(1 + (side + 1) ** 2 * (p**2 + q**2))) for p, q in ((a, b), (c, e)))

    def make(ca: Any, s: list[Any]) -> Any:
        z = ca.SX.zeros(side + 2, side + 2)
        z[1:-1, 1:-1] = ca.reshape(s[0], side, side).T
        return ca.hessian(area(z, ca.sqrt, lambda w: ca.sum1(ca.sum2(w))), s[0])[0]

    x = 0.1 * np.random.default_rng(0).standard_normal(side * side)
    return Case(sb.sparse_hessian, lambda u: area(np.pad(u.reshape(side, side), 1), np.sqrt, np.sum), (x,),
                *by_casadi(make, x))  # fmt: skip


def network_of(name: str) -> dict[str, Any]:
    """Return one of pandapower's networks after a power flow, in its own form."""
    import pandapower
    from pandapower import networks

    net = getattr(networks, name)()
    pandapower.runpp(net, init="dc", lightsim2grid=False)
    found: dict[str, Any] = net._ppc["internal"]
    return found


def parts_of(admittance: Any) -> Any:
    """Return the real matrix that takes the real and imaginary parts of voltages to those of currents."""
    import scipy.sparse as sp

    g, b = sp.csr_array(admittance.real), sp.csr_array(admittance.imag)
    return sp.csr_array(sp.vstack([sp.hstack([g, -b]), sp.hstack([b, g])]))


def power_flow(name: str) -> Case:
    """Return the Jacobian of a power flow's mismatch, as Newton's method has it."""
    from pandapower.pf.create_jacobian import create_jacobian_matrix, get_fastest_jacobian_function

    net = network_of(name)
    admittance, volts, ref, pv, pq = (net[key] for key in ("Ybus", "V", "ref", "pv", "pq"))
    both, n = np.concatenate([pv, pq]), len(volts)
    matrix, angle, size = parts_of(admittance), np.angle(volts), abs(volts)
    where_angle, where_size = np.zeros(n, int), np.zeros(n, int)
    where_angle[both], where_size[pq] = 1 + np.arange(len(both)), 1 + len(both) + np.arange(len(pq))

    def mismatch(x: Any) -> Any:
        every = np.concatenate([np.zeros(1), x])
        va = np.where(where_angle > 0, every[where_angle], angle)
        vm = np.where(where_size > 0, every[where_size], size)
        c, s = vm * np.cos(va), vm * np.sin(va)
        current = matrix @ np.concatenate([c, s])
        re, im = current[:n], current[n:]
        return np.concatenate([(c * re + s * im)[both], (s * re - c * im)[pq]])

    lookup = np.zeros(n, int)
    lookup[both] = np.arange(len(both))
    create = get_fastest_jacobian_function(both, pq, True, False)
    refs = np.concatenate([ref, both])

    def theirs() -> Any:
        return create_jacobian_matrix(admittance, volts, ref, refs, both, pq, create, lookup, len(ref), len(pv),
                                      len(pq), True, np.zeros(n), False)  # fmt: skip

    return Case(sb.sparse_jacobian, mismatch, (np.concatenate([angle[both], size[pq]]),), theirs, theirs)


def optimal_power_flow(name: str) -> Case:
    """Return the Hessian of an AC optimal power flow's Lagrangian: costs, balance at buses, flows into branches."""
    net, rng = network_of(name), np.random.default_rng(0)
    n, lines, gens = len(net["V"]), net["Yf"].shape[0], len(net["gen"])
    at_bus, at_from = parts_of(net["Ybus"]), parts_of(net["Yf"])
    start = net["branch"][:, 0].real.astype(int)
    cost = rng.uniform(1, 2, gens)
    x = np.concatenate([np.angle(net["V"]), abs(net["V"]), rng.uniform(0.5, 1, 2 * gens)])
    weights = rng.standard_normal(2 * n + lines)

    def value(x: Any, weights: Any, lib: Any, join: Any, dot: Any, bus: Any, branch: Any) -> Any:
        c, s = x[n : 2 * n] * lib.cos(x[:n]), x[n : 2 * n] * lib.sin(x[:n])
        volts = join([c, s])
        current, flow = bus @ volts, branch @ volts
        p, q = c * current[:n] + s * current[n:], s * current[:n] - c * current[n:]
        cf, sf = c[start], s[start]
        pf, qf = cf * flow[:lines] + sf * flow[lines:], sf * flow[:lines] - cf * flow[lines:]
        made = x[2 * n : 2 * n + gens]
        return (dot(cost, made**2 + 3 * made) + dot(weights[:n], p) + dot(weights[n : 2 * n], q)
                + dot(weights[2 * n :], pf**2 + qf**2))  # fmt: skip

    def f(x: Any, weights: Any) -> Any:
        return value(x, weights, np, np.concatenate, np.dot, at_bus, at_from)

    def make(ca: Any, s: list[Any]) -> Any:
        bus, branch = (ca.DM(matrix.tocsc()) for matrix in (at_bus, at_from))
        return ca.hessian(value(s[0], s[1], ca, lambda parts: ca.vertcat(*parts), ca.dot, bus, branch), s[0])[0]

    return Case(sb.sparse_hessian, f, (x, weights), *by_casadi(make, x, weights))


CASES: dict[str, tuple[Callable[[Any], Case], str, str, float]] = {
    "chained Rosenbrock, Hessian": (rosenbrock, "n", "casadi", 5),
    "collocation, Jacobian": (collocation, "intervals", "casadi", 8),
    "collocation, Hessian of the Lagrangian": (lagrangian, "intervals", "casadi", 3),
    "minimal surface, Hessian": (minimal_surface, "side", "casadi", 3),
    "power flow, Jacobian": (power_flow, "network", "pandapower", 1),
    "optimal power flow, Hessian of the Lagrangian": (optimal_power_flow, "network", "casadi", 3),
}
"""Makes a case from a setting; the peer, and the target over it."""


def measure_derivatives(run: Run) -> Iterator[Row]:
    for name, (make, setting, peer, target) in CASES.items():
        needed = {peer} | ({"pandapower"} if setting == "network" else set())
        if missing := [library for library in sorted(needed) if optional(library) is None]:
            run.note(f"{name} is left out: {', '.join(missing)} is not installed")
            continue
        yield {"case": name, "against": peer} | measure_case(make(run.settings[setting]), target, run.rounds)


def measure_case(case: Case, target: float, rounds: Mapping[str, Any]) -> Row:
    start = time.perf_counter()
    ours = case.prepare(case.f, *case.args, compiled=True)
    plan = time.perf_counter() - start
    colours = case.prepare(case.f, *case.args)
    expected = case.matrix()
    for _ in range(2):  # the first one is compared with the interpreter's
        found = ours(*case.args)
    refuse_difference("A derivative", "the peer", float(abs(found - expected).max() / abs(expected).max()))
    sides = {"ours": lambda: ours.values(*case.args), "peer": case.peer, "colours": lambda: colours.values(*case.args)}
    row = timing.side_by_side(timing.measure(sides, **rounds))
    return {"n": len(case.args[0]), "nnz": ours.pattern.nnz, "plan": plan, "way": ours.describe().split(": ")[1], **row,
            **harness.reaches(row, "peer_ratio", target)}  # fmt: skip


DERIVATIVES = Benchmark(
    name="derivatives",
    title="Values of compiled sparse derivatives of NumPy functions: float64, CPU",
    leaves_out="planning and compiling, on all sides (column 'first use' has ours)",
    settings={},
    sizes={"n": 10_000, "intervals": 2000, "side": 60, "network": "case2848rte"},
    quick={"n": 20, "intervals": 4, "side": 3, "network": "case9"},
    rounds={"rounds": 25, "least_rounds": 9, "budget": 6.0},
    measure=measure_derivatives,
    threads=None,
    columns=columns(
        words={"case": "derivative", "against": "compared with", "way": "way"},
        numbers={"n": "unknowns", "nnz": "entries"},
        seconds={"plan": "first use", "peer": "the peer"},
        times={"peer_ratio": "over the peer", "colours_ratio": "over colours"},
    ),
    short=("case", "n", "against", "ours", "peer", "peer_ratio", "colours_ratio", "plan", "target", "met"),
    picture=harness.bars("{case}; {against}", {"peer_ratio": "over the peer"}, harness.SPEED_UP, line=1.0),
)  # fmt: skip
