"""The structure of L and U for a given order of elimination: blocks, supernodes, panels.

Blocks are the unknowns of an elimination; supernodes are blocks that follow one another and have the same columns of U
and rows of L; panels are pieces of supernodes, `sparsebp.kernels.host.sparse.panels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.patterns.pattern import SparsityPattern

SPARE, FEW = 0.1, 2
"""Zeros for each value of the rows of a supernode that get columns of others, at most; and zeros that are too few to
matter, as in pairs of rows of a band.
"""
PIECES = 32
"""Tasks whose work would be that of the whole: so much, at most, has a subtree that one thread eliminates."""
SHORT = 25
"""Multiply-adds for each value of U, at most, of symmetric matrices whose panels are single rows: they are eliminated
column by column, twice as fast as by panels for 5, and as fast for 25."""
SMALL = 600_000
"""Multiply-adds of such a matrix at most: larger ones are shared by threads."""


class _Supernodes(NamedTuple):
    """Blocks and supernodes of an order.

    Attributes
    ----------
    starts
        The first block of every supernode, and the number of blocks.
    tail_ptr, tails
        The columns of U of every supernode behind its own.
    below_ptr, below
        The rows of L of every supernode below its own.
    linked
        Of all blocks but the last, whether L has an entry in the next one's row and U in its column.
    """

    starts: np.ndarray
    tail_ptr: np.ndarray
    tails: np.ndarray
    below_ptr: np.ndarray
    below: np.ndarray
    linked: np.ndarray


def lay_out(
    pattern: SparsityPattern, rows: np.ndarray, order: np.ndarray, heads: np.ndarray | None = None, half: bool = False
) -> tuple[int, int, Any]:
    """Return how many values L and U have, the operations that they take, and `Panels`.

    Parameters
    ----------
    pattern, rows, order
        The matrices' pattern, and the row and the column of every pivot: (n,) int32.
    heads
        Where blocks of rows and columns begin, if any are larger than one, and n.
    half
        For U alone: A = Uᵀ U.
    """
    structure, storage, n, nnz = kernels.on_host().elimination, kernels.on_host().panels, len(rows), pattern.nnz
    heads = np.arange(n + 1) if heads is None else heads
    place = np.empty(n, np.int32)
    place[order] = np.arange(n, dtype=np.int32)
    nodes = _supernodes(pattern, rows, place, heads, half or _is_symmetric(pattern, rows, order))
    single = half and _is_short(nodes, heads)
    nodes = nodes if single else _merged(nodes, heads)

    begins = heads[nodes.starts]  # the first row of every supernode
    within = np.arange(n) - np.repeat(begins[:-1], np.diff(begins))
    first = np.append(np.flatnonzero(within % (1 if single else storage.PANEL) == 0), n)
    sizes = np.diff(first)
    panel_ptr = np.searchsorted(first, begins)  # the first panel of every supernode
    node = np.repeat(np.arange(len(begins) - 1), np.diff(panel_ptr))
    left_ptr, left = structure.panels_left(panel_ptr, begins, first, nodes.below_ptr, nodes.below, heads)
    column_ptr, columns, own = structure.list_columns(
        first, node, begins, left_ptr, left, nodes.tail_ptr, nodes.tails, heads, half
    )

    base = running(np.diff(column_ptr) * sizes)
    kept = (nnz + n) // 2 if half else nnz
    entry_ptr, source, target = np.zeros(n + 1, np.int64), np.empty(kept, np.int64), np.empty(kept, np.int64)
    column, back = np.empty(kept, np.int32), np.empty(len(left), np.int32)
    structure.locate(pattern.indptr, pattern.indices, rows, place, first, column_ptr, columns, base, left_ptr, left,
                     half, np.empty(n, np.int64), entry_ptr, source, target, column, back)  # fmt: skip
    rest = np.diff(column_ptr) - own - sizes
    later = np.diff(column_ptr)[left] - back if half else rest[left] + sizes[left] / 2
    of_left = np.repeat(np.arange(len(sizes)), np.diff(left_ptr))
    work = np.bincount(of_left, sizes[of_left] * sizes[left] * later, len(sizes)) + sizes**2 * rest / 2
    tasks = structure.cut_tasks(left_ptr, left, first, work, work.sum() / PIECES, storage.PANEL, storage.BLOCK)
    panels = storage.Panels(
        first=first.astype(np.int32), column_ptr=column_ptr, columns=columns, own=own, base=base, left_ptr=left_ptr,
        left=left, back=back, entry_ptr=entry_ptr, source=source, target=target, column=column,
        after=panel_ptr[node + 1].astype(np.int32), rows=rows, order=order,
        signs=np.zeros(0, np.int8), tasks=tasks, half=half, definite=half,
    )  # fmt: skip
    panels = panels._replace(source=across(pattern, panels, source)) if half else panels
    return int(base[-1]), 2 * int(work.sum()), panels


def across(pattern: SparsityPattern, panels: Any, source: np.ndarray) -> np.ndarray:
    """Return the numbers of entries, -1 - q of those whose row is the column of the entry that is meant."""
    row = np.repeat(panels.rows, np.diff(panels.entry_ptr))
    return np.where(pattern.row_of_entry[source] == row, source, -1 - source)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``start … start + count - 1`` for every start, one behind the other."""
    return np.repeat(starts - running(counts)[:-1], counts) + np.arange(counts.sum())


