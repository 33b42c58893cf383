"""CSR kernels on every backend, against dense arithmetic in float64."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.core.errors import ShapeError
from sparsebp.core.threads import most_threads
from sparsebp.kernels.operands import RowShapes
from strategies import csr_patterns, index_dtypes, normal, reals, seeds, sizes, tolerance

batches = sizes(0, 33)


def rows_of(indptr):
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def values(rng, entries, batch, shared, dtype):
    return normal(rng, (entries, 1 if shared else batch), dtype)


@given(
    pattern=csr_patterns(), batch=batches, shared=st.booleans(), with_add=st.booleans(), dtype=reals,
    index=index_dtypes, seed=seeds,
)  # fmt: skip
def test_csr_matvec(backend, pattern, batch, shared, with_add, dtype, index, seed):
    indptr, indices, (m, n) = pattern
    rng = np.random.default_rng(seed)
    data, x = values(rng, len(indices), batch, shared, dtype), normal(rng, (n, batch), dtype)
    add = normal(rng, (m, batch), dtype) if with_add else None
    out = backend.empty((m, batch), dtype)
    backend.kernels.csr_matvec(
        backend.array(indptr, index), backend.array(indices, index), backend.array(data), backend.array(x), out,
        None if add is None else backend.array(add),
    )  # fmt: skip
    expected = np.zeros((m, batch)) if add is None else add.astype(np.float64)
    np.add.at(expected, rows_of(indptr), data.astype(np.float64) * x[indices])
    np.testing.assert_allclose(backend.numpy(out), expected, **tolerance(dtype))


def wide_batch(batch, *shared):
    return 1 if all(shared) else batch


@given(
    pattern=csr_patterns(), batch=batches, data_shared=st.booleans(), scale_shared=st.booleans(), dtype=reals,
    index=index_dtypes, seed=seeds,
)  # fmt: skip
def test_scale_rows_and_columns(backend, pattern, batch, data_shared, scale_shared, dtype, index, seed):
    indptr, indices, (m, n) = pattern
    rng = np.random.default_rng(seed)
    data = values(rng, len(indices), batch, data_shared, dtype)
    rows, columns = values(rng, m, batch, scale_shared, dtype), values(rng, n, batch, scale_shared, dtype)
    shape = (len(indices), wide_batch(batch, data_shared, scale_shared))
    out = backend.empty(shape, dtype)
    backend.kernels.scale_rows(backend.array(indptr, index), backend.array(data), backend.array(rows), out)
    np.testing.assert_array_equal(backend.numpy(out), rows[rows_of(indptr)] * data)
    out = backend.empty(shape, dtype)
    backend.kernels.scale_columns(backend.array(indices, index), backend.array(data), backend.array(columns), out)
    np.testing.assert_array_equal(backend.numpy(out), data * columns[indices])


def row_shapes_of(indptr, indices, index):
    """Return `RowShapes` whose every row has a shape of its own. In plain Python: a device may have no Numba beside."""
    run_ptr, whole, columns, ends = [0], [], [], []
    for begin, end in itertools.pairwise(indptr.tolist()):
        row = indices[begin:end].tolist()
        starts = [k for k, column in enumerate(row) if k == 0 or column != row[k - 1] + 1]
        stops = [*starts[1:], len(row)][: len(starts)]
        far = [start + -(-(stop - start) // 4) * 4 for start, stop in zip(starts, stops, strict=True)]
        can = [
            there <= len(row) and row[start] + there - start <= row[-1] + 1
            for start, there in zip(starts, far, strict=True)
        ]
        whole.append(run_ptr[-1] + (can.index(False) if False in can else len(can)))
        columns += [row[start] - row[0] for start in starts]
        ends += stops
        run_ptr.append(len(columns))
    first = np.append(indices, 0)[np.minimum(indptr[:-1], len(indices))] * (np.diff(indptr) > 0)
    runs = np.array(columns, np.int32), np.array(ends, np.int32)
    counted = np.arange(len(whole), dtype=np.int32), first.astype(index)
    return RowShapes(indptr.astype(index), *counted, np.array(run_ptr), np.array(whole, np.int64), *runs, gap=0)


@given(
    pattern=csr_patterns(), batch=batches, data_shared=st.booleans(), scale_shared=st.booleans(), dtype=reals,
    index=index_dtypes, seed=seeds,
)  # fmt: skip
def test_scale_runs(backend, pattern, batch, data_shared, scale_shared, dtype, index, seed):
    indptr, indices, (_, n) = pattern
    rng = np.random.default_rng(seed)
    data, scale = values(rng, len(indices), batch, data_shared, dtype), values(rng, n, batch, scale_shared, dtype)
    shapes = [backend.array(x) if isinstance(x, np.ndarray) else x for x in row_shapes_of(indptr, indices, index)]
    out = backend.empty((len(indices), wide_batch(batch, data_shared, scale_shared)), dtype)
    arrays = backend.array(data), backend.array(scale), out
    backend.kernels.scale_runs(backend.array(indices, index), RowShapes(*shapes), *arrays)
    np.testing.assert_array_equal(backend.numpy(out), data * scale[indices])


@given(
    n=sizes(1, 33), m=sizes(0, 33), batch=batches, a_shared=st.booleans(), b_shared=st.booleans(), dtype=reals,
    index=index_dtypes, seed=seeds,
)  # fmt: skip
def test_gather_and_gather_multiply(backend, n, m, batch, a_shared, b_shared, dtype, index, seed):
    rng = np.random.default_rng(seed)
    a, b = values(rng, n, batch, a_shared, dtype), values(rng, n + 1, batch, b_shared, dtype)
    i, j = rng.integers(0, n, m).astype(index), rng.integers(0, n + 1, m).astype(index)
    out = backend.empty((m, a.shape[1]), dtype)
    backend.kernels.gather(backend.array(a), backend.array(i), out)
    np.testing.assert_array_equal(backend.numpy(out), a[i])
    out = backend.empty((m, wide_batch(batch, a_shared, b_shared)), dtype)
    backend.kernels.gather_multiply(backend.array(a), backend.array(i), backend.array(b), backend.array(j), out)
    np.testing.assert_array_equal(backend.numpy(out), a[i] * b[j])


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_nan_and_infinity_stay_in_their_row_and_sample(backend, batch):
    indptr, indices = backend.array([0, 2, 4], np.int32), backend.array([0, 1, 0, 2], np.int32)
    data, x = np.ones((4, batch), np.float32), np.ones((3, batch), np.float32)
    data[1, -1], data[3, -1], x[2, -1] = np.nan, 0, np.inf
    out = backend.empty((2, batch), np.float32)
    backend.kernels.csr_matvec(indptr, indices, backend.array(data), backend.array(x), out)
    result = backend.numpy(out)
    assert np.isnan(result[:, -1]).all()  # NaN + 1, and 1 + 0 * infinity
    np.testing.assert_array_equal(result[:, :-1], 2)


def test_batches_that_differ_are_refused(backend):
    a, b = backend.array(np.ones((2, 3))), backend.array(np.ones((2, 4)))
    index = backend.array([0, 1], np.int32)
    with pytest.raises(ShapeError, match="batch"):
        backend.kernels.gather_multiply(a, index, b, index, backend.empty((2, 4), np.float64))


@pytest.mark.skipif(most_threads() < 2, reason="needs two threads")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("batch", [1, 7, 16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("empty", [(0, 1), (0, 500), (1, 0), (700, 13), (3000, 3000)])
def test_rows_without_entries_at_either_end_are_written_in_parallel(dtype, batch, shared, empty):
    """Parts are cut by entries; the rows before the first and behind the last entry belong to somebody, too."""
    before, after = empty
    rng, per_row, full = np.random.default_rng(0), 40, 5000
    indptr = np.concatenate([np.zeros(before), np.arange(full + 1) * per_row, np.full(after, full * per_row)])
    indptr = indptr.astype(np.int32)
    indices = np.tile(np.arange(per_row, dtype=np.int32), full)
    data = normal(rng, (len(indices), 1 if shared else batch), dtype)
    x = normal(rng, (per_row, batch), dtype)
    rows = before + full + after
    from sparsebp.kernels.host.engine.compile import parts_for

    assert parts_for((indices.size + rows) * batch, vectors=batch > 1) > 1, "the case does not run in parallel"
    add = normal(rng, (rows, batch), dtype)
    blocks = data.reshape(full, per_row, -1).astype(np.float64)
    expected = np.zeros((rows, batch))
    expected[before : before + full] = (blocks * x.astype(np.float64)).sum(axis=1)
    for offset in (None, add):
        out = np.full((rows, batch), np.nan, dtype)
        kernels.get(np).csr_matvec(indptr, indices, data, x, out, offset)
        wanted = expected if offset is None else expected + offset
        np.testing.assert_allclose(out, wanted, **tolerance(np.dtype(dtype), 4))
