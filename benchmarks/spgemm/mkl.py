"""Sparse products of Intel MKL through its C interface: anew each time, or values alone on a structure that it keeps.

MKL's inspector-executor routines take the structure and the values apart: ``mkl_sparse_sp2m`` with
``SPARSE_STAGE_FULL_MULT_NO_VAL`` makes the structure of C, and ``SPARSE_STAGE_FINALIZE_MULT`` then computes values into
it, any number of times. That second stage is what a plan of ours does, and the strongest peer that there is for it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.errors import MissingDependencyError, SparseBPError

_GENERAL, _AS_IT_IS = 20, 10  # SPARSE_MATRIX_TYPE_GENERAL, SPARSE_OPERATION_NON_TRANSPOSE
_FULL, _VALUES, _STRUCTURE = 90, 92, 93  # SPARSE_STAGE_FULL_MULT, _FINALIZE_MULT, _FULL_MULT_NO_VAL


class _Description(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int))


class MklProduct:
    """The product of two CSR arrays of float32 with 4-byte indices, in MKL.

    Parameters
    ----------
    a, b
        SciPy CSR arrays.

    Raises
    ------
    MissingDependencyError
        MKL is not installed.
    SparseBPError
        MKL refuses the matrices.
    """

    def __init__(self, a: Any, b: Any) -> None:
        library = load()
        if library is None:
            raise MissingDependencyError(
                "MKL is not installed, and this measures it", remedy="Install the extra: pip install 'sparsebp[peers]'"
            )
        self._mkl = library
        self.shape = (a.shape[0], b.shape[1])
        self._kept: list[Any] = []  # MKL reads the caller's arrays
        self._handles = [self._matrix(a), self._matrix(b), ctypes.c_void_p()]
        self._multiply(_STRUCTURE, self._handles[2])
        self.values()

    def fresh(self) -> None:
        """Multiply as if for the first time, structure and values, and drop the result."""
        result = ctypes.c_void_p()
        self._multiply(_FULL, result)
        self._mkl.mkl_sparse_destroy(result)

    def values(self) -> None:
        """Compute the values into the kept structure."""
        self._multiply(_VALUES, self._handles[2])

    def result(self) -> Any:
        """Return a copy of the kept product as a SciPy CSR array (columns as MKL left them, unsorted)."""
        import scipy.sparse as sp

        numbers = [ctypes.c_int() for _ in range(3)]
        begin, end, columns, values = arrays = [ctypes.c_void_p() for _ in range(4)]
        pointers = [ctypes.byref(item) for item in (*numbers, *arrays)]
        self._check(self._mkl.mkl_sparse_s_export_csr(self._handles[2], *pointers))
        rows = self.shape[0]
        indptr = np.concatenate(([0], _array(end, ctypes.c_int, rows))).astype(np.int32)
        if not np.array_equal(indptr[:-1], _array(begin, ctypes.c_int, rows)):
            raise SparseBPError("MKL's product has gaps between its rows", remedy="Use another version of MKL")
        nnz = int(indptr[-1])
        parts = (_array(values, ctypes.c_float, nnz), _array(columns, ctypes.c_int, nnz), indptr)
        return sp.csr_array(parts, shape=self.shape)

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):
            if handle:
                self._mkl.mkl_sparse_destroy(handle)

    def _matrix(self, matrix: Any) -> ctypes.c_void_p:
        indptr, indices = (np.ascontiguousarray(x, dtype=np.int32) for x in (matrix.indptr, matrix.indices))
        data = np.ascontiguousarray(matrix.data, dtype=np.float32)
        self._kept += [indptr, indices, data]
        handle = ctypes.c_void_p()
        begin = indptr.ctypes.data
        addresses = [ctypes.c_void_p(p) for p in (begin, begin + 4, indices.ctypes.data, data.ctypes.data)]
        status = self._mkl.mkl_sparse_s_create_csr(
            ctypes.byref(handle), 0, *map(ctypes.c_int, matrix.shape), *addresses
        )
        self._check(status)
        return handle

    def _multiply(self, stage: int, into: ctypes.c_void_p) -> None:
        plain = _Description(_GENERAL, 0, 0)
        a, b = self._handles[:2]
        status = self._mkl.mkl_sparse_sp2m(_AS_IT_IS, plain, a, _AS_IT_IS, plain, b, stage, ctypes.byref(into))
        self._check(status)

    def _check(self, status: int) -> None:
        if status:
            raise SparseBPError("MKL refused a sparse product", expected="status 0", got=status)


def _array(pointer: ctypes.c_void_p, kind: Any, length: int) -> np.ndarray:
    if length == 0:
        return np.empty(0, kind)
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (length,)).copy()


@cache
def load() -> Any:
    """Return MKL's single dynamic library, from the package ``mkl`` or else from where the system looks; None without.

    Its worker threads spin for 10 ms after a product, not for the usual 200: by the next side's turn they sleep.
    """
    os.environ.setdefault("KMP_BLOCKTIME", "10")
    path = ctypes.util.find_library("mkl_rt")
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libmkl_rt.so"):
            path = str(Path(str(file.locate())).resolve())
    try:
        return ctypes.CDLL(path) if path else None
    except OSError:
        return None
