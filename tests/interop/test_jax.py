"""Products, solves and linear recurrences in JAX: values, gradients of both orders, and `vmap`, against dense ones."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import sparsebp as sb
from matrices import of_mask
from sparsebp.core.errors import DTypeError, OptionError, ShapeError

jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")

from jax import numpy as jnp  # noqa: E402

import sparsebp.jax as sj  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_compiles_quickly")
EYE, FULL = np.eye(3, dtype=bool), np.ones((3, 3), bool)
LOWER = np.tri(3, k=0, dtype=bool) & ~np.tri(3, k=-2, dtype=bool)
MASKS = [(LOWER, LOWER.T), (EYE, LOWER), (LOWER, EYE), (FULL, FULL), (LOWER[:2], np.ones((3, 4), bool)),
         (np.zeros((0, 2), bool), np.ones((2, 3), bool)), (np.ones((1, 1), bool), np.ones((1, 1), bool)),
         (LOWER, LOWER.T, EYE)]  # fmt: skip


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    rng = np.random.default_rng(sum(shape) + len(shape))
    parts = [rng.standard_normal(shape) for _ in range(2)]
    return jnp.asarray((parts[0] + 1j * parts[1] if np.dtype(dtype).kind == "c" else parts[0]).astype(dtype))


def stacked(values: Any, *factors: float, axis: int) -> Any:
    """Return an array and multiples of it, by NumPy: JAX compiles every operation on every shape."""
    return jnp.asarray(np.stack([values, *(factor * np.asarray(values) for factor in factors)], axis))


def matrix_of(pattern: sb.SparsityPattern, values: Any) -> Any:
    rows, columns = (torch.from_numpy(i.astype(np.int64)) for i in (pattern.row_of_entry, pattern.indices))
    return values.new_zeros(pattern.shape).index_put((rows, columns), values)


def by_column(f: Any, *tensors: Any) -> Any:
    """Call f once for every column of the tensors (…, B), by a loop."""
    counts = [tensor.shape[1] for tensor in tensors if tensor.dim() == 2]
    rows = [[t[:, i] if t.dim() == 2 else t for t in tensors] for i in range(max(counts, default=1))]
    return torch.stack([f(*row) for row in rows], -1) if counts else f(*rows[0])


def assert_same(ours: Any, theirs: Any, *operands: Any) -> None:
    """Values and gradients at all operands, and the gradients of these, of a function of JAX and one of PyTorch."""
    every = tuple(range(len(operands)))

    def loss(*v: Any) -> Any:
        return (jnp.abs(ours(*v)) ** 2).sum()

    def steep(*v: Any) -> Any:
        return sum((jnp.abs(g) ** 2).sum() for g in jax.grad(loss, every)(*v))

    found = jax.jit(lambda *v: (ours(*v), jax.grad(loss, every)(*v), jax.grad(steep, every)(*v)))(*operands)
    tensors = [torch.from_numpy(np.array(v)).requires_grad_() for v in operands]
    value = theirs(*tensors)
    first = torch.autograd.grad((value.abs() ** 2).sum(), tensors, create_graph=True)
    second = torch.autograd.grad(sum((g.abs() ** 2).sum() for g in first), tensors)
    expected = [value, *(g.conj() for g in (*first, *second))]  # PyTorch's gradients are conjugates of JAX's
    close = {"rtol": 1e-3, "atol": 1e-3} if operands[0].dtype.itemsize == 4 else {"rtol": 1e-9, "atol": 1e-10}
    for mine, true in zip(jax.tree.leaves(found), expected, strict=True):
        assert mine.dtype == operands[0].dtype
        np.testing.assert_allclose(mine, true.detach().resolve_conj().numpy(), **close)


@pytest.mark.parametrize(
    ("masks", "batched"),
    [(MASKS[0], (own_a, own_b)) for own_a in (False, True) for own_b in (False, True)]
    + [(masks, (True, False)) for masks in MASKS[1:]],
)
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_products(masks, batched, dtype):
    a, b, *mask = map(of_mask, masks)
    plan = sb.plan_product(a, b, mask=mask[0] if mask else None)
    c = plan.pattern
    values = [normal(p.nnz, *((3,) if own else ()), dtype=dtype) for p, own in zip((a, b), batched, strict=True)]

    def one(x: Any, y: Any) -> Any:
        return (matrix_of(a, x) @ matrix_of(b, y))[tuple(i.astype(np.int64) for i in (c.row_of_entry, c.indices))]

    assert_same(lambda x, y: sj.product(plan, x, y), lambda x, y: by_column(one, x, y), *values)


def plan_of(n: int) -> Any:
    mask = np.random.default_rng(n).random((n, n)) < 0.3
    return sb.plan_factor(of_mask(mask | np.eye(n, dtype=bool)))


def system(plan: Any, of_values: Any, of_b: Any, dtype: Any = np.float64) -> tuple[Any, Any]:
    pattern = plan.pattern
    values = np.array(normal(pattern.nnz, *of_values, dtype=dtype))
    values[pattern.row_of_entry == pattern.indices] += 4 * pattern.shape[0]
    return jnp.asarray(values), normal(pattern.shape[0], *of_b, dtype=dtype)


FORMS = [((), ()), ((), (3,)), ((3,), (3,)), ((9,), ()), ((1,), (1,))]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("n", "dtype", "form"),
    [*((5, np.float64, form) for form in FORMS), (1, np.float32, FORMS[0])]
    + [(5, np.complex128, form) for form in FORMS[1:4]],
    ids=str,
)
def test_solves(n, dtype, form, transposed):
    plan = plan_of(n)

    def one(values: Any, b: Any) -> Any:
        matrix = matrix_of(plan.pattern, values)
        return torch.linalg.solve(matrix.T if transposed else matrix, b)

    assert_same(lambda v, b: sj.solve(plan, v, b, transposed), lambda v, b: by_column(one, v, b),
                *system(plan, *form, dtype))  # fmt: skip


@pytest.mark.parametrize(("form", "kind", "transposed", "dtype"), [
    *((form, "cholesky", transposed, np.complex128) for form in FORMS[1:4] for transposed in (False, True)),
    *((form, kind, False, np.float64) for form in FORMS for kind in ("cholesky", "ldlt")),
], ids=str)  # fmt: skip
def test_solves_with_symmetric_and_hermitian_matrices(form, kind, transposed, dtype):
    """The derivatives are those of a function of the entries on one side of the diagonal."""
    mask = plan_of(5).pattern.to_scipy().toarray() != 0
    plan = sb.plan_factor(of_mask(mask | mask.T), kind=kind)
    mirror = plan.pattern.transpose_permutation

    def one(values: Any, b: Any) -> Any:
        matrix = matrix_of(plan.pattern, values + values[mirror.astype(np.int64)].conj())
        return torch.linalg.solve(matrix.T if transposed else matrix, b)

    assert_same(lambda v, b: sj.solve(plan, v + v[mirror].conj(), b, transposed), lambda v, b: by_column(one, v, b),
                *system(plan, *form, dtype))  # fmt: skip


def test_an_identity_has_values_of_its_own():
    plan = sb.plan_factor(sb.SparsityPattern.identity(3))
    assert_same(lambda v, b: sj.solve(plan, v, b), lambda v, b: b / v, jnp.arange(1.0, 4), normal(3))


def scanned(a: Any, b: Any, h0: Any, lengths: Any = None, reset: Any = False, reverse: bool = False) -> Any:
    """The recurrence by `lax.scan`: the state waits at steps beyond a sample's length."""
    lengths = jnp.full(b.shape[1], len(b)) if lengths is None else lengths

    def step(h: Any, at: Any) -> Any:
        t, factor, term, cleared = at
        inside = (t < lengths)[:, None]
        h = jnp.where(inside, jnp.where(cleared, 0, factor * h) + term, h)
        return h, jnp.where(inside, h, 0)

    full = jnp.broadcast_to(a, b.shape), b, jnp.broadcast_to(reset, b.shape)
    return jax.lax.scan(step, h0, (jnp.arange(len(b)), *full), reverse=reverse)[1]


