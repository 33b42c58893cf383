"""Jacobians and Hessians with dense rows or columns: few directions, and none of the work is quadratic in a dense row.

The sizes are those at which squares of a row, or of all of x, would take minutes or more memory than there is.
"""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp.patterns import color_both, color_columns, color_symmetric
from sparsebp.patterns.bicoloring import sources
from sparsebp.patterns.pattern import star_sources

N = 100_003


def arrow(x):
    return np.concatenate([np.sum(x * x)[None], x[1:] * x[0]])


def hubs(x):
    return np.sum(x[2:] ** 2 * x[0] + x[2:] ** 3 * x[1]) + np.sum(x[3:] * x[2:-1])


def two_rows(x):
    """Two rows that share a part of their columns, beside a band."""
    return np.concatenate([x[1:] * x[:-1], np.sum(x[: 2 * len(x) // 3])[None], np.sum(x[len(x) // 3 :] ** 2)[None]])


def bordered(x):
    """A band with a dense row and a dense column, as of a free end time and an integral."""
    return np.concatenate([x[1:-1] * x[:-2] * x[2:] * x[-1], x[:1] * x[-1], np.sum(x**2)[None]])


def optimality(x):
    """The conditions of a minimum under one dense and many sparse constraints, by x and multipliers."""
    z, y, t = x[: N // 3], x[N // 3 : -1], x[-1]
    return np.concatenate([z**3 + t * np.sin(z) + y[: len(z)] * z, y[: len(z)] ** 2 - z**2, np.sum(np.cos(z))[None]])


def arrows(x):
    """Arrowheads of 50, and a dense row and column across all of them."""
    z = x[: (N - 1) // 50 * 50].reshape(-1, 50)
    hubs, rest = np.sum(z**2, axis=1) * x[-1], z[:, 1:] * z[:, :1] * x[-1]
    return np.concatenate([hubs, rest.ravel(), np.sum(x**2)[None]])


# name: (function, the most directions, the mode)
JACOBIANS = {
    "row": (lambda x: np.sum(x * x)[None], 1, "reverse"),
    "column": (lambda x: x * x[0], 2, "forward"),
    "arrow": (arrow, 3, "mixed"),
    "arrow of several": (lambda x: np.append(arrow(x), [x.mean(), x.var()]) * x[-1], 7, "mixed"),
    "band and rows": (two_rows, 4, "reverse"),
    "column and rows apart": (lambda x: np.sum(x[: N // 7 * 7].reshape(7, -1) ** 2, axis=1) + x[-1], 2, "mixed"),
    "bordered": (bordered, 5, "mixed"),
    "optimality": (optimality, 5, "mixed"),
    "arrows": (arrows, 5, "mixed"),
    "sum of centered squares": (lambda x: np.sum((x - x.mean()) ** 2)[None], 1, "reverse"),
    "sum of normed": (lambda x: np.stack([np.sum(np.sin(x / np.linalg.norm(x))), np.std(x)]), 2, "reverse"),
}  # fmt: skip


@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians(name):
    f, most, mode = JACOBIANS[name]
    jac, x = sb.sparse_jacobian(f, np.ones(N)), np.random.default_rng(0).uniform(0.5, 1, N)
    assert jac.colors <= most and jac.mode == mode
    found, v = jac(x, check=True), np.random.default_rng(1).standard_normal(N)
    np.testing.assert_allclose(found @ v, (f(x + 1e-7 * v) - f(x - 1e-7 * v)) / 2e-7, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("g", "most"), [(lambda x: np.sum(x[1:] ** 2) * x[0], 2), (hubs, 5)])
def test_hessians(g, most):
    hess, x = sb.sparse_hessian(g, np.ones(N)), np.random.default_rng(0).uniform(0.5, 1, N)
    assert hess.colors <= most
    hess(x, check=True)
    small = sb.sparse_hessian(g, x[:9])(x[:9]).toarray()
    hess = sb.sparse_hessian(g, x[:9], pattern=sb.SparsityPattern.dense(9, 9))
    np.testing.assert_allclose(small, hess(x[:9]).toarray(), atol=1e-12)


def test_full_matrices():
    """Of n columns, with n colours; what stands between, such as a sorted x, costs no more than x."""
    n, x = 700, np.random.default_rng(0).uniform(0.5, 1, 700)
    e = np.exp(x) / np.exp(x).sum()
    for f, expected in ((lambda x: np.exp(x) / np.exp(x).sum(), np.diag(e) - np.outer(e, e)),
                        (np.cumsum, np.tri(n)), (lambda x: x - x.mean(), np.eye(n) - 1 / n)):  # fmt: skip
        jac = sb.sparse_jacobian(f, x)
        assert jac.colors == n
        np.testing.assert_allclose(jac(x).toarray(), expected, atol=1e-12)
    assert sb.sparse_hessian(lambda x: np.sum(x) ** 2, x).colors == n
    assert sb.sparse_jacobian(lambda x: np.sum(np.sort(x) * np.cumsum(x))[None], x).pattern.nnz == n


@given(seed=st.integers(0, 999), m=st.integers(0, 9), n=st.sampled_from([67, 130, 257]), dense=st.integers(0, 5))
def test_colors_of_dense_rows(seed, m, n, dense):
    """Columns of one colour share no row; there are no more colours than a greedy choice for each column takes."""
    rng = np.random.default_rng(seed)
    present = np.concatenate([rng.random((dense, n)) < rng.uniform(0.3, 1), rng.random((m, n)) < 0.05])
    present = present[rng.permutation(len(present))]
    colors = color_columns(sb.SparsityPattern.from_scipy(sp.csr_array(present)))
    assert set(colors) == set(range(colors.max() + 1))
    for row in present:
        assert len(set(colors[row])) == row.sum()
    greedy = np.full(n, -1)
    for j in range(n):
        near = greedy[present[present[:, j]].any(axis=0)]
        greedy[j] = next(c for c in range(n) if c not in near)
    assert dense or colors.max() <= greedy.max()


@given(seed=st.integers(0, 999), m=st.integers(0, 60), n=st.integers(0, 60), dense=st.integers(0, 6),
       costs=st.sampled_from([(1, 1), (3, 1), (1, 3)]))  # fmt: skip
def test_colors_of_both(seed, m, n, dense, costs):
    """Every entry is alone by one of its colours; of either rows or columns alone, as many would do."""
    rng = np.random.default_rng(seed)
    present = rng.random((m, n)) < rng.choice([0, 0.03, 0.2])
    for line in (present, present.T):
        if line.size:
            line[rng.integers(len(line), size=dense)] |= rng.random(line.shape[1]) < rng.uniform(0.3, 1)
    pattern = sb.SparsityPattern.from_scipy(sp.csr_array(present))
    rows, columns = color_both(pattern, row_cost=costs[0], column_cost=costs[1])
    by_column, i, j = sources(pattern, rows, columns), pattern.row_of_entry, pattern.indices
    values = rng.standard_normal((m, n)) * present
    forward = values @ (columns[:, None] == np.arange(columns.max(initial=-1) + 1))
    backward = (rows[:, None] == np.arange(rows.max(initial=-1) + 1)).T @ values
    np.testing.assert_array_equal(forward[i[by_column], columns[j[by_column]]], values[i[by_column], j[by_column]])
    np.testing.assert_array_equal(backward[rows[i[~by_column]], j[~by_column]], values[i[~by_column], j[~by_column]])
    count = costs[0] * (rows.max(initial=-1) + 1) + costs[1] * (columns.max(initial=-1) + 1)
    if pattern.nnz:
        assert count <= costs[0] * (color_columns(pattern.T).max() + 1)
        assert count <= costs[1] * (color_columns(pattern).max() + 1)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_both_modes_in_other_libraries(library):
    xp = pytest.importorskip(library)
    if library != "torch":
        pytest.importorskip("asdex")
    x = xp.linspace(0.5, 1, 40)
    f = lambda x: xp.concatenate([x[1:] * x[:1], x[1:-1] * x[2:], (x**2).sum()[None]])  # noqa: E731
    jac = sb.sparse_jacobian(f, x)
    assert jac.mode == "mixed" and jac.colors <= 5
    expected = sb.sparse_jacobian(
        lambda x: np.concatenate([x[1:] * x[:1], x[1:-1] * x[2:], (x**2).sum()[None]]), np.ones(40)
    )
    np.testing.assert_allclose(jac(x, check=True).toarray(), expected(np.asarray(x)).toarray(), rtol=1e-6)


@given(seed=st.integers(0, 999), n=st.integers(0, 90), hubs=st.integers(0, 4), density=st.sampled_from([0, 0.02, 0.2]))
def test_stars_around_hubs(seed, n, hubs, density):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((n, n)) < density, 1)
    upper[rng.permutation(n)[:hubs]] |= rng.random((min(hubs, n), n)) < 0.9
    present = upper | upper.T | np.eye(n, dtype=bool)
    pattern = sb.SparsityPattern.from_scipy(sp.csr_array(present))
    colors = color_symmetric(pattern)
    values = rng.standard_normal((n, n)) * present
    values += values.T
    product = values @ np.eye(colors.max(initial=-1) + 1)[colors]
    rows, of = star_sources(pattern, colors)
    np.testing.assert_allclose(product[rows, of], values[pattern.row_of_entry, pattern.indices], atol=1e-12)
    if not density:
        assert colors.max(initial=-1) <= 2 * hubs
