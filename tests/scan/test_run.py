"""Planned scans on values: every algorithm against the sequential product, general and stacked, any sharing."""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import needs_numba
from scan.chains import Chain, algorithms, chains, make_chain, make_stack
from sparsebp import SparsityPattern, kernels, plan_scan
from sparsebp.core import backend as seam
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, MissingDependencyError, ShapeError


@pytest.fixture(scope="module", params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request) -> ModuleType:
    """NumPy, and CuPy where there is a GPU: the scan is the same for both."""
    if request.param == "host":
        return np
    try:
        return seam.cupy()
    except (MissingDependencyError, DeviceError) as error:
        pytest.skip(f"no GPU: {error}")


def run(plan, chain: Chain, xp: ModuleType) -> list[np.ndarray]:
    """Call the plan with the chain's values on `xp`; return results on the host."""

    def move(a):
        return None if a is None else xp.asarray(a)

    stacked = isinstance(chain.data, np.ndarray)
    data = move(chain.data) if stacked else [move(d) for d in chain.data]
    b = chain.injections
    injections = move(b) if b is None or isinstance(b, np.ndarray) else [move(v) for v in b]
    y = plan(move(chain.g), data, injections)
    return seam.to_host(y) if stacked else [seam.to_host(v) for v in y]


def assert_close(y, expected, dtype=np.float64) -> None:
    rtol = 1e-9 if dtype == np.float64 else 1e-3
    assert len(y) == len(expected)
    for i, (have, want) in enumerate(zip(y, expected, strict=True)):
        assert have.shape == want.shape and have.dtype == dtype
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(have, want, rtol=rtol, atol=rtol * scale, err_msg=f"y[{i}]")


@settings(max_examples=60)
@given(chain=chains(), options=algorithms())
def test_every_algorithm_equals_the_sequential_product(chain, options, xp):
    needs_numba("products are planned with it, on the host")
    plan = plan_scan(chain.patterns, **options, batch=chain.batch, dtype=np.float64, shared=chain.shared)
    assert_close(run(plan, chain, xp), chain.expected())


@settings(max_examples=30)
@given(
    n=st.integers(1, 40),
    size=st.sampled_from([1, 2, 3, 5, 8]),
    batch=st.sampled_from([1, 2, 3, 16, 17]),
    shared=st.booleans(),
    options=algorithms(),
    seed=st.integers(0, 2**32 - 1),
)
def test_stacked_equals_general_and_sequential(n, size, batch, shared, options, seed, xp):
    chain = make_stack(np.random.default_rng(seed), n, size, batch, shared)
    plan = plan_scan(chain.patterns, **options, batch=batch, shared=[shared] * n)
    expected = chain.expected()
    stacked = run(plan, chain, xp)
    assert stacked.shape == (n, size, batch)
    assert_close(stacked, expected)
    listed = Chain(
        chain.patterns, list(chain.data), chain.g, None if chain.injections is None else list(chain.injections)
    )
    assert_close(run(plan, listed, xp), expected)


@pytest.mark.parametrize("algorithm", ["linear", "blelloch", "hybrid", "chunked"])
def test_float32(algorithm, xp):
    needs_numba("products are planned with it, on the host")
    chain = make_chain(np.random.default_rng(3), 19, 4, np.float32)
    plan = plan_scan(chain.patterns, algorithm, workers=4)
    assert_close(run(plan, chain, xp), chain.expected(), np.float32)


@pytest.mark.parametrize("algorithm", ["linear", "blelloch", "hybrid", "chunked"])
@pytest.mark.parametrize("make", [lambda r: make_chain(r, 23, 5), lambda r: make_stack(r, 23, 6, 5, False)])
def test_bitwise_equal_over_runs_and_workspaces(algorithm, make, xp):
    needs_numba("products are planned with it, on the host")
    chain = make(np.random.default_rng(5))
    options = {"up_levels": 2} if algorithm == "hybrid" else {"chunks": 5} if algorithm == "chunked" else {}
    plan = plan_scan(chain.patterns, algorithm, **options)
    first = run(plan, chain, xp)
    again = run(plan, chain, xp)
    fresh = run(plan_scan(chain.patterns, algorithm, **options), chain, xp)
    for y in (again, fresh):
        assert all(np.array_equal(a, b) for a, b in zip(first, y, strict=True))


