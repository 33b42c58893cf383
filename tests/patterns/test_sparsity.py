"""SparsityPattern: what it accepts, refuses, and says about itself."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import SparsityPattern, plan_product
from sparsebp.core.errors import DTypeError, MemoryLimitError, PatternError
from sparsebp.interop import scipy as sb_scipy
from sparsebp.patterns import (
    conv_pattern,
    hidden_pattern,
    linear_pattern,
    lstm_pattern,
    pointwise_pattern,
    pool_pattern,
    sequence_pattern,
)
from sparsebp.products import plan_addition
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
def test_structures_of_scipy_matrices_are_copied(kind):
    matrix = kind(np.array([[1.0, 0, 2], [0, 0, 3]]))
    p = SparsityPattern.from_scipy(matrix)
    assert not np.shares_memory(p.indices, matrix.indices) and not np.shares_memory(p.indptr, matrix.indptr)
    assert matrix.indices.flags.writeable
    with pytest.raises(PatternError, match=r"scipy\.sparse\.csr_array"):
        SparsityPattern.from_scipy(matrix.tocsc())
    matrix.indices[:], matrix.indptr[:] = 2**30, 2**30
    assert p == SparsityPattern([0, 2, 3], [0, 2, 2], (2, 3))


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


def test_the_hash_is_of_every_entry():
    indptr, indices = np.arange(1001), np.arange(1000)
    p = SparsityPattern(indptr, indices, (1000, 2000))
    others = [SparsityPattern(indptr, indices + 1000 * (indices == i), p.shape) for i in range(1000)]
    assert len({hash(q) for q in [p, *others]}) == len({q.digest for q in [p, *others]}) == 1001
    assert all(p != q for q in others)
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
        assert "A.sum_duplicates()" in str(caught.value)


@pytest.mark.parametrize("make", [SparsityPattern, SparsityPattern.canonical])
@pytest.mark.parametrize(
    ("indptr", "indices"),
    [
        (None, [0]), ([0, 1], None), ("ab", [0]), ([0, 1], {0: 1}), (3, [0]), ([[0, 1], [1]], [0]),
        ([0, 1], [[0], [1, 2]]), ([0, 1], [2**70]), ([0, 1], np.array([2**64 - 1], np.uint64)), ([0, 1], [True]),
        ([0, 1], ["0"]), (np.array([0, 1]), np.array([0.0])), (np.array([0, 1], object), [0]), ([0, None], [0]),
    ],
)  # fmt: skip
def test_what_is_no_index_array_is_refused_by_name(make, indptr, indices):
    with pytest.raises((PatternError, DTypeError), match=r"(indptr|indices) is not an (index )?array.*Got "):
        make(indptr, indices, (1, 3))


WRONG_SHAPES = [None, (3,), (1, 2, 3), "12", (1.0, 3.0), (None, 3), (1, 2**63), (2**70, 1), (1, np.inf)]


@pytest.mark.parametrize("shape", WRONG_SHAPES)
def test_what_is_no_shape_is_refused(shape):
    for make in (SparsityPattern, SparsityPattern.canonical):
        with pytest.raises(PatternError, match=r"shape of a pattern is wrong.*2\*\*63.*Got "):
            make([0, 1], [0], shape)


@pytest.mark.parametrize("size", [2**63, 2**64, -1, 2.0, "3", None, [3]])
def test_sizes_that_are_none_are_refused(size):
    makers = [
        SparsityPattern.identity, SparsityPattern.diagonal, lambda n: SparsityPattern.dense(n, 1), pointwise_pattern,
        lambda n: SparsityPattern.dense(0, n), hidden_pattern, lstm_pattern, lambda n: linear_pattern(n, 0),
        lambda n: linear_pattern(0, n), lambda n: linear_pattern(2, 3, n),
        lambda n: sequence_pattern(n, 1, 1), lambda n: sequence_pattern(1, n, 1),
    ]  # fmt: skip
    for make in makers:
        with pytest.raises((PatternError, MemoryLimitError), match=r"Expected .* Got "):
            make(size)


@pytest.mark.parametrize("size", [2**60, 2**50])
def test_structures_that_no_memory_holds_are_refused(size):
    for make in (
        SparsityPattern.identity, SparsityPattern.diagonal, lambda n: SparsityPattern.dense(n, 2), pointwise_pattern,
        lambda n: SparsityPattern.dense(2, n), lambda n: linear_pattern(2, 3, n), lambda n: sequence_pattern(1, n, 1),
    ):  # fmt: skip
        with pytest.raises(MemoryLimitError, match="does not fit in memory"):
            make(size)
    assert SparsityPattern.dense(0, size).nnz == 0


@given(parts=csr_patterns(), dtype=st.sampled_from([np.uint64, np.int64, np.uint8, np.int8, np.uint32, np.int16]))
def test_every_type_of_integers_is_taken(parts, dtype):
    indptr, indices, shape = parts
    if len(indices) > 127:
        return
    for make in (SparsityPattern, SparsityPattern.canonical):
        assert make(indptr.astype(dtype), indices.astype(dtype), shape) == SparsityPattern(*parts)


def test_unsorted_columns_of_scipy_are_mended_with_their_values():
    """The remedy of the message: the pattern's entries and the matrix's values are in one order."""
    a = scipy.sparse.random_array((7, 7), density=0.5, rng=np.random.default_rng(0), format="csr")
    product = a @ a
    product.indices[:2] = product.indices[1::-1].copy()  # a row of two entries or more begins with them, exchanged
    product.data[:2] = product.data[1::-1].copy()
    product.has_sorted_indices = product.has_canonical_format = False
    dense = product.toarray()
    for take in (SparsityPattern.from_scipy, sb_scipy.from_scipy):
        with pytest.raises(PatternError, match=r"A\.sum_duplicates\(\)"):
            take(product)
    product.sum_duplicates()
    np.testing.assert_array_equal(sb_scipy.from_scipy(product).to_dense(), dense)


def test_no_array_of_a_pattern_or_a_plan_can_be_written_to():
    p = SparsityPattern([0, 2, 3], [0, 2, 2], (2, 3))
    conv = conv_pattern(1, 2, (4, 4), 3)
    pool = pool_pattern(2, (4, 4), 2)
    plan = plan_product(conv.pattern, conv.pattern.T)
    total = plan_addition(p, SparsityPattern.dense(2, 3))
    arrays = [
        p.indptr, p.indices, p.T.indptr, p.T.indices, p.row_of_entry, p.transpose_permutation, conv.weight_index,
        pool.offset, pool.inputs, pool.extent, *plan.arrays.values(), *total.indices, plan.pattern.indices,
        pickle.loads(pickle.dumps(p)).indices, copy.deepcopy(p).indptr, SparsityPattern.dense(2, 2).indices,
    ]  # fmt: skip
    assert plan.arrays
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_spare_room_of_a_scipy_matrix_is_named():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.eye(3, 5))
    matrix.indices, matrix.data = np.append(matrix.indices, [7, 7]), np.append(matrix.data, [1.0, 2.0])
    with pytest.raises(PatternError, match=r"A\.prune\(\)"):
        SparsityPattern(matrix.indptr, matrix.indices, matrix.shape)
    matrix.prune()
    assert SparsityPattern(matrix.indptr, matrix.indices, matrix.shape).nnz == 3
