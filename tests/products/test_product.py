"""Product plans against SciPy: structure from all-ones data (SciPy drops exact zeros), values sample by sample."""

import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from backends import needs_numba
from matrices import csr, dense, disjoint, of_blocks, of_mask, of_runs, random_pattern, wide
from products.operands import OPERANDS
from sparsebp import SparsityPattern, kernels, plan_product
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, MemoryLimitError, OptionError, ShapeError
from sparsebp.products import product, strategies, symbolic
from sparsebp.products.strategies import OF_KINDS, OF_KINDS_AND_STRUCTURE, OF_STRUCTURE, Gather
from sparsebp.products.symbolic import SymbolicProduct
from strategies import csr_patterns, normal, reals, seeds, sizes, tolerance


def product_on(backend, plan, a_data, b_data, out):
    """Run a plan on the kernels of the backend, emulated ones too."""
    own = backend.kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get", lambda xp: own)
        return plan(backend.array(a_data), backend.array(b_data), out=out)


@st.composite
def operands(draw):
    """Two patterns that chain, of every kind."""
    inner = draw(sizes(0, 13))
    special = st.sampled_from([SparsityPattern.identity, SparsityPattern.diagonal]).map(lambda make: make(inner))
    left = csr_patterns(columns=st.just(inner)).map(lambda parts: SparsityPattern(*parts))
    right = csr_patterns(rows=st.just(inner)).map(lambda parts: SparsityPattern(*parts))
    return draw(st.one_of(left, left, special)), draw(st.one_of(right, right, special))


def draw_values(rng, pattern, batch, shared, dtype):
    shape = (pattern.nnz,) if shared else (pattern.nnz, batch)
    return np.ones(shape, dtype) if pattern.kind == "identity" else normal(rng, shape, dtype)


