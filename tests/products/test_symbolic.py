"""The symbolic phase against SciPy's products of ones, and positions against a search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrices import csr, wide
from sparsebp import SparsityPattern
from sparsebp.core.threads import get_threads, set_threads
from sparsebp.products import symbolic
from sparsebp.products.symbolic import SymbolicProduct
from strategies import csr_patterns, seeds, sizes


def random_pattern(m, n, per_row, seed):
    """At most `per_row` entries in every row, anywhere."""
    columns = np.random.default_rng(seed).integers(0, n, (m, per_row))
    return SparsityPattern.canonical(np.arange(m + 1) * per_row, columns.reshape(-1), (m, n))


def check(a, b):
    """Compare everything that is found for A @ B with SciPy."""
    found = SymbolicProduct(a, b)
    expected = csr(a) @ csr(b)
    expected.sort_indices()
    indptr = found.c_indptr
    np.testing.assert_array_equal(indptr, expected.indptr)
    c = found.pattern
    np.testing.assert_array_equal(c.indices, expected.indices)
    assert found.products == expected.sum() == found.product_ptr[-1]
    if found.has_short_rows:
        np.testing.assert_array_equal(found.terms, expected.data)
    # the column that every product lands in, in Gustavson's order
    rows = np.repeat(a.row_of_entry, np.diff(b.indptr)[a.indices])
    columns = np.concatenate([b.indices[b.indptr[k] : b.indptr[k + 1]] for k in a.indices] or [np.empty(0, int)])
    for dtype in (np.uint16, np.uint32):
        positions = found.positions(dtype)
        assert positions.dtype == dtype
        np.testing.assert_array_equal(c.indices[c.indptr[rows] + positions], columns)
    if found.products == c.nnz:
        a_index, b_index = found.pairs()
        np.testing.assert_array_equal(a.row_of_entry[a_index], c.row_of_entry)
        np.testing.assert_array_equal(b.indices[b_index], c.indices)
        np.testing.assert_array_equal(a.indices[a_index], b.row_of_entry[b_index])
    return indptr, c.indices, found.positions(np.uint16)


@given(data=st.data(), inner=sizes(0, 13), is_wide=st.booleans())
def test_structure_and_positions(data, inner, is_wide):
    a = SparsityPattern(*data.draw(csr_patterns(columns=st.just(inner))))
    b = SparsityPattern(*data.draw(csr_patterns(rows=st.just(inner), columns=sizes(0, 200))))
    check(*map(wide, (a, b)) if is_wide else (a, b))


@given(
    m=sizes(0, 33), columns=st.sampled_from([63, 64, 65, 300, 5000, 100_000, 500_000]), per_row=sizes(1, 7), seed=seeds
)
def test_rows_that_are_searched_and_rows_that_are_sorted(m, columns, per_row, seed):
    check(random_pattern(m, 20, 3, seed), random_pattern(20, columns, per_row, seed + 1))


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_products_without_elements(shape):
    m, inner, n = shape
    check(SparsityPattern.dense(m, inner), SparsityPattern.dense(inner, n))


def test_entries_of_more_products_than_a_byte_counts():
    b = random_pattern(300, 40, 3, 0)
    columns = np.stack((np.zeros(300, int), 1 + b.indices[b.indptr[:-1]]), axis=1)
    check(SparsityPattern.dense(3, 300), SparsityPattern(2 * np.arange(301), columns.reshape(-1), (300, 41)))


def test_entries_that_are_counted_first():
    a, b = random_pattern(300, 200, 9, 0), random_pattern(200, 500, 40, 1)
    first, direct = SymbolicProduct(a, b, 1000), SymbolicProduct(a, b)
    np.testing.assert_array_equal(first.c_indptr, direct.c_indptr)
    assert "_found" in direct.__dict__ and "_found" not in first.__dict__
    assert first.pattern == direct.pattern


def test_more_rows_than_there_are_stamps(monkeypatch):
    monkeypatch.setattr(symbolic, "MOST_ROOM", 0)  # entries are counted first
    monkeypatch.setattr(symbolic, "_MAX_PARTS", 1)
    a = SparsityPattern(np.arange(2**17 + 4) // 2, np.zeros(2**16 + 1, int), (2**17 + 3, 2))
    assert len(SymbolicProduct(a, SparsityPattern.dense(2, 3))._cuts) == 2
    check(a, SparsityPattern.dense(2, 3))


def test_the_split_into_parts_and_the_threads_change_nothing(monkeypatch):
    a, b = random_pattern(300, 200, 9, 0), random_pattern(200, 500, 40, 1)
    before, results = get_threads(), []
    monkeypatch.setattr(symbolic, "_PART_WORK", 1)
    try:
        for parts, threads in ((1, 1), (7, 1), (32, before)):
            monkeypatch.setattr(symbolic, "_MAX_PARTS", parts)
            set_threads(threads)
            results.append(check(a, b))
    finally:
        set_threads(before)
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, another)


@given(work=st.lists(st.integers(0, 9), max_size=20), parts=st.integers(1, 9))
def test_cuts_cover_all_rows(work, parts):
    cuts = symbolic.row_cuts(np.concatenate(([0], np.cumsum(work))).astype(np.int32), parts)
    assert cuts[0] == 0 and cuts[-1] == len(work) and len(cuts) <= parts + 1
    assert not len(work) or (np.diff(cuts) > 0).all()
