"""The matrices of the sparse-product benchmarks have the structure their names promise."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_array_equal

from benchmarks import workloads
from benchmarks.workloads import finite_elements, poisson, prolongation, random_rows, rmat


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 2)])
def test_the_laplacian_has_a_row_for_every_point_and_its_neighbours(shape: tuple[int, ...]) -> None:
    field = np.random.default_rng(0).standard_normal(shape)
    padded = np.pad(field, 1)
    inner = (slice(1, -1),) * len(shape)
    around = sum(np.roll(padded, step, axis)[inner] for axis in range(len(shape)) for step in (-1, 1))
    assert np.allclose(poisson(*shape) @ field.ravel(), (2 * len(shape) * field - around).ravel(), atol=1e-5)


def test_smoothed_aggregation_keeps_constants_inside() -> None:
    """Where a row of the matrix sums to zero, so does the smoothing of a constant."""
    matrix = poisson(12, 13)
    coarse = prolongation(matrix)
    assert coarse.shape[1] < matrix.shape[0] / 4
    inside = matrix.sum(axis=1) == 0
    assert np.allclose(coarse.sum(axis=1)[inside], 1)


def test_smoothed_aggregation_has_pyamgs_structure() -> None:
    pyamg = pytest.importorskip("pyamg")
    matrix = poisson(9, 11)
    theirs = pyamg.smoothed_aggregation_solver(sp.csr_matrix(matrix, dtype=np.float64), max_levels=2, max_coarse=5)
    theirs = theirs.levels[0].P.tocsr()
    assert_array_equal(prolongation(matrix).toarray() != 0, theirs.toarray() != 0)


def test_every_unknown_of_a_vertex_meets_all_of_its_neighbours() -> None:
    one, three = (finite_elements(20, unknowns) for unknowns in (1, 3))
    assert (one.toarray() != 0).sum() == one.nnz
    assert_array_equal(np.kron(one.toarray() != 0, np.ones((3, 3), bool)), three.toarray() != 0)
    assert_array_equal(one.toarray() != 0, one.toarray().T != 0)


def test_a_few_vertices_of_an_rmat_graph_have_most_edges() -> None:
    graph = rmat(8)
    degrees = np.sort(np.diff(graph.indptr))
    assert graph.shape == (256, 256) and (graph.data > 0).all() and graph.has_canonical_format
    assert degrees[-26:].sum() > 0.3 * graph.nnz and degrees[0] < degrees.mean() / 4


def test_random_rows_have_distinct_columns_in_order() -> None:
    matrix = random_rows(50, 12, 6)
    assert_array_equal(np.diff(matrix.indptr), 6)
    assert (np.diff(matrix.indices.reshape(50, 6)) > 0).all()
    assert_array_equal(np.unique(matrix.indices), np.arange(12))


def test_products_are_the_same_every_time() -> None:
    for first, second in zip(workloads.pairs(quick=True), workloads.pairs(quick=True), strict=True):
        for one, other in ((first.a, second.a), (first.b, second.b)):
            assert_array_equal(one.indices, other.indices)
            assert_array_equal(one.data, other.data)
