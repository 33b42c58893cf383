"""TransposedJacobian: products, conversions, refusals."""

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import SparsityPattern, TransposedJacobian, kernels
from sparsebp.core.errors import DTypeError, LayoutError, OptionError, ShapeError
from strategies import csr_patterns, normal, reals, seeds, sizes, tolerance


def make(rng, parts, batch, shared, dtype):
    pattern = SparsityPattern(*parts)
    return TransposedJacobian(pattern, normal(rng, (pattern.nnz,) if shared else (pattern.nnz, batch), dtype))


def dense(jacobian, batch):
    """(n_in, n_out, batch) in float64."""
    many = 1 if jacobian.batch is None else jacobian.batch
    samples = [jacobian.to_dense(b).astype(np.float64) for b in range(many)]
    stack = np.stack(samples, axis=-1) if samples else np.zeros((*jacobian.shape, 0))
    return np.broadcast_to(stack, (*jacobian.shape, batch))


@given(
    draw=st.data(), inner=sizes(0, 13), batch=sizes(0, 18), shared=st.tuples(st.booleans(), st.booleans()),
    dtype=reals, seed=seeds,
)  # fmt: skip
def test_matrix_products(draw, inner, batch, shared, dtype, seed):
    rng = np.random.default_rng(seed)
    j = make(rng, draw.draw(csr_patterns(columns=st.just(inner))), batch, shared[0], dtype)
    k = make(rng, draw.draw(csr_patterns(rows=st.just(inner))), batch, shared[1], dtype)
    product = j @ k
    many = 1 if all(shared) else batch
    assert product.shape == (j.shape[0], k.shape[1])
    assert product.batch == (None if all(shared) else batch) and product.dtype == dtype
    expected = np.einsum("mkb,knb->mnb", dense(j, many), dense(k, many))
    np.testing.assert_allclose(dense(product, many), expected, **tolerance(dtype))


@given(parts=csr_patterns(), batch=sizes(0, 18), shared=st.booleans(), vector=st.booleans(), dtype=reals, seed=seeds)
def test_gradients(parts, batch, shared, vector, dtype, seed):
    rng = np.random.default_rng(seed)
    j = make(rng, parts, batch, shared, dtype)
    g = normal(rng, (j.shape[1],) if vector else (j.shape[1], batch), dtype)
    got = j @ g
    if shared and vector:
        assert got.shape == (j.shape[0],)
        expected = dense(j, 1)[..., 0] @ g
    else:
        assert got.shape == (j.shape[0], batch)
        columns = np.broadcast_to(g[:, None] if vector else g, (j.shape[1], batch))
        expected = np.einsum("mkb,kb->mb", dense(j, batch), columns)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, **tolerance(dtype))


@given(parts=csr_patterns(), batch=sizes(1, 5), shared=st.booleans(), seed=seeds)
def test_conversions_and_transpose(parts, batch, shared, seed):
    j = make(np.random.default_rng(seed), parts, batch, shared, np.float64)
    for sample in range(1 if shared else batch):
        matrix = j.to_scipy(sample)
        assert isinstance(matrix, scipy.sparse.csr_array) and matrix.shape == j.shape
        np.testing.assert_array_equal(matrix.toarray(), j.to_dense(sample))
        np.testing.assert_array_equal(j.T.to_dense(sample), j.to_dense(sample).T)
    if shared or batch == 1:
        np.testing.assert_array_equal(j.to_scipy().toarray(), dense(j, batch)[..., 0])
        np.testing.assert_array_equal(j.to_dense(), dense(j, batch)[..., 0])
    if shared:
        assert np.shares_memory(j.to_scipy().data, j.data) or j.pattern.nnz == 0


def test_what_they_are_called():
    pattern = SparsityPattern([0, 2, 2, 5], [0, 3, 1, 2, 3], (3, 4))
    assert repr(pattern) == "SparsityPattern(3 x 4, nnz=5, general)"
    assert repr(TransposedJacobian(pattern, np.ones((5, 2)))) == f"TransposedJacobian({pattern!r}, float64, batch=2)"
    assert repr(TransposedJacobian(pattern, np.ones(5))) == f"TransposedJacobian({pattern!r}, float64, shared)"


def test_products_on_every_backend(backend):
    rng = np.random.default_rng(0)
    pattern = SparsityPattern([0, 2, 2, 5], [0, 3, 1, 2, 3], (3, 4))
    data, other, g = normal(rng, (5, 3), np.float32), normal(rng, (4,), np.float32), normal(rng, (4, 3), np.float32)
    own = backend.kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get", lambda xp: own)
        j = TransposedJacobian(pattern, backend.array(data))
        k = TransposedJacobian(SparsityPattern.diagonal(4), backend.array(other))
        vector, product = j @ backend.array(g), j @ k
    rows = pattern.row_of_entry
    expected = np.zeros((3, 3), np.float64)
    np.add.at(expected, rows, data * g[pattern.indices])
    np.testing.assert_allclose(backend.numpy(vector), expected, **tolerance(np.float32))
    np.testing.assert_array_equal(backend.numpy(product.data), data * other[pattern.indices][:, None])
    np.testing.assert_array_equal(backend.numpy(j.to_dense(1))[rows, pattern.indices], data[:, 1])


def test_an_identity_copies_the_gradient():
    j = TransposedJacobian(SparsityPattern.identity(3), np.ones(3))
    g = np.array([1, np.nan, np.inf])
    np.testing.assert_array_equal(j @ g, g)
    assert not np.shares_memory(j @ g, g)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (np.ones(3), ShapeError),
        (np.ones((4, 2, 1)), ShapeError),
        (np.ones(4, np.float16), DTypeError),
        (np.ones(4, int), DTypeError),
        (np.ones((2, 4)).T, LayoutError),
        ([1.0] * 4, DTypeError),
    ],
)
def test_wrong_values_are_refused(data, error):
    with pytest.raises(error, match=r"Expected .* Got "):
        TransposedJacobian(SparsityPattern.dense(2, 2), data)


@pytest.mark.parametrize(
    ("g", "error"),
    [
        (np.ones(2), ShapeError),
        (np.ones((3, 4)), ShapeError),
        (np.ones((3, 2, 1)), ShapeError),
        (np.ones(3, np.float32), DTypeError),
        (np.ones((2, 3)).T, LayoutError),
        ([1.0] * 3, DTypeError),
    ],
)
def test_wrong_gradients_are_refused(g, error):
    j = TransposedJacobian(SparsityPattern.dense(2, 3), np.ones((6, 2)))
    with pytest.raises(error, match=r"Expected .* Got "):
        j @ g


def test_other_refusals():
    j = TransposedJacobian(SparsityPattern.dense(2, 3), np.ones((6, 2)))
    with pytest.raises(ShapeError, match="do not chain"):
        j @ j
    with pytest.raises(ShapeError, match="batch sizes"):
        j @ TransposedJacobian(SparsityPattern.dense(3, 2), np.ones((6, 4)))
    for export in (j.to_scipy, j.to_dense, j.values_of):  # which of both samples?
        with pytest.raises(OptionError, match="its own Jacobian"):
            export()
    with pytest.raises(OptionError, match="sample"):
        j.to_scipy(2)
    with pytest.raises(OptionError, match="sample"):
        j.to_dense(-1)
    with pytest.raises(TypeError):
        np.ones((2, 2)) @ j
