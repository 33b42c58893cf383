"""The compiled tape: when a function is recorded, how the record stays true, real compilation, and what is kept."""

import copy
import functools
import math
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.interpolate import CubicSpline

import sparsebp as sb
from jacobians.operations import awkward, check_every_operation
from sparsebp.core.errors import OptionError, PatternError, TracingError
from sparsebp.jacobians.tape import loops
from sparsebp.jacobians.tape.environment import Environment
from sparsebp.jacobians.tape.expressions import Table

RNG = np.random.default_rng(0)
MATRIX = sp.random_array((9, 11), density=0.3, rng=1, format="csr")
N = 11


def collocation(z, weight):
    x, y = z[: len(z) // 2], z[len(z) // 2 :]
    middle = (x[1:] + x[:-1]) / 2 + 0.1 * (np.sin(y[:-1]) - np.sin(y[1:]))
    return np.concatenate([x[1:] - x[:-1] - weight * middle**2, np.maximum(y[1:] * y[:-1], 0.1)])


def energy(z, weight):
    ends = np.sum(MATRIX @ z[:N]) ** 2 + np.sqrt(1 + np.sum(z**2))
    return weight * ends + np.sum(collocation(z, weight) ** 2 * np.exp(-z[1:-1]))


def stencil(u):
    z = np.pad(u.reshape(5, -1), 1)
    a, b = np.diff(z, axis=0)[:, 1:], np.diff(z, axis=1)[1:]
    return np.sum(np.sqrt(1 + a**2 + b**2)) + np.mean(MATRIX @ np.cos(u[:N]))


def chained(x):
    y = x
    for _ in range(6):
        y = y + 0.1 * (np.roll(y, 1) - 2 * y + np.roll(y, -1)) - 0.05 * y**3
    return np.where(y > 0, y, 0.5 * y) * (MATRIX.T @ (MATRIX @ np.tanh(x)))


def same(new, old, *args, rtol=1e-12):
    assert new.describe().split(": ")[1].startswith("compiled"), new.describe()
    for _ in range(2):  # the first one is compared
        found = new.values(*args)
        np.testing.assert_allclose(found, old.values(*args), rtol=rtol, atol=rtol)
        assert found.dtype == args[0].dtype
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_errors_of_functions_in_vectors(dtype):
    """In units in the last place, of NumPy in a wider type; zeros, infinities and NaN among `awkward` numbers."""
    wide, bounds, t = np.longdouble if dtype == np.float64 else np.float64, {"tanh": 3, "expit": 3}, Table()
    spread = np.concatenate([scale * RNG.standard_normal(999) for scale in (1e-5, 1, 10, 1e4)] + [np.arange(-99, 99)])
    x = np.concatenate([spread, np.round(RNG.uniform(-1, 1, 999) * 9000) * (np.pi / 2), abs(spread)]).astype(dtype)
    own, size = np.arange(len(x)), len(x)
    names = sorted(loops.VECTORS)
    roots = [loops.Root(t.make(name, t.make("leaf", 0)), "out", size * k + own, False) for k, name in enumerate(names)]
    out = np.zeros(size * len(names), dtype)
    loops.Loop([loops.Leaf("numbers", own)], roots, size)(x, out, out)
    for name, found in zip(names, out.reshape(-1, size), strict=True):
        with np.errstate(all="ignore"):
            of = wide(1) / (1 + np.exp(-x.astype(wide))) if name == "expit" else getattr(np, name)(x.astype(wide))
            usual = (abs(of) >= np.finfo(dtype).tiny) & (abs(of) <= np.finfo(dtype).max)
            errors = abs(found - of)[usual] / np.spacing(abs(of[usual]).astype(dtype))
        assert usual.sum() > 2000
        assert errors.max() <= bounds.get(name, 2), name


@pytest.mark.parametrize(("make", "f", "n", "args"), [
    (sb.sparse_jacobian, collocation, 24, (0.3,)), (sb.sparse_hessian, energy, 24, (0.3,)),
    (sb.sparse_hessian, stencil, 25, ()), (sb.sparse_jacobian, chained, N, ()),
])  # fmt: skip
def test_by_numba_in_both_dtypes(make, f, n, args):
    x = RNG.uniform(0.2, 1, n)
    new, old = make(f, x, *args, compiled=True), make(f, x, *args, compiled=False)
    found = same(new, old, x, *args)
    single = new.values(x.astype(np.float32), *args)
    if single.dtype == np.float32:
        np.testing.assert_allclose(single, found, rtol=1e-3, atol=1e-4)
    if args:
        same(new, old, x, 1.7)
    dense = new(x, *args, check=True).toarray()
    if new._scalar:
        np.testing.assert_array_equal(dense, dense.T)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_operation_is_numpys(dtype):
    """By Numba, whose functions differ from NumPy's at zeros, infinity and rounded quotients."""
    check_every_operation(loops.Loop, *awkward(dtype, np.finfo(dtype).smallest_subnormal), exact=True)


def test_machine_code_is_kept_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loops, "_compiled", {})
    x = RNG.uniform(0.2, 1, 8)
    f = lambda x: np.log1p(x[1:] ** 2 + 0.12345 * x[:-1])  # noqa: E731
    sb.sparse_jacobian(f, x, compiled=True)
    assert [path.suffix for path in sorted((tmp_path / "sparsebp" / "tape").glob("loop_*"))] == [".py"]
    (first,) = loops._compiled.values()
    loops._compiled.clear()
    sb.sparse_jacobian(f, RNG.uniform(0.2, 1, 13), compiled=True)  # of another size
    (again,) = loops._compiled.values()
    assert (sum(first.stats.cache_hits.values()), sum(again.stats.cache_hits.values())) == (0, 1)


