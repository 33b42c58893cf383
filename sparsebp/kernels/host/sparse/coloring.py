"""Greedy colourings of sparse matrices on the host: columns that share no row, stars of a symmetric matrix.

Sequential, because each choice depends on those before it. A call takes about as many steps as there are columns and
colours, times each other, at most: no more than derivatives along all colours.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine.compile import SERIAL

# The functions below are compiled: their arguments are index arrays and sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def color_columns(rows, column_ptr, column_rows, groups, order, colors):
    """Give each column the smallest colour of no earlier one that shares a row with it; return how many there are.

    Partial distance-2 colouring (Gebremedhin, Manne, Pothen, "What Color Is Your Jacobian?", SIAM Review 47, 2005,
    Algorithm 3.2), but one colour at a time: each takes the columns, in order, none of whose rows it has marked. The
    colours are the same, and a column is left at the first marked row, where the other loop reads all of all rows.
    `column_rows` is reordered: the row that blocked a column comes first the next time.

    `groups` says by bits which of the longest rows a column is in, and `order` keeps columns of one group together. A
    group is left as a whole where one of these rows is marked; in the last group, each column gets its own colour.
    """
    n = len(order)
    marked = np.full(rows, -1, np.int64)  # the last colour in a row
    after = np.full(n, -1, np.int64)  # the next column of the group that has no colour
    first, bits = np.empty(n, np.int64), np.empty(n, np.uint64)
    count = 0
    for k in range(n):
        if k > 0 and groups[order[k]] == groups[order[k - 1]]:
            after[order[k - 1]] = order[k]
        else:
            first[count], bits[count] = order[k], groups[order[k]]
            count += 1
    color = 0
    while count > 0:
        if count == 1 and bits[0] != 0:
            j = first[0]
            while j >= 0:
                colors[j] = color
                color += 1
                j = after[j]
            break
        taken, left = np.uint64(0), 0
        for g in range(count):
            j, before = first[g], -1
            while j >= 0 and bits[g] & taken == 0:
                start, free = column_ptr[j], True
                for q in range(start, column_ptr[j + 1]):
                    if marked[column_rows[q]] == color:
                        column_rows[q], column_rows[start] = column_rows[start], column_rows[q]
                        free = False
                        break
                if not free:
                    before = j
                else:
                    colors[j] = color
                    for q in range(start, column_ptr[j + 1]):
                        marked[column_rows[q]] = color
                    taken |= bits[g]
                    if before < 0:
                        first[g] = after[j]
                    else:
                        after[before] = after[j]
                j = after[j]
            if first[g] >= 0:
                first[left], bits[left] = first[g], bits[g]
                left += 1
        count = left
        color += 1
    return color


@numba.njit(**SERIAL)
def color_stars(indptr, indices, mirrored, order, most, steps, colors):
    """Colour the vertices of a symmetric matrix so that every two colours form stars; return how many there are.

    Then each entry is alone with its colour in its row or in its column (Gebremedhin, Tarafdar, Manne, Pothen, "New
    Acyclic and Star Coloring Algorithms with Application to Computing Hessians", SIAM J. Sci. Comput. 29, 2007,
    Algorithm 4.1). `mirrored` holds the place of entry (j, i) for every entry (i, j); `colors` must hold -1. Return -1
    if that takes `most` colours or more, or more than so many steps.
    """
    n = len(order)
    taken = np.full(n + 1, -1, np.int64)
    first_vertex = np.full(n + 1, -1, np.int64)  # by colour: the vertex that met it last, the entry where, and
    first_entry = np.full(n + 1, -1, np.int64)
    again = np.full(n + 1, -1, np.int64)  # the vertex that met it twice
    star = np.full(len(indices), -1, np.int64)  # of every coloured edge, by entry
    hub = np.full(len(indices) + 1, -1, np.int64)  # of every star; -1 while it has one edge
    met = np.empty(len(indices), np.int64)  # in the row of a coloured vertex: one entry for each colour next to it
    met_end = indptr[:-1].astype(np.int64)
    stars, number = 0, 0
    for v in order:
        adjacent = 0
        for e in range(indptr[v], indptr[v + 1]):
            w = indices[e]
            if w == v or colors[w] < 0:
                continue
            color = colors[w]
            if first_vertex[color] == v:  # v becomes their hub
                again[color] = v
            else:
                first_vertex[color], first_entry[color], taken[color] = v, e, v
                adjacent += 1
        if adjacent < number:  # otherwise no colour is left
            for e in range(indptr[v], indptr[v + 1]):
                w = indices[e]
                if w == v or colors[w] < 0:
                    continue
                is_hub = again[colors[w]] == v
                for m in range(indptr[w], met_end[w]):
                    x = indices[met[m]]
                    if is_hub or hub[star[met[m]]] == x:
                        taken[colors[x]] = v
                steps -= 1 + met_end[w] - indptr[w]
        color = 0
        while taken[color] == v:
            color += 1
        if color + 1 >= most or steps < 0:
            return -1
        colors[v] = color
        for e in range(indptr[v], indptr[v + 1]):  # to which stars v's edges belong
            w = indices[e]
            if w == v or colors[w] < 0:
                continue
            joined = -1
            if color < number:
                for m in range(indptr[w], met_end[w]):
                    if colors[indices[met[m]]] == color:
                        joined = star[met[m]]
                        hub[joined] = w
                        break
                steps -= met_end[w] - indptr[w]
            if joined < 0:
                met[met_end[w]] = mirrored[e]
                met_end[w] += 1
                first = first_entry[colors[w]]
                if first != e:
                    joined = star[first]
                    hub[joined] = v
                else:
                    joined = stars
                    stars += 1
            star[e] = star[mirrored[e]] = joined
            if first_entry[colors[w]] == e:
                met[met_end[v]] = e
                met_end[v] += 1
        number = max(number, color + 1)
    return number


@numba.njit(**SERIAL)
def smallest_last(indptr, indices, column_ptr, column_rows, longest, degrees, order):
    """Write an order of the columns: each has the fewest neighbours among those not yet placed behind it.

    `degrees` counts a column's neighbours once for every row that both have; it is overwritten. Rows that are longer
    than `longest` count once and for all: their columns are neighbours of each other in any order.
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
            if indptr[row + 1] - indptr[row] > longest:
                continue
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
