"""The compiled tape as CUDA kernels: emitted sources under NVRTC, in the emulator, and from end to end."""

import functools
import itertools
from types import ModuleType

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsebp as sb
from backends import make_backend, needs_numba
from cuda_on_cpu.loader import ExecutorLoader
from cuda_on_cpu.memory import CheckedNumpy
from jacobians.operations import awkward, check_every_operation, in_python
from jacobians.test_random_programs import PROGRAMS, program
from nvrtc.compile import log_of, usage
from sparsebp.core import graphs
from sparsebp.core.errors import DeviceError, TracingError
from sparsebp.jacobians.tape import UnrecordedError, device, loops, plan_tape
from sparsebp.jacobians.tape.sweeps import Sweep
from sparsebp.kernels.device import DeviceKernels, launch, source

needs_numba("products are planned by it")
RNG = np.random.default_rng(0)
MATRIX = sp.random_array((9, 12), density=0.3, rng=1, format="csr")


def rosenbrock(x):
    return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def defects(z, h=0.1):
    """Hermite-Simpson collocation of a van der Pol oscillator."""
    x, y, u = z.reshape(3, -1)
    fx, fy = (1 - y**2) * x - y + u, x
    xm, ym = (x[1:] + x[:-1]) / 2 + h / 8 * (fx[:-1] - fx[1:]), (y[1:] + y[:-1]) / 2 + h / 8 * (fy[:-1] - fy[1:])
    gx = (1 - ym**2) * xm - ym + (u[1:] + u[:-1]) / 2
    ends = x[1:] - x[:-1] - h / 6 * (fx[:-1] + 4 * gx + fx[1:]), y[1:] - y[:-1] - h / 6 * (fy[:-1] + 4 * xm + fy[1:])
    return np.concatenate(ends)


def lagrangian(z, multipliers):
    return multipliers @ defects(z) + 0.1 * np.sum(z**2)


def surface(u):
    m = int(len(u) ** 0.5)
    z = np.pad(u.reshape(m, m), 1)
    a, b, c, d = z[1:, :-1] - z[:-1, :-1], z[:-1, 1:] - z[:-1, :-1], z[1:, 1:] - z[:-1, 1:], z[1:, 1:] - z[1:, :-1]
    return np.sum(np.sqrt(1 + (m + 1) ** 2 * (a**2 + b**2))) + np.sum(np.sqrt(1 + (m + 1) ** 2 * (c**2 + d**2)))


def network(x):
    """Reductions along axes, a constant matrix that reads numbers twice, bincounts, branches."""
    y = MATRIX.astype(x.dtype) @ np.sin(np.concatenate([x[:6], x[:6]]))
    if x.dtype == np.float64:
        sums = np.bincount(np.arange(len(x)) % 4, weights=x**2)
    else:  # NumPy's bincount is of float64
        sums = np.sum(x[:12].reshape(3, 4) ** 2, axis=0)
    rows = np.sum(x[:10].reshape(2, 5) ** 2, axis=1)
    return np.concatenate([np.maximum(y, 0.1) * sums[0], sums * np.where(rows[0] > 1, rows[1], 2.0), rows])


CASES = {
    "rosenbrock": (sb.sparse_hessian, rosenbrock, (11,)), "a cube": (sb.sparse_hessian, lambda x: x[0] ** 3, (1,)),
    "collocation": (sb.sparse_jacobian, defects, (33,)), "lagrangian": (sb.sparse_hessian, lagrangian, (33, 20)),
    "surface": (sb.sparse_hessian, surface, (25,)), "network": (sb.sparse_jacobian, network, (13,)),
    "energy": (sb.sparse_hessian, lambda x: np.sum(network(x) ** 2) ** 2 + x[0] ** 3, (13,)),
    "one number": (sb.sparse_jacobian, lambda x: np.exp(x) * x, (1,)),
    "long sums": (sb.sparse_jacobian, lambda x: np.stack([np.sum(x), np.sum(x * x)])[:1] * x[:3] ** 2, (1201,)),
}  # fmt: skip


def close(found, expected):
    for kind, values in expected.items():
        room = np.sqrt(np.finfo(values.dtype).eps)
        np.testing.assert_allclose(found[kind], values, room, room * abs(values).max(initial=0), err_msg=kind)


def planned(make, f, args, device=None):
    jac = make(f, *args)
    floats = [place for place, arg in enumerate(args) if jac._function.varies(place, arg)]
    return jac, plan_tape(jac._function.recorded, args, 0, floats, jac.pattern, jac._scalar, device)


