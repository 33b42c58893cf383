"""Cohen's sketches, in Numba: the least random keys that a row or column of a product of patterns reaches.

E. Cohen, "Structure prediction and jump-start in sparse matrix multiplication", J. Comb. Optim. 2 (1998). Give every
column a key; a row's least key among its entries, carried through the factors of a product one after the other, is the
least key among the entries of the product's row, at the cost of reading the factors alone.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.threads import in_parts, team

# The functions below are compiled: their arguments are index arrays and keys.
# mypy: disable-error-code="no-untyped-def"

PARTS = 16


@numba.njit(**INNER_SERIAL)
def _row_minima_part(part, indptr, indices, keys, out):
    rows = len(indptr) - 1
    for i in range(rows * part // PARTS, rows * (part + 1) // PARTS):
        least = out[i]
        least[:] = np.inf
        for k in range(indptr[i], indptr[i + 1]):
            found = keys[indices[k]]
            for r in range(len(least)):
                least[r] = min(least[r], found[r])


@numba.njit(**SERIAL)
def _row_minima_parallel(team, parts, *args):
    in_parts(_row_minima_part, team, parts, args)


def row_minima(indptr, indices, keys, out):
    """``out[i] = min of keys[j]`` over the entries (i, j). keys (n_columns, R) float32; out (n_rows, R), written."""
    _row_minima_parallel(team(), PARTS, indptr, indices, keys, out)


@numba.njit(**SERIAL)
def column_minima(indptr, indices, keys, out):
    """``out[j] = min of keys[i]`` over the entries (i, j). keys (n_rows, R) float32; out (n_columns, R), written."""
    out[:] = np.inf
    for i in range(len(indptr) - 1):
        found = keys[i]
        for k in range(indptr[i], indptr[i + 1]):
            least = out[indices[k]]
            for r in range(len(found)):
                least[r] = min(least[r], found[r])