def test_structure_picks_the_strategy():
    general, other = random_pattern(30, 40, 0.2), random_pattern(40, 20, 0.2, 1)
    selection = SparsityPattern(np.arange(41), np.arange(40) // 4, (40, 10))
    assert plan_product(general, other).strategy == "pairs"
    assert plan_product(general, random_pattern(40, 90, 0.5, 1)).strategy == "positions"  # rows of B are long
    assert plan_product(general, SparsityPattern.diagonal(40)).strategy == "scale_columns"
    assert plan_product(SparsityPattern.diagonal(30), general).strategy == "scale_rows"
    assert plan_product(SparsityPattern.identity(30), general).strategy == "identity"
    assert plan_product(general, SparsityPattern.identity(40)).strategy == "identity"
    assert plan_product(SparsityPattern.dense(3, 4), SparsityPattern.dense(4, 5)).strategy == "dense"
    assert plan_product(selection, random_pattern(10, 20, 0.4)).strategy == "select_rows"
    assert plan_product(random_pattern(9, 40, 0.4), selection).strategy == "select_columns"
    assert plan_product(general, of_runs(40, 20)).strategy == "runs"
    assert plan_product(of_blocks(30, 40, 3, 3), of_blocks(40, 50, 3, 2)).strategy == "blocks"
    assert plan_product(of_blocks(9, 8, 3, 3), of_blocks(8, 7, 3, 2)).strategy != "blocks"  # too little work
    assert plan_product(general, disjoint(40)).strategy == "gather"
    assert plan_product(SparsityPattern.diagonal(5), SparsityPattern.diagonal(5)).pattern.kind == "diagonal"
    both = plan_product(SparsityPattern.identity(5), SparsityPattern.identity(5))
    assert (both.pattern.kind, both.flops, both.index_bytes) == ("identity", 0, 0)


@pytest.mark.parametrize("longest", [2**16, 2**16 + 1])
def test_positions_are_as_narrow_as_they_can_be(longest):
    columns = np.concatenate([np.arange(0, 2 * longest, 2)] * 2)  # no runs
    b = SparsityPattern(np.arange(3) * longest, columns, (2, 2 * longest))
    a = SparsityPattern([0, 2, 2], [0, 1], (2, 2))
    plan = plan_product(a, b)
    assert plan.strategy == "positions"
    assert plan.arrays["positions"].dtype == (np.uint16 if longest == 2**16 else np.uint32)
    values = np.arange(2.0 * longest)
    np.testing.assert_array_equal(plan(np.ones(2), values), values[:longest] + values[longest:])


@pytest.mark.parametrize("entries", [2**15, 2**15 + 1])
def test_pairs_are_as_narrow_as_they_can_be(entries):
    """An entry of B takes 16 bits of 32, or 17, and that of a row of A 15, or 16; every list is longer than a tile."""
    rng = np.random.default_rng(0)
    a = SparsityPattern([0, entries, entries, entries + 3], [*range(entries), 0, 5, 9], (3, entries))
    columns = np.sort(rng.random((entries, 3)).argsort(axis=1)[:, :2], axis=1)
    b = SparsityPattern(np.arange(entries + 1) * 2, columns.ravel(), (entries, 3))
    plan = plan_product(a, b)
    assert plan.strategy == "pairs"
    assert plan.arrays["words"].dtype == (np.uint32 if b.nnz <= 2**16 else np.uint64)
    a_data, b_data = rng.standard_normal(a.nnz), rng.standard_normal(b.nnz)
    expected = csr(a, a_data) @ csr(b, b_data)
    np.testing.assert_allclose(csr(plan.pattern, plan(a_data, b_data)).toarray(), expected.toarray(), atol=1e-9)


def test_index_types_may_differ(monkeypatch):
    """int64 index arrays beside int32 ones: the plan keeps int64 copies for the kernel."""
    a, b = SparsityPattern([0, 2, 3], [0, 1, 1], (2, 2)), SparsityPattern([0, 2, 4], [0, 1, 0, 2], (2, 3))
    listed = product._make_plan(wide(a), b, None)
    monkeypatch.setattr(symbolic, "ROW_LENGTH", 0)
    plan, mixed = product._make_plan(a, b, None), product._make_plan(wide(a), b, None)
    assert (listed.strategy, mixed.strategy) == ("pairs", "positions")
    assert mixed.arrays["a_indptr"].dtype == mixed.arrays["c_indptr"].dtype == np.int64
    data = np.arange(3.0), np.arange(4.0)
    np.testing.assert_array_equal(mixed(*data), plan(*data))
    np.testing.assert_array_equal(listed(*data), plan(*data))


def test_plans_are_cached_by_content():
    first = plan_product(random_pattern(9, 8, 0.3), random_pattern(8, 7, 0.3))
    assert plan_product(random_pattern(9, 8, 0.3), random_pattern(8, 7, 0.3)) is first
    for n in range(1, 70):
        plan_product(SparsityPattern.diagonal(n), SparsityPattern.diagonal(n))
    assert plan_product(first.a, first.b) is not first  # only the last 64 are kept


@pytest.mark.parametrize("strategy", OPERANDS)
@pytest.mark.parametrize("batch", [1, 16])
def test_the_second_call_allocates_no_array_of_the_output_s_size(strategy, batch):
    a, b = OPERANDS[strategy]
    plan, rng = plan_product(a, b), np.random.default_rng(0)
    assert plan.strategy == strategy
    a_data, b_data = (draw_values(rng, p, batch, False, np.float32) for p in (a, b))
    out = plan(a_data, b_data)
    first = out.copy()
    tracemalloc.start()
    try:
        plan(a_data, b_data, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < out.nbytes / 2
    np.testing.assert_array_equal(out, first)


@pytest.mark.parametrize("strategy", [name for name in OPERANDS if name != "dense"] + ["pairs of long lists"])
def test_a_sample_alone_has_the_same_bits_as_in_a_batch(strategy):
    """But for dense blocks, which a library multiplies."""
    long_lists = random_pattern(60, 300, 0.3), random_pattern(300, 50, 0.3, 1)
    a, b = (OPERANDS | {"pairs of long lists": long_lists})[strategy]
    plan, rng = plan_product(a, b), np.random.default_rng(0)
    a_data, b_data = (draw_values(rng, p, 17, False, np.float32) for p in (a, b))
    if a.kind != "identity":
        a_data[::5] = -0.0
    together = plan(a_data, b_data)
    for sample in (0, 16):
        alone = plan(*(np.ascontiguousarray(data[:, sample]) for data in (a_data, b_data)))
        np.testing.assert_array_equal(alone.view(np.uint32), together[:, sample].copy().view(np.uint32))


@pytest.mark.parametrize("strategy", ["pairs", "positions", "select_columns", "gather"])
def test_columns_far_apart_are_as_quick_to_plan_as_near_ones(strategy):
    """No array is as long as there are columns."""
    a, b = OPERANDS[strategy]
    step = 2**30 // b.shape[1]
    far = product._make_plan(a, SparsityPattern(b.indptr, step * b.indices, (b.shape[0], 2**30)), None)
    near, rng = plan_product(a, b), np.random.default_rng(0)
    assert far.strategy == strategy
    np.testing.assert_array_equal(far.pattern.indices, step * near.pattern.indices)
    data = [draw_values(rng, p, 1, True, np.float32) for p in (a, b)]
    np.testing.assert_array_equal(far(*data), near(*data))


def test_possible_zeros_stay_and_nan_and_infinity_are_kept():
    a, b = SparsityPattern([0, 2, 3], [0, 1, 1], (2, 2)), SparsityPattern.dense(2, 2)
    a_data, b_data = np.array([0.0, 1.0, 2.0]), np.array([np.inf, 1.0, 1.0, np.nan])
    plan = plan_product(a, b)
    c = dense(plan.pattern, plan(a_data, b_data))
    np.testing.assert_array_equal(c, [[np.nan, np.nan], [2, np.nan]])  # 0 * infinity is NaN
    assert plan.pattern.nnz == 4


def test_shapes_that_do_not_chain_are_refused():
    with pytest.raises(ShapeError, match=r"do not chain.*Expected.*3 rows"):
        plan_product(SparsityPattern.dense(2, 3), SparsityPattern.dense(2, 3))


@pytest.mark.parametrize(
    ("a_data", "b_data", "error", "message"),
    [
        (np.ones(5), np.ones(4), ShapeError, "shared by the batch"),
        (np.ones((4, 2, 1)), np.ones(4), ShapeError, "shared by the batch"),
        (np.ones((4, 2)), np.ones((4, 3)), ShapeError, "different batch sizes"),
        (np.ones(4, np.float32), np.ones(4), DTypeError, "different dtypes"),
        (np.ones(4, int), np.ones(4), DTypeError, "float32 or float64"),
        (np.ones((2, 4)).T, np.ones(4), LayoutError, "contiguous"),
        (np.ones(8)[::2], np.ones(4), LayoutError, "contiguous"),
        ([1.0] * 4, np.ones(4), DTypeError, "a_data is not an array"),
        (None, np.ones(4), DTypeError, "a_data is not an array"),
        (sp.csr_array(np.eye(4)), np.ones(4), ShapeError, "does not fit the pattern"),
        (np.ones(4), None, DTypeError, "b_data is not an array"),
    ],
)
def test_wrong_values_are_refused(a_data, b_data, error, message):
    plan = plan_product(SparsityPattern.dense(2, 2), SparsityPattern.dense(2, 2))
    with pytest.raises(error, match=message):
        plan(a_data, b_data)


def test_wrong_outputs_are_refused():
    plan = plan_product(SparsityPattern.dense(2, 2), SparsityPattern.dense(2, 2))
    a = np.ones((4, 3))
    for out, error in [
        (np.ones(4), ShapeError),
        (np.ones((4, 3), np.float32), DTypeError),
        (np.ones((3, 4)).T, LayoutError),
        (a, LayoutError),
    ]:
        with pytest.raises(error, match="out"):
            plan(a, np.ones(4), out=out)


def test_cupy_and_numpy_arrays_do_not_mix(monkeypatch):
    import sys
    import types

    fake = types.ModuleType("cupy")
    fake.ndarray = type("ndarray", (), {"__module__": "cupy"})
    monkeypatch.setitem(sys.modules, "cupy", fake)
    plan = plan_product(SparsityPattern.dense(2, 2), SparsityPattern.dense(2, 2))
    with pytest.raises(DeviceError, match="mixed"):
        plan(np.ones(4), fake.ndarray())


def test_memory_limit_is_said_before_anything_is_allocated():
    a, b = random_pattern(100, 2000, 0.5), SparsityPattern.dense(2000, 2000)
    tracemalloc.start()
    try:
        with pytest.raises(MemoryLimitError, match=r"at most 100000 bytes.*for 200000000 products"):
            plan_product(a, b, memory_limit=100_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000  # the positions alone would take 400 MB
    a, b = random_pattern(30, 40, 0.2), random_pattern(40, 90, 0.5, 1)
    needed = plan_product(a, b).index_bytes
    assert plan_product(a, b, memory_limit=needed) is plan_product(a, b)
    smaller = plan_product(a, b, memory_limit=needed - 1)  # the cached plan is measured, too
    assert smaller.strategy == "accumulate" and smaller.index_bytes < needed
    assert plan_product(a, b).strategy == "positions"  # the smaller one takes nobody's place
    with pytest.raises(MemoryLimitError):
        plan_product(a, b, memory_limit=smaller.index_bytes - 1)
    a, b = OPERANDS["pairs"]
    assert plan_product(a, b, memory_limit=plan_product(a, b).index_bytes - 1).strategy == "positions"


def candidates(a, b):
    """A plan for every strategy that fits, runs of any length among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "RUN_LENGTH", 0)
        patch.setattr(strategies, "worth", lambda *sizes: True)
        return [(one, product.plan_by(one)) for one in product.candidates_of_structure(a, b)]


@given(
    pair=operands(), batch=st.sampled_from([0, 1, 3, 16, 17]), a_shared=st.booleans(), b_shared=st.booleans(),
    dtype=reals, seed=seeds, reuse=st.booleans(),
)  # fmt: skip
def test_every_strategy_that_fits_gives_the_product(backend, pair, batch, a_shared, b_shared, dtype, seed, reuse):
    """The one that is planned, and all others of the structure; the pattern is that of SciPy's product of ones."""
    needs_numba("products are planned with it, on the host")
    (a, b), rng = pair, np.random.default_rng(seed)
    a_data, b_data = draw_values(rng, a, batch, a_shared, dtype), draw_values(rng, b, batch, b_shared, dtype)
    shared = a_shared and b_shared
    many = 1 if shared else batch
    expected = dense(a, a_data, many) @ dense(b, b_data, many)
    structure = csr(a) @ csr(b)
    structure.sort_indices()
    planned, found = plan_product(a, b), candidates(a, b)
    assert planned.strategy == "identity" or planned.products == structure.sum()
    assert found[-1][1].strategy == "accumulate"
    for candidate, plan in [(None, planned), *found]:
        np.testing.assert_array_equal(plan.pattern.indptr, structure.indptr)
        np.testing.assert_array_equal(plan.pattern.indices, structure.indices)
        assert plan.flops == 2 * plan.products
        if candidate is not None:
            own = plan.pattern.indptr.nbytes + plan.pattern.indices.nbytes
            stated = own + candidate.index_bytes, candidate.index_bytes
            assert plan.index_bytes in stated, f"{candidate.name}: index_bytes and arrays() differ"
        shape = (plan.pattern.nnz,) if shared else (plan.pattern.nnz, batch)
        out = backend.empty(shape, dtype) if reuse else None
        got = product_on(backend, plan, a_data, b_data, out)
        assert got.shape == shape and got.dtype == dtype and (got is out or not reuse)
        values = dense(plan.pattern, backend.numpy(got), many)
        np.testing.assert_allclose(values, expected, **tolerance(dtype), err_msg=plan.strategy)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("shared", ["", "a", "b", "ab"])
@pytest.mark.parametrize("strategy", OPERANDS)
def test_complex_values(strategy, shared, dtype):
    """Of every strategy, the products and the gradients of dense matrices; those of the second sample here."""
    a, b = OPERANDS[strategy]
    plan, rng = plan_product(a, b), np.random.default_rng(0)
    assert plan.strategy == strategy

    def draw(pattern: SparsityPattern, own: bool) -> np.ndarray:
        parts = rng.standard_normal((2, pattern.nnz, *((3,) if own else ()))).astype(dtype)
        values = parts[0] + 1j * parts[1]
        return np.ones_like(values) if pattern.kind == "identity" else values

    def matrix(pattern: SparsityPattern, values: np.ndarray) -> sp.csr_array:
        values = values if values.ndim == 1 else np.ascontiguousarray(values[:, 1])
        return sp.csr_array((values.astype(complex), pattern.indices, pattern.indptr), shape=pattern.shape)

    def entries(pattern: SparsityPattern, matrix: sp.csr_array) -> np.ndarray:
        return matrix.toarray()[pattern.row_of_entry, pattern.indices]

    values = draw(a, "a" not in shared), draw(b, "b" not in shared)
    found, close = plan(*values), {"rtol": 1e-4, "atol": 1e-4} if dtype == np.complex64 else {"atol": 1e-12}
    assert found.dtype == dtype and found.shape == (plan.pattern.nnz, *((3,) if shared != "ab" else ()))
    left, right, c = matrix(a, values[0]), matrix(b, values[1]), matrix(plan.pattern, found)
    np.testing.assert_allclose(c.toarray(), (left @ right).toarray(), **close)
    out = np.empty_like(found)
    np.testing.assert_array_equal(plan(*values, out=out), found)
    if strategy != "identity":
        at_a, at_b = plan.gradients.at_a(found, values[1]), plan.gradients.at_b(values[0], found)
        scale = {"rtol": 1e-3, "atol": 1e-2} if dtype == np.complex64 else {"atol": 1e-9}
        at = (lambda v: v) if shared == "ab" else (lambda v: v[:, 1])
        np.testing.assert_allclose(at(at_a), entries(a, c @ right.conj().T), **scale)
        np.testing.assert_allclose(at(at_b), entries(b, left.conj().T @ c), **scale)


@pytest.mark.parametrize("how", [*OF_KINDS, *OF_KINDS_AND_STRUCTURE, *OF_STRUCTURE], ids=lambda how: how.name)
@given(pair=operands(), seed=seeds)
def test_a_strategy_is_refused_where_it_does_not_fit(how, pair, seed):
    """Forced past that, a kernel writes past its arrays."""
    (a, b), rng = pair, np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "RUN_LENGTH", 0)
        patch.setattr(strategies, "WORTH", 0)
        patch.setattr(strategies, "worth", lambda *sizes: True)
        strategy = how(SymbolicProduct(a, b))
        if not strategy.fits:
            with pytest.raises(OptionError, match=f"'{how.name}' cannot compute this product"):
                product.plan_by(strategy)
            return
        plan = product.plan_by(strategy)
    a_data, b_data = (draw_values(rng, pattern, 1, True, np.float64) for pattern in (a, b))
    expected = (csr(a, a_data) @ csr(b, b_data)).toarray()
    np.testing.assert_allclose(csr(plan.pattern, plan(a_data, b_data)).toarray(), expected, atol=1e-12)


def test_a_product_of_sums_is_not_gathered():
    full = random_pattern(5, 5, 1)
    for how in (Gather, OF_KINDS[1]):
        with pytest.raises(OptionError, match="Use plan_product"):
            product.plan_by(how(SymbolicProduct(full, full)))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("of_a", [True, False])
def test_values_that_are_not_finite_meet_entries_alone(value, of_a):
    a, b = OPERANDS["filled"]
    plan, rng = plan_product(a, b), np.random.default_rng(5)
    assert plan.strategy == "filled"
    a_data, b_data = (draw_values(rng, p, 1, True, np.float64) for p in (a, b))
    (a_data if of_a else b_data)[1234] = value
    ones = csr(a, np.ones(a.nnz)) @ csr(b, np.ones(b.nnz))
    expected = (csr(a, a_data) @ csr(b, b_data)).toarray()[ones.toarray() > 0]
    got = plan(a_data, b_data)
    assert 0 < np.count_nonzero(~np.isfinite(got)) < 300
    np.testing.assert_allclose(got, expected)


def test_nearly_full_matrices_give_the_bits_of_sums_by_entries():
    a, b = OPERANDS["filled"]
    filled_plan, *_, summed = (product.plan_by(one) for one in product.candidates_of_structure(a, b))
    assert (filled_plan.strategy, summed.strategy) == ("filled", "accumulate")
    a_data, b_data = (draw_values(np.random.default_rng(6), p, 3, False, np.float32) for p in (a, b))
    alone = filled_plan(np.ascontiguousarray(a_data[:, 1]), np.ascontiguousarray(b_data[:, 1]))
    np.testing.assert_array_equal(alone, filled_plan(a_data, b_data)[:, 1])
    np.testing.assert_array_equal(filled_plan(a_data, b_data), summed(a_data, b_data))


def test_selections_with_empty_rows_list_their_products():
    a, b = random_pattern(20, 30, 0.3), SparsityPattern(np.repeat(np.arange(11), 3)[:31], np.arange(10), (30, 10))
    plan = plan_product(a, b)
    assert (b.kind, plan.strategy) == ("selection", "select_columns")
    a_data, b_data = np.arange(1.0, a.nnz + 1), np.arange(1.0, 11.0)
    expected = csr(a, a_data) @ csr(b, b_data)
    np.testing.assert_allclose(csr(plan.pattern, plan(a_data, b_data)).toarray(), expected.toarray())


@pytest.mark.parametrize("strategy", OPERANDS)
def test_the_exact_memory_limit_is_enough(strategy):
    a, b = OPERANDS[strategy]
    plan = product._make_plan(a, b, None)
    needed = plan.index_bytes
    exact = product._make_plan(a, b, needed)
    assert (exact.strategy, exact.index_bytes) == (strategy, needed)
    if needed:
        try:
            smaller = product._make_plan(a, b, needed - 1)
        except MemoryLimitError:
            return  # a pattern that no strategy can do without
        assert smaller.strategy != strategy and smaller.index_bytes < needed


def test_a_pattern_that_an_operand_has_is_kept_once_and_counted_so():
    upper = of_mask(np.triu(np.ones((9, 9))))  # its square has the same pattern
    plan = product._make_plan(upper, upper, None)
    assert plan.pattern is upper
    assert plan.index_bytes == sum(array.nbytes for array in plan.arrays.values())
    assert product._make_plan(upper, upper, plan.index_bytes).strategy == plan.strategy
    for full in (SparsityPattern.dense(41, 41), SparsityPattern.dense(1, 1)):
        plan = product._make_plan(full, full, product._make_plan(full, full, None).index_bytes)
        assert plan.strategy == "dense" and plan.pattern is full


@pytest.mark.parametrize("strategy", OPERANDS)
def test_one_plan_serves_all_dtypes_and_batch_sizes_in_any_order(strategy):
    a, b = OPERANDS[strategy]
    plan, rng = plan_product(a, b), np.random.default_rng(0)
    out = {}
    for dtype, batch, shared in [
        (np.float32, 3, False), (np.float64, 3, False), (np.float64, 1, True), (np.float32, 17, False),
        (np.float32, 17, True), (np.float64, 5, False), (np.float32, 3, False), (np.float64, 0, False),
    ]:  # fmt: skip
        a_data = draw_values(rng, a, batch, shared, np.dtype(dtype))
        b_data = draw_values(rng, b, batch, False, np.dtype(dtype))
        shape = (plan.pattern.nnz, batch)
        given = out.setdefault((dtype, shape), np.full(shape, np.nan, dtype))  # what an earlier call has written, too
        got = plan(a_data, b_data, out=given)
        assert got is given and got.dtype == dtype
        for sample in range(batch):
            left, right = (d if d.ndim == 1 else d[:, sample] for d in (a_data, b_data))
            expected = csr(a, left.astype(float)) @ csr(b, right.astype(float))
            ours = csr(plan.pattern, got[:, sample].astype(float))
            np.testing.assert_allclose(ours.toarray(), expected.toarray(), **tolerance(np.dtype(dtype), 4))
