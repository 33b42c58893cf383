"""Sparse matrices as meshes give them: finite differences, finite elements, and the operators of multigrid on them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np


def poisson(*shape: int) -> Any:
    """Return the Laplacian on a grid with Dirichlet boundaries, 5 points in two dimensions and 7 in three, as CSR."""
    import scipy.sparse as sp

    matrix: Any = sp.csr_array((1, 1), dtype=np.float32)
    for n in shape:
        line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n), dtype=np.float32)
        matrix = sp.kron(matrix, sp.eye_array(n)) + sp.kron(sp.eye_array(matrix.shape[0]), line)
    return sorted_csr(matrix)


def prolongation(matrix: Any) -> Any:
    """Return the prolongation of smoothed aggregation for a matrix with a positive diagonal, as CSR.

    Constants on aggregates, smoothed by one Jacobi step with weight 2/3 (P. Vaněk, J. Mandel and M. Brezina, "Algebraic
    multigrid by smoothed aggregation", Computing 56, 1996); pyamg's with no strength threshold has the same entries.
    """
    import scipy.sparse as sp

    aggregate = _aggregates(matrix)
    n = len(aggregate)
    tentative = sp.csr_array((np.ones(n, np.float32), aggregate, np.arange(n + 1)), shape=(n, aggregate.max() + 1))
    smoothing = sp.diags_array(np.float32(2 / 3) / matrix.diagonal()) @ matrix
    return sorted_csr(tentative - smoothing @ tentative)


def _aggregates(matrix: Any) -> np.ndarray:
    """Return the aggregate of every unknown: one that has no neighbour in an aggregate founds one with all of them."""
    pointers, columns = matrix.indptr.tolist(), matrix.indices.tolist()
    neighbours = [columns[begin:end] for begin, end in pairwise(pointers)]
    founded, count = [-1] * len(neighbours), 0
    for row, near in enumerate(neighbours):
        if all(founded[other] < 0 for other in near):
            for other in (row, *near):
                founded[other] = count
            count += 1
    joined = [own if own >= 0 else next(founded[other] for other in near if founded[other] >= 0)
              for own, near in zip(founded, neighbours, strict=True)]  # fmt: skip
    return np.array(joined)


def finite_elements(vertices: int, unknowns: int = 1, seed: int = 0) -> Any:
    """Return a matrix with the pattern of linear (P1) finite elements on a Delaunay mesh of random points, as CSR.

    Every vertex has so many `unknowns` (displacements in elasticity, say): each entry is a dense block of that size.
    Values are random.
    """
    import scipy.sparse as sp
    from scipy.spatial import Delaunay

    rng = np.random.default_rng(seed)
    corners = Delaunay(rng.random((vertices, 2))).simplices
    rows, columns = np.repeat(corners, 3, axis=1).ravel(), np.tile(corners, 3).ravel()
    near = sp.csr_array((np.ones(len(rows), np.float32), (rows, columns)), shape=(vertices, vertices))
    matrix = sorted_csr(sp.kron(near, np.ones((unknowns, unknowns), np.float32)))
    matrix.data[:] = rng.standard_normal(matrix.nnz, dtype=np.float32)
    return matrix


def sorted_csr(matrix: Any) -> Any:
    """Return a matrix as a CSR array of float32 with 4-byte indices in order, without duplicates."""
    import scipy.sparse as sp

    matrix = sp.csr_array(matrix)
    matrix.sum_duplicates()
    parts = (matrix.data.astype(np.float32), matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32))
    return sp.csr_array(parts, shape=matrix.shape)
