"""Greedy colourings of sparse matrices on the host: columns that share no row, stars of a symmetric matrix.

Sequential, because each choice depends on those before it; both are bound by reading index arrays.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine.compile import SERIAL

# The functions below are compiled: their arguments are index arrays and sizes.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR1714


@numba.njit(**SERIAL)
def color_columns(indptr, indices, column_ptr, column_rows, order, colors):
    """Give each column the smallest colour of no column that shares a row with it; return how many there are.

    Partial distance-2 colouring (Gebremedhin, Manne, Pothen, "What Color Is Your Jacobian?", SIAM Review 47, 2005,
    Algorithm 3.2). The matrix comes by rows and by columns; `colors` must hold -1.
    """
    taken = np.full(len(order) + 1, -1, np.int64)  # by colour: the last column that may not have it
    number = 0
    for j in order:
        for q in range(column_ptr[j], column_ptr[j + 1]):
            row = column_rows[q]
            for e in range(indptr[row], indptr[row + 1]):
                color = colors[indices[e]]
                if color >= 0:
                    taken[color] = j
        color = 0
        while taken[color] == j:
            color += 1
        colors[j] = color
        number = max(number, color + 1)
    return number


@numba.njit(**SERIAL)
def color_stars(indptr, indices, mirrored, order, colors):
    """Colour the vertices of a symmetric matrix so that every two colours form stars; return how many there are.

    Then each entry is alone with its colour in its row or in its column (Gebremedhin, Tarafdar, Manne, Pothen, "New
    Acyclic and Star Coloring Algorithms with Application to Computing Hessians", SIAM J. Sci. Comput. 29, 2007,
    Algorithm 4.1). `mirrored` holds the place of entry (j, i) for every entry (i, j); `colors` must hold -1.
    """
    n = len(order)
    taken = np.full(n + 1, -1, np.int64)
    treated = np.full(n, -1, np.int64)
    first_vertex = np.full(n + 1, -1, np.int64)  # by colour: the vertex that met it last, and the entry where
    first_entry = np.full(n + 1, -1, np.int64)
    star = np.full(len(indices), -1, np.int64)  # of every coloured edge, by entry
    hub = np.full(len(indices) + 1, -1, np.int64)  # of every star; -1 while it has one edge
    stars, number = 0, 0
    for v in order:
        for e in range(indptr[v], indptr[v + 1]):
            w = indices[e]
            if w == v or colors[w] < 0:
                continue
            color = colors[w]
            taken[color] = v
            if first_vertex[color] == v:  # v has two neighbours of this colour, and becomes their hub
                q = indices[first_entry[color]]
                for vertex in (q, w):
                    if treated[vertex] != v:
                        for f in range(indptr[vertex], indptr[vertex + 1]):
                            if colors[indices[f]] >= 0:
                                taken[colors[indices[f]]] = v
                        treated[vertex] = v
            else:
                first_vertex[color], first_entry[color] = v, e
                for f in range(indptr[w], indptr[w + 1]):
                    x = indices[f]
                    if x != v and x != w and colors[x] >= 0 and hub[star[f]] == x:
                        taken[colors[x]] = v
        color = 0
        while taken[color] == v:
            color += 1
        colors[v] = color
        number = max(number, color + 1)
        for e in range(indptr[v], indptr[v + 1]):  # to which stars v's edges belong
            w = indices[e]
            if w == v or colors[w] < 0:
                continue
            joined = -1
            for f in range(indptr[w], indptr[w + 1]):
                x = indices[f]
                if x != v and x != w and colors[x] == color:
                    joined = star[f]
                    hub[joined] = w
                    break
            if joined < 0:
                first = first_entry[colors[w]]
                if first_vertex[colors[w]] == v and first != e:
                    joined = star[first]
                    hub[joined] = v
                else:
                    joined = stars
                    stars += 1
            star[e] = star[mirrored[e]] = joined
    return number


@numba.njit(**SERIAL)
def smallest_last(indptr, indices, column_ptr, column_rows, degrees, order):
    """Write an order of the columns: each has the fewest neighbours among those not yet placed behind it.

    `degrees` counts a column's neighbours once for every row that both have; it is overwritten.
    """
    n = len(order)
    most = 0
    for j in range(n):
        most = max(most, degrees[j])
    heads, after, before = np.full(most + 1, -1, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for j in range(n):
        _insert(j, degrees[j], heads, after, before)
    placed = np.zeros(n, np.bool_)
    least = 0
    for place in range(n - 1, -1, -1):
        while heads[least] < 0:
            least += 1
        j = heads[least]
        _remove(j, least, heads, after, before)
        order[place] = j
        placed[j] = True
        for q in range(column_ptr[j], column_ptr[j + 1]):
            row = column_rows[q]
            for e in range(indptr[row], indptr[row + 1]):
                k = indices[e]
                if not placed[k]:
                    _remove(k, degrees[k], heads, after, before)
                    degrees[k] -= 1
                    _insert(k, degrees[k], heads, after, before)
                    least = min(least, degrees[k])


@numba.njit(**SERIAL)
def _insert(j, degree, heads, after, before):
    after[j], before[j] = heads[degree], -1
    if heads[degree] >= 0:
        before[heads[degree]] = j
    heads[degree] = j


@numba.njit(**SERIAL)
def _remove(j, degree, heads, after, before):
    if before[j] >= 0:
        after[before[j]] = after[j]
    else:
        heads[degree] = after[j]
    if after[j] >= 0:
        before[after[j]] = before[j]