@pytest.fixture
def interpreted_loops(monkeypatch):
    """Host loops in Python: the text that Numba, too, gets. Threads of kernels have several turns of long ones."""
    monkeypatch.setattr(launch, "BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(launch, "_emitted", {})
    monkeypatch.setattr(loops, "_compiled", {})
    monkeypatch.setattr(loops, "translated", in_python)
    monkeypatch.setattr(graphs, "kept", lambda xp, array: array)


def along(tape, x, *others):
    """What sweeps give: values, and products with vectors."""
    v, w = (np.cos(np.arange(n)).astype(x.dtype) for n in (len(x), sum(len(group.to) for group in tape.outputs)))
    vectors = {"value": (), "jvp": (v,), "vjp": (w,), "hvp": (v, w)}
    return {kind: Sweep(tape.program, tape.outputs, kind)((x, *others), *given) for kind, given in vectors.items()}


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, np.float64) for name in CASES), *((name, np.float32) for name in ("surface", "network"))])  # fmt: skip
def test_in_the_emulator(name, dtype, interpreted_loops):
    """Against the host's loops and the interpreter; every order of threads gives the same bits. By NVRTC as well."""
    make, f, sizes = CASES[name]
    args = tuple(RNG.uniform(0.2, 1.2, n).astype(dtype) for n in sizes)
    _, on_host = planned(make, f, args)
    found = []
    for order in ("random", "reverse"):
        jac, tape = planned(make, f, args, DeviceKernels(CheckedNumpy(), ExecutorLoader(order)))
        found += [tape.values(args), tape.values(args)]
    assert all((found[0] == one).all() for one in found)
    assert found[0].dtype == dtype
    batch = tape.values((np.stack([args[0], 1.1 * args[0], 0.9 * args[0]], axis=1), *args[1:]))
    for sample, factor in enumerate((1, 1.1, 0.9)):
        expected, room = on_host.values((factor * args[0], *args[1:])), np.sqrt(np.finfo(dtype).eps)
        np.testing.assert_allclose(batch[:, sample], expected, rtol=room, atol=room * abs(expected).max())
    for expected in (on_host.values(args), jac.values(*args)):
        room = np.sqrt(np.finfo(dtype).eps)
        np.testing.assert_allclose(found[0], expected, rtol=room, atol=room * abs(expected).max())
    assert tape.describe() == on_host.describe()
    for file, architecture in itertools.product(launch._emitted if name == "surface" else (), ("sm_80", "sm_90")):
        (kernel,) = usage(log_of(file, {"REAL": "double" if dtype == np.float64 else "float"}, architecture))
        assert kernel.spill_loads == kernel.spill_stores == 0
    if name in ("network", "a cube") and dtype == np.float64:  # once: to compile them takes seconds
        close(along(tape, *args), along(on_host, *args))


@pytest.mark.parametrize(("dtype", "real", "architecture"), [
    (np.float64, "double", "sm_90"), (np.float32, "float", "sm_80")])  # fmt: skip
def test_every_operation_is_numpys(dtype, real, architecture, interpreted_loops):
    """Compiled by NVRTC, and run on awkward numbers."""
    make = functools.partial(device.DeviceLoop, DeviceKernels(np, ExecutorLoader()))
    loop = check_every_operation(make, *awkward(dtype, 1e-30), exact=False)
    assert "np::multiply" in source(loop._file)  # where there are branches, products are rounded by themselves
    assert usage(log_of(loop._file, {"REAL": real}, architecture))


def launch_in_python(kernels, text, like, count, *args):
    """Run a loop's text turn by turn."""
    if text == device.SUMS:
        parts, order, ends, to, out, lanes, _ = args
        sums = [parts[order[a:b]].sum() for a, b in itertools.pairwise(ends)]
        assert count == lanes * len(sums) and to is not None  # none is so long that it is split
        out[to] += sums
        return
    numbers, adjoints, out, parts, index, at, _ = args
    module = ModuleType("loop")
    module.parts = parts
    run = loops.as_python(text, module)
    with np.errstate(all="ignore"):
        run(like if numbers is None else numbers, adjoints, out, None if index is None else index.T, at, count)


class InPython(DeviceKernels):
    def csr_matvec(self, indptr, indices, data, x, out, add=None):
        out[...] = sp.csr_array((data[:, 0], indices, indptr), shape=(len(out), len(x))) @ x


def apart(loop, roots, plan=device.DeviceLoop._apart):
    """Plan a loop's sums, and check that no two threads write to one place."""
    found = plan(loop, roots)
    for where in ("numbers", "adjoints", "out", "parts"):
        places = [root.places[root.places != root.nowhere] for root in found if root.where == where]
        assert not places or np.unique(np.concatenate(places), return_counts=True)[1].max() == 1
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(steps=PROGRAMS, n=st.sampled_from([1, 2, 5, 7, 11]), seed=st.integers(0, 999),
       dtype=st.sampled_from([np.float64, np.float32]))  # fmt: skip
