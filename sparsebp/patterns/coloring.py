"""Colours: groups of columns of a pattern that one product with a vector of ones tells apart.

If no two columns of a colour share a row, the sum of a colour's columns holds each of their entries alone (Curtis,
Powell, Reid, 1974). A symmetric matrix needs fewer: it is enough that an entry or its mirror image is alone (Coleman,
Moré, 1984).
"""

from __future__ import annotations

import numpy as np

from sparsebp.core.errors import PatternError, ShapeError
from sparsebp.patterns.pattern import SparsityPattern, check_patterns, frozen


def color_columns(pattern: SparsityPattern) -> np.ndarray:
    """Colour the columns of a pattern so that columns of one colour share no row.

    Greedy, in smallest-last order (D. Matula, L. Beck, 1983): few colours, not always the fewest. Columns without
    entries have one too. Time: the sum of the squared lengths of the rows.

    Parameters
    ----------
    pattern
        (m, n).

    Returns
    -------
    numpy.ndarray
        The colour of each column, 0, 1, …; int64, shape (n,), read-only. Two calls return the same colours.

    Raises
    ------
    PatternError
        `pattern` is no `SparsityPattern`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsebp as sb
    >>> band = sp.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(6, 6)).tocsr()
    >>> sb.patterns.color_columns(sb.SparsityPattern.from_scipy(band)).max() + 1
    np.int64(3)
    """
    check_patterns(pattern=pattern)
    from sparsebp.kernels.host import coloring

    n = pattern.shape[1]
    arrays = (pattern.indptr, pattern.indices, pattern.T.indptr, pattern.T.indices)
    neighbors = (np.diff(pattern.indptr) - 1)[pattern.row_of_entry]
    degrees = np.bincount(pattern.indices, weights=neighbors, minlength=n).astype(np.int64)
    order, colors = np.empty(n, np.int64), np.full(n, -1, np.int64)
    coloring.smallest_last(*arrays, degrees, order)
    coloring.color_columns(*arrays, order, colors)
    return frozen(colors)


def color_symmetric(pattern: SparsityPattern) -> np.ndarray:
    """Colour the rows and columns of a symmetric pattern so that any two colours form stars.

    Then entry (i, j) is the only one of its colour in row i, or entry (j, i) is in row j: `star_sources` says which.

    Parameters
    ----------
    pattern
        (n, n), symmetric, with a full diagonal or without.

    Returns
    -------
    numpy.ndarray
        The colour of each column, 0, 1, …; int64, shape (n,), read-only.

    Raises
    ------
    PatternError
        `pattern` is not symmetric.
    ShapeError
        `pattern` is not square.
    """
    check_patterns(pattern=pattern)
    if pattern.shape[0] != pattern.shape[1]:
        raise ShapeError("The pattern is not square", expected="(n, n)", got=pattern.shape)
    mirror = pattern.T
    if not (np.array_equal(mirror.indptr, pattern.indptr) and np.array_equal(mirror.indices, pattern.indices)):
        raise PatternError("The pattern is not symmetric", expected="an entry (j, i) for every (i, j)",
                           got=repr(pattern))  # fmt: skip
    from sparsebp.kernels.host import coloring

    order = np.argsort(-np.diff(pattern.indptr), kind="stable")
    colors = np.full(len(order), -1, np.int64)
    coloring.color_stars(pattern.indptr, pattern.indices, pattern.transpose_permutation, order, colors)
    return frozen(colors)


def star_sources(pattern: SparsityPattern, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each entry stands in the product with the colours: rows and colours, both int64, shape (nnz,).

    An entry and its mirror image have one source, so that the matrix is symmetric to the last bit.
    """
    rows, columns = pattern.row_of_entry.astype(np.int64), pattern.indices.astype(np.int64)
    count = int(colors.max(initial=-1)) + 1
    seen = rows * count + colors[columns]
    _, where, repeats = np.unique(seen, return_inverse=True, return_counts=True)
    alone = repeats[where] == 1
    mirrored = pattern.transpose_permutation
    lower = rows >= columns
    direct = np.where(lower, alone, ~alone[mirrored])  # of (i, j) and (j, i), i > j, both read at (i, j) if it is alone
    if not (direct & alone | ~direct & alone[mirrored]).all():
        raise PatternError("The colours do not tell the entries apart", expected="a star colouring", got=repr(pattern))
    return np.where(direct, rows, columns), colors[np.where(direct, columns, rows)]