@pytest.mark.parametrize("stacked", [False, True])
def test_second_call_reuses_the_workspace_and_keeps_results(stacked):
    rng = np.random.default_rng(7)
    chain = make_stack(rng, 20, 4, 3, False) if stacked else make_chain(rng, 20, 3)
    plan = plan_scan(chain.patterns, "blelloch")
    first = run(plan, chain, np)
    kept = [np.array(y) for y in first]
    (workspace,) = plan.workspaces
    changed = Chain(chain.patterns, [-d for d in chain.data] if not stacked else -chain.data, chain.g, chain.injections)
    run(plan, changed, np)
    assert plan.workspaces == [workspace]
    assert all(np.array_equal(a, b) for a, b in zip(first, kept, strict=True))
    made = []

    def empty(shape, dtype=float):
        made.append(shape)
        return np.zeros(shape, dtype)

    with mock.patch.object(np, "empty", empty):
        run(plan, chain, np)
    # only vectors are new at a second call: the results, together, and what injections come to between products
    rows = [p.shape[0] for p in chain.patterns]
    if not stacked:
        numbers = [np.prod(shape) for shape in made]
        assert max(numbers) <= sum(rows) * chain.batch + 32
        assert sorted(numbers)[-2] <= max(max(rows) * chain.batch, 3 * len(rows) + 32)


def test_workspace_is_remade_for_another_batch_and_two_are_kept():
    rng = np.random.default_rng(8)
    plan = None
    for batch in (4, 3, 4, 2):
        chain = make_stack(rng, 9, 3, batch, False)
        plan = plan or plan_scan(chain.patterns, "blelloch")
        assert_close(run(plan, chain, np), chain.expected())
    assert len(plan.workspaces) == 2


def test_nested_call_gets_a_workspace_of_its_own():
    chain = make_stack(np.random.default_rng(9), 9, 3, 2, False)
    plan = plan_scan(chain.patterns, "blelloch")
    run(plan, chain, np)
    out = plan.workspaces.pop()  # as if another thread were using it
    run(plan, chain, np)
    assert plan.workspaces[0] is not out


@pytest.mark.parametrize("stacked", [False, True])
def test_without_a_batch(stacked, xp):
    rng = np.random.default_rng(11)
    chain = make_stack(rng, 9, 4, 1, False) if stacked else make_chain(rng, 9, 1)
    plan = plan_scan(chain.patterns, "blelloch")
    data = xp.asarray(chain.data[:, :, 0]) if stacked else [xp.asarray(d.reshape(-1)) for d in chain.data]
    b = chain.injections
    injections = None if b is None else [None if v is None else xp.asarray(v[:, 0]) for v in b]
    y = plan(xp.asarray(chain.g[:, 0]), data, injections)
    assert_close([seam.to_host(v) for v in y], [v[:, 0] for v in chain.expected()])


def test_stacked_values_on_an_equal_sparse_pattern(xp):
    """Equal square patterns that are not dense take stacked data too; they run step by step."""
    needs_numba("products are planned with it, on the host")
    rng = np.random.default_rng(12)
    p = SparsityPattern([0, 2, 3, 5], [0, 2, 1, 0, 1], (3, 3))
    data = rng.standard_normal((10, 5, 2))
    chain = Chain([p] * 10, data, rng.standard_normal((3, 2)), None)
    assert_close(run(plan_scan(chain.patterns, "blelloch"), chain, xp), chain.expected())


def test_stacked_injections_may_be_a_list(xp):
    chain = make_stack(np.random.default_rng(13), 6, 3, 2, False)
    b = [None, np.ones((3, 2)), None, None, np.full((3, 2), 2.0), None]
    chain = Chain(chain.patterns, chain.data, chain.g, b)
    assert_close(run(plan_scan(chain.patterns, "blelloch"), chain, xp), chain.expected())


@pytest.mark.parametrize("count", [2, 4])
def test_stacked_injections_of_another_number_are_refused(xp, count):
    data, g = xp.zeros((3, 4)), xp.zeros(2)
    plan = plan_scan([SparsityPattern.dense(2, 2)] * 3)
    with pytest.raises(ShapeError, match="injections has the wrong length"):
        plan(g, data, [xp.zeros(2)] * count)


def test_patterns_without_entries_or_rows():
    empty = SparsityPattern([0, 0, 0], [], (2, 3))
    none = SparsityPattern([0], [], (0, 2))
    plan = plan_scan([empty, none, SparsityPattern([0, 0], [], (1, 0))], "blelloch")
    y = plan(np.ones((3, 2)), [np.empty((0, 2)), np.empty(0), np.empty((0, 2))], [None, None, np.ones((1, 2))])
    assert [v.shape for v in y] == [(2, 2), (0, 2), (1, 2)]
    assert not y[0].any() and (y[2] == 1).all()


