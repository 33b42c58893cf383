"""BLAS inside Numba functions: the matrix products of the library that SciPy brings along, or NumPy.

SciPy publishes the addresses of its BLAS functions for Cython (``scipy.linalg.cython_blas``). The wheels of NumPy have
an OpenBLAS of their own; where it is the newer of the two, its functions are taken, since releases differ much in speed
(thin matrices on AVX2, 0.3.31 against 0.3.30: 1.2 to 1.8 times). Its integers have 64 bits, those of SciPy's 32: they
are passed by address, of 64 bits, of which SciPy's reads the lower half. The functions' addresses are arguments here,
not constants, so that compiled code can be kept between runs.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import get_cython_function_address
from threadpoolctl import threadpool_info

from sparsebp.kernels.host.engine.parts import INNER_JIT
from sparsebp.kernels.host.engine.simd import intrinsic

_constants: list[np.ndarray] = []


@cache
def blas_of(dtype: np.dtype) -> tuple[int, int, int, int]:
    """Return the addresses of ``gemm`` and ``gemv``, that of the numbers 1 and 0, and the bytes of a number."""
    letter = "s" if dtype.itemsize == 4 else "d"
    _constants.append(np.array([1, 0], dtype))
    gemm, gemv = (_address(letter + name) for name in _FUNCTIONS)
    return gemm, gemv, _constants[-1].ctypes.data, dtype.itemsize


def _address(name: str) -> int:
    """Return the address of a function of the newer library."""
    of_scipy = int(get_cython_function_address("scipy.linalg.cython_blas", name))
    library = _library()
    if is_numpys():
        function = getattr(ctypes.CDLL(library["filepath"]), f"scipy_{name}_64_", None)
        return of_scipy if function is None else ctypes.cast(function, ctypes.c_void_p).value or of_scipy
    return of_scipy


@cache
def is_numpys() -> bool:
    """Return whether the BLAS is the one that NumPy brings along and computes with itself."""
    return Path(_library()["filepath"]).name.startswith(_OF_NUMPY)


@cache
def has_small_kernels() -> bool:
    """Return whether the BLAS has kernels for small products that do not pack: OpenBLAS for AVX-512."""
    return _library()["architecture"] in {"SkylakeX", "Cooperlake", "SapphireRapids"}


_OF_NUMPY, _OF_SCIPY = "libscipy_openblas64_", "libscipy_openblas-"


@cache
def _library() -> dict[str, str]:
    """Return what is known of the library whose functions are taken: of the two wheels' the newer one."""
    get_cython_function_address("scipy.linalg.cython_blas", "sgemm")  # loads SciPy's
    found = {name: info for info in threadpool_info() for name in (_OF_NUMPY, _OF_SCIPY)
             if Path(info["filepath"]).name.startswith(name)}  # fmt: skip
    usable = [name for name in (_OF_SCIPY, _OF_NUMPY) if name in found and sys.byteorder == "little"]
    newest = max(usable, key=lambda name: _release(found[name])) if _OF_SCIPY in usable else None
    return {"filepath": "", "architecture": ""} if newest is None else found[newest]


def _release(info: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in str(info.get("version")).split(".") if part.isdigit())


_FUNCTIONS = {"gemm": "wwwwwaawawaaw", "gemv": "wwwaawawaaw"}
"""Of each argument, whether it is given as a word, of which Fortran takes the address, or as an address."""


def _fortran(name: str) -> Any:
    """Return a function ``(address of the Fortran function, *arguments)`` for compiled code."""
    kinds = _FUNCTIONS[name]

    @intrinsic
    def call(typingctx: Any, function: Any, *given: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            byte = ir.IntType(8).as_pointer()
            places = []
            for kind, value, given_type in zip(kinds, cgutils.unpack_tuple(builder, args[1]), given, strict=True):
                if kind == "a":
                    places.append(builder.inttoptr(value, byte))
                else:
                    word = context.cast(builder, value, given_type, types.int64)
                    places.append(builder.bitcast(cgutils.alloca_once_value(builder, word), byte))
            signature = ir.FunctionType(ir.VoidType(), [byte] * len(kinds))
            builder.call(builder.inttoptr(args[0], signature.as_pointer()), places)
            return context.get_dummy_value()

        return types.void(function, types.StarArgTuple.from_types(given)), codegen

    return call


_gemm, _gemv = map(_fortran, _FUNCTIONS)
_NO, _TURNED = 78, 84  # the letters N and T

# The functions below are compiled: their arguments are sizes and addresses.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_JIT)
def gemm(blas, m, n, k, a, a_turned, lda, b, b_turned, ldb, added, c, ldc):
    """Compute C = A B, or C += A B if `added`, for row-major C (m, n).

    A is row-major (m, k), or the transpose of a row-major (k, m); B likewise. `a`, `b`, `c` are addresses, ``ld…`` the
    lengths of rows; `blas` is what `blas_of` returns.
    """
    # Fortran's matrices are column-major: what it computes is Cᵀ = Bᵀ Aᵀ.
    left, right, one = _TURNED if b_turned else _NO, _TURNED if a_turned else _NO, blas[2]
    before = one if added else one + blas[3]
    _gemm(blas[0], left, right, n, m, k, one, b, ldb, a, lda, before, c, ldc)


@numba.njit(**INNER_JIT)
def product(blas, m, n, k, a, a_turned, lda, b, b_turned, ldb, c, ldc):
    """Compute C = A B as `gemm`; a row or a column by the library's function for vectors, which is faster."""
    if m > 1 and n > 1:
        gemm(blas, m, n, k, a, a_turned, lda, b, b_turned, ldb, False, c, ldc)
        return
    if n == 1:
        matrix, turned, rows, length = a, a_turned, m, lda
        vector, apart, out_apart = b, 1 if b_turned else ldb, ldc
    else:
        matrix, turned, rows, length = b, not b_turned, n, ldb
        vector, apart, out_apart = a, lda if a_turned else 1, 1
    height, width = (rows, k) if turned else (k, rows)
    letter, one = _NO if turned else _TURNED, blas[2]
    _gemv(blas[1], letter, height, width, one, matrix, length, vector, apart, one + blas[3], c, out_apart)
