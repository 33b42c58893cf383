"""Colours for rows and columns together: dense rows by reverse mode, dense columns by forward mode.

An entry is known if it is the only one of its column's colour in its row, or of its row's colour in its column; lines
that no entry needs have no colour. That is a star bicolouring (T. Coleman, A. Verma, "The Efficient Computation of
Sparse Jacobian Matrices Using Automatic Differentiation", 1998; A. Montoison, G. Dalle, A. Gebremedhin, "Revisiting
Sparse Matrix Coloring and Bicoloring", 2025).

Here long rows and long columns are set apart. Long columns have colours that tell them apart in all rows, long rows
those that tell them apart in all other columns, and what is left is coloured by columns, or by rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparsebp.core.errors import PatternError
from sparsebp.patterns.pattern import (
    SparsityPattern,
    alone_in_line,
    check_patterns,
    color_columns,
    frozen,
    longest_alone,
    part_of,
)

COLORED = 3
"""How many ways to set lines apart are coloured, of those with the best bounds."""


def color_both(pattern: SparsityPattern, *, row_cost: int = 1, column_cost: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Colour rows and columns of a pattern so that every entry is alone in its row or its column.

    Parameters
    ----------
    pattern
        (m, n). Rows and columns may be dense.
    row_cost, column_cost
        What one colour of rows, and of columns, costs: their weighted number is to be small.

    Returns
    -------
    rows, columns : numpy.ndarray
        The colour of each row and of each column, 0, 1, … separately, -1 for none; int64, shapes (m,) and (n,),
        read-only. Two calls return the same colours.

    Raises
    ------
    PatternError
        `pattern` is no `SparsityPattern`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsebp as sb
    >>> arrow = np.eye(6)
    >>> arrow[0] = arrow[:, 0] = 1
    >>> rows, columns = sb.patterns.color_both(sb.SparsityPattern.from_scipy(sp.csr_array(arrow)))
    >>> rows.tolist(), columns.tolist()
    ([0, -1, -1, -1, -1, -1], [0, 1, 1, 1, 1, 1])
    """
    check_patterns(pattern=pattern)
    ways = sorted(_ways(pattern, row_cost, column_cost), key=lambda way: (not way.simple, way.bound))
    best, number, tried, found = math.inf, math.inf, 0, (np.empty(0, np.int64), np.empty(0, np.int64))
    for way in ways:
        if way.bound < best and (way.simple or tried < COLORED):
            rows, columns = _colored(pattern, way)
            counts = rows.max(initial=-1) + 1, columns.max(initial=-1) + 1
            cost, tried = row_cost * counts[0] + column_cost * counts[1], tried + (not way.simple)
            if cost < best and (way.simple or sum(counts) <= number):
                best, number, found = cost, sum(counts), (rows, columns)
    return frozen(found[0]), frozen(found[1])


def sources(pattern: SparsityPattern, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return for each entry whether it is alone, by its column's colour, in its row; others are in their column."""
    by_column = alone_in_line(columns[pattern.indices], pattern.row_of_entry, pattern.shape[0])
    by_row = alone_in_line(rows[pattern.row_of_entry], pattern.indices, pattern.shape[1])
    if not (by_column | by_row).all():
        raise PatternError("The colours do not tell the entries apart", expected="a star bicolouring",
                           got=repr(pattern))  # fmt: skip
    return by_column


class _Way(NamedTuple):
    """Long rows and columns, whether the rest is coloured by columns, and a lower bound of the cost.

    `simple`: at most one colour for each line that is set apart, a colouring that others may not exceed.
    """

    rows: np.ndarray
    columns: np.ndarray
    by_columns: bool
    bound: float
    simple: bool


def _ways(pattern: SparsityPattern, row_cost: int, column_cost: int) -> Iterator[_Way]:
    lengths = np.diff(pattern.indptr), np.bincount(pattern.indices, minlength=pattern.shape[1])
    no_rows, no_columns = (np.zeros(n, bool) for n in pattern.shape)
    way = functools.partial(_way, pattern, (row_cost, column_cost))
    for by_columns in (True, False):
        yield way(no_rows, no_columns, by_columns, simple=True)
    yield way(longest_alone(lengths[0], row_cost, column_cost), no_columns, True, simple=True)
    yield way(no_rows, longest_alone(lengths[1], column_cost, row_cost), False, simple=True)
    for rows in _longer(lengths[0]):
        for columns in _longer(lengths[1]):
            for by_columns in (True, False):
                yield way(rows, columns, by_columns)


def _longer(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the lines that are longer than others: by powers of two."""
    powers = np.frexp(lengths)[1]
    for power in np.unique(powers):
        yield powers > power


def _way(pattern: SparsityPattern, costs: tuple[int, int], rows: np.ndarray, columns: np.ndarray, by_columns: bool,
         simple: bool = False) -> _Way:  # fmt: skip
    """Return a way with its bound: what shares a line has different colours."""

    def most(across: np.ndarray, entries: np.ndarray) -> int:
        return int(np.bincount(across[entries], minlength=1).max())

    (row_cost, column_cost), i, j = costs, pattern.row_of_entry, pattern.indices
    in_rows, in_columns = rows[i], columns[j]
    rest = ~(in_rows | in_columns)
    if by_columns:
        bound = column_cost * (most(i, in_columns) + most(i, rest)) + row_cost * most(j, in_rows & ~in_columns)
    else:
        bound = row_cost * (most(j, in_rows) + most(j, rest)) + column_cost * most(i, in_columns & ~in_rows)
    return _Way(rows, columns, by_columns, bound, simple)


def _colored(pattern: SparsityPattern, way: _Way) -> tuple[np.ndarray, np.ndarray]:
    """Return the colours of rows and columns."""
    rows, columns = way.rows, way.columns
    if not way.by_columns:
        turned = _Way(columns, rows, True, way.bound, way.simple)
        return _colored(pattern.T, turned)[::-1]
    in_rows, in_columns = rows[pattern.row_of_entry], columns[pattern.indices]
    found = _colors(pattern, ~(in_rows | in_columns))
    long = _colors(pattern, in_columns)
    found[columns] = np.where(long[columns] < 0, -1, long[columns] + found.max(initial=-1) + 1)
    return _colors(pattern.T, (in_rows & ~in_columns)[pattern.transpose_permutation]), found


def _colors(pattern: SparsityPattern, entries: np.ndarray) -> np.ndarray:
    """Colour the columns that have some of these entries, where these alone count."""
    found = np.full(pattern.shape[1], -1)
    if entries.any():
        mine = np.unique(pattern.indices[entries])
        found[mine] = color_columns(part_of(pattern, entries))[mine]
    return found
