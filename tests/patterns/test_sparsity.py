"""SparsityPattern: what it accepts, refuses, and says about itself."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given

from sparsebp import SparsityPattern
from sparsebp.errors import PatternError
from strategies import csr_patterns, seeds


def as_scipy(pattern):
    return scipy.sparse.csr_array((np.ones(pattern.nnz), pattern.indices, pattern.indptr), shape=pattern.shape)


@given(parts=csr_patterns())
def test_a_pattern_keeps_its_structure_read_only(parts):
    indptr, indices, shape = parts
    p = SparsityPattern(indptr, indices, shape)
    indices[:] = 0  # the pattern has its own copy
    assert (p.shape, p.nnz) == (shape, len(indices))
    assert p.indptr.dtype == p.indices.dtype == np.int32
    assert not p.indptr.flags.writeable and not p.indices.flags.writeable
    np.testing.assert_array_equal(p.indptr, indptr)
    with pytest.raises(AttributeError, match="immutable"):
        p.shape = (1, 1)


@given(parts=csr_patterns())
def test_transpose_agrees_with_scipy(parts):
    p = SparsityPattern(*parts)
    expected = as_scipy(p).T.tocsr()
    np.testing.assert_array_equal(p.T.indptr, expected.indptr)
    np.testing.assert_array_equal(p.T.indices, expected.indices)
    assert p.T.shape == p.shape[::-1]
    assert p.T.T is p
    data = np.arange(p.nnz) + 1.0
    ours = scipy.sparse.csr_array((data[p.transpose_permutation], p.T.indices, p.T.indptr), shape=p.T.shape)
    theirs = scipy.sparse.csr_array((data, p.indices, p.indptr), shape=p.shape).T
    np.testing.assert_array_equal(ours.toarray(), theirs.toarray())


@given(parts=csr_patterns())
def test_kind_sparsity_and_rows(parts):
    p = SparsityPattern(*parts)
    m, n = p.shape
    dense = as_scipy(p).toarray()
    if dense.all():
        assert p.kind == "dense"
    elif m == n and np.array_equal(dense, np.eye(n)):
        assert p.kind == "diagonal"
    elif (dense.sum(axis=1) <= 1).all():
        assert p.kind == "selection"
    else:
        assert p.kind == "general"
    assert p.sparsity == pytest.approx((dense == 0).mean() if m * n else 0.0)
    np.testing.assert_array_equal(p.row_of_entry, np.nonzero(dense)[0])


@given(parts=csr_patterns(), seed=seeds)
def test_canonical_sorts_and_merges(parts, seed):
    indptr, indices, shape = parts
    p, rng = SparsityPattern(indptr, indices, shape), np.random.default_rng(seed)
    rows = [indices[a:b] for a, b in itertools.pairwise(indptr)]
    messy = [rng.permutation(np.concatenate([row, row[: rng.integers(0, len(row) + 1)]])) for row in rows]
    messy_indptr = np.concatenate([[0], np.cumsum([len(row) for row in messy], dtype=int)])
    again = SparsityPattern.canonical(messy_indptr, np.concatenate([*messy, []]).astype(int), shape)
    assert again == p
    assert again.indices.dtype == np.int32


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_scipy_matrices_are_taken_without_a_copy(kind):
    matrix = kind(np.array([[1.0, 0, 2], [0, 0, 3]]))
    p = SparsityPattern.from_scipy(matrix)
    assert np.shares_memory(p.indices, matrix.indices)
    assert not np.shares_memory(SparsityPattern.from_scipy(matrix, copy=True).indices, matrix.indices)
    assert p == SparsityPattern([0, 2, 3], [0, 2, 2], (2, 3))
    assert matrix.indices.flags.writeable
    with pytest.raises(PatternError, match="tocsr"):
        SparsityPattern.from_scipy(matrix.tocsc())


def test_constructors():
    assert SparsityPattern.dense(2, 3) == SparsityPattern([0, 3, 6], [0, 1, 2] * 2, (2, 3))
    assert SparsityPattern.diagonal(3) == SparsityPattern([0, 1, 2, 3], [0, 1, 2], (3, 3))
    assert SparsityPattern.identity(3) != SparsityPattern.diagonal(3)
    assert [SparsityPattern.identity(3).kind, SparsityPattern.diagonal(3).kind] == ["identity", "diagonal"]
    assert SparsityPattern.identity(3) == SparsityPattern.identity(3).T
    for m, n in [(0, 0), (0, 3), (3, 0), (1, 1)]:
        assert (SparsityPattern.dense(m, n).shape, SparsityPattern.dense(m, n).nnz) == ((m, n), m * n)
    assert SparsityPattern.identity(0).nnz == 0


def test_equality_and_hash_are_of_the_content():
    p, q = SparsityPattern.dense(2, 2), SparsityPattern(np.array([0, 2, 4], np.int64), [0, 1, 0, 1], (2, 2))
    assert p == q and hash(p) == hash(q) and p is not q
    assert p != SparsityPattern([0, 2, 3], [0, 1, 0], (2, 2))
    assert SparsityPattern([0, 1], [0], (1, 2)) != SparsityPattern([0, 1], [0], (1, 3))
    assert p != "p"
    assert {p: 1}[q] == 1
    for other in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert other == p and not other.indices.flags.writeable
    assert pickle.loads(pickle.dumps(SparsityPattern.identity(2))).kind == "identity"


def test_patterns_of_one_hash_may_differ():
    """The hash reads some entries only; equality reads all."""
    indptr, indices = np.arange(1001), np.arange(1000)
    p = SparsityPattern(indptr, indices, (1000, 2000))
    others = [SparsityPattern(indptr, indices + 1000 * (indices == i), p.shape) for i in range(1, 9)]
    assert any(hash(p) == hash(q) for q in others)
    assert all(p != q and p.digest != q.digest for q in others)
    assert SparsityPattern.identity(3) != SparsityPattern.diagonal(3)
    assert p.digest == SparsityPattern(indptr, indices, p.shape).digest


def test_indices_are_int64_from_two_to_the_31():
    wide = SparsityPattern([0, 1], [2**31 - 1], (1, 2**31))
    assert wide.indices.dtype == wide.indptr.dtype == np.int64
    assert SparsityPattern([0, 1], [5], (1, 2**31 - 1)).indices.dtype == np.int32


def test_relu_of_table_1():
    """BPPSA Table 1: the ReLU after VGG-11's first convolution on 32 x 32 has 64 channels."""
    assert round(SparsityPattern.diagonal(64 * 32 * 32).sparsity, 5) == 0.99998


