"""Where the entries of L and U are: panels, their tables for kernels, and values of batches side by side.

Rows that have nearly the same columns are neighbours, and up to four of them make a *panel*: a dense block that stands
on one list of columns, those of L, the panel's own, and those of U.

Each entry of a panel holds a vector of samples, or one number where there is one matrix; kernels are written once for
both, `like` is a value of the type meant. Both do the same operations in the same order.

Values of panel P are those of its columns, one after the other, each with the panel's rows side by side. Its own
columns hold L below the diagonal (whose ones are not stored), U above, and the reciprocals of the pivots on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine import simd

PANEL = 4
"""Rows of a panel at most."""
GROUP = 4
"""Panels that are eliminated together at most: they fit into the second cache with a batch."""
BLOCK = 8
"""Panels of one matrix that are eliminated together at most, in a work block in the second cache."""
LINE = 64
"""Bytes of an entry that holds samples: a cache line, whatever the machine's vectors. Half of it costs as many index
operations, and takes up to twice as long for each sample."""


class Panels(NamedTuple):
    """Where the entries of L and U are. Rows and columns are numbered in the order of elimination.

    Attributes
    ----------
    first
        First row of every panel, and the number of rows, (panels + 1,) int32.
    column_ptr, columns
        The columns of every panel, ascending, (panels + 1,) int64 and int32.
    own
        How many of them are those of L, (panels,) int32; the panel's own follow.
    base
        The panel's first value, and the number of values, (panels + 1,) int64.
    left_ptr, left, back
        Every panel of L in a panel, ascending, and which of its columns is the first one that is not before this panel:
        (panels + 1,) int64, and int32.
    entry_ptr, source, target, column
        For every row, its entries: their numbers in the matrix and among the values, and their columns. (n + 1,) and
        (nnz,) int64, (nnz,) int32. A number q of an entry of a Hermitian matrix on the other side of the diagonal is
        given as -1 - q.
    after
        The panel behind the last one of each panel's supernode, (panels,) int32: those have the same columns behind.
    rows, order
        The matrix's row and column behind every one here, (n,) int32.
    signs
        Of symmetric matrices that are not positive definite, what sign each pivot should have, (n,) int8: 1, -1, or 0
        for any. Of others (0,).
    tasks
        The first panel of every task, and the number of panels, (tasks + 1,) int64. Threads share one matrix by tasks:
        subtrees of little work, and groups of the panels above them.
    half
        Whether the matrices are symmetric, and U alone is kept. Then `own` is 0, and `entry_ptr`, `source`, `target`
        and `column` are those of entries on the diagonal and above.
    definite
        Whether they are positive definite too: A = Uᵀ U, else A = Uᵀ D⁻¹ U.
    """

    first: Any
    column_ptr: Any
    columns: Any
    own: Any
    base: Any
    left_ptr: Any
    left: Any
    back: Any
    entry_ptr: Any
    source: Any
    target: Any
    column: Any
    after: Any
    rows: Any
    order: Any
    signs: Any
    tasks: Any
    half: bool
    definite: bool


COUNTS = Panels._fields.index("half")
"""Where `table_of` has the first number behind the addresses."""


def table_of(panels: Panels) -> Array:
    """Return the addresses of a structure's arrays, the numbers of panels, rows and tasks, and both flags, as int64.

    Numba takes a quarter of a microsecond for every array that it is passed: more than a small matrix needs. The arrays
    have to be kept.
    """
    *arrays, half, definite = panels
    numbers = (
        *(array.ctypes.data for array in arrays),
        len(panels.own),
        len(panels.rows),
        len(panels.tasks) - 1,
        half,
        definite,
    )
    return np.array(numbers, np.int64)


def width(batch: int, dtype: Any) -> int:
    """Return how many samples an entry of the factors holds."""
    return 1 if batch == 1 else LINE // np.dtype(dtype).itemsize


def by_sample(blocked: Array) -> Array:
    """Return (blocks, size, lanes) of the kernels as (blocks, size, lanes) of samples: of complex ones a copy.

    An entry's complex numbers are kept as all real parts, then all imaginary ones.
    """
    if blocked.dtype.kind != "c" or blocked.shape[2] == 1:
        return blocked
    parts = blocked.view(np.finfo(blocked.dtype).dtype).reshape(*blocked.shape[:2], 2, blocked.shape[2])
    samples = np.empty_like(blocked)
    samples.real, samples.imag = parts[:, :, 0], parts[:, :, 1]
    return samples


def side_by_side(samples: Array) -> Array:
    """Return what `by_sample` was given, C-contiguous."""
    samples = np.ascontiguousarray(samples)
    if samples.dtype.kind != "c" or samples.shape[2] == 1:
        return samples
    parts = np.stack([samples.real, samples.imag], axis=2)
    return parts.reshape(*samples.shape[:2], -1).view(samples.dtype)


# mypy: disable-error-code="no-untyped-def"


@simd.device
def pointers(table):
    """Return `Panels` of pointers from `table_of`, the number of panels, and of rows."""
    at = simd.pointer(table)
    panels = Panels(
        simd.address(at[0], np.int32(0)),
        simd.address(at[1], np.int64(0)),
        simd.address(at[2], np.int32(0)),
        simd.address(at[3], np.int32(0)),
        simd.address(at[4], np.int64(0)),
        simd.address(at[5], np.int64(0)),
        simd.address(at[6], np.int32(0)),
        simd.address(at[7], np.int32(0)),
        simd.address(at[8], np.int64(0)),
        simd.address(at[9], np.int64(0)),
        simd.address(at[10], np.int64(0)),
        simd.address(at[11], np.int32(0)),
        simd.address(at[12], np.int32(0)),
        simd.address(at[13], np.int32(0)),
        simd.address(at[14], np.int32(0)),
        simd.address(at[15], np.int8(0)),
        simd.address(at[16], np.int64(0)),
        at[COUNTS + 3] != 0,
        at[COUNTS + 4] != 0,
    )
    return panels, at[COUNTS], at[COUNTS + 1]
