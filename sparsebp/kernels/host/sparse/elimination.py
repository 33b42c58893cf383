"""The structure of the factors of a sparse matrix, on the host: elimination tree, fill, supernodes, panels.

A *block* is one row and column of the matrix, or some that are equal in every step of elimination; a *supernode* is a
run of blocks with the same columns of U and the same rows of L behind them. Where the pattern is symmetric and pivots
are on the diagonal, both are found from the elimination tree, in time about that of reading them; else row by row.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine.compile import SERIAL, lower_bound
from sparsebp.kernels.host.sparse.symbolic import sort

DENSE = 16
"""A row with an entry in one of this many columns, or more, is put in order by a pass over all columns."""

# The functions below are compiled: their arguments are index arrays and sizes.
# mypy: disable-error-code="no-untyped-def"

# ---- orders ----------------------------------------------------------------------------------------------------------


@numba.njit(**SERIAL)
def match_rows(indptr, indices, column_of, row_of, ahead, at, visited, stack):
    """Give each row a column of its own, where that is possible; return the number of a row without one, or -1.

    In each phase one search from every row without a column, no column in two of them: A. Pothen, C.-J. Fan, "Computing
    the Block Triangular Form of a Sparse Matrix", ACM Trans. Math. Softw. 16, 1990. All of (n,), int64: `column_of` and
    `row_of` are -1 at first, `ahead` is where each row begins, `visited` is 0; `at` and `stack` may hold anything.
    """
    for phase in range(1, len(column_of) + 2):
        left, grown = -1, False
        for root in range(len(column_of)):
            if column_of[root] >= 0:
                continue
            top, found = 0, False
            stack[0], at[root] = root, indptr[root]
            while top >= 0 and not found:
                i = stack[top]
                end = indptr[i + 1]
                while ahead[i] < end and not found:  # a free column: they only become fewer
                    j = np.int64(indices[ahead[i]])
                    ahead[i] += 1
                    found = row_of[j] < 0
                if found:
                    for k in range(top, -1, -1):
                        before = column_of[stack[k]]
                        column_of[stack[k]], row_of[j] = j, stack[k]
                        j = before
                    continue
                deeper = False
                while at[i] < end and not deeper:
                    j = np.int64(indices[at[i]])
                    at[i] += 1
                    deeper = visited[j] != phase
                if deeper:
                    visited[j] = phase
                    top += 1
                    stack[top] = row_of[j]
                    at[stack[top]] = indptr[stack[top]]
                else:
                    top -= 1
            if found:
                grown = True
            else:
                left = root
        if left < 0 or not grown:
            return left
    return -1


@numba.njit(**SERIAL)
def parents(indptr, indices):
    """Return the elimination tree of a symmetric pattern: each row's parent is the first one that takes a multiple of
    it; -1 of roots (J. Liu, "The role of elimination trees in sparse factorization", SIAM J. Matrix Anal. Appl. 11,
    1990, algorithm 4.2). Columns may be in any order, and more than once.
    """
    n = len(indptr) - 1
    parent, ancestor = np.full(n, -1), np.full(n, -1)
    for i in range(n):
        for q in range(indptr[i], indptr[i + 1]):
            k = np.int64(indices[q])
            while k != -1 and k < i:
                above = ancestor[k]
                ancestor[k] = i
                if above == -1:
                    parent[k] = i
                k = above
    return parent


@numba.njit(**SERIAL)
def postorder(parent):
    """Return an order with the same fill, in which rows come directly behind those that they need."""
    n = len(parent)
    size, place, found = np.ones(n, np.int64), np.zeros(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        if parent[i] >= 0:
            size[parent[i]] += size[i]
    end, free = n, np.empty(n, np.int64)
    for i in range(n - 1, -1, -1):  # a row is the last of its subtree, whose rows follow one another
        p = parent[i]
        if p < 0:
            place[i] = end - 1
            end -= size[i]
        else:
            place[i] = free[p]
            free[p] -= size[i]
        free[i] = place[i] - 1
        found[place[i]] = i
    return found


@numba.njit(**SERIAL)
def made_of_blocks(indptr, indices, head, sizes, marks):
    """Say whether rows are those of their heads, and hold all columns of a head or none; `sizes`: those of heads.

    `marks` are -1 at first, one a row.
    """
    for i in range(len(head)):
        begin, length, of_head = indptr[i], indptr[i + 1] - indptr[i], indptr[head[i]]
        if length != indptr[head[i] + 1] - of_head:
            return False
        if i != head[i]:
            for q in range(length):
                if indices[begin + q] != indices[of_head + q]:
                    return False
            continue
        for q in range(begin, begin + length):
            j = indices[q]
            if head[j] == j:
                marks[j] = i
                length -= sizes[j]
        if length != 0:
            return False
        for q in range(begin, indptr[i + 1]):
            if marks[head[indices[q]]] != i:
                return False
    return True


# ---- supernodes ------------------------------------------------------------------------------------------------------


@numba.njit(**SERIAL)
def column_counts(indptr, indices, parent):
    """Return how many rows every column of L has, the diagonal among them; the pattern is symmetric, in postorder.

    A column has those of its children, less what they share, which is counted at the least common ancestors of leaves
    of row subtrees: J. Gilbert, E. Ng, B. Peyton, "An efficient algorithm to compute row and column counts for sparse
    Cholesky factorization", SIAM J. Matrix Anal. Appl. 15, 1994.
    """
    n = len(parent)
    first, count = np.full(n, -1), np.zeros(n, np.int64)
    for k in range(n):
        j = k
        count[k] = first[j] == -1  # a leaf
        while j != -1 and first[j] == -1:
            first[j] = k
            j = parent[j]
    last, most, ancestor = np.full(n, -1), np.full(n, -1), np.arange(n)
    for j in range(n):
        if parent[j] != -1:
            count[parent[j]] -= 1
        for q in range(indptr[j], indptr[j + 1]):
            i = np.int64(indices[q])
            if i <= j or first[j] <= most[i]:  # not a leaf of the subtree of row i
                continue
            most[i] = first[j]
            before = last[i]
            last[i] = j
            count[j] += 1
            if before != -1:  # not the first leaf
                top = before
                while top != ancestor[top]:
                    top = ancestor[top]
                while before != top:
                    before, ancestor[before] = ancestor[before], top
                count[top] -= 1
        if parent[j] != -1:
            ancestor[j] = parent[j]
    for j in range(n):
        if parent[j] != -1:
            count[parent[j]] += count[j]
    return count


@numba.njit(**SERIAL)
def tails_of_tree(indptr, indices, parent, count, starts):
    """Return where every supernode's columns behind its own begin, and the columns, ascending, int32.

    They are those of its rows in the matrix, and those of the supernodes whose parent is in it.
    """
    nodes, n = len(starts) - 1, len(parent)
    ptr, node_of, marks = np.zeros(nodes + 1, np.int64), np.empty(n, np.int64), np.full(n, -1)
    child, sibling = np.full(nodes, -1), np.full(nodes, -1)
    for s in range(nodes):
        ptr[s + 1] = ptr[s] + count[starts[s + 1] - 1] - 1
        node_of[starts[s] : starts[s + 1]] = s
    found = np.empty(ptr[nodes], np.int32)
    for s in range(nodes):
        at, last = ptr[s], starts[s + 1] - 1
        for q in range(indptr[starts[s]], indptr[last + 1]):
            j = indices[q]
            if j > last and marks[j] != s:
                marks[j], found[at] = s, j
                at += 1
        c = child[s]
        while c != -1:
            for q in range(ptr[c], ptr[c + 1]):
                j = found[q]
                if j > last and marks[j] != s:
                    marks[j], found[at] = s, j
                    at += 1
            c = sibling[c]
        sort(found, ptr[s], at)
        if parent[last] != -1:
            above = node_of[parent[last]]
            sibling[s], child[above] = child[above], s
    return ptr, found


@numba.njit(**SERIAL)
def fill_rows(row, indptr, indices, ends, cuts, marks, found):
    """Find the columns of L + U row by row, from `row` on, as long as there is room; return the first row not done.

    A column j of row i has an entry if j is reached from one of the matrix through rows of U before i (J. Gilbert, T.
    Peierls, "Sparse partial pivoting in time proportional to arithmetic operations", SIAM J. Sci. Stat. Comput. 9,
    1988). A row of U is followed up to its first column whose entry of L is there too: behind it that column's row has
    all that this one has (S. Eisenstat, J. Liu, "Exploiting structural symmetry in a sparse partial pivoting code",
    SIAM J. Sci. Comput. 14, 1993).

    Parameters
    ----------
    row, indptr, indices
        Where to begin, and the pattern in the order of elimination; columns may be unsorted.
    ends
        (n + 1, 2) int64: where each row ends in `found`, and where its part of U begins; row 0 is before the first.
    cuts
        (n,) int64: up to where a row of U is followed.
    marks
        (n,) int64, the last row that met a column; -1 at first.
    found
        The columns, int32; the last ones may be those of an unfinished row.
    """
    size = len(indptr) - 1
    for i in range(row, size):
        begin = ends[i, 0]
        if begin + size >= len(found):  # the longest row might not fit, and one more
            return i
        at = begin
        marks[i], found[at] = i, i
        at += 1
        for q in range(indptr[i], indptr[i + 1]):
            j = indices[q]
            if marks[j] != i:
                marks[j], found[at] = i, j
                at += 1
        q = begin
        while q < at:
            k = found[q]
            if k < i:
                for u in range(ends[k + 1, 1], cuts[k]):
                    j = found[u]
                    if marks[j] != i:
                        marks[j], found[at] = i, j
                        at += 1
            q += 1
        if DENSE * (at - begin) < size:
            sort(found, begin, at)
        else:
            at = begin
            for j in range(size):
                found[at] = j
                at += marks[j] == i
        q = begin
        while found[q] < i:
            k = found[q]
            low, high = ends[k + 1, 1], ends[k + 1, 0]
            if cuts[k] == high:  # not cut yet
                low = lower_bound(found, low, high, i)
                if low < ends[k + 1, 0] and found[low] == i:
                    cuts[k] = low + 1
            q += 1
        ends[i + 1, 0], ends[i + 1, 1], cuts[i] = at, q + 1, at
    return size


@numba.njit(**SERIAL)
def linked_rows(ends, found):
    """Say of all rows but the last whether L has an entry in the next row and their column, and U across; and return
    how many entries of L are in every column. `ends` and `found` are those of `fill_rows`.
    """
    n = len(ends) - 1
    linked, below = np.zeros(max(n - 1, 0), np.bool_), np.zeros(n, np.int64)
    for i in range(n):
        begin, diagonal, end = ends[i, 0], ends[i + 1, 1] - 1, ends[i + 1, 0]
        for q in range(begin, diagonal):
            below[found[q]] += 1
        if i + 1 < n:
            before = ends[i + 2, 1] - 2  # the last entry of L in the next row
            linked[i] = diagonal + 1 < end and found[diagonal + 1] == i + 1 and before >= end and found[before] == i
    return linked, below


@numba.njit(**SERIAL)
def tails_of_rows(ends, found, starts):
    """Return where every supernode's columns of U behind its own begin, and the columns; and so the rows of L below.

    `ends` and `found` are those of `fill_rows`.
    """
    nodes, n = len(starts) - 1, len(ends) - 1
    ptr, below_ptr, node_of = np.zeros(nodes + 1, np.int64), np.zeros(nodes + 1, np.int64), np.full(n, -1)
    for s in range(nodes):
        last = starts[s + 1]
        ptr[s + 1] = ptr[s] + ends[last, 0] - ends[last, 1]
        node_of[last - 1] = s
    for i in range(n):
        for q in range(ends[i, 0], ends[i + 1, 1] - 1):
            s = node_of[found[q]]
            if s >= 0:
                below_ptr[s + 1] += 1
    for s in range(nodes):
        below_ptr[s + 1] += below_ptr[s]
    tails, below, at = np.empty(ptr[nodes], np.int32), np.empty(below_ptr[nodes], np.int32), below_ptr[:-1].copy()
    for s in range(nodes):
        last = starts[s + 1]
        tails[ptr[s] : ptr[s + 1]] = found[ends[last, 1] : ends[last, 0]]
    for i in range(n):
        for q in range(ends[i, 0], ends[i + 1, 1] - 1):
            s = node_of[found[q]]
            if s >= 0:
                below[at[s]] = i
                at[s] += 1
    return ptr, tails, below_ptr, below


@numba.njit(**SERIAL)
def merge_supernodes(begins, tails, below, linked, spare, few):
    """Return the first supernode of every run that becomes one, and their number.

    A supernode and the next one, which it is linked to, become one if few of its values are zeros then: its rows get
    the columns of the other one (C. Ashcraft, R. Grimes, "The influence of relaxed supernode partitions on the
    multifrontal method", ACM Trans. Math. Softw. 15, 1989). `begins`: the first row of every supernode; `tails` and
    `below`: how many columns of U and rows of L each has behind its own; `linked`: whether it is linked to the next.
    `spare`: zeros for each value of the rows that get columns, at most. `few` zeros are accepted in any case, unless
    one column is left.
    """
    count = len(begins) - 1
    found, runs, zeros, start = np.empty(count + 1, np.int64), 0, 0, 0
    for s in range(count):
        if s > 0:
            wide, own = begins[s] - begins[start], begins[s + 1] - begins[s]
            more = wide * (2 * own + tails[s] - tails[s - 1] + below[s] - below[s - 1])
            values = wide * (wide + 2 * own + tails[s] + below[s])
            if linked[s - 1] and zeros + more <= max(spare * values, few * (tails[s] > 1)):
                zeros += more
                continue
            zeros, start = 0, s
        found[runs] = s
        runs += 1
    found[runs] = count
    return found[: runs + 1].copy()


# ---- panels ----------------------------------------------------------------------------------------------------------


@numba.njit(**SERIAL)
def panels_left(panel_ptr, begins, first, below_ptr, below, heads):
    """Return where every panel's panels of L begin, and the panels, ascending: those of supernodes with a row below in
    it, and its own supernode's before it.

    Parameters
    ----------
    panel_ptr, begins
        The first panel and the first row of every supernode, and their numbers.
    first
        The first row of every panel.
    below_ptr, below, heads
        The blocks of L's rows of every supernode, and the first row of every block.
    """
    nodes, count, n = len(begins) - 1, len(first) - 1, begins[-1]
    panel_of, ptr, last = np.empty(n, np.int32), np.zeros(count + 1, np.int64), np.full(count, -1)
    for p in range(count):
        panel_of[first[p] : first[p + 1]] = p
    for s in range(nodes):
        some = panel_ptr[s + 1] - panel_ptr[s]
        for p in range(panel_ptr[s], panel_ptr[s + 1]):
            ptr[p + 1] += p - panel_ptr[s]
        for q in range(below_ptr[s], below_ptr[s + 1]):
            for p in range(panel_of[heads[below[q]]], panel_of[heads[below[q] + 1] - 1] + 1):
                if last[p] != s:
                    last[p] = s
                    ptr[p + 1] += some
    for p in range(count):
        ptr[p + 1] += ptr[p]
    left, at = np.empty(ptr[count], np.int32), ptr[:-1].copy()
    last[:] = -1
    for s in range(nodes):
        for p in range(panel_ptr[s], panel_ptr[s + 1]):
            for other in range(panel_ptr[s], p):
                left[at[p]] = other
                at[p] += 1
        for q in range(below_ptr[s], below_ptr[s + 1]):
            for p in range(panel_of[heads[below[q]]], panel_of[heads[below[q] + 1] - 1] + 1):
                if last[p] != s:
                    last[p] = s
                    for other in range(panel_ptr[s], panel_ptr[s + 1]):
                        left[at[p]] = other
                        at[p] += 1
    return ptr, left


@numba.njit(**SERIAL)
def list_columns(first, node, begins, left_ptr, left, tail_ptr, tails, heads, half):
    """Return where every panel's columns begin, the columns, and how many of them are those of L.

    They are the rows of its panels of L unless `half`, its supernode's from its own first row on, and the tail's.
    """
    count = len(first) - 1
    ptr, own, widths = np.zeros(count + 1, np.int64), np.zeros(count, np.int32), np.zeros(len(begins) - 1, np.int64)
    for s in range(len(begins) - 1):
        for q in range(tail_ptr[s], tail_ptr[s + 1]):
            widths[s] += heads[tails[q] + 1] - heads[tails[q]]
    for p in range(count):
        if not half:
            for q in range(left_ptr[p], left_ptr[p + 1]):
                own[p] += first[left[q] + 1] - first[left[q]]
        ptr[p + 1] = ptr[p] + own[p] + begins[node[p] + 1] - first[p] + widths[node[p]]
    columns, at = np.empty(ptr[count], np.int32), 0
    for p in range(count):
        if not half:
            for q in range(left_ptr[p], left_ptr[p + 1]):
                for j in range(first[left[q]], first[left[q] + 1]):
                    columns[at] = j
                    at += 1
        for j in range(first[p], begins[node[p] + 1]):
            columns[at] = j
            at += 1
        for q in range(tail_ptr[node[p]], tail_ptr[node[p] + 1]):
            for j in range(heads[tails[q]], heads[tails[q] + 1]):
                columns[at] = j
                at += 1
    return ptr, columns, own


@numba.njit(**SERIAL)
def cut_tasks(left_ptr, left, first, work, most, panel, group):
    """Return where tasks begin, and the number of panels: subtrees of at most so much work, or groups above them.

    A panel's parent is the first one that takes a multiple of it. Panels of a group are whole, `panel` rows.
    """
    count = len(first) - 1
    parent, total = np.full(count, -1), work.copy()
    for p in range(count):
        for q in range(left_ptr[p], left_ptr[p + 1]):
            if parent[left[q]] < 0:
                parent[left[q]] = p
    for p in range(count):
        if parent[p] >= 0:
            total[parent[p]] += total[p]
    bounds, tasks, p, light = np.empty(count + 1, np.int64), 0, 0, 0.0
    bounds[0] = 0
    while p < count:
        if total[p] > most:
            end = p + 1
            while (end < count and end - p < group and total[end] > most
                   and first[end + 1] - first[p] == (end + 1 - p) * panel):  # fmt: skip
                end += 1
            if light > 0:  # subtrees that have been collected
                tasks, light = tasks + 1, 0.0
                bounds[tasks] = p
            tasks, p = tasks + 1, end
            bounds[tasks] = p
            continue
        begin = p
        while parent[p] >= 0 and total[parent[p]] <= most:  # to the root of the subtree
            p = parent[p]
        if light > 0 and light + total[p] > most:
            tasks, light = tasks + 1, 0.0
            bounds[tasks] = begin
        light, p = light + total[p] + 1.0, p + 1
    if light > 0:
        tasks += 1
        bounds[tasks] = count
    return bounds[: tasks + 1].copy()


@numba.njit(**SERIAL)
def locate(indptr, indices, rows, place, first, column_ptr, columns, base, left_ptr, left, half,
           slot, entry_ptr, source, target, column, back):  # fmt: skip
    """Write `Panels`' fields of these names; `place`: the number of every column of the matrix; `slot`: (n,) int64."""
    e, above = 0, np.arange(len(indices) if half else 0)
    if half:  # rows ascend, so a row's entries behind the diagonal are met in order by those of its column
        for i in range(len(rows)):
            for q in range(indptr[i], indptr[i + 1]):
                j = indices[q]
                if j < i:
                    above[q] = slot[j]
                    slot[j] += 1
                elif j == i:
                    slot[i] = q + 1
    for p in range(len(first) - 1):
        row, begin, end = np.int64(first[p]), column_ptr[p], column_ptr[p + 1]
        r = first[p + 1] - row
        for c in range(begin, end):
            slot[columns[c]] = base[p] + (c - begin) * r
        for i in range(row, row + r):
            for q in range(indptr[rows[i]], indptr[rows[i] + 1]):
                j = place[indices[q]]
                if not half or j >= i:
                    source[e], target[e], column[e] = above[q] if half else q, slot[j] + i - row, j
                    e += 1
            entry_ptr[i + 1] = e
        for q in range(left_ptr[p], left_ptr[p + 1]):
            begin = column_ptr[left[q]]
            back[q] = lower_bound(columns, begin, column_ptr[left[q] + 1], row) - begin
