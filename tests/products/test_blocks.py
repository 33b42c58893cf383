"""Small dense blocks: found, sized and multiplied as blocks."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrices import csr, of_mask, wide
from sparsebp import plan_product
from sparsebp.kernels.host.sparse.symbolic import find_blocks
from sparsebp.products import product
from sparsebp.products import strategies as strategy
from sparsebp.products.strategies import WORTH, AddBlocks
from sparsebp.products.symbolic import SymbolicProduct
from strategies import seeds, sizes


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def consists_of(present: np.ndarray, m: int, n: int) -> bool:
    rows, columns = present.shape
    blocks = present.reshape(rows // m, m, columns // n, n)
    return bool((blocks.all(axis=(1, 3)) == blocks.any(axis=(1, 3))).all())


@given(rows=sizes(1, 7), columns=sizes(1, 7), m=st.integers(1, 4), n=st.integers(1, 4),
       density=st.sampled_from([0.1, 0.4, 0.9, 1.0]), seed=seeds, spoilt=st.booleans())  # fmt: skip
def test_the_largest_blocks_are_found(rows, columns, m, n, density, seed, spoilt):
    rng = np.random.default_rng(seed)
    present = np.kron(rng.random((rows, columns)) < density, np.ones((m, n), bool))
    if spoilt:
        present[rng.integers(len(present)), rng.integers(present.shape[1])] ^= True
    pattern = of_mask(present)
    found = find_blocks(pattern.indptr, pattern.indices, *pattern.shape)
    fitting = [(i, j) for i in divisors(present.shape[0]) for j in divisors(present.shape[1])
               if consists_of(present, i, j)]  # fmt: skip
    assert found in fitting
    if present.any():
        assert all(found[0] % i == 0 and found[1] % j == 0 for i, j in fitting)


@given(shape=st.tuples(sizes(1, 6), sizes(1, 6), sizes(1, 6)), size=st.sampled_from([(2, 2, 2), (3, 3, 3), (1, 3, 6)]),
       density=st.sampled_from([0.2, 0.6, 1.0]), seed=seeds)  # fmt: skip
def test_the_structure_is_that_of_single_entries(shape, size, density, seed):
    rng = np.random.default_rng(seed)
    a, b = (of_mask(np.kron(rng.random(shape[i : i + 2]) < density, np.ones(size[i : i + 2]))) for i in (0, 1))
    single = SymbolicProduct(a, b)
    blocks = AddBlocks(single)
    assert blocks.fits == (single.products >= WORTH)
    assert blocks.pattern == single.pattern
    assert blocks.products == single.products
    assert blocks.pattern_bytes == single.pattern_bytes
    with mock.patch.object(strategy, "WORTH", 0):  # however small the product is
        plan = product.plan_by(blocks)
    assert sum(array.nbytes for array in plan.arrays.values()) == blocks.index_bytes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_larger_than_registers_are_cut(dtype):
    rng = np.random.default_rng(0)
    a, b = (of_mask(np.kron(rng.random((5, 6)) < 0.4, np.ones((8, 8))).T if i else
            np.kron(rng.random((5, 6)) < 0.4, np.ones((8, 8)))) for i in (0, 1))  # fmt: skip
    plan = product.plan_by(AddBlocks(SymbolicProduct(a, b)))
    assert plan.arrays["size"].shape == (4, 4, 4)
    data = [rng.standard_normal(p.nnz).astype(dtype) for p in (a, b)]
    expected = csr(a, data[0]) @ csr(b, data[1])
    np.testing.assert_allclose(csr(plan.pattern, plan(*data)).toarray(), expected.toarray(), rtol=1e-4, atol=1e-4)


def test_blocks_that_do_not_meet_are_no_blocks():
    """Columns of A in twos and rows of B in threes: an entry of A meets a row of B alone."""
    rng = np.random.default_rng(1)
    a = of_mask(np.kron(rng.random((60, 90)) < 0.2, np.ones((1, 2))))
    b = of_mask(np.kron(rng.random((60, 90)) < 0.2, np.ones((3, 2))))
    assert SymbolicProduct(a, b).products >= WORTH
    assert plan_product(a, b).strategy != "blocks"


def test_index_types_may_differ():
    """int64 index arrays beside int32 ones: the plan keeps int64 copies for the kernel."""
    a = b = of_mask(np.kron(np.eye(3) + np.eye(3, k=1), np.ones((2, 2))))
    with mock.patch.object(strategy, "WORTH", 0):
        plan, mixed = (product.plan_by(AddBlocks(SymbolicProduct(left, b))) for left in (a, wide(a)))
    assert mixed.arrays["a_indptr"].dtype == mixed.arrays["c_indptr"].dtype == np.int64
    data = np.arange(1.0, a.nnz + 1), np.arange(2.0, b.nnz + 2)
    np.testing.assert_array_equal(mixed(*data), plan(*data))
