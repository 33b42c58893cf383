"""The entry points of cuBLAS that the package calls itself, as its documentation describes them; column-major.

`library` takes the place of ``ctypes.CDLL("libcublas.so.13")``. It refuses in a capture what cuBLAS refuses: a handle
whose workspace nobody has set would allocate one. A handle works on the device that it was created on.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from strict_cupy.device import DEVICE, current_device

_SUCCESS, _NOT_INITIALIZED, _INVALID_VALUE, _EXECUTION_FAILED = 0, 1, 7, 13
_TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float64)}  # cudaDataType
_COMPUTES = {68: np.dtype(np.float32), 70: np.dtype(np.float64), 77: np.dtype(np.float32)}  # cublasComputeType_t


class _Handle:
    def __init__(self) -> None:
        self.stream, self.workspace, self.device = 0, 0, current_device()


class Library:
    """cuBLAS."""

    def __init__(self) -> None:
        self._handles: dict[int, _Handle] = {}
        self._made = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        self._made += 1
        number = 0xC0DE + self._made
        self._handles[number] = _Handle()
        handle._obj.value = number
        return _SUCCESS

    def cublasDestroy_v2(self, handle: Any) -> int:
        return _SUCCESS if self._handles.pop(handle.value, None) else _NOT_INITIALIZED

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        """Set the stream, and with it the workspace back to cuBLAS's own."""
        found = self._handles[handle.value]
        found.stream, found.workspace = stream.value or 0, 0
        return _SUCCESS

    def cublasSetWorkspace_v2(self, handle: Any, workspace: Any, size: Any) -> int:
        """Set the workspace, of at least 256-byte alignment."""
        if not workspace.value or workspace.value % 256:
            return _INVALID_VALUE
        self._handles[handle.value].workspace = size.value
        return _SUCCESS

    def cublasGemmEx(
        self, handle: Any, ta: int, tb: int, m: int, n: int, k: int, alpha: Any, a: Any, ka: int, lda: int,
        b: Any, kb: int, ldb: int, beta: Any, c: Any, kc: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        """Set C to alpha·op(A)·op(B) + beta·C."""
        return self._products("cublasGemmEx", handle, ta, tb, m, n, k, alpha, (a, ka, lda, 0), (b, kb, ldb, 0), beta,
                              (c, kc, ldc, 0), 1, compute)  # fmt: skip

    def cublasGemmStridedBatchedEx(
        self, handle: Any, ta: int, tb: int, m: int, n: int, k: int, alpha: Any, a: Any, ka: int, lda: int, sa: Any,
        b: Any, kb: int, ldb: int, sb: Any, beta: Any, c: Any, kc: int, ldc: int, sc: Any, count: int, compute: int,
        algorithm: int,
    ) -> int:  # fmt: skip
        """Do so for a batch."""
        return self._products(
            "cublasGemmStridedBatchedEx", handle, ta, tb, m, n, k, alpha, (a, ka, lda, sa.value),
            (b, kb, ldb, sb.value), beta, (c, kc, ldc, sc.value), count, compute,
        )  # fmt: skip

    def _products(
        self, name: str, handle: Any, ta: int, tb: int, m: int, n: int, k: int, alpha: Any, a: tuple[Any, ...],
        b: tuple[Any, ...], beta: Any, c: tuple[Any, ...], count: int, compute: int,
    ) -> int:  # fmt: skip
        found = self._handles.get(handle.value)
        if found is None:
            return _NOT_INITIALIZED
        if found.device != current_device():
            return _EXECUTION_FAILED
        if found.stream in DEVICE.captures and not found.workspace:
            return _NOT_INITIALIZED
        dtype = _TYPES[c[1]]
        wrong = (
            a[1] != c[1] or b[1] != c[1] or _COMPUTES[compute] != dtype or min(m, n, k) < 0
            or a[2] < max(1, k if ta else m) or b[2] < max(1, n if tb else k) or c[2] < max(1, m)
        )  # fmt: skip
        if wrong:
            return _INVALID_VALUE
        left = [_matrix(a, i, *((k, m) if ta else (m, k)), dtype) for i in range(count)]
        right = [_matrix(b, i, *((n, k) if tb else (k, n)), dtype) for i in range(count)]
        result = [_matrix(c, i, m, n, dtype) for i in range(count)]
        one, zero = dtype.type(alpha._obj.value), dtype.type(beta._obj.value)

        def run() -> None:
            with np.errstate(all="ignore"):
                for x, y, out in zip(left, right, result, strict=True):
                    product = one * ((x.T if ta else x) @ (y.T if tb else y))
                    out[...] = product if zero == 0 else product + zero * out

        DEVICE.submit(run, found.stream, "kernel", name)
        return _SUCCESS


def _matrix(operand: tuple[Any, ...], number: int, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """Return the host's view of a column-major matrix of a batch."""
    pointer, _, leading, stride = operand
    count = (columns - 1) * leading + rows if rows and columns else 0
    address = (pointer.value or 0) + number * stride * dtype.itemsize
    buffer = (ctypes.c_char * (max(count, 1) * dtype.itemsize)).from_address(address)
    return np.ndarray((rows, columns), dtype, buffer, strides=(dtype.itemsize, leading * dtype.itemsize))  # type: ignore[call-overload]


LIBRARY = Library()
