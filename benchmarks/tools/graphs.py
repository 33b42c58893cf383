"""Sparse matrices without a geometry: graphs whose degrees follow a power law, and random ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.tools.meshes import sorted_csr

QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Where an edge falls, of four quadrants of the adjacency matrix, and again in each of them (Graph500)."""


def rmat(scale: int, edges_a_vertex: int = 16, seed: int = 0) -> Any:
    """Return the adjacency matrix of an R-MAT graph with 2**scale vertices, duplicate edges merged, as CSR.

    D. Chakrabarti, Y. Zhan and C. Faloutsos, "R-MAT: a recursive model for graph mining", SDM 2004, with the
    parameters of the Graph500 benchmark; its shuffle of the vertices is left out.
    """
    import scipy.sparse as sp

    rng = np.random.default_rng(seed)
    count = edges_a_vertex << scale
    rows, columns = np.zeros((2, count), np.int64)
    for _ in range(scale):
        quadrant = np.searchsorted(np.cumsum(QUADRANTS)[:3], rng.random(count), side="right")
        rows, columns = 2 * rows + quadrant // 2, 2 * columns + quadrant % 2
    n = 1 << scale
    return sorted_csr(sp.coo_array((np.ones(count, np.float32), (rows, columns)), shape=(n, n)))


def random_rows(rows: int, columns: int, entries: int, seed: int = 0) -> Any:
    """Return a matrix with the same number of `entries` in every row, anywhere, as CSR."""
    import scipy.sparse as sp

    rng = np.random.default_rng(seed)
    indices = np.sort(rng.integers(0, columns, (rows, entries), np.int32))
    while len(again := np.flatnonzero((np.diff(indices) == 0).any(axis=1))):  # rows that drew a column twice
        indices[again] = np.sort(rng.integers(0, columns, (len(again), entries), np.int32))
    data = rng.standard_normal(rows * entries, dtype=np.float32)
    parts = (data, indices.ravel(), np.arange(rows + 1, dtype=np.int32) * entries)
    return sp.csr_array(parts, shape=(rows, columns))