def test_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr(loops, "cache_folder", lambda: None)
    monkeypatch.setattr(loops, "_compiled", {})
    x = np.ones(4)
    same(*(sb.sparse_jacobian(lambda x: x[1:] * x[:-1], x, compiled=c) for c in (True, False)), x)


# When a function is recorded.


def test_only_where_it_is_asked_for(loops_in_python):
    x = np.arange(1.0, 7)
    jac = sb.sparse_jacobian(lambda x: x[1:] * x[:-1], x)
    for _ in range(3):
        jac.values(x)
    assert jac.describe() == f"{jac!r}: interpreted: compiled=False"
    jac = sb.sparse_jacobian(lambda x: x[1:] * x[:-1], x, compiled=True)
    assert jac.describe() == f"{jac!r}: compiled, 1 loop"


def test_what_cannot_be_compiled_is_said(loops_in_python):
    x = np.array([0.3, 0.1, 0.7])
    for f, why in ((np.sort, "numpy.sort"), (lambda x: np.linalg.solve(np.eye(3), x), "solve"),
                   (lambda x: x * np.random.default_rng(0).random(3), "random"),
                   (lambda x: np.where(x > 0, x, x.astype(int)), "int64"),
                   (lambda x: np.min(np.where(x > 0.2, x, 1.0)) * x, "numpy.min"),
                   (lambda x: np.max(np.maximum(np.nan_to_num(0.1), x)) + x, "numpy.max")):  # fmt: skip
        with pytest.raises(TracingError, match=why):
            sb.sparse_jacobian(f, x, compiled=True)
    with pytest.raises(OptionError, match="pattern was given"):
        sb.sparse_jacobian(lambda x: x**2, x, pattern=sb.SparsityPattern.diagonal(3), compiled=True)
    with pytest.raises(OptionError, match="compiled"):
        sb.sparse_jacobian(lambda x: x**2, x, compiled=1)
    assert "no entries" in sb.sparse_jacobian(lambda x: x**2, np.zeros(0), compiled=True).describe()
    assert "compiled=False" in sb.sparse_jacobian(lambda x: x**2, x, compiled=False).describe()


def test_a_refusal_that_the_function_catches_is_not_recorded(loops_in_python):
    def f(x):
        try:
            return np.sort(x) * x
        except Exception:
            return x

    with pytest.raises(TracingError, match=r"sort.*Leave compiled=True out"):
        sb.sparse_jacobian(f, np.ones(3), compiled=True)


# How the record stays true.


def always(f, x, *args):
    return lambda: sb.sparse_jacobian(f, x, *args, compiled=False).values(x, *args)


