"""Patterns of every structure that products tell apart, and values on them as SciPy's and as dense matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from sparsebp import SparsityPattern


def of_mask(mask: Any) -> SparsityPattern:
    """Return the pattern of the elements that are not zero."""
    mask = np.asarray(mask, bool)
    return SparsityPattern(np.concatenate([[0], np.cumsum(mask.sum(axis=1))]), np.nonzero(mask)[1], mask.shape)


def random_pattern(rows: int, columns: int, density: float, seed: int = 0) -> SparsityPattern:
    """Return a pattern with exactly that share of entries, anywhere."""
    mask = np.zeros((rows, columns), bool)
    mask.flat[np.random.default_rng(seed).choice(mask.size, round(density * mask.size), replace=False)] = True
    return of_mask(mask)


def of_blocks(rows: int, columns: int, m: int, n: int, seed: int = 0) -> SparsityPattern:
    """Return a random pattern with dense blocks (m, n) in place of its entries."""
    return of_mask(np.kron(np.random.default_rng(seed).random((rows, columns)) < 0.2, np.ones((m, n))))


def of_runs(rows: int, columns: int) -> SparsityPattern:
    """Return rows of long runs of neighbouring columns, every second row like the one before."""
    mask = np.ones((rows, columns), bool)
    mask[np.arange(rows), np.arange(rows) // 2 % columns] = False
    return of_mask(mask)


def disjoint(rows: int) -> SparsityPattern:
    """Return two entries a row, each column in one row only: every product lands on an entry of its own."""
    return SparsityPattern(2 * np.arange(rows + 1), np.arange(2 * rows), (rows, 2 * rows))


def wide(pattern: SparsityPattern) -> SparsityPattern:
    """Return the pattern with 8-byte indices, as one of 2**31 columns or entries has them."""
    same = SparsityPattern(pattern.indptr, pattern.indices, pattern.shape)
    same.__dict__.update(indptr=pattern.indptr.astype(np.int64), indices=pattern.indices.astype(np.int64))
    return same


def csr(pattern: SparsityPattern, values: Any = None) -> scipy.sparse.csr_array:
    """Return values on a pattern, by default ones, as SciPy has them."""
    values = np.ones(pattern.nnz) if values is None else values
    return scipy.sparse.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)


def dense(pattern: SparsityPattern, data: Any = 1.0, batch: int | None = None) -> np.ndarray:
    """Return values on a pattern as a float64 matrix; with a `batch` (B, rows, columns), of (nnz,) or (nnz, B)."""
    matrices = np.zeros(pattern.shape if batch is None else (batch, *pattern.shape))
    matrices[..., pattern.row_of_entry, pattern.indices] = np.transpose(data)
    return matrices