def test_results_do_not_alias_each_other_or_the_arguments():
    """Through identities a value passes unchanged, but every result is an array of its own."""
    p = SparsityPattern.identity(3)
    g = np.ones((3, 2))
    y = plan_scan([p, p, p], "blelloch")(g, [np.ones(3)] * 3)
    y[0][:] = 5
    assert (g == 1).all() and (y[1] == 1).all() and (y[2] == 1).all()


def small():
    chain = make_stack(np.random.default_rng(1), 3, 2, 4, False)
    return plan_scan(chain.patterns, "blelloch"), chain.g, list(chain.data)


def bad_calls():
    plan, g, data = small()
    wide = np.zeros((4, 8))[:, ::2]
    yield "too few arrays", plan, (g, data[:2]), ShapeError, "3 entries"
    yield "wrong nnz", plan, (g, [data[0], data[1][:3], data[2]]), ShapeError, r"data\[1\]"
    yield "wrong batch", plan, (g, [data[0], data[1][:, :3].copy(), data[2]]), ShapeError, r"data\[1\]"
    yield "wrong g", plan, (np.zeros((3, 4)), data), ShapeError, "g has the wrong shape"
    yield "g with three axes", plan, (np.zeros((2, 4, 1)), data), ShapeError, "batch last"
    yield "empty batch", plan, (np.zeros((2, 0)), [d[:, :0].copy() for d in data]), ShapeError, "batch is empty"
    yield "dtype mix", plan, (g.astype(np.float32), data), DTypeError, "float32"
    yield "integers", plan, (g.astype(int), data), DTypeError, "float32 or float64"
    yield "not contiguous", plan, (g, [data[0], wide, data[2]]), LayoutError, "ascontiguousarray"
    yield "not an array", plan, (g, [data[0], [1.0] * 4, data[2]]), DTypeError, "NumPy or CuPy"
    yield "injections' count", plan, (g, data, [None]), ShapeError, "injections has the wrong length"
    yield "injection's shape", plan, (g, data, [None, np.zeros((3, 4)), None]), ShapeError, r"injections\[1\]"
    narrow = np.zeros((2, 4), np.float32)
    yield "injection's dtype", plan, (g, data, [None, narrow, None]), DTypeError, r"injections\[1\]"
    yield "injection is no array", plan, (g, data, [None, [[1.0] * 4] * 2, None]), DTypeError, r"injections\[1\]"
    yield "batchless g", plan, (g[:, 0].copy(), data), ShapeError, r"data\[0\]"
    yield "stack's shape", plan, (g, np.zeros((2, 4, 4))), ShapeError, "data"
    mixed = plan_scan([SparsityPattern.dense(2, 2), SparsityPattern.dense(3, 2)], "linear")
    yield "stack of unequal patterns", mixed, (g, np.zeros((2, 4, 4))), ShapeError, "same square pattern"


@pytest.mark.parametrize("case", list(bad_calls()), ids=lambda case: case[0])
def test_bad_calls_are_refused(case):
    _, plan, arguments, error, message = case
    with pytest.raises(error, match=message):
        plan(*arguments)


@pytest.mark.gpu
def test_numpy_and_cupy_are_not_mixed():
    try:
        cp = seam.cupy()
    except (MissingDependencyError, DeviceError) as error:
        pytest.skip(f"no GPU: {error}")
    plan, g, data = small()
    with pytest.raises(DeviceError, match="mixed"):
        plan(cp.asarray(g), data)


# ---- every implementation of the kernels, the emulated device among them ---------------------------------------------


@pytest.mark.parametrize("options", [{"algorithm": "hybrid", "up_levels": 1}, {"algorithm": "chunked", "chunks": 3}])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_scan_on_every_backend(backend, options, stacked, batch, monkeypatch):
    """Values and vectors agree with the dense sequential product, injections included."""
    rng = np.random.default_rng(17)
    chain = make_stack(rng, 7, 3, batch, False) if stacked else make_chain(rng, 7, batch, most=5)
    chain.injections = [rng.standard_normal((p.shape[0], batch)) for p in chain.patterns]
    plan = plan_scan(chain.patterns, **options)
    implementation = backend.kernels
    monkeypatch.setattr(kernels, "get", lambda xp: implementation)
    data = backend.array(chain.data) if stacked else [backend.array(d) for d in chain.data]
    y = plan(backend.array(chain.g), data, [backend.array(v) for v in chain.injections])
    for have, want in zip(y, chain.expected(), strict=True):
        np.testing.assert_allclose(backend.numpy(have), want, rtol=1e-9, atol=1e-9)
