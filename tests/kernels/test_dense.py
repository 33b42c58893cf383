"""Kernels on stacks of dense blocks, on every backend, against einsum in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import ShapeError
from strategies import normal, reals, seeds, sizes, tolerance

small = sizes(0, 9)
batches = sizes(0, 18)


def wide(array, batch):
    return np.broadcast_to(array.astype(np.float64), (*array.shape[:-1], batch))


@given(
    m=small, k=small, n=small, batch=batches, steps=sizes(0, 5), a_shared=st.booleans(), b_shared=st.booleans(),
    dtype=reals, seed=seeds,
)  # fmt: skip
def test_dense_matmul(backend, m, k, n, batch, steps, a_shared, b_shared, dtype, seed):
    rng = np.random.default_rng(seed)
    a, b = (
        normal(rng, (3, m, k, 1 if a_shared else batch), dtype),
        normal(rng, (4, k, n, 1 if b_shared else batch), dtype),
    )
    i, j, o = rng.integers(0, 3, steps), rng.integers(0, 4, steps), rng.permutation(6)[:steps]
    result_batch = 1 if a_shared and b_shared else batch
    out = backend.array(np.full((6, m, n, result_batch), 7, dtype))
    backend.kernels.dense_matmul(
        backend.array(a), backend.array(i), backend.array(b), backend.array(j), out, backend.array(o)
    )
    expected = np.full((6, m, n, result_batch), 7.0)
    expected[o] = np.einsum("smkb,sknb->smnb", wide(a, result_batch)[i], wide(b, result_batch)[j])
    np.testing.assert_allclose(backend.numpy(out), expected, **tolerance(dtype))


@given(
    m=small, k=small, batch=batches, steps=sizes(0, 5), shared=st.booleans(), with_add=st.booleans(), dtype=reals,
    seed=seeds,
)  # fmt: skip
def test_dense_matvec(backend, m, k, batch, steps, shared, with_add, dtype, seed):
    rng = np.random.default_rng(seed)
    a, x = normal(rng, (3, m, k, 1 if shared else batch), dtype), normal(rng, (4, k, batch), dtype)
    add, d = normal(rng, (2, m, batch), dtype), rng.integers(0, 2, steps)
    i, j, o = rng.integers(0, 3, steps), rng.integers(0, 4, steps), rng.permutation(6)[:steps]
    out = backend.array(np.full((6, m, batch), 7, dtype))
    backend.kernels.dense_matvec(
        backend.array(a), backend.array(i), backend.array(x), backend.array(j),
        backend.array(add) if with_add else None, backend.array(d) if with_add else None, out, backend.array(o),
    )  # fmt: skip
    expected = np.full((6, m, batch), 7.0)
    expected[o] = np.einsum("smkb,skb->smb", wide(a, batch)[i], x[j].astype(np.float64)) + (add[d] if with_add else 0)
    np.testing.assert_allclose(backend.numpy(out), expected, **tolerance(dtype))


def test_dense_matvec_may_write_into_the_array_it_reads(backend):
    rng = np.random.default_rng(0)
    a, x = normal(rng, (2, 5, 5, 3), np.float64), normal(rng, (4, 5, 3), np.float64)
    stack = backend.array(x)
    index = backend.array([0, 1]), backend.array([0, 1]), backend.array([2, 3])
    backend.kernels.dense_matvec(backend.array(a), index[0], stack, index[1], stack, index[1], stack, index[2])
    expected = np.einsum("smkb,skb->smb", a, x[:2]) + x[:2]
    np.testing.assert_allclose(backend.numpy(stack), np.concatenate([x[:2], expected]), rtol=1e-12)


def chunks_of(draw, steps):
    """chunk_ptr from 0 to steps; chunks may be empty."""
    inner = draw.draw(st.lists(st.integers(0, steps), max_size=3))
    return np.array([0, *sorted(inner), steps], np.int64)


@given(
    draw=st.data(), n=small, batch=batches, steps=sizes(0, 9), shared=st.booleans(), with_add=st.booleans(),
    dtype=reals, seed=seeds,
)  # fmt: skip
def test_dense_chain_and_reduce(backend, draw, n, batch, steps, shared, with_add, dtype, seed):
    rng = np.random.default_rng(seed)
    ptr = chunks_of(draw, steps)
    chunks, own = len(ptr) - 1, 1 if shared else batch
    a = normal(rng, (steps, n, n, own), dtype, scale=1 / max(n, 1) ** 0.5)
    x, add = normal(rng, (chunks, n, batch), dtype), normal(rng, (steps, n, batch), dtype)
    given_add = backend.array(add) if with_add else None
    out = backend.empty((steps, n, batch), dtype)
    matrix = backend.empty((chunks, n, n, own), dtype)
    vector = backend.empty((chunks, n, batch), dtype) if with_add else None
    backend.kernels.dense_chain(backend.array(a), backend.array(ptr), backend.array(x), given_add, out)
    backend.kernels.dense_reduce(backend.array(a), backend.array(ptr), given_add, matrix, vector)
    out, matrix = backend.numpy(out), backend.numpy(matrix)
    for c in range(chunks):
        v, b = x[c].astype(np.float64), np.zeros((n, batch))
        p = np.broadcast_to(np.eye(n)[..., None], (n, n, own))
        for s in range(ptr[c], ptr[c + 1]):
            extra = add[s] if with_add else 0
            v = np.einsum("ijb,jb->ib", wide(a[s], batch), v) + extra
            b = np.einsum("ijb,jb->ib", wide(a[s], batch), b) + extra
            p = np.einsum("ijb,jkb->ikb", a[s].astype(np.float64), p)
            np.testing.assert_allclose(out[s], v, **tolerance(dtype, 10))
        np.testing.assert_allclose(matrix[c], p, **tolerance(dtype, 10))
        if vector is not None:
            np.testing.assert_allclose(backend.numpy(vector)[c], b, **tolerance(dtype, 10))


def test_wrong_arguments_are_refused(backend):
    k, block = backend.kernels, backend.array(np.ones((1, 2, 2, 3)))
    index, out = backend.array([0]), backend.empty((1, 2, 2, 3), np.float64)
    vectors, ptr = backend.array(np.ones((1, 2, 3))), backend.array([0, 1])
    with pytest.raises(ShapeError, match="add_index is missing"):
        k.dense_matvec(block, index, vectors, index, vectors, None, backend.empty((1, 2, 3), np.float64), index)
    with pytest.raises(ShapeError, match="out_vector is missing"):
        k.dense_reduce(block, ptr, vectors, out, None)


# ---- linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 3, 2), (5, 0, 2), (5, 3, 0), (1, 1, 1), (16, 20, 10), (129, 3, 2), (3, 129, 2)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_linear_layers(backend, sizes, biased, dtype):
    """Of few rows, inputs and outputs, and of many."""
    rng, (rows, inputs, outputs) = np.random.default_rng(0), sizes
    x, weight, gy = (normal(rng, shape, dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    bias, out = normal(rng, (outputs,), dtype), backend.empty((rows, outputs), dtype)
    backend.kernels.affine(backend.array(x), backend.array(weight), backend.array(bias) if biased else None, out)
    np.testing.assert_allclose(backend.numpy(out), x.astype(float) @ weight.T + bias * biased, **tolerance(dtype, 10))
    grads = backend.empty((outputs, inputs), dtype), backend.empty(outputs, dtype) if biased else None
    backend.kernels.affine_grad(backend.array(gy), backend.array(x), *grads)
    np.testing.assert_allclose(backend.numpy(grads[0]), gy.T.astype(float) @ x, **tolerance(dtype, 10))
    if biased:
        np.testing.assert_allclose(backend.numpy(grads[1]), gy.sum(axis=0, dtype=float), **tolerance(dtype, 10))


def test_a_bias_is_added_to_every_row(backend):
    rng = np.random.default_rng(0)
    rows, bias = normal(rng, (9, 40), np.float32), normal(rng, (40,), np.float32)
    out = backend.array(rows)
    backend.kernels.add_bias(out, backend.array(bias))
    np.testing.assert_array_equal(backend.numpy(out), rows + bias)