def test_random_programs(interpreted_loops, steps, n, seed, dtype):
    """The plan of sums and conditions, without a compiler."""
    rng = np.random.default_rng(seed)
    f, x = program(np, steps), (rng.uniform(0.3, 1.1, n) * rng.choice([-1, 1], n)).astype(dtype)
    for make, g in ((sb.sparse_jacobian, f), (sb.sparse_hessian, lambda x: np.sum(f(x) ** 2))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "as_cuda", lambda text: text)
            patch.setattr(device, "emitted", lambda text: text)
            patch.setattr(device, "launch_emitted", launch_in_python)
            patch.setattr(device.DeviceLoop, "_apart", apart)
            try:
                jac = make(g, np.zeros(n, dtype))
                if not jac.pattern.nnz:
                    continue
                _, tape = planned(make, g, (x,), InPython(CheckedNumpy(), None))
            except (UnrecordedError, TracingError):
                continue
            found, expected, sweeps = tape.values((x,)), jac.values(x), along(tape, x)
        if np.isfinite(found).all():
            room = np.sqrt(np.finfo(dtype).eps) * (1 + abs(expected).max())
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2 * room)
            close(sweeps, along(planned(make, g, (x,))[1], x))


@pytest.mark.gpu
def test_from_end_to_end():
    cupy = make_backend("gpu").xp
    z, weights = RNG.uniform(0.2, 1.2, 33), RNG.standard_normal(20)
    for make, f, args in ((sb.sparse_jacobian, defects, (z,)), (sb.sparse_hessian, lagrangian, (z, weights)),
                          (sb.sparse_jacobian, network, (z[:13],))):  # fmt: skip
        there = tuple(map(cupy.asarray, args))
        jac, expected = make(f, *there, compiled=True), make(f, *args)
        for _ in range(3):  # the first ones are compared with the interpreter
            found = jac.values(*there)
            assert isinstance(found, cupy.ndarray)
            cupy.testing.assert_allclose(found, expected.values(*args), rtol=1e-9, atol=1e-9)
        assert "compiled as CUDA kernels, " in jac.describe()
        np.testing.assert_allclose(jac(*there, check=True).get().toarray(), expected(*args).toarray(), rtol=1e-9)
        v, w = RNG.standard_normal(jac.pattern.shape[1]), RNG.standard_normal(jac.pattern.shape[0])
        for _ in range(2):
            cupy.testing.assert_allclose(jac.jvp(cupy.asarray(v), *there), expected(*args) @ v, rtol=1e-9)
            cupy.testing.assert_allclose(jac.value(*there), f(*args), rtol=1e-12)
            if make is sb.sparse_jacobian:
                cupy.testing.assert_allclose(jac.vjp(cupy.asarray(w), *there), w @ expected(*args), rtol=1e-9)
            else:
                cupy.testing.assert_allclose(jac.gradient(*there), expected.gradient(*args), rtol=1e-9)
        for count in (0, 1, 2, 5):
            xs = args[0][:, None] * np.linspace(1, 2, count)
            batch = jac.batch(cupy.asarray(xs), *there[1:])
            cupy.testing.assert_allclose(batch, expected.batch(xs, *args[1:]), rtol=1e-9, atol=1e-9)
        if f is not network:
            single = jac.values(*(one.astype(cupy.float32) for one in there))
            assert single.dtype == cupy.float32
            cupy.testing.assert_allclose(single, expected.values(*args), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(jac.values(*args), expected.values(*args), rtol=1e-9)  # on the host as well
    roots, xs = lambda x: np.sqrt(x[1:]) * x[:-1], z[:20].reshape(4, 5).copy()
    xs[2, [1, 4]] = 0  # where derivatives are infinite, the interpreter's rules hold
    jac, expected = (sb.sparse_jacobian(roots, x, compiled=True) for x in (cupy.asarray(z[:4]), z[:4]))
    for _ in range(2):
        cupy.testing.assert_allclose(jac.batch(cupy.asarray(xs)), expected.batch(xs), rtol=1e-12)
        cupy.testing.assert_allclose(jac.values(cupy.asarray(xs[:, 1])), expected.values(xs[:, 1]), rtol=1e-12)

    def tree(state, scale):
        return {"a": state["p"] * state["q"][:, None] * scale, "b": np.sin(state["q"])}

    state = {"p": z[:6].reshape(3, 2), "q": z[6:9]}
    jac = sb.sparse_jacobian(tree, {name: cupy.asarray(x) for name, x in state.items()}, 2.0, compiled=True)
    expected = sb.sparse_jacobian(tree, state, 2.0)(state, 3.0).toarray()
    for _ in range(2):
        np.testing.assert_allclose(jac({n: cupy.asarray(x) for n, x in state.items()}, 3.0).get().toarray(), expected)
    jac = sb.sparse_hessian(lagrangian, cupy.asarray(z), cupy.asarray(weights), compiled=True)
    with pytest.raises(DeviceError, match="mixed"):
        jac.values(cupy.asarray(z), weights)
    with pytest.raises(DeviceError, match="compiled=True"):
        sb.sparse_jacobian(defects, cupy.asarray(z))
    with pytest.raises(TracingError, match="sort"):
        sb.sparse_jacobian(np.sort, cupy.asarray(z), compiled=True)
    nothing = cupy.zeros(0)
    assert sb.sparse_jacobian(np.exp, nothing, compiled=True).values(nothing).shape == (0,)