def running(counts: np.ndarray) -> np.ndarray:
    """Return the running sum of counts, from 0."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _is_symmetric(pattern: SparsityPattern, rows: np.ndarray, order: np.ndarray) -> bool:
    """Say whether pivots are on the diagonal of a pattern that is its own transpose."""
    if rows is not order and not np.array_equal(rows, order):
        return False
    there = pattern.T
    return np.array_equal(there.indptr, pattern.indptr) and np.array_equal(there.indices, pattern.indices)


def _supernodes(
    pattern: SparsityPattern, rows: np.ndarray, place: np.ndarray, heads: np.ndarray, symmetric: bool
) -> _Supernodes:
    """Find the supernodes of a pattern of blocks, which are empty or full."""
    number, lengths = np.repeat(np.arange(len(heads) - 1), np.diff(heads)), np.diff(pattern.indptr)[rows]
    source = ranges(pattern.indptr[rows].astype(np.int64), lengths)
    indptr, indices = running(lengths)[heads], number[place[pattern.indices[source]]].astype(np.int32)
    if symmetric:
        structure = kernels.on_host().elimination
        parent = structure.parents(indptr, indices)
        if np.array_equal(structure.postorder(parent), np.arange(len(parent))):
            return _of_tree(indptr, indices, parent)
    return _of_rows(indptr, indices)


def _of_tree(indptr: np.ndarray, indices: np.ndarray, parent: np.ndarray) -> _Supernodes:
    """Find the supernodes of a symmetric pattern from its elimination tree, whose postorder it is in."""
    structure, n = kernels.on_host().elimination, len(parent)
    count = structure.column_counts(indptr, indices, parent)
    linked = parent[:-1] == np.arange(1, n)
    starts = _starts(linked & (count[1:] == count[:-1] - 1), n)
    ptr, tails = structure.tails_of_tree(indptr, indices, parent, count, starts)
    return _Supernodes(starts, ptr, tails, ptr, tails, linked)


def _of_rows(indptr: np.ndarray, indices: np.ndarray) -> _Supernodes:
    """Find the supernodes of any pattern from all entries of L and U.

    Row i + 1 has all columns of U that row i has if L has an entry in its column i, and L's rows likewise. So they are
    the same if there are as many.
    """
    structure, n = kernels.on_host().elimination, len(indptr) - 1
    ends, cuts, marks = np.zeros((n + 1, 2), np.int64), np.zeros(n, np.int64), np.full(n, -1, np.int64)
    found, row = np.empty(n + 16 * len(indices), np.int32), 0
    while (row := structure.fill_rows(row, indptr, indices, ends, cuts, marks, found)) < n:
        found = np.concatenate((found, np.empty(len(found) + n, np.int32)))
    right = ends[1:, 0] - ends[1:, 1]
    linked, below = structure.linked_rows(ends, found)
    starts = _starts(linked & (right[1:] == right[:-1] - 1) & (below[1:] == below[:-1] - 1), n)
    tail_ptr, tails, below_ptr, below = structure.tails_of_rows(ends, found, starts)
    return _Supernodes(starts, tail_ptr, tails, below_ptr, below, linked)


def _is_short(nodes: _Supernodes, heads: np.ndarray) -> bool:
    """Say whether a symmetric matrix is eliminated column by column, in panels of single rows."""
    begins = heads[nodes.starts]
    sizes, tails = np.diff(begins), np.diff(running(np.diff(heads)[nodes.tails])[nodes.tail_ptr])
    count = np.repeat(tails + begins[1:], sizes) - np.arange(begins[-1])
    return bool((count * (count - 1)).sum() <= 2 * min(SHORT * count.sum(), SMALL))


def _starts(joined: np.ndarray, n: int) -> np.ndarray:
    """Return where runs of blocks begin that are joined to the next one, and the number of blocks."""
    return np.concatenate(([0], np.flatnonzero(~joined) + 1, [n])) if n > 1 else np.arange(n + 1)


def _merged(nodes: _Supernodes, heads: np.ndarray) -> _Supernodes:
    """Return supernodes of which neighbours with nearly the same columns are one."""
    sizes = np.diff(heads)
    tails, below = (np.diff(running(sizes[blocks])[ptr]) for blocks, ptr in
                    ((nodes.tails, nodes.tail_ptr), (nodes.below, nodes.below_ptr)))  # fmt: skip
    linked, begins = nodes.linked[nodes.starts[1:-1] - 1], heads[nodes.starts]
    first = kernels.on_host().elimination.merge_supernodes(begins, tails, below, linked, SPARE, FEW)
    last = first[1:] - 1

    def of_last(ptr: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = np.diff(ptr)[last]
        return running(counts), blocks[ranges(ptr[last], counts)]

    ends = *of_last(nodes.tail_ptr, nodes.tails), *of_last(nodes.below_ptr, nodes.below)
    return _Supernodes(nodes.starts[first], *ends, nodes.linked)