def test_arrays_variables_and_attributes_that_change(loops_in_python):
    weight, scale, box = np.arange(1.0, 5), [2.0], {"shift": 0.5}
    matrix = sp.csr_array(np.diag([1.0, 2, 3, 4]))

    class Model:
        power = 2

        def __init__(self):
            self.h, self.unused = 0.1, open

        def inner(self, x):
            return self.h * x**self.power

        def residual(self, x):
            return weight * x + scale[0] * np.sin(x) + box["shift"] * (matrix @ self.inner(x)) + factor * x

    factor, model, x = 3.0, Model(), np.array([0.3, 0.5, 0.7, 0.9])
    jac = sb.sparse_jacobian(model.residual, x, compiled=True)
    expected = always(model.residual, x)

    def change_factor():
        nonlocal factor
        factor = 4.0

    def check():
        for _ in range(4):
            np.testing.assert_allclose(jac.values(x), expected(), rtol=1e-13)

    check()
    before = jac.values(x)
    tape_before = jac._tape._records[x.dtype]
    for change in (
        lambda: weight.__setitem__(2, 9.0), lambda: scale.__setitem__(0, 3.0), lambda: box.update(shift=0.7),
        lambda: matrix.data.__setitem__(1, 7.0), lambda: setattr(model, "h", 0.3),
        lambda: setattr(Model, "power", 3), change_factor,
    ):  # fmt: skip
        jac._tape._changes = 0
        change()
        check()
        after = jac.values(x)
        assert abs(after - before).max() > 1e-3
        assert jac._tape._records[x.dtype] is not tape_before  # recorded anew
        before, tape_before = after, jac._tape._records[x.dtype]


def test_what_changes_at_every_call_is_interpreted(loops_in_python):
    weight, x = np.ones(3), np.array([0.3, 0.5, 0.7])
    jac = sb.sparse_jacobian(lambda x: weight * x**2, x, compiled=True)
    for k in range(7):
        weight[0] = k
        np.testing.assert_array_equal(jac.values(x), 2 * weight * x)
    assert "again and again" in jac.describe()


COUNT = 0


def counts(x):
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return x * COUNT


def appends(x, kept=[]):  # noqa: B006
    kept.append(1)
    return x * len(kept)


def test_functions_with_a_memory_are_not_recorded():
    def closure(x, state=None):
        nonlocal number
        number += 1
        return number * x

    number, name, rng, source = 0, "pi", np.random.default_rng(0), iter(range(100))
    for f in (counts, appends, closure, lambda x: x * rng.random(), lambda x: x * next(source),
              lambda x: x * np.random.rand(),  # noqa: NPY002
              lambda x: x * getattr(math, name), lambda x: eval("x")):  # fmt: skip
        with pytest.raises((TracingError, OptionError), match=r"compiled|another one"):
            sb.sparse_jacobian(f, np.ones(3), compiled=True)


def test_environments_follow_calls():
    def helper(x):
        return x * inner["k"]

    inner, f = {"k": 2.0}, functools.partial(lambda scale, x: scale * helper(x), np.ones(2))
    environment = Environment(f)
    assert environment.holds()
    f.args[0][1] = 2
    assert not environment.holds()
    environment = Environment(f)
    inner["other"] = 1
    assert not environment.holds()


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0

    def __float__(self):
        return self.k


class Squared(dict):
    extra = 1.0

    def __missing__(self, key):
        return self.extra


class Reading:
    def __get__(self, instance, owner=None):
        return instance.weights[0]


class Hidden:
    reading = Reading()

    def __init__(self):
        self.weights = [1.0]

    @property
    def first(self):
        return self.weights[0]

    def __getitem__(self, key):
        return self.weights[key]


def absent(x):
    return x * max(1.0, 2.0)


