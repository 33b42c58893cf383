"""BLAS inside Numba functions: the matrix product of the library that SciPy brings along.

SciPy publishes the addresses of its BLAS functions for Cython (``scipy.linalg.cython_blas``). They are arguments here,
not constants, so that compiled code can be kept between runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import get_cython_function_address

from sparsebp.kernels.host.engine.parts import INNER_JIT
from sparsebp.kernels.host.engine.simd import intrinsic

_ARGUMENTS = 13


@cache
def gemm_address(dtype: np.dtype) -> int:
    """Return where ``sgemm`` or ``dgemm`` is."""
    return int(get_cython_function_address("scipy.linalg.cython_blas", "sgemm" if dtype.itemsize == 4 else "dgemm"))


@intrinsic
def _call(typingctx: Any, function: Any, a0: Any, a1: Any, a2: Any, a3: Any, a4: Any, a5: Any, a6: Any, a7: Any,
          a8: Any, a9: Any, a10: Any, a11: Any, a12: Any) -> Any:  # fmt: skip
    """Call a Fortran function at an address with the addresses of its arguments."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [pointer] * _ARGUMENTS)
        target = builder.inttoptr(args[0], signature.as_pointer())
        builder.call(target, [builder.inttoptr(arg, pointer) for arg in args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (_ARGUMENTS + 1)), codegen


@numba.njit(**INNER_JIT)
def gemm(function, words, constants, item, m, n, k, a, a_transposed, lda, b, b_transposed, ldb, added, c, ldc):  # type: ignore[no-untyped-def]
    """Compute C = A B, or C += A B if `added`, for row-major C (m, n).

    A is row-major (m, k), or the transpose of a row-major (k, m); B likewise. `a`, `b`, `c` are addresses, ``ld…`` the
    lengths of rows, `item` the bytes of a number. `constants` is the address of the numbers 1 and 0; `words`, eight of
    int32, is room for the arguments that Fortran takes by address, of each thread's own.
    """
    # Fortran's matrices are column-major: what it computes is Cᵀ = Bᵀ Aᵀ.
    words[0] = 84 if b_transposed else 78  # the letters T and N
    words[1] = 84 if a_transposed else 78
    words[2], words[3], words[4], words[5], words[6], words[7] = n, m, k, ldb, lda, ldc
    at = words.ctypes.data
    _call(
        function, at, at + 4, at + 8, at + 12, at + 16, constants, b, at + 20, a, at + 24,
        constants + (0 if added else item), c, at + 28,
    )  # fmt: skip