def assert_same_derivatives(ours: Any, theirs: Any, *operands: Any, more: Any = ({},)) -> None:
    """Values, derivatives forward and in reverse, and of both orders of the two, by JAX itself.

    `more` has further arguments by name, without derivatives: several, as compiling takes most of the time.
    """
    every = tuple(range(len(operands)))
    along = tuple(np.cos(np.arange(v.size, dtype=v.real.dtype)).reshape(v.shape).astype(v.dtype) for v in operands)

    def everything(function: Any) -> Any:
        def of_all(operands: Any, given: Any) -> Any:
            def f(*v: Any) -> Any:
                return function(*v, **given)

            def loss(*v: Any) -> Any:
                return sum((jnp.abs(part) ** 2).sum() for part in jax.tree.leaves(f(*v)))

            def slope(*v: Any) -> Any:
                return jax.jvp(loss, v, along)[1]

            grads = jax.grad(loss, every)
            first = f(*operands), jax.jvp(f, operands, along), grads(*operands)
            return *first, jax.grad(slope, every)(*operands), jax.jvp(grads, operands, along)

        return jax.jit(of_all)

    single, both = operands[0].real.dtype == np.float32, [everything(f) for f in (ours, theirs)]
    for given in more:
        for mine, true in zip(*(map(np.asarray, jax.tree.leaves(f(operands, given))) for f in both), strict=True):
            scale = max(float(np.abs(true).max(initial=0)), 1.0)
            np.testing.assert_allclose(mine / scale, true / scale, rtol=0, atol=2e-5 if single else 1e-12)


