"""Matrices of many kinds for tests of factors, and how solutions are judged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import strategies as st
from scipy.sparse.linalg import splu

from sparsebp import SparsityPattern
from sparsebp.products import elimination

Array = np.ndarray


def backward_error(matrix: Any, x: Array, b: Array) -> float:
    """Return how far the residual is from zero: ``|b - A x| / (|A| |x| + |b|)`` in the maximum norm, in double."""
    a, x, b = (np.asarray(v, np.result_type(v, np.float64)) for v in (matrix, x, b))
    if not len(a):
        return 0.0
    scale = np.abs(a).sum(axis=1).max() * np.abs(x).max() + np.abs(b).max()
    return float(np.abs(b - a @ x).max() / scale) if scale else 0.0


def assert_as_small_as_superlu(matrix: Array, x: Array, b: Array) -> None:
    """The residual is at most ten times SuperLU's, in the dtype of x."""
    eps = float(np.finfo(x.dtype).eps)
    theirs = splu(sp.csc_array(matrix.astype(x.dtype))).solve(b) if len(matrix) else b
    assert backward_error(matrix, x, b) <= 10 * max(backward_error(matrix, theirs, b), eps)


def pattern_of(matrix: Any) -> tuple[SparsityPattern, Array]:
    """Return the pattern and the values of a matrix; stored zeros are entries."""
    matrix = sp.csr_array(matrix)
    matrix.sum_duplicates()
    return SparsityPattern.from_scipy(matrix), np.ascontiguousarray(matrix.data, np.float64)


def mirrored(pattern: SparsityPattern, values: Array) -> Array:
    """Return values with those below the diagonal equal to those above, on a symmetric pattern."""
    below = (pattern.row_of_entry > pattern.indices).reshape(-1, *[1] * (values.ndim - 1))
    return np.where(below, values[pattern.transpose_permutation], values)


def either_way(test: Callable[..., None]) -> Callable[..., None]:
    """Lay out a test's symmetric matrices in single rows, or in panels, where the size chooses."""

    @functools.wraps(test)
    def run(**drawn: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elimination, "SHORT", drawn["seed"] % 2 * 1000)
            test(**drawn)

    return run


kinds = st.sampled_from(["lu", "cholesky", "ldlt"])


def complex_matrices(rng: Any, n: int, density: float, kind: str, batch: int, dtype: Any) -> Array:
    """Return dominant matrices (B, n, n), Hermitian ones with pivots of either sign but for LU factors."""
    mask = rng.random((n, n)) < density
    matrices = rng.standard_normal((batch, n, n)) + 1j * rng.standard_normal((batch, n, n))
    if kind == "lu":
        matrices *= mask
        diagonal = np.full(n, 2 + 3j)
    else:
        matrices *= mask | mask.T
        matrices = matrices + matrices.conj().swapaxes(1, 2)
        diagonal = np.ones(n) if kind == "cholesky" else rng.choice([-1.0, 1.0], n)
    matrices[:, np.arange(n), np.arange(n)] = diagonal * (8 * n + rng.random((batch, n)))
    return matrices.astype(dtype)


def line(n: int) -> sp.csr_array:
    return sp.csr_array(sp.diags_array([2.0, -1.0, -1.0], offsets=[0, 1, -1], shape=(n, n)))


def laplacian(*shape: int) -> sp.csr_array:
    """Finite differences of the Laplacian on a grid, Dirichlet boundary."""
    total = sp.csr_array((1, 1))
    for n in shape:
        total = sp.kron(total, sp.eye_array(n)) + sp.kron(sp.eye_array(total.shape[0]), line(n))
    return sp.csr_array(total)


def convection(n: int, speed: float) -> sp.csr_array:
    """Convection-diffusion on a square, upwind."""
    wind = sp.diags_array([1.0, -1.0], offsets=[0, -1], shape=(n, n))
    return sp.csr_array(laplacian(n, n) + speed * sp.kron(wind, sp.eye_array(n)))


def band(n: int, below: int, above: int) -> sp.csr_array:
    rng = np.random.default_rng(n)
    offsets = range(-below, above + 1)
    return sp.csr_array(sp.diags_array([rng.random(n - abs(k)) + (k == 0) for k in offsets], offsets=[*offsets]))


def arrow(n: int, backwards: bool = False) -> sp.csr_array:
    matrix = np.eye(n) * n
    matrix[0], matrix[:, 0] = 1, 1
    matrix[0, 0] = n
    return sp.csr_array(matrix[::-1, ::-1] if backwards else matrix)