def test_what_hides_behind_special_methods_and_functions_is_seen(monkeypatch):
    def of_default(x, k=1.0, *, b=2.0):
        return k * b * x

    def of_own(x):
        return of_own.k * x

    of_own.k = 1.0
    slotted, hidden, squared, zeros, spline = (
        Slotted(),
        Hidden(),
        Squared(),
        np.zeros(5000),
        CubicSpline([0, 1], [0, 1]),
    )
    cases = [
        (of_default, lambda: setattr(of_default, "__defaults__", (3.0,))),
        (of_default, lambda: of_default.__kwdefaults__.update(b=3.0)),
        (of_default, lambda: setattr(of_default, "__code__", (lambda x, k, *, b: x).__code__)),
        (of_own, lambda: setattr(of_own, "k", 2.0)),
        (lambda x: float(slotted) * x, lambda: setattr(slotted, "k", 2.0)),
        (lambda x: hidden[0] * x, lambda: hidden.weights.append(2.0)),
        (lambda x: hidden.reading * x, lambda: hidden.weights.append(2.0)),
        (lambda x: hidden.first * x, lambda: setattr(Hidden, "first", property(lambda self: 2.0))),
        (lambda x: squared["a"] * x, lambda: setattr(squared, "extra", 2.0)),
        (lambda x: np.copysign(x, zeros[:3]), lambda: np.negative(zeros, out=zeros)),
        (lambda x: spline(0.5) * x, lambda: np.negative(spline.c, out=spline.c)),
        (lambda x: hidden[0] * x, lambda: setattr(hidden, "__class__", type("Other", (Hidden,), {}))),
        (absent, lambda: monkeypatch.setitem(globals(), "max", min)),
    ]  # fmt: skip
    for f, change in cases:
        environment = Environment(f)
        assert environment.holds()
        change()
        assert not environment.holds()


def test_branches_on_values_are_refused_as_before(loops_in_python):
    for f in (lambda x: x if x[0] > 0 else -x, lambda x: x * float(x[0]), lambda x: x[np.argsort(x)]):
        with pytest.raises(TracingError, match=r"where|number|depends on x"):
            sb.sparse_jacobian(f, np.ones(3), compiled=True)


def test_arguments(loops_in_python):
    """Floats may have other values, but with other shapes or dtypes the function is interpreted."""

    def f(t, x, data, power):
        return np.sin(t) * x[1:] * data + x[:-1] ** power * np.sum(data)

    x, data = RNG.uniform(0.3, 1, 5), np.ones(4)
    new, old = (sb.sparse_jacobian(f, 0.0, x, data, 2, argnums=1, compiled=c) for c in (True, False))
    for t, d in ((0.5, data), (1.5, 2 * data), (np.float64(0.3), data), (0.5, np.float64(2.0) * data.astype("f4")),
                 (0.5, np.array(2.0)), (0.5, np.array([2.0]))):  # fmt: skip
        for _ in range(2):
            np.testing.assert_allclose(new.values(t, x, d, 2), old.values(t, x, d, 2), rtol=1e-12)
    assert "compiled, 1 loop" in new.describe() or "loops" in new.describe()
    with pytest.raises(OptionError, match="has changed"):
        new.values(0.5, x, data, 3)
    xs = RNG.uniform(0.3, 1, (5, 3))
    np.testing.assert_allclose(new.batch(0.3, xs, data, 2), old.batch(0.3, xs, data, 2), rtol=1e-12)


def test_constants_among_the_arguments(loops_in_python):
    """Values of a sparse matrix may be others, and a function that is passed may change."""
    matrix, scale, x = sp.csr_array(np.diag([1.0, 2, 3])), [2.0], np.array([0.3, 0.5, 0.7])

    def f(x, a, g):
        return a @ x**2 + g(x)

    def g(x):
        return scale[0] * x

    new, old = (sb.sparse_jacobian(f, x, matrix, g, compiled=c) for c in (True, False))
    assert "compiled, " in new.describe()
    other = matrix.copy()
    for change in (lambda: None, lambda: other.data.__setitem__(1, 9.0), lambda: scale.__setitem__(0, 3.0),
                   lambda: matrix.data.__setitem__(0, 5.0)):  # fmt: skip
        change()
        for a in (matrix, other, matrix, other):
            np.testing.assert_allclose(new.values(x, a, g), old.values(x, a, g), rtol=1e-13)


def test_slopes_of_mixed_dtypes_are_exact():
    """A constant of float32 next to x of float64: the interpreter's derivatives are of float64 too."""
    c, x = np.array([0.1, -0.59], np.float32), np.array([0.3, 0.7])
    for compiled in (True, False):
        jac = sb.sparse_jacobian(lambda x: x / c + c**x, x, compiled=compiled)
        expected = 1 / c.astype(float)[0] + np.log(c.astype(float)[0]) * c.astype(float)[0] ** x[0]
        np.testing.assert_allclose(jac.values(x)[0], expected, rtol=1e-14)


