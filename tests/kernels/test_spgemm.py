"""Numeric phase of sparse products on every backend, against SciPy one sample at a time."""

import inspect

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import SparsityPattern, kernels
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.threads import get_threads, set_threads
from sparsebp.products import strategies as strategies_of_products
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


def dense(pattern, data, batch):
    out = np.zeros((*pattern.shape, batch))
    out[pattern.row_of_entry, pattern.indices] = data
    return out


@given(
    draw=st.data(), inner=sizes(0, 13), batch=sizes(0, 18), a_shared=st.booleans(), b_shared=st.booleans(),
    position=st.sampled_from([np.uint16, np.uint32]), parts=st.integers(1, 5), dtype=reals, index=index_dtypes,
    seed=seeds,
)  # fmt: skip
def test_spgemm_numeric(backend, draw, inner, batch, a_shared, b_shared, position, parts, dtype, index, seed):
    a = SparsityPattern(*draw.draw(csr_patterns(columns=st.just(inner))))
    b = SparsityPattern(*draw.draw(csr_patterns(rows=st.just(inner))))
    c_indptr, c_indices, product_ptr, positions = structure(a, b)
    rng = np.random.default_rng(seed)
    a_data = normal(rng, (a.nnz, 1 if a_shared else batch), dtype)
    b_data = normal(rng, (b.nnz, 1 if b_shared else batch), dtype)
    result_batch = 1 if a_shared and b_shared else batch
    out = backend.empty((len(c_indices), result_batch), dtype)
    backend.kernels.spgemm_numeric(
        backend.array(a.indptr, index), backend.array(a.indices, index), backend.array(a_data),
        backend.array(b.indptr, index), backend.array(b_data), backend.array(c_indptr, index),
        backend.array(product_ptr, np.int64), backend.array(positions, position),
        backend.array(row_cuts(product_ptr, parts), np.int64), out,
    )  # fmt: skip
    expected = np.einsum("mkb,knb->mnb", dense(a, a_data, result_batch), dense(b, b_data, result_batch))
    got = np.zeros_like(expected)
    got[np.repeat(np.arange(a.shape[0]), np.diff(c_indptr)), c_indices] = backend.numpy(out)
    np.testing.assert_allclose(got, expected, **tolerance(dtype))


KERNELS = {
    "select_rows": "spgemm_select_rows",
    "select_columns": "spgemm_select_columns",
    "runs": "spgemm_runs",
    "accumulate": "spgemm_accumulate",
}


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
    left = (
        selection(draw.draw, 7, inner) if strategy == "select_rows" else draw.draw(csr_patterns(columns=st.just(inner)))
    )
    columns = draw.draw(sizes(0, 70))
    if strategy == "select_columns":
        right = selection(draw.draw, inner, columns)
    else:
        right = draw.draw(csr_patterns(rows=st.just(inner), columns=st.just(columns)))
    a, b = SparsityPattern(*left), SparsityPattern(*right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies_of_products, "RUN_LENGTH", 0)
        product = strategies_of_products.Product(a, b)
        candidate = {one.strategy: one for one in product.candidates()}.get(strategy)
    if candidate is None:  # a selection that is full or empty can be of another kind
        return
    c = product.symbolic.pattern(product.c_indptr)
    rng = np.random.default_rng(seed)
    a_data = normal(rng, (a.nnz, 1 if a_shared else batch), dtype)
    b_data = normal(rng, (b.nnz, 1 if b_shared else batch), dtype)
    many = 1 if a_shared and b_shared else batch
    arrays = {
        "a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "b_indices": b.indices,
        "c_indptr": c.indptr, "c_indices": c.indices, "a_index": None,
    } | {"product_ptr": a.indptr, "b_index": a.indices} | candidate.make(c)  # fmt: skip
    on_backend = {
        name: None if array is None else backend.array(array, index if array.dtype == np.int32 else array.dtype)
        for name, array in arrays.items()
    } | {
        "a_data": backend.array(a_data), "b_data": backend.array(b_data), "columns": b.shape[1],
        "out": backend.empty((c.nnz, many), dtype),
    }  # fmt: skip
    kernel = getattr(backend.kernels, KERNELS[strategy])
    kernel(*(on_backend[name] for name in inspect.signature(kernel).parameters))
    expected = np.einsum("mkb,knb->mnb", dense(a, a_data, many), dense(b, b_data, many))
    np.testing.assert_allclose(dense(c, backend.numpy(on_backend["out"]), many), expected, **tolerance(dtype))


def small_product(backend):
    one = backend.array([0, 1], np.int32)
    return {
        "a_indptr": one,
        "a_indices": backend.array([0], np.int32),
        "a_data": backend.array(np.ones((1, 2))),
        "b_indptr": one,
        "b_data": backend.array(np.ones((1, 2))),
        "c_indptr": one,
        "product_ptr": backend.array([0, 1], np.int64),
        "positions": backend.array([0], np.uint16),
        "row_cuts": backend.array([0, 1], np.int64),
        "out": backend.empty((1, 2), np.float64),
    }


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("positions", lambda a: a.astype(np.int32), DTypeError),
        ("product_ptr", lambda a: a.astype(np.int32), DTypeError),
        ("c_indptr", lambda a: a.astype(np.int64), DTypeError),
        ("b_data", lambda a: a.astype(np.float32), DTypeError),
        ("b_data", lambda a: a[:0], None),
        ("a_data", lambda a: a[:0], ShapeError),
        ("out", lambda a: a[:, :1], ShapeError),
    ],
)
def test_wrong_arguments_are_refused(backend, name, change, error):
    given_arguments = small_product(backend)
    given_arguments[name] = change(given_arguments[name])
    if error is None:  # values of B are not counted against its indptr: that would read device memory
        return
    with pytest.raises(error, match=r"Expected .* Got "):
        backend.kernels.spgemm_numeric(**given_arguments)


@pytest.mark.parametrize("batch", [1, 16, 19])
def test_host_product_is_bitwise_equal_for_every_number_of_threads(batch):

    rng = np.random.default_rng(1)
    matrices = [scipy.sparse.random_array((300, 300), density=0.05, rng=rng, format="csr") for _ in range(2)]
    for matrix in matrices:
        matrix.sort_indices()
    a, b = (SparsityPattern.from_scipy(matrix) for matrix in matrices)
    c_indptr, c_indices, product_ptr, positions = structure(a, b)
    data = [normal(rng, (p.nnz, batch), np.float32) for p in (a, b)]
    results, before = [], get_threads()
    try:
        for threads in (1, before, before):
            set_threads(threads)
            out = np.empty((len(c_indices), batch), np.float32)
            kernels.get(np).spgemm_numeric(
                a.indptr, a.indices, data[0], b.indptr, data[1], c_indptr.astype(np.int32),
                product_ptr.astype(np.int64), positions.astype(np.uint16), row_cuts(product_ptr, 7), out,
            )  # fmt: skip
            results.append(out)
    finally:
        set_threads(before)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[1], results[2])