@pytest.mark.parametrize(("sizes", "shared", "dtype", "reverse", "lengths", "resets", "axes"), [
    ((7, 3, 17), (), "float64", True, True, [None] * 3, None),
    ((7, 3, 1), (1,), "complex64", False, True, [(0, 0, 0), (0, 1, 1)], None),
    ((2, 3, 17), (0,), "complex128", True, True, [(1, 0, 0)], (0, 1, 2)),
    ((7, 1, 5), (1, 2), "float32", True, False, [(0, 1, 1)] * 2, (None, 2, None)),
    ((1, 3, 5), (), "float64", False, False, [None], (3, None, None)),
    ((0, 3, 5), (), "float32", False, False, [(0, 0, 0)], (1, None, 0)),
], ids=str)  # fmt: skip
def test_recurrences_as_scanned(sizes, shared, dtype, reverse, lengths, resets, axes):
    """In both directions, with lengths and resets, of few states and many; also as one batch by `vmap`.

    Of each of `resets`, the axes that it has one of; every other shape is compiled anew.
    """
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    of_a = [1 if axis in shared else n for axis, n in enumerate(sizes)]
    operands = np.asarray(normal(*of_a, dtype=dtype)) / 2, normal(*sizes, dtype=dtype), normal(*sizes[1:], dtype=dtype)
    more = []
    for of_reset in resets:
        drawn = {"lengths": rng.integers(0, sizes[0] + 1, sizes[1])} if lengths else {}
        if of_reset is not None:
            drawn["reset"] = rng.random([1 if one else n for one, n in zip(of_reset, sizes, strict=True)]) < 0.3
        more += [drawn]
    functions = [partial(f, reverse=reverse) for f in (sj.linear_recurrence, scanned)]
    if axes is not None:
        operands = tuple(v if axis is None else stacked(v, 0.5, 2, axis=axis)
                         for v, axis in zip(operands, axes, strict=True))  # fmt: skip
        functions = [lambda *v, f=f, **given: jax.vmap(partial(f, **given), axes)(*v) for f in functions]
    assert_same_derivatives(*functions, *operands, more=more)