def test_not_a_number(loops_in_python):
    x = np.array([0.3, np.nan, np.inf, -1.0, 0.2])
    for f in (lambda x: np.maximum(x[1:], x[:-1]) * x[1:], lambda x: np.where(x > 0, np.log(x), 0.0)):
        new, old = (sb.sparse_jacobian(f, np.ones(5), compiled=c) for c in (True, False))
        for point in (np.ones(5), x, np.zeros(5), -np.ones(5)):
            np.testing.assert_array_equal(new.values(point), old.values(point))


def test_arrays_between_the_steps_are_not_shared():
    """Calls at one time, and results that are kept, of tapes with products."""
    for make, f, args in ((sb.sparse_hessian, energy, (0.3,)), (sb.sparse_jacobian, chained, ())):
        xs = RNG.standard_normal((40, 24 if args else N))
        jac = make(f, xs[0], *args, compiled=True)
        assert "product" in jac.describe()
        expected = [jac.values(x, *args).copy() for x in xs]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda x, jac=jac, args=args: jac.values(x, *args), xs))
        np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-13)  # the first ones are interpreted


def along_short_axes(x):
    """Norms, dot products and rotations of vectors in space, in one expression of each element."""
    p, q = x.reshape(2, -1, 3)
    size = np.sqrt(np.sum(p**2, axis=1) + 0.1)
    turned = np.einsum("kij,kj->ki", np.stack([p, q, p * q], axis=1), q)
    return np.concatenate([size, (p * q) @ np.array([1.0, -2.0, 0.5]), (turned / size[:, None]).ravel()])


def test_sums_along_short_axes_are_no_stages():
    x = RNG.standard_normal(24)
    for make, f in ((sb.sparse_jacobian, along_short_axes), (sb.sparse_hessian, lambda x: np.sum(along_short_axes(x)))):
        new = make(f, x, compiled=True)
        assert "product" not in new.describe()
        same(new, make(f, x), RNG.standard_normal(24))


def test_parts_and_lanes_by_numba(monkeypatch):
    """Results do not depend on the number of threads: loops in parts, one after the other and in two phases."""
    n, t = 60, 0.3
    x, v, xs = RNG.uniform(0.3, 1, n), RNG.standard_normal(n), RNG.uniform(0.3, 1, (n, 21))
    monkeypatch.setattr(loops, "GRAIN", 64)

    def f(x, t):
        return np.sin(t) * x[1:] * x[:-1] ** 2

    calls = {
        sb.sparse_jacobian: [lambda jac: jac.values(x, t), lambda jac: jac.value(x, t), lambda jac: jac.jvp(v, x, t),
                             lambda jac: jac.vjp(v[1:], x, t), lambda jac: jac.batch(xs, t)],
        sb.sparse_hessian: [lambda hess: hess.value(x, t), lambda hess: hess.gradient(x, t),
                            lambda hess: hess.hvp(v, x, t)],
    }  # fmt: skip
    for make, own in calls.items():
        h = f if make is sb.sparse_jacobian else lambda x, t: np.sum(f(x, t) * x[1:])
        new, old = make(h, x, t, compiled=True), make(h, x, t)
        for call in own:
            expected, found = call(old), []
            for threads in (1, 1, sb.threads.most_threads()):  # the first one is compared
                sb.threads.set_threads(threads)
                found.append(call(new))
            np.testing.assert_allclose(found[1], expected, rtol=1e-13)
            np.testing.assert_array_equal(found[1], found[2])
    steps = new._tape._records[x.dtype]._sweeps["hvp"].back
    assert {step._phases for step in steps if len(step._cuts) > 2} == {2}


