"""Products with packed weights against NumPy, and the kernels for large hidden states against those for small ones."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core import threads
from sparsebp.kernels.host.engine.simd import pointer
from sparsebp.kernels.host.engine.tiles import GROUP, _multiply_slices, multiply_packed, pack_matrix, product_of
from sparsebp.kernels.host.rnn import backward, cells
from sparsebp.kernels.host.rnn.backward import wide_blocks_of, wide_rows, wide_weights


@numba.njit
def _multiply(product, x, w, vectors, out):
    rows, depth = x.shape
    stride = out.shape[1]
    multiply_packed(
        product, pointer(x), GROUP * depth, depth, 1, rows, depth, pointer(w), vectors, pointer(out), stride
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 21), depth=st.integers(1, 40), columns=st.integers(1, 70),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_packed_products_against_numpy(rows, depth, columns, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, depth)), rng.standard_normal((depth, columns))
    lanes = pack_matrix(np.ones((1, 1))).size
    vectors = -(-columns // lanes)
    out = rng.standard_normal((rows, vectors * lanes))
    wanted = out[:, :columns] + x @ w
    rest = out[:, columns:].copy()
    _multiply(product_of(out.dtype), x, pack_matrix(w), vectors, out)
    np.testing.assert_allclose(out[:, :columns], wanted, rtol=1e-12, atol=1e-12)
    assert np.array_equal(out[:, columns:], rest)  # padded with zeros


def test_a_row_has_the_same_bits_whatever_rows_are_computed_with_it():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((11, 37), np.float32), rng.standard_normal((37, 61), np.float32)
    lanes = pack_matrix(np.ones((1, 1), np.float32)).size
    vectors = -(-61 // lanes)
    together = np.ones((11, vectors * lanes), np.float32)
    _multiply(product_of(x.dtype), x, pack_matrix(w), vectors, together)
    for row in range(11):
        alone = np.ones((1, vectors * lanes), np.float32)
        _multiply(product_of(x.dtype), x[row : row + 1], pack_matrix(w), vectors, alone)
        assert np.array_equal(alone[0], together[row])


@numba.njit
def _multiply_sliced(x, w, vectors, deepest, out):
    rows, depth = x.shape
    _multiply_slices(pointer(x), GROUP * depth, depth, 1, rows, depth, pointer(w), vectors, deepest, pointer(out))


@pytest.mark.parametrize("deepest", [1, 5, 37, 50])
def test_slices_along_k_change_no_bit(deepest):
    rng = np.random.default_rng(0)
    lanes = pack_matrix(np.ones((1, 1), np.float32)).size
    x, w = rng.standard_normal((19, 37), np.float32), rng.standard_normal((37, 3 * lanes), np.float32)
    at_once, sliced = np.zeros((2, 19, 3 * lanes), np.float32)
    _multiply(product_of(x.dtype), x, pack_matrix(w), 3, at_once)
    _multiply_sliced(x, pack_matrix(w), 3, deepest, sliced)
    assert np.array_equal(at_once, sliced)


def test_gates_are_packed_each_to_whole_vectors():
    w, lanes = np.arange(1, 19.0).reshape(6, 3), pack_matrix(np.ones((1, 1))).size
    none, packed, bias = wide_weights((0, 0), w, None, None, w[:, 0], w[:, 1])
    assert (none.size, packed.size, bias.size) == (0, 3 * 2 * lanes, 2 * lanes)
    assert sorted(filter(None, packed)) == sorted(filter(None, wide_rows(w, 2))) == list(w.ravel())
    assert np.array_equal(bias.reshape(2, lanes)[:, :3], (w[:, 0] + w[:, 1]).reshape(2, 3))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_blocks_share_out_the_samples(count, monkeypatch):
    monkeypatch.setattr(threads, "count", lambda: count)
    assert [wide_blocks_of(batch) for batch in (1, 4)] == [1, 1]
    for batch in range(5, 200):
        blocks, tiles = wide_blocks_of(batch), -(-batch // 4)
        assert blocks <= tiles and (blocks == tiles or blocks % count == 0)
        assert -(-tiles // blocks) <= 16 or blocks == tiles


def _everything(layer, x, gy):
    y, saved = layer.forward(x)
    found = layer.gradients(gy, saved)
    return [y, found.input, found.h0, *(found.weights[name] for name in sorted(found.weights))]


@pytest.mark.parametrize(
    ("kind", "dtype", "size", "batch", "options"),
    [
        ("RNN", np.float32, 131, 6, {}),
        ("RNN", np.float64, 129, 1, {"backward": "chunked", "chunks": 2}),
        ("GRU", np.float32, 136, 5, {}),
        ("GRU", np.float32, 129, 3, {"backward": "chunked", "chunks": 2}),
        ("LSTM", np.float32, 133, 7, {}),
        ("LSTM", np.float32, 128, 1, {"backward": "chunked", "chunks": 2}),
    ],
)
def test_kernels_for_large_and_small_states_give_the_same_bits(kind, dtype, size, batch, options, monkeypatch):
    rng = np.random.default_rng(size)
    layer = getattr(nn, kind)(3, size, dtype=dtype, rng=0, **options)
    x, gy = rng.standard_normal((5, batch, 3)).astype(dtype), rng.standard_normal((5, batch, size)).astype(dtype)
    large = _everything(layer, x, gy)
    for module in (backward, cells):
        monkeypatch.setattr(module, "LEAST", size + 1)
    for name, ours, theirs in zip(("y", "gx", "h0", *"wwww"), large, _everything(layer, x, gy), strict=False):
        assert np.array_equal(ours, theirs), name