def test_any_axis_of_steps():
    """`dim`, one to three axes, and mapped resets, with and without NaN before them."""
    a, b, h0 = (np.array(normal(*shape)) for shape in ((6, 2, 1), (6, 2, 5), (2, 5)))
    cut = np.zeros((6, 2, 5), bool)
    cut[3] = cut[1, 0, 2] = True
    b[2], a[3] = np.nan, np.inf
    options = {"reverse": True, "lengths": [6, 4]}
    want = sb.linear_recurrence(a, b, h0, reset=cut, **options)
    assert np.isfinite(want[3:]).all() and np.isnan(want[:2]).any()
    for dim in (0, 1, -1):
        moved = [np.moveaxis(x, 0, dim) for x in (a, b, cut)]
        found = sj.linear_recurrence(*moved[:2], h0, reset=moved[2], dim=np.int64(dim), **options)
        np.testing.assert_allclose(np.moveaxis(found, dim, 0), want, rtol=1e-12)
    one = sj.linear_recurrence(a[:, 0, 0], b[:, 0, 1], h0[0, 1], reset=cut[:, 0, 1], reverse=True)
    np.testing.assert_allclose(one, sb.linear_recurrence(a, b, h0, reset=cut, reverse=True)[:, 0, 1], rtol=1e-12)
    two = sj.linear_recurrence(a[..., 0].T, b[..., 2].T, h0[:, 2], dim=1, reset=cut[..., 2].T, **options)
    np.testing.assert_allclose(two, want[..., 2].T, rtol=1e-12)
    grad = jax.grad(lambda a, b, h0: jnp.nansum(sj.linear_recurrence(a, b, h0, reset=cut)[3:]), (0, 1, 2))(a, b, h0)
    assert all(jnp.isfinite(g).all() for g in grad) and not grad[0][:4].any()
    mapped = jax.vmap(lambda of: sj.linear_recurrence(a, b, h0, reset=of, **options))(np.stack([cut, cut[::-1]]))
    np.testing.assert_allclose(mapped[1], sb.linear_recurrence(a, b, h0, reset=cut[::-1], **options), rtol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, [4, 0, 2]])
def test_transposes_and_padding(reverse, lengths):
    """A recurrence is linear in its terms and its initial state; no derivative reads the padding."""
    with jax.enable_x64():
        rng = np.random.default_rng(0)
        a, b, g = (jnp.asarray(x) for x in rng.standard_normal((3, 5, 3, 2)))
        h0, steps_of = jnp.asarray(rng.standard_normal((3, 2))), jnp.asarray(lengths or [5] * 3)
        padding = (jnp.arange(5)[:, None] >= steps_of)[..., None]
        run = partial(sj.linear_recurrence, reverse=reverse, lengths=lengths)
        nans = jnp.where(padding, jnp.nan, a)

        def squares(f, a):
            return jax.grad(lambda a, b, h0: (f(a, b, h0) ** 2).sum(), (0, 1, 2))(a, b, h0)

        def plain(a, b, h0):
            return scanned(jnp.where(padding, 0, a), b, h0, steps_of, reverse=reverse)

        found = jax.jit(jax.linear_transpose(lambda b, h0: run(nans, b, h0), b, h0))(g)
        want = jax.jit(jax.vjp(partial(plain, a), b, h0)[1])(g)
        for one, other in zip(found, want, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12)
        again, wanted = (jax.jit(jax.jacrev(lambda a, f=f: squares(f, a)))(x) for f, x in ((run, nans), (plain, a)))
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-10)


def test_mapped_lengths():
    a, b, h0 = normal(5, 2, 3), normal(5, 2, 3), normal(2, 3)
    lengths = np.array([[5, 0], [2, 3], [1, 1]], np.uint8)
    found = jax.jit(jax.vmap(lambda of: sj.linear_recurrence(a, b, h0, lengths=of)))(lengths)
    np.testing.assert_allclose(found, np.stack([jax.jit(scanned)(a, b, h0, of) for of in lengths]), rtol=1e-12)


def scanned_selectively(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, h0: Any, reset: Any) -> Any:
    def step(h: Any, at: Any) -> Any:
        x, dt, b, c, reset = at
        h = jnp.where(reset[..., None, None], 0, jnp.exp(dt[..., None] * a) * h) + (dt * x)[..., None] * b[:, None]
        return h, (h * c[:, None]).sum(-1) + d * x

    h, y = jax.lax.scan(step, h0, (x, dt, b, c, reset))
    return y, h