def test_values_and_products_of_trees(loops_in_python):
    def f(x):
        return {"a": x["p"][1:] * x["p"][:-1], "b": (MATRIX @ x["p"]).reshape(3, 3) * x["q"]}

    x, v = ({"p": RNG.uniform(0.3, 1, N), "q": RNG.uniform(0.3, 1, (1, 3))} for _ in range(2))
    new, old = (sb.sparse_jacobian(f, x, compiled=c) for c in (True, False))
    for _ in range(2):
        for call in (lambda jac: jac.value(x), lambda jac: jac.jvp(v, x), lambda jac: jac.vjp(f(v), x),
                     lambda jac: jac.value_and_jacobian(x)[0]):  # fmt: skip
            found, expected = call(new), call(old)
            assert found.keys() == expected.keys()
            for key, one in expected.items():
                np.testing.assert_allclose(found[key], one, rtol=1e-13)
                assert found[key].shape == one.shape


def test_values_that_are_not_finite_or_come_with_others(loops_in_python):
    x, bad = np.array([0.3, 0.5, 2.0]), np.array([0.3, -0.5, np.nan])
    new, old = (sb.sparse_jacobian(lambda x: np.log(x[1:]) * x[:-1], x, compiled=c) for c in (True, False))
    for point in (x, x, bad, x[::-1].copy()[::-1], bad):
        with np.errstate(all="ignore"):
            for call in (lambda jac, x=point: jac.value(x), lambda jac, x=point: jac.jvp([1, 0, 2] * np.ones(3), x),
                         lambda jac, x=point: jac.vjp(np.arange(2), x)):  # fmt: skip
                np.testing.assert_allclose(call(new), call(old), rtol=1e-14)
    xs = np.stack([x, bad, x, np.zeros(3), x], axis=1)
    with np.errstate(all="ignore"):
        for _ in range(2):
            np.testing.assert_allclose(new.batch(xs), old.batch(xs), rtol=1e-14)
    pair = sb.sparse_jacobian(lambda x: (x**2, "data"), x, has_aux=True, compiled=True)
    assert pair.value_and_jacobian(x)[0][1] == "data"
    np.testing.assert_array_equal(pair.value(x), x**2)
    kept = sb.sparse_hessian(lambda x: 2 * np.sum(x**2), x, compiled=True)
    assert [kept.value(x) for _ in range(3)] == pytest.approx([2 * (x**2).sum()] * 3)
    assert isinstance(kept.value(x), np.float64)


def test_copies_and_threads(loops_in_python):
    jac = sb.sparse_jacobian(chained, np.ones(N), compiled=True)
    xs = [RNG.uniform(-1, 1, N) for _ in range(16)]
    expected = [sb.sparse_jacobian(chained, np.ones(N), compiled=False).values(x) for x in xs]
    for one in (jac, copy.deepcopy(jac), pickle.loads(pickle.dumps(jac))):
        with ThreadPoolExecutor(4) as pool:
            np.testing.assert_allclose(list(pool.map(one.values, xs)), expected, rtol=1e-12, atol=1e-14)
        assert "compiled, " in one.describe()


def test_other_values_than_the_interpreters_are_not_used(loops_in_python, monkeypatch):
    jac, x = sb.sparse_jacobian(lambda x: x**2, np.ones(3), compiled=True), np.arange(1.0, 4)
    monkeypatch.setattr(jac._tape._records[x.dtype].tape, "values", lambda args: 3 * args[0])
    np.testing.assert_array_equal(jac.values(x), 2 * x)
    assert "differ" in jac.describe()


# What was wrong once.


def test_a_constant_that_is_written_to_after_its_use(loops_in_python):
    """Also where the first call is at zero, of which both ways make zeros."""
    n = 100

    def f(x):
        weight = np.linspace(1, 2, n)
        y = weight * x**2
        weight *= 2
        return y + weight * x**3

    new, old = (sb.sparse_jacobian(f, np.zeros(n), compiled=c) for c in (True, False))
    for x in (np.zeros(n), np.ones(n), np.linspace(1, 2, n)):
        np.testing.assert_allclose(new.values(x), old.values(x), rtol=1e-14)
    assert "compiled, " in new.describe()