@pytest.mark.parametrize(
    ("indptr", "indices", "shape", "problem"),
    [
        ([0, 2, 1], [0, 1], (2, 3), "not monotone"),
        ([0, 2], [0, 1], (2, 3), "wrong length"),
        ([], [], (0, 3), "wrong length"),
        ([1, 2, 2], [0, 1], (2, 3), "start at 0"),
        ([0, 1, 3], [0, 1], (2, 3), "belong together"),
        ([0, 1, 2], [0, 3], (2, 3), "out of range"),
        ([0, 1, 2], [0, -1], (2, 3), "out of range"),
        ([0, 2, 2], [1, 0], (2, 3), "unsorted"),
        ([0, 0, 3], [0, 2, 2], (2, 3), "duplicated"),
        ([0, 1, 2], [0.0, 1.0], (2, 3), "not an index array"),
        ([[0, 1, 2]], [0, 1], (2, 3), "not an index array"),
        ([0, 1], [0], (1, -1), "shape"),
        ([0, 1], [0], (1, 2.5), "shape"),
        ([0, 1], [0], 3, "shape"),
    ],
)
def test_wrong_structures_are_refused_with_a_remedy(indptr, indices, shape, problem):
    with pytest.raises(PatternError, match=problem) as caught:
        SparsityPattern(indptr, indices, shape)
    assert "Expected" in str(caught.value) and "Got" in str(caught.value)
    if problem in ("unsorted", "duplicated"):
        assert "SparsityPattern.canonical" in str(caught.value)