@pytest.mark.parametrize(
    ("sizes", "axes", "resets", "dtype"),
    [((7, 2, 3, 2), None, 2, "float32"), ((33, 1, 1, 1), None, 1, "float64"), ((0, 2, 3, 1), None, 1, "float64"),
     ((3, 2, 5, 2), (0, None, None, 1, None, None, 0, None), 1, "float64"),
     ((3, 2, 5, 2), (None, 3, 0, None, None, 1, None, 0), 2, "float32")],
    ids=str,
)  # fmt: skip
def test_selective_scans(sizes, axes, resets, dtype):
    """With resets of all samples (T,), or of each (T, B)."""
    steps, batch, channels, order = sizes
    wide, narrow = (steps, batch, channels), (steps, batch, order)
    shapes = wide, wide, (channels, order), narrow, narrow, (channels,), (batch, channels, order)
    operands = [jnp.asarray(np.asarray(normal(*shape)) / 2, dtype) for shape in shapes]
    operands[1:3] = (jnp.asarray(sign * np.abs(v)) for sign, v in zip((1, -1), operands[1:3], strict=True))
    functions = (lambda *v: sj.selective_scan(*v[:7], reset=v[7])), scanned_selectively
    reset = normal(steps, batch)[(slice(None), 0)[: 3 - resets]] > 0.5
    if axes is not None:
        operands = [
            v if axis is None else stacked(v, 0.5, axis=axis) for v, axis in zip(operands, axes[:7], strict=True)
        ]
        reset = reset if axes[7] is None else jnp.stack([reset, ~reset])
        functions = [jax.vmap(f, axes) for f in functions]
    assert_same_derivatives(*(lambda *v, f=f: f(*v, reset) for f in functions), *operands)
    if axes is None:
        y, last = sj.selective_scan(*operands[:5])
        none = jnp.zeros(channels), jnp.zeros((batch, channels, order)), jnp.zeros(steps, bool)
        expected = jax.jit(scanned_selectively)(*operands[:5], *none)
        np.testing.assert_allclose(y, expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(last, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_both_modes_of_products_and_solves(transposed):
    plan = plan_of(5)
    pattern = plan.pattern
    product = sb.plan_product(pattern, pattern)
    values, b = system(plan, (), ())

    def dense(values: Any) -> Any:
        return jnp.zeros(pattern.shape).at[pattern.row_of_entry, pattern.indices].set(values)

    def solve(values: Any, b: Any) -> Any:
        return jnp.linalg.solve(dense(values).T if transposed else dense(values), b)

    assert_same_derivatives(lambda v, b: sj.solve(plan, v, b, transposed), solve, values, b)
    at = product.pattern.row_of_entry, product.pattern.indices
    assert_same_derivatives(
        lambda v, w: sj.product(product, v, w), lambda v, w: (dense(v) @ dense(w))[at], values, 2 * values
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1, 1), np.float32), *((shape, np.complex128) for shape in ((4, 2, 3), (1, 2, 3), (4, 1, 3), (1, 1, 1)))],
)
def test_recurrences(dtype, shape, reverse):
    operands = normal(*shape, dtype=dtype), normal(4, 2, 3, dtype=dtype), normal(2, 3, dtype=dtype)

    def stepped(a: Any, b: Any, h: Any) -> Any:
        steps = {}
        for t in sorted(range(4), reverse=reverse):
            h = steps[t] = a.expand(b.shape)[t] * h + b[t]
        return torch.stack([steps[t] for t in range(4)])

    assert_same(lambda *v: sj.linear_recurrence(*v, reverse=reverse), stepped, *operands)
    a, b, h0 = operands
    np.testing.assert_array_equal(sj.linear_recurrence(a, b), sj.linear_recurrence(a, b, jnp.zeros_like(h0)))