def circuit(n: int, sources: int = 0) -> sp.csr_array:
    """Conductances of a random network, with voltage sources in further rows whose diagonal is zero."""
    rng = np.random.default_rng(n)
    ends = np.concatenate([[(i, rng.integers(i)) for i in range(1, n)], rng.integers(n, size=(n // 3, 2))])
    conductance = 10.0 ** rng.uniform(-6, 2, len(ends))
    matrix = sp.coo_array((-conductance, ends.T), shape=(n, n)).tocsr()
    matrix = matrix + matrix.T
    matrix = matrix - sp.diags_array(matrix.sum(axis=1) - 1e-6)
    chosen = rng.choice(n, sources, replace=False)
    at = sp.coo_array((np.ones(sources), (np.arange(sources), chosen)), shape=(sources, n))
    return sp.csr_array(sp.block_array([[matrix, at.T], [at, None]]) if sources else matrix)


def permuted(matrix: sp.csr_array, rows: bool = True) -> sp.csr_array:
    rng = np.random.default_rng(0)
    matrix = sp.csr_array(matrix)[rng.permutation(matrix.shape[0])]
    return sp.csr_array(matrix if rows else matrix[:, rng.permutation(matrix.shape[0])])


def hilbert(n: int) -> sp.csr_array:
    return sp.csr_array(1 / (1 + np.add.outer(np.arange(n), np.arange(n))))


def kahan(n: int) -> sp.csr_array:
    """The matrix for which partial pivoting grows as 2ⁿ⁻¹."""
    matrix = np.eye(n) - np.tril(np.ones((n, n)), -1)
    matrix[:, -1] = 1
    return sp.csr_array(matrix)


def random(n: int, density: float, seed: int = 0) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return sp.csr_array(sp.random_array((n, n), density=density, rng=rng) + sp.eye_array(n).tocsr()[rng.permutation(n)])


GALLERY: dict[str, Callable[[], Any]] = {
    "one": lambda: [[3.0]],
    "tiny": lambda: [[1e-200]],
    "diagonal": lambda: sp.diags_array(np.arange(1.0, 14)),
    "identity backwards": lambda: np.eye(7)[::-1],
    "cyclic shift": lambda: np.roll(np.eye(11), 3, axis=1),
    "line": lambda: line(31),
    "line of 1000": lambda: line(1000),
    "square": lambda: laplacian(13, 13),
    "rectangle": lambda: laplacian(31, 7),
    "square of 40": lambda: laplacian(40, 40),
    "cube": lambda: laplacian(7, 7, 7),
    "cube of 11": lambda: laplacian(11, 11, 11),
    "slow wind": lambda: convection(12, 0.1),
    "strong wind": lambda: convection(12, 1e4),
    "biharmonic": lambda: laplacian(9, 9) @ laplacian(9, 9),
    "Helmholtz": lambda: laplacian(12, 12) - 2.3 * sp.eye_array(144),
    "band 1, 1": lambda: band(97, 1, 1),
    "band 2, 5": lambda: band(60, 2, 5),
    "band 7, 0": lambda: band(53, 7, 0),
    "band 0, 3": lambda: band(53, 0, 3),
    "arrow": lambda: arrow(40),
    "arrow backwards": lambda: arrow(40, backwards=True),
    "network": lambda: circuit(200),
    "network with sources": lambda: circuit(100, sources=9),
    "rows permuted": lambda: permuted(laplacian(9, 9)),
    "rows and columns permuted": lambda: permuted(band(50, 3, 1), rows=False),
    "saddle point": lambda: sp.block_array([[laplacian(5, 5), np.eye(25)[:, ::3]], [np.eye(25)[::3], None]]),
    "zero diagonal": lambda: np.ones((6, 6)) - np.eye(6),
    "small pivot": lambda: [[1e-20, 1.0], [1.0, 1.0]],
    "Hilbert 6": lambda: hilbert(6),
    "Hilbert 9": lambda: hilbert(9),
    "scaled rows": lambda: sp.diags_array(10.0 ** np.arange(-20, 20, 1.6)) @ laplacian(5, 5),
    "scaled columns": lambda: laplacian(5, 5) @ sp.diags_array(10.0 ** np.arange(-20, 20, 1.6)),
    "Kahan 20": lambda: kahan(20),
    "sparse 1": lambda: random(70, 0.02),
    "sparse 2": lambda: random(101, 0.05, seed=1),
    "dense": lambda: np.random.default_rng(0).standard_normal((61, 61)),
    "one dense row": lambda: sp.vstack([np.ones((1, 50)), sp.eye_array(50).tocsr()[1:]]),
    "stored zeros": lambda: sp.csr_array((np.array([2.0, 0, 0, 5]), [0, 1, 0, 1], [0, 2, 4]), shape=(2, 2)),
    "blocks": lambda: sp.kron(sp.eye_array(6), np.random.default_rng(3).standard_normal((5, 5))),
    "definite blocks": lambda: sp.kron(laplacian(5, 4), np.ones((3, 3)) + np.eye(3)),
    "disconnected": lambda: sp.block_diag([laplacian(4, 3), np.eye(3), arrow(7), line(11), [[5.0]]]),
    "definite": lambda: np.ones((61, 61)) + np.diag(np.arange(1.0, 62)),
}


DEFINITE = ("one", "tiny", "diagonal", "line", "line of 1000", "square", "rectangle", "square of 40", "cube",
            "cube of 11", "biharmonic", "arrow", "arrow backwards", "network", "Hilbert 6", "definite blocks",
            "disconnected", "definite")  # fmt: skip
