"""Least keys of the rows or columns of a sparse matrix: a step of the sketches of `sparsebp.scan.fill_in`."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.threads import in_parts, team

PARTS = 16

# The functions below are compiled: their arguments are arrays.
# mypy: disable-error-code="no-untyped-def"


def row_minima(indptr: np.ndarray, indices: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """``out[i] = min of keys[j]`` over the entries (i, j); keys (n_columns, R), out (n_rows, R)."""
    _row_minima(team(), PARTS, indptr, indices, keys, out)


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
def _row_minima(team, parts, *args):
    in_parts(_row_minima_part, team, parts, args)


@numba.njit(**SERIAL)
def column_minima(indptr, indices, keys, out):
    """``out[j] = min of keys[i]`` over the entries (i, j); keys (n_rows, R), out (n_columns, R)."""
    out[:] = np.inf
    for i in range(len(indptr) - 1):
        found = keys[i]
        for k in range(indptr[i], indptr[i + 1]):
            least = out[indices[k]]
            for r in range(len(found)):
                least[r] = min(least[r], found[r])