@pytest.mark.parametrize("mapped", [(0, 0), (1, None), (None, 0)], ids=str)
@pytest.mark.parametrize("kind", ["product", "solve", "columns", "batch", "one b", "recurrence"])
def test_vmap(kind, mapped):
    """Around and within `grad`, and twice."""
    plan = plan_of(5)
    product = sb.plan_product(plan.pattern, plan.pattern)

    def solve(values: Any, b: Any) -> Any:
        return sj.solve(plan, values, b)

    f, operands = {
        "product": (lambda x, y: sj.product(product, x, y), (normal(product.a.nnz), normal(product.b.nnz, 2))),
        "solve": (solve, system(plan, (), ())),
        "columns": (solve, system(plan, (), (2,))),
        "batch": (solve, system(plan, (2,), (2,))),
        "one b": (solve, system(plan, (2,), ())),
        "recurrence": (lambda a, b: sj.linear_recurrence(a, b, reverse=True), (normal(4, 1, 3), normal(4, 2, 3))),
    }[kind]  # fmt: skip
    many = [v if axis is None else stacked(v, 1.5, 2, axis=axis)
            for v, axis in zip(operands, mapped, strict=True)]  # fmt: skip
    rows = [[w if axis is None else np.take(np.asarray(w), i, axis) for w, axis in zip(many, mapped, strict=True)]
            for i in range(3)]  # fmt: skip

    def both(run: Any) -> Any:
        return lambda *v: (run(*v), jax.grad(lambda *v: (run(*v) ** 2).sum(), (0, 1))(*v))

    one = jax.jit(both(f))
    values, grads = jax.tree.map(lambda *found: np.stack(found), *(one(*row) for row in rows))
    close = {"rtol": 1e-11, "atol": 1e-13}
    for mine, true in zip(jax.tree.leaves(jax.jit(jax.vmap(both(f), mapped))(*many)), (values, *grads), strict=True):
        np.testing.assert_allclose(mine, true, **close)
    found, at = jax.jit(both(jax.vmap(f, mapped)))(*many)
    np.testing.assert_allclose(found, values, **close)
    for mine, true, axis in zip(at, grads, mapped, strict=True):
        np.testing.assert_allclose(mine, true.sum(0) if axis is None else np.moveaxis(true, 0, axis), **close)
    twice = jax.jit(jax.vmap(jax.vmap(f, mapped), (None, 0)))(many[0], stacked(many[1], 3, axis=0))
    np.testing.assert_allclose(twice, np.stack([values, 3 * values]), **close)


def test_empty_arrays():
    nothing = sb.plan_factor(sb.SparsityPattern.diagonal(0))
    assert sj.solve(nothing, normal(0), normal(0)).shape == (0,)
    assert sj.solve(nothing, normal(0, 3), normal(0, 3)).shape == (0, 3)
    plan = plan_of(3)
    values = system(plan, (), ())[0]
    assert sj.solve(plan, values, normal(3, 0)).shape == (3, 0)
    for shape in ((0, 2, 3), (4, 0, 3), (4, 2, 0)):
        h0 = normal(*shape[1:])
        grads = jax.grad(lambda *v: sj.linear_recurrence(*v).sum(), (0, 1, 2))(normal(*shape), normal(*shape), h0)
        assert [g.shape for g in grads] == [shape, shape, shape[1:]]
        assert not any(g.any() for g in grads if shape[0] == 0)


def test_arrays_of_numpy_are_read_at_every_call():
    """Also read-only ones and views; NaN stays in its sample."""
    plan = plan_of(3)
    values, b = (np.array(v) for v in system(plan, (2,), (2,)))
    before = sj.solve(plan, values, b)
    values *= 2
    np.testing.assert_allclose(sj.solve(plan, values, b), before / 2)
    values.setflags(write=False)
    np.testing.assert_allclose(sj.solve(plan, values[:, ::-1], b[:, ::-1]), before[:, ::-1] / 2)
    b[0, 1] = np.nan
    found = sj.solve(plan, values, b)
    assert np.isfinite(found[:, 0]).all() and np.isnan(found[:, 1]).any()


def test_a_matrix_is_factorised_once(monkeypatch):
    from sparsebp.kernels.host.sparse import factor

    calls, whole = [], factor.factorise
    monkeypatch.setattr(factor, "factorise", lambda *args: (calls.append(1), whole(*args))[1])
    plan = plan_of(5)
    operands = system(plan, (3,), (3,))
    jax.block_until_ready(jax.jit(jax.grad(lambda v, b: (sj.solve(plan, v, b) ** 2).sum(), (0, 1)))(*operands))
    assert len(calls) == 1


def test_two_threads_at_once():
    plan = plan_of(17)
    grad = jax.jit(jax.grad(lambda v, b: sj.solve(plan, v, b).sum(), (0, 1)))
    tasks = [system(plan, (), ()), system(plan, (3,), ())]
    expected = [[np.asarray(g) for g in grad(*task)] for task in tasks]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            same = zip(grad(*tasks[number]), expected[number], strict=True)
            wrong.extend(number for mine, true in same if not np.array_equal(mine, true))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_matrices_of_scipy():
    plan = plan_of(3)
    product = sb.plan_product(plan.pattern, plan.pattern)
    values, b = system(plan, (), ())
    matrix = plan.pattern.to_scipy(np.asarray(values)).tocsc()
    np.testing.assert_array_equal(sj.solve(plan, matrix, b), sj.solve(plan, values, b))
    np.testing.assert_array_equal(sj.product(product, matrix, values), sj.product(product, values, values))