def test_attributes_that_hide_others_and_numbers_in_containers(loops_in_python):
    class Model:
        nu = 2.7

        def residual(self, x):
            return self.nu * x**2

    model, numbers, x = Model(), {"t": 1.0}, np.ones(6)
    for f, change in ((model.residual, lambda: setattr(model, "nu", 3.7)),
                      (lambda x: numbers["t"] * x**2, lambda: numbers.update(t=numbers["t"] + 0.5))):  # fmt: skip
        jac = sb.sparse_jacobian(f, x, compiled=True)
        jac.values(x)
        for _ in range(3):
            change()
            np.testing.assert_array_equal(jac.values(x), sb.sparse_jacobian(f, x).values(x))


@pytest.mark.parametrize("suffix", ["nbc", "nbi"])
def test_machine_code_that_was_cut_off_is_compiled_anew(monkeypatch, tmp_path, suffix):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = RNG.uniform(0.2, 1, 8)
    f = lambda x: np.log1p(x[1:] ** 2 + 0.54321 * x[:-1])  # noqa: E731
    for cut in (0, 41):
        monkeypatch.setattr(loops, "_compiled", {})
        same(sb.sparse_jacobian(f, x, compiled=True), sb.sparse_jacobian(f, x), x)
        paths = list(tmp_path.glob(f"**/loop_*.{suffix}"))
        assert paths
        for path in paths:
            path.write_bytes(path.read_bytes()[:cut])


def test_subnormal_numbers_count():
    x = np.array([700.0, 715.0, 730.0])
    f = lambda x: np.exp(-x) * 1e300  # noqa: E731
    found = same(sb.sparse_jacobian(f, x, compiled=True), sb.sparse_jacobian(f, x), x, rtol=1e-300)
    assert (found < 0).all()


def test_an_environment_with_other_derivatives_is_an_error(loops_in_python):
    """Unless all of them are in the pattern; it may be an object of attributes."""
    outside = types.SimpleNamespace(scale=2.0, weights=np.array([1.0, 0, 0, 1, 0, 0]))
    f = lambda x: x**2 * outside.scale + np.roll(x, 1) * outside.weights  # noqa: E731
    x = RNG.uniform(0.2, 1, 6)
    jac = sb.sparse_jacobian(f, x, compiled=True)
    jac.values(x)
    outside.scale = 3.0
    same(jac, sb.sparse_jacobian(f, x), x)
    outside.weights = np.ones(6)
    for _ in range(2):
        with pytest.raises(PatternError, match="changed"):
            jac.values(x)


def test_zeros_among_constants_have_signs(loops_in_python):
    x = RNG.uniform(0.5, 2, 6)
    for signs in ([0.0, -0.0], [-0.0], [1.0, -0.0, 0.0]):
        of = np.resize(signs, 6)
        jac = sb.sparse_jacobian(lambda x, of=of: np.copysign(x, of), x, compiled=True)
        np.testing.assert_array_equal(jac._tape._records[x.dtype].run("value", (x,)), np.copysign(x, of))


def test_subclasses_of_arrays_are_on_the_host(loops_in_python):
    jac, x = sb.sparse_jacobian(np.sin, np.ones(3), compiled=True), np.ones(3).view(type("Own", (np.ndarray,), {}))
    np.testing.assert_allclose(jac.values(x), np.cos(1.0) * np.ones(3))
    assert "CUDA" not in jac.describe()


def test_slopes_of_remainders_are_whole_quotients(loops_in_python):
    x = np.array([3.0, 0.1])  # 3 / 0.1 is rounded to 30, and 29 times 0.1 were taken off
    for f in (lambda x: np.remainder(x[:1], x[1:]), lambda x: np.fmod(x[:1], x[1:])):
        for compiled in (True, False):
            jac = sb.sparse_jacobian(f, np.ones(2), compiled=compiled)
            np.testing.assert_array_equal([jac.values(x) for _ in range(3)], [[1.0, -29.0]] * 3)


@pytest.mark.parametrize("aim", [np.mean, np.var])
def test_products_of_one_target_by_one_plan(aim):
    """The same patterns, and so one plan, twice: only the first of its products is all of the target."""

    def f(x):
        s = np.sum(x) * x
        return s - aim(s)

    x = RNG.standard_normal(7)
    found = sb.sparse_jacobian(f, x, compiled=True)._tape._records[x.dtype].tape.values((x,))
    np.testing.assert_allclose(found, sb.sparse_jacobian(f, x).values(x), rtol=1e-10)
