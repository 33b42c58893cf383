"""Numeric phase of sparse products on every backend, against SciPy one sample at a time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strict_cupy
from backends import needs_numba
from matrices import dense, of_mask, random_pattern
from sparsebp import SparsityPattern, kernels
from sparsebp.kernels.operands import Places, Rows
from sparsebp.products import product, strategies
from sparsebp.products.symbolic import row_cuts
from strategies import csr_patterns, index_dtypes, normal, reals, seeds, sizes, tolerance


def structure(a, b):
    """C's pattern, the products' rows and positions, by plain Python."""
    columns, product_ptr, positions = [], [0], []
    for r in range(a.shape[0]):
        met = [list(b.indices[b.indptr[m] : b.indptr[m + 1]]) for m in a.indices[a.indptr[r] : a.indptr[r + 1]]]
        row = sorted({j for found in met for j in found})
        columns.append(row)
        positions += [row.index(j) for found in met for j in found]
        product_ptr.append(len(positions))
    c_indptr = np.concatenate([[0], np.cumsum([len(row) for row in columns], dtype=int)])
    return c_indptr, np.array([j for row in columns for j in row], int), np.array(product_ptr), np.array(positions, int)


@given(
    draw=st.data(), inner=sizes(0, 13), batch=sizes(0, 18), a_shared=st.booleans(), b_shared=st.booleans(),
    position=st.sampled_from([np.uint16, np.uint32]), parts=st.integers(1, 5), dtype=reals, index=index_dtypes,
    seed=seeds,
)  # fmt: skip
def test_spgemm_positions(backend, draw, inner, batch, a_shared, b_shared, position, parts, dtype, index, seed):
    a = SparsityPattern(*draw.draw(csr_patterns(columns=st.just(inner))))
    b = SparsityPattern(*draw.draw(csr_patterns(rows=st.just(inner))))
    c_indptr, c_indices, product_ptr, positions = structure(a, b)
    rng = np.random.default_rng(seed)
    a_data = normal(rng, (a.nnz, 1 if a_shared else batch), dtype)
    b_data = normal(rng, (b.nnz, 1 if b_shared else batch), dtype)
    result_batch = 1 if a_shared and b_shared else batch
    out = backend.empty((len(c_indices), result_batch), dtype)
    rows = Rows(*(backend.array(array, index) for array in (a.indptr, a.indices, b.indptr, c_indptr)))
    cuts = backend.array(row_cuts(product_ptr, parts), np.int64)
    places = Places(backend.array(product_ptr, np.int64), backend.array(positions, position), cuts)
    backend.kernels.spgemm_positions(rows, places, backend.array(a_data), backend.array(b_data), out)
    expected = dense(a, a_data, result_batch) @ dense(b, b_data, result_batch)
    got = np.zeros_like(expected)
    got[:, np.repeat(np.arange(a.shape[0]), np.diff(c_indptr)), c_indices] = backend.numpy(out).T
    np.testing.assert_allclose(got, expected, **tolerance(dtype))


KERNELS = {
    "select_rows": "spgemm_select_rows",
    "select_columns": "spgemm_select_columns",
    "runs": "spgemm_runs",
    "blocks": "spgemm_blocks",
    "pairs": "spgemm_pairs",
    "accumulate": "spgemm_accumulate",
    "filled": "spgemm_filled",
}


def of_any_size(patch):
    """Let strategies take products that are too small to be worth it."""
    patch.setattr(strategies, "RUN_LENGTH", 0)
    patch.setattr(strategies, "worth", lambda *sizes: True)
    patch.setattr(strategies, "WORTH", 0)


def selection(draw, rows, columns):
    """At most one entry a row; sometimes exactly one in every row."""
    share = draw(st.sampled_from([0.0, 0.6, 1.0])) if columns else 0.0
    rng = np.random.default_rng(draw(seeds))
    present = rng.random(rows) < share
    return np.concatenate([[0], np.cumsum(present)]), rng.integers(0, max(columns, 1), present.sum()), (rows, columns)


@given(
    draw=st.data(), inner=sizes(1, 40), batch=st.sampled_from([0, 1, 3, 16, 17]), a_shared=st.booleans(),
    b_shared=st.booleans(), strategy=st.sampled_from(list(KERNELS)), dtype=reals, index=index_dtypes, seed=seeds,
)  # fmt: skip
def test_kernels_of_other_strategies(backend, draw, inner, batch, a_shared, b_shared, strategy, dtype, index, seed):
    needs_numba("products are planned with it, on the host")
    left = (
        selection(draw.draw, 7, inner) if strategy == "select_rows" else draw.draw(csr_patterns(columns=st.just(inner)))
    )
    columns = draw.draw(sizes(0, 17 if strategy == "blocks" else 70))
    size = draw.draw(st.sampled_from([(2, 2, 2), (3, 1, 4)]))  # a kernel is compiled for each
    if strategy == "select_columns":
        right = selection(draw.draw, inner, columns)
    else:
        right = draw.draw(csr_patterns(rows=st.just(inner), columns=st.just(columns)))
    a, b = SparsityPattern(*left), SparsityPattern(*right)
    if strategy == "blocks":
        a, b = (of_mask(np.kron(dense(p), np.ones(of))) for p, of in ((a, size[:2]), (b, size[1:])))
    with pytest.MonkeyPatch.context() as patch:
        of_any_size(patch)
        if strategy == "blocks":
            patch.setattr(strategies.AddBlocks, "_size", size)
        candidate = {one.name: one for one in product.candidates_of_structure(a, b)}.get(strategy)
        if candidate is None:  # a selection that is full or empty can be of another kind
            return
        plan = product.plan_by(candidate)
    c = plan.pattern
    rng = np.random.default_rng(seed)
    a_data = normal(rng, (a.nnz, 1 if a_shared else batch), dtype)
    b_data = normal(rng, (b.nnz, 1 if b_shared else batch), dtype)
    many = 1 if a_shared and b_shared else batch
    out = backend.empty((c.nnz, many), dtype)
    operands = [on(backend, operand, index) for operand in plan.operands(np)]
    kernel = getattr(backend.kernels, KERNELS[strategy])
    kernel(*operands, backend.array(a_data), backend.array(b_data), out)
    expected = dense(a, a_data, many) @ dense(b, b_data, many)
    np.testing.assert_allclose(dense(c, backend.numpy(out), many), expected, **tolerance(dtype))


PATTERNS = {
    "diagonal": SparsityPattern.diagonal(12), "dense": SparsityPattern.dense(12, 12),
    "selection": SparsityPattern(np.arange(13), np.arange(12)[::-1] // 2, (12, 12)),
    "band": of_mask(np.tri(12, k=2) - np.tri(12, k=-3)),
    "nearly full": of_mask(1 - np.eye(12)),
    "blocks": of_mask(np.kron(np.tri(6), np.ones((2, 2)))),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3, 33])
def test_lanes_that_meet_in_an_entry_wait_for_each_other(backend, batch, monkeypatch):
    """Every strategy, on patterns whose products land on one entry of C: without a barrier that is a race.

    On a GPU, fifty calls have the same bits.
    """
    needs_numba("products are planned with it, on the host")
    of_any_size(monkeypatch)
    rng, seen, names = np.random.default_rng(0), set(), KERNELS | {"positions": "spgemm_positions"}
    some = {"random": random_pattern(12, 12, 0.4), **{name: PATTERNS[name] for name in ("selection", "band", "blocks")}}
    for a, b in itertools.product(some.values(), repeat=2):
        a_data, b_data = (normal(rng, (one.nnz, batch), np.float32) for one in (a, b))
        for candidate in product.candidates_of_structure(a, b):
            if candidate.name not in names:  # no lanes meet
                continue
            plan = product.plan_by(candidate)
            out = backend.empty((plan.pattern.nnz, batch), np.float32)
            operands = [on(backend, operand, np.int32) for operand in plan.operands(np)]
            kernel = getattr(backend.kernels, names[candidate.name])
            on_device, found = (backend.array(a_data), backend.array(b_data)), set()
            for _ in range(50 if backend.name == "gpu" and not strict_cupy.installed() else 1):
                kernel(*operands, *on_device, out)
                found.add(backend.numpy(out).tobytes())
            assert len(found) == 1, candidate.name
            got, expected = (
                dense(plan.pattern, backend.numpy(out), batch),
                dense(a, a_data, batch) @ dense(b, b_data, batch),
            )
            np.testing.assert_allclose(got, expected, **tolerance(np.float32), err_msg=candidate.name)
            seen.add(candidate.name)
    assert seen == names.keys()


@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_rows_of_one_block_keep_their_sums_apart(backend, rows, batch):
    """Some have their sums in shared memory side by side; the last one, longer than twice the mean, has not."""
    rng = np.random.default_rng(rows)
    last = np.arange(rows)[:, None] == rows - 1  # it alone names the full row of B
    a = of_mask(np.hstack([rng.random((rows, 8)) < 0.4, last]))
    b = of_mask(np.vstack([rng.random((8, 60)) < 0.03, np.ones((1, 60))]))
    c_indptr, c_indices, product_ptr, positions = structure(a, b)
    lengths = np.diff(c_indptr)
    assert rows == 1 or lengths[-1] > 2 * -(-lengths.sum() // rows) > lengths[:-1].max()
    a_data, b_data = (normal(rng, (one.nnz, batch), np.float32) for one in (a, b))
    out = backend.empty((len(c_indices), batch), np.float32)
    operand = Rows(*(backend.array(array, np.int32) for array in (a.indptr, a.indices, b.indptr, c_indptr)))
    cuts = backend.array(row_cuts(product_ptr, 1), np.int64)
    places = Places(backend.array(product_ptr, np.int64), backend.array(positions, np.uint16), cuts)
    backend.kernels.spgemm_positions(operand, places, backend.array(a_data), backend.array(b_data), out)
    expected = dense(a, a_data, batch) @ dense(b, b_data, batch)
    got = np.zeros_like(expected)
    got[:, np.repeat(np.arange(rows), lengths), c_indices] = backend.numpy(out).T
    np.testing.assert_allclose(got, expected, **tolerance(np.float32))


@pytest.mark.parametrize("left", PATTERNS)
@pytest.mark.parametrize("right", PATTERNS)
@pytest.mark.parametrize(("a_shared", "b_shared"), [(False, False), (True, False), (False, True)])
def test_a_batch_of_none_touches_nothing(left, right, a_shared, b_shared, monkeypatch):
    needs_numba("products are planned with it, on the host")
    a, b, dtype = PATTERNS[left], PATTERNS[right], np.float64
    of_any_size(monkeypatch)
    for candidate in product.candidates_of_structure(a, b):
        if candidate.name not in KERNELS:
            continue
        plan, memory = product.plan_by(candidate), np.full(4096, 7.0)
        none = [np.ndarray((one.nnz, 0), dtype, memory) for one in (a, b, plan.pattern)]
        values = [np.ones((one.nnz, 1)) if shared else where
                  for one, where, shared in zip((a, b), none, (a_shared, b_shared), strict=False)]  # fmt: skip
        getattr(kernels.get(np), KERNELS[candidate.name])(*plan.operands(np), *values, none[2])
        assert (memory == 7).all(), candidate.name


def on(backend, value, index):
    """An operand on the backend; int32 as another index type."""
    if isinstance(value, tuple):
        return value._make(on(backend, field, index) for field in value)
    if not isinstance(value, np.ndarray):
        return value
    return backend.array(value, index if value.dtype == np.int32 else value.dtype)