def test_refusals():
    plan = plan_of(3)
    product = sb.plan_product(plan.pattern, plan.pattern)
    identity = sb.plan_product(sb.SparsityPattern.identity(3), plan.pattern)
    values, b = system(plan, (), ())
    a, terms, h0 = normal(4, 2, 3), normal(4, 2, 3), normal(2, 3)
    wrong = [
        (OptionError, lambda: sj.solve(product, values, b)),
        (OptionError, lambda: sj.product(plan, values, values)),
        (OptionError, lambda: sj.product(identity, b, values)),
        (OptionError, lambda: sj.solve(plan, values, b, transposed=2)),
        (DTypeError, lambda: sj.solve(plan, values.tolist(), b)),
        (DTypeError, lambda: sj.solve(plan, values, b.astype(np.float32))),
        (DTypeError, lambda: sj.product(product, values.astype(np.float16), values)),
        (DTypeError, lambda: sj.linear_recurrence(a.astype(int), terms)),
        (ShapeError, lambda: sj.solve(plan, values[:-1], b)),
        (ShapeError, lambda: sj.solve(plan, values[None], b)),
        (ShapeError, lambda: sj.solve(plan, jnp.stack([values, values], 1), normal(3, 3))),
        (ShapeError, lambda: sj.product(product, jnp.stack([values, values], 1), normal(len(values), 3))),
        (ShapeError, lambda: sj.linear_recurrence(a[0], terms)),
        (ShapeError, lambda: sj.linear_recurrence(a[:3], terms)),
        (ShapeError, lambda: sj.linear_recurrence(a[None], terms[None])),
        (OptionError, lambda: sj.linear_recurrence(a, terms, dim=3)),
        (DTypeError, lambda: sj.linear_recurrence(a, terms, reset=a)),
        (ShapeError, lambda: sj.linear_recurrence(a, terms, reset=a[:2] > 0)),
        (ShapeError, lambda: sj.linear_recurrence(a, terms, h0[0])),
        (ShapeError, lambda: sj.linear_recurrence(a, terms, lengths=[1])),
        (DTypeError, lambda: sj.linear_recurrence(a, terms, lengths=[1.0, 2.0])),
        (OptionError, lambda: sj.linear_recurrence(a, terms, lengths=[1, 5])),
        (ShapeError, lambda: sj.selective_scan(a, terms, h0.T, a, a[:3])),
        (ShapeError, lambda: sj.selective_scan(a, terms, h0, a, a)),
        (DTypeError, lambda: sj.selective_scan(a, terms, h0.T.astype(np.float32), a, a)),
        (ShapeError, lambda: sj.selective_scan(a, a, a[0].T, a, a, reset=a > 0)),
    ]
    for error, call in wrong:
        with pytest.raises(error, match="Expected"):
            call()
    with pytest.raises(Exception, match="PivotError: The matrix cannot be factorised"):
        jax.block_until_ready(jax.jit(lambda v: sj.solve(plan, v, b))(0 * values))


def test_float64_is_never_converted():
    jax.config.update("jax_enable_x64", False)
    plan = plan_of(3)
    values, b = np.ones(plan.pattern.nnz), np.ones(3)
    with pytest.raises(DTypeError, match="jax_enable_x64"):
        sj.solve(plan, values, b)
    with pytest.raises(DTypeError, match="jax_enable_x64"):
        sj.linear_recurrence(np.ones((2, 1, 1), complex), np.ones((2, 1, 1), complex))
    single = sj.solve(sb.plan_factor(sb.SparsityPattern.diagonal(3)), 2 * np.ones(3, np.float32), np.float32(b))
    assert single.dtype == np.float32 and single.tolist() == [0.5, 0.5, 0.5]


def test_without_jax_the_extra_is_named():
    code = "import sys; sys.modules['jax'] = None; import sparsebp.jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in result.stderr and "pip install 'sparsebp[jax]'" in result.stderr
