"""Dense products on the host: large ones on the kernels' threads, many of one size, stacks of small blocks.

Three things make them faster than NumPy's, and results the same for every number of threads:

- Small products have kernels of their own in OpenBLAS for AVX-512, which do not copy their operands first (Goto and van
  de Geijn's packing). A large matrix in blocks is read once, without that copy. Where a BLAS has none, it is left to
  pack large parts: in small blocks it reached half the speed there.
- The large matrix is cut along its outer axis, always alike. So the same thread meets the same rows of a weight in
  forward, input gradient and update: they stay in its cache, and do not wander to and fro between two.
- The threads are those of the other kernels. A library's own go on spinning after each product, and those that are
  woken next wait for their cores.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import get_cython_function_address
from threadpoolctl import threadpool_info

from sparsebp.core import threads
from sparsebp.core.check import Array, UpdateRule
from sparsebp.core.host_pool import empty
from sparsebp.kernels.checks import check_update
from sparsebp.kernels.host.dense.blocks import (
    matvec_of_block,
    reduce_matrices,
    reduce_vectors,
    run_chains,
    shared_rows,
    tile,
)
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, MAX_PARTS, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import intrinsic
from sparsebp.kernels.host.engine.threads import atomic_exchange, atomic_store, parallel, split, team, team_for
from sparsebp.kernels.host.engine.tiles import TURNED, gemm_of
from sparsebp.kernels.host.optim import CHUNK, add_chunks, chunk_rows, rule_address, square_sum, update_range

_FAST = 4  # multiply-adds of a BLAS in the time of one of another kernel


# BLAS inside Numba functions: the matrix products of the library that SciPy brings along, or NumPy.
#
# SciPy publishes the addresses of its BLAS functions for Cython (``scipy.linalg.cython_blas``). The wheels of NumPy
# have their OpenBLAS; if it is the newer of the two, its functions are used, since releases differ much
# in speed (thin matrices on AVX2, 0.3.31 against 0.3.30: 1.2 to 1.8 times). Its integers have 64 bits, those of SciPy's
# 32: they are passed by address, of 64 bits, of which SciPy's reads the lower half. The functions' addresses are
# arguments here, not constants, so that compiled code can be kept between runs.

_constants: list[np.ndarray] = []


@cache
def blas_of(dtype: np.dtype, alone: bool = False) -> tuple[int, int, int, int, int]:
    """Return the addresses of ``gemm``, ``gemv`` and the numbers 1 and 0, and the bytes of a number.

    Last the address of our own ``gemm`` if it is the faster one, else 0; `alone`: only the library's, always.
    """
    letter = "s" if dtype.itemsize == 4 else "d"
    _constants.append(np.array([1, 0], dtype))
    gemm, gemv = (_address(letter + name) for name in _FUNCTIONS)
    own = gemm_of(dtype) if not alone and simd.VECTOR_BYTES == 64 and _architecture() in {"Haswell", "Zen"} else 0
    return gemm, gemv, _constants[-1].ctypes.data, dtype.itemsize, own


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
    return _architecture() in {"SkylakeX", "Cooperlake", "SapphireRapids"}


def _architecture() -> str:
    """Return which machines the BLAS uses the vectors of."""
    return str(_library()["architecture"])


_OF_NUMPY, _OF_SCIPY = "libscipy_openblas64_", "libscipy_openblas-"


@cache
def _library() -> dict[str, str]:
    """Return the description of the library that is used: the newer one of the two wheels'."""
    get_cython_function_address("scipy.linalg.cython_blas", "sgemm")  # loads SciPy's
    found = {name: info for info in threadpool_info() for name in (_OF_NUMPY, _OF_SCIPY)
             if Path(info["filepath"]).name.startswith(name)}  # fmt: skip
    usable = [name for name in (_OF_SCIPY, _OF_NUMPY) if name in found and sys.byteorder == "little"]
    newest = max(usable, key=lambda name: _release(found[name])) if _OF_SCIPY in usable else None
    for info in found.values():
        _map_buffers(info["filepath"])
    return {"filepath": "", "architecture": ""} if newest is None else found[newest]


_BUFFER_BYTES, _POPULATE_READ = 1 << 22, 22
"""Bytes of a buffer of OpenBLAS that packed operands fill at most, roughly; Linux' ``MADV_POPULATE_READ``."""


def _map_buffers(path: str) -> None:
    """Map the first pages of the buffers in which OpenBLAS packs operands, one for each thread of the kernels.

    Its kernels prefetch beyond what they packed. Where the next page was never touched, each prefetch looks for it in
    vain: in a virtual machine, products of 3072 rows took 2.4 times as long, until a larger one had touched the page.
    Pages that are read alone share the system's page of zeros, so this takes no memory.
    """
    library = ctypes.CDLL(path)
    if sys.platform != "linux" or not hasattr(library, "blas_memory_alloc"):
        return
    take, give_back, advise = library.blas_memory_alloc, library.blas_memory_free, ctypes.CDLL(None).madvise
    take.restype = ctypes.c_void_p
    give_back.argtypes, advise.argtypes = (ctypes.c_void_p,), (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    buffers = [take(0) for _ in range(min(threads.most_threads(), MAX_PARTS))]  # kept for later products
    for buffer in buffers:
        advise(buffer, _BUFFER_BYTES, _POPULATE_READ)  # a system older than 5.14 refuses, and nothing is lost
        give_back(buffer)


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
_NO = 78  # the letter N
LEAST_OWN = 1 << 15
"""Multiply-adds, and a vector of columns, from which `gemm_of` is faster than a BLAS with half as long vectors."""

# The functions below are compiled: their arguments are sizes and addresses.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_JIT)
def gemm(blas, m, n, k, a, a_turned, lda, b, b_turned, ldb, added, c, ldc):
    """Compute C = A B, or C += A B if `added`, for row-major C (m, n).

    A is row-major (m, k), or the transpose of a row-major (k, m); B likewise. `a`, `b`, `c` are addresses, ``ld…`` the
    lengths of rows; `blas` from `blas_of`.
    """
    # Fortran's matrices are column-major: it computes Cᵀ = Bᵀ Aᵀ.
    left, right, one = TURNED if b_turned else _NO, TURNED if a_turned else _NO, blas[2]
    before = one if added else one + blas[3]
    own = blas[4] != 0 and n * blas[3] >= simd.VECTOR_BYTES and m * n * k >= LEAST_OWN
    _gemm(blas[4] if own else blas[0], left, right, n, m, k, one, b, ldb, a, lda, before, c, ldc)


@numba.njit(**INNER_JIT)
def product(blas, m, n, k, a, a_turned, lda, b, b_turned, ldb, added, c, ldc):
    """Compute C = A B as `gemm`; a row or a column by the library's function for vectors, which is faster."""
    if m > 1 and n > 1:
        gemm(blas, m, n, k, a, a_turned, lda, b, b_turned, ldb, added, c, ldc)
        return
    if n == 1:
        matrix, turned, rows, length = a, a_turned, m, lda
        vector, apart, out_apart = b, 1 if b_turned else ldb, ldc
    else:
        matrix, turned, rows, length = b, not b_turned, n, ldb
        vector, apart, out_apart = a, lda if a_turned else 1, 1
    height, width = (rows, k) if turned else (k, rows)
    letter, one = _NO if turned else TURNED, blas[2]
    before = one if added else one + blas[3]
    _gemv(blas[1], letter, height, width, one, matrix, length, vector, apart, before, c, out_apart)


SMALL = 1_000_000
"""Multiply-adds up to which OpenBLAS does not pack."""
THIN = 64
"""Length of the thin matrices' common axis up to which a product is cut into small ones: beyond, packing pays."""
_INNER, _INNER_THIN = 512, 32  # numbers of a block's rows, and the thin axis up to which they are as many
_MOST_ROWS = 256
_LEAST_ROWS = 8  # of a block; below that it is not worth its call
_BLOCK_BYTES = 1 << 18  # of the gradient that an update takes at once: a quarter of a core's second cache
_PART = 1 << 19  # multiply-adds that one part should hold, some 10 microseconds
_SUMS = ((32, 1 << 19), (256, 1 << 21))
"""The longest thin axis and the smallest large matrix for which a cut along k is worth its partial results."""
_LONG, _FEW_SUMS, _SUM_NUMBERS = 800, 4, 1 << 19
"""The length along k of parts that pack, and the number of such parts, from which their partial results cost less than
packing a large matrix for each part of the other axis; the numbers of one result up to which that is so."""
_PACKED_PART, _PACKED_HALF, _PACKED_ROWS = 1 << 22, 1 << 20, 64
"""The same, and rows, where packing has to pay; halves are worth it earlier."""
_MAX_PARTS, _MAX_SUMS = 16, 8
_SUM_PART = 1 << 14

M, N, K, LDA, LDB, LDC, A_TRANSPOSED, B_TRANSPOSED, OUTER, INNER, PARTS, STEP, ROWS, WIDTH, ITEM = range(15)
"""Places in a product's description: the sizes; the lengths of rows in memory, and whether they are the
matrix's columns; the `Plan`; the bytes of a number."""


class Plan(NamedTuple):
    """How a product is cut: all that decides about the rounding, and it depends on shapes alone.

    Attributes
    ----------
    outer, inner
        The large matrix's axes, 0 for m, 1 for n, 2 for k.
    parts
        Parts along the outer axis; those along k each have a partial result, added afterwards.
    step
        Rows of the large matrix that belong together: parts begin at multiples of it.
    rows, width
        A block of the large matrix.
    """

    outer: int
    inner: int
    parts: int
    step: int
    rows: int
    width: int


@lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, itemsize: int, a_transposed: bool, b_transposed: bool, small: bool) -> Plan:
    """Return how C (m, n) = A (m, k) B (k, n) is cut; `small`: whether the BLAS has kernels for small products."""
    largest = max(m * n, m * k, k * n)
    if m * n == largest:
        outer, inner = M, N
    elif k * n == largest:
        outer, inner = (N, K) if b_transposed else (K, N)
    else:
        outer, inner = (K, M) if a_transposed else (M, K)
    sizes = (m, n, k)
    thin = sizes[3 - outer - inner]
    result = (outer, inner) == (M, N) and n <= CHUNK  # a gradient of weights: its blocks also go into an update
    packed = thin > THIN or not (small or result)
    long = outer == K and k >= _FEW_SUMS * _LONG and m * n <= _SUM_NUMBERS
    if outer == K and not long and not any(thin <= most and largest >= least for most, least in _SUMS):
        outer, inner, packed = inner, K, True
    length, across = sizes[outer], sizes[inner]
    width = across if inner == K or not small else min(across, _INNER if thin <= _INNER_THIN else _INNER // 2)
    rows = 0 if packed else min(SMALL // max(thin * width, 1) // _LEAST_ROWS * _LEAST_ROWS, _MOST_ROWS)
    step = rows
    if (outer, inner) == (M, N) and not packed:  # whole chunks of a sum of squares, as `product_update` takes them
        chunk = max(CHUNK // n, 1)
        step = max(_BLOCK_BYTES // (itemsize * max(n, 1)) // chunk, 1) * chunk
        rows = rows if small else step
    most, work = _MAX_SUMS if outer == K else _MAX_PARTS, m * n * k
    if rows:
        parts = max(1, min(work // _PART, most, length // step))
    else:  # not thin: whole parts for a BLAS that packs
        wanted = max(work // _PACKED_PART, min(work // _PACKED_HALF, 2))
        parts = max(1, min(wanted, most, length // (_LONG if long else _PACKED_ROWS)))
        step, rows, width = (-(-length // parts),) * 2 + (across,)
    return Plan(outer, inner, parts, step, rows, width)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Write ``a @ b`` into `out`, or into pooled memory, and return it.

    Parameters
    ----------
    a, b
        (…, m, k) and (k, n), of one real dtype; one whose rows are not contiguous each, nor its columns, is copied.
    out
        (…, m, n), C-contiguous, of that dtype.
    """
    k, n = b.shape
    if a.ndim != 2:
        rows = a.reshape(math.prod(a.shape[:-1]), k)
        return matmul(rows, b, None if out is None else out.reshape(len(rows), n)).reshape(*a.shape[:-1], n)
    m = len(a)
    work = m * n * k
    if out is None:
        out = np.empty((m, n), a.dtype) if work <= threads.ALONE and k else empty(np, (m, n), a.dtype)
    if work <= SMALL:
        if k == 1:
            return np.multiply(a, b, out=out)
        if work <= threads.ALONE:  # too small for a BLAS to wake a second thread
            return np.matmul(a, b, out=out)
        with threads.one_blas_thread_for(work):
            return np.matmul(a, b, out=out)
    a, b = _in_rows(a), _in_rows(b)
    cut, sizes = describe(a, b)
    sums = empty(np, (cut.parts, m, n), out.dtype) if cut.outer == K and cut.parts > 1 else None
    target = (out if sums is None else sums).ctypes.data
    helpers = team_for(cut.parts, work // _FAST)
    with threads.one_blas_thread():
        _product(helpers, cut.parts, blas_of(out.dtype), sizes, a.ctypes.data, b.ctypes.data, target)
    if sums is not None:
        flat = out.reshape(-1)
        parts = max(1, flat.size // _SUM_PART)
        _add(team_for(parts, sums.size), parts, sums.reshape(cut.parts, -1), flat)
    return out


def column_sums(rows: Array) -> Array:
    """Return the sums over the first axis of a matrix, a bias's gradient, by a GEMV: several times faster."""
    return matmul(row_of_ones(rows), rows)[0]


def row_of_ones(rows: Array) -> Array:
    """Return a matrix (1, number of rows) of ones, read-only."""
    return _ones(len(rows), rows.dtype) if len(rows) <= 1 << 14 else np.ones((1, len(rows)), rows.dtype)


@lru_cache(maxsize=16)
def _ones(count: int, dtype: np.dtype) -> np.ndarray:
    return np.ones((1, count), dtype)


def describe(a: Array, b: Array) -> tuple[Plan, np.ndarray]:
    """Return how the product of two matrices is cut, and all that compiled code wants to know of them."""
    (m, k), n = a.shape, b.shape[1]
    (a_turned, lda), (b_turned, ldb) = layout_of(a) or (False, k), layout_of(b) or (False, n)
    cut = plan(m, n, k, a.itemsize, a_turned, b_turned, has_small_kernels())
    return cut, np.array([m, n, k, lda, ldb, n, a_turned, b_turned, *cut, a.itemsize], np.int64)


def layout_of(matrix: Array) -> tuple[bool, int] | None:
    """Return whether a matrix lies in memory by columns, and how far they are apart, or rows; None if neither fits."""
    (rows, columns), item = matrix.shape, matrix.itemsize
    if matrix.flags.c_contiguous or matrix.flags.f_contiguous:
        return (False, columns) if matrix.flags.c_contiguous else (True, rows)
    down, across = matrix.strides
    if across == item and down % item == 0 and down >= columns * item:
        return False, down // item
    if down == item and across % item == 0 and across >= rows * item:
        return True, across // item
    return None


def _in_rows(matrix: Array) -> Array:
    """Return a matrix that has a `layout_of`."""
    return matrix if layout_of(matrix) is not None else np.ascontiguousarray(matrix)


@numba.njit(**INNER_JIT)
def part_range(part, parts, step, length):
    """Return where a part begins and ends: at multiples of `step`."""
    low, high = span(part, parts, -(-length // step))
    return min(low * step, length), min(high * step, length)


@parallel(**JIT)
def _product(part, parts, blas, sizes, a, b, c):
    outer, step = sizes[OUTER], sizes[STEP]
    low, high = part_range(part, parts, step, sizes[outer])
    if outer == K and parts > 1:
        c += part * sizes[M] * sizes[N] * sizes[ITEM]
    for first in range(low, high, step):
        strip(blas, sizes, a, b, c, low, first, min(first + step, high))


@numba.njit(**INNER_JIT)
def _of(axis, outer, along_outer, inner, along_inner, other):
    """Return the value for an axis: the outer one's, the inner one's, or the other's."""
    return along_outer if axis == outer else along_inner if axis == inner else other


@numba.njit(**INNER_JIT)
def strip(blas, sizes, a, b, c, low, first, last):
    """Compute with the rows from `first` to `last` of the large matrix; `low` is where its part begins."""
    outer, inner, rows, width = sizes[OUTER], sizes[INNER], sizes[ROWS], sizes[WIDTH]
    lda, ldb, ldc, item = sizes[LDA], sizes[LDB], sizes[LDC], sizes[ITEM]
    a_turned, b_turned = sizes[A_TRANSPOSED], sizes[B_TRANSPOSED]
    for i in range(first, last, rows):
        high = min(rows, last - i)
        for j in range(0, sizes[inner], width):
            wide = min(width, sizes[inner] - j)
            m, n, k = _of(M, outer, i, inner, j, 0), _of(N, outer, i, inner, j, 0), _of(K, outer, i, inner, j, 0)
            at = a + (k * lda + m if a_turned else m * lda + k) * item
            bt = b + (n * ldb + k if b_turned else k * ldb + n) * item
            fresh = k == (low if outer == K else 0)
            gemm(
                blas, _of(M, outer, high, inner, wide, sizes[M]), _of(N, outer, high, inner, wide, sizes[N]),
                _of(K, outer, high, inner, wide, sizes[K]), at, a_turned, lda, bt, b_turned, ldb, not fresh,
                c + (m * ldc + n) * item, ldc,
            )  # fmt: skip


@parallel(**JIT)
def _add(part, parts, sums, out):
    low, high = span(part, parts, len(out))
    for i in range(low, high):
        total = sums[0, i]
        for j in range(1, len(sums)):
            total += sums[j, i]
        out[i] = total


# Products of many pairs of matrices of one size, as attention has for every sample and head.

COUNT, BATCH_M, BATCH_N, BATCH_K, BATCH_LDA, BATCH_LDB, A_TURNED, B_TURNED, A_APART, B_APART, BATCH_ITEM = range(11)
"""Places in a description: as for a single product; then the bytes from one matrix to the next."""


def matmul_batches(a: Array, b: Array, out: Array | None = None) -> Array:
    """Write ``a[i] @ b[i]`` for every i into `out`, or into pooled memory, and return it; parts are of pairs.

    Parameters
    ----------
    a, b
        (count, m, k) and (count, k, n), of one real dtype; their matrices may lie in memory by rows or by columns, and
        are copied where neither is so.
    out
        (count, m, n), C-contiguous, of that dtype.
    """
    (count, m, k), n = a.shape, b.shape[2]
    out = empty(np, (count, m, n), a.dtype) if out is None else out
    if out.size == 0 or k == 0:
        out.fill(0)
        return out
    (a, a_turned, lda), (b, b_turned, ldb) = _readable(a), _readable(b)
    apart = a.strides[0], b.strides[0]
    sizes = np.array([count, m, n, k, lda, ldb, a_turned, b_turned, *apart, a.itemsize], np.int64)
    parts = min(parts_for(count * m * n * k // _FAST), count)
    with threads.one_blas_thread():
        _batches_products(team(parts), parts, blas_of(out.dtype), sizes, a.ctypes.data, b.ctypes.data, out.ctypes.data)
    return out


def _readable(matrices: Array) -> tuple[Array, bool, int]:
    """Return matrices that BLAS reads as they lie, whether they lie by columns, and how far those are apart."""
    found = layout_of(matrices[0])
    if found is None:
        matrices = np.ascontiguousarray(matrices)
        found = False, matrices.shape[2]
    return matrices, *found


@parallel(**JIT)
def _batches_products(part, parts, blas, sizes, a, b, c):
    m, n, k = sizes[BATCH_M], sizes[BATCH_N], sizes[BATCH_K]
    low, high = span(part, parts, sizes[COUNT])
    for i in range(low, high):
        gemm(
            blas, m, n, k, a + i * sizes[A_APART], sizes[A_TURNED], sizes[BATCH_LDA], b + i * sizes[B_APART],
            sizes[B_TURNED], sizes[BATCH_LDB], False, c + i * m * n * sizes[BATCH_ITEM], n,
        )  # fmt: skip


# Stacks of small dense blocks on the host: the materialised Jacobians of recurrent layers, batch last.
#
# The rows of all products of a level are one range, split evenly; chains are split by chunk and lane block.


class DenseKernels:
    """Host side of the dense part of `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def affine(self, x: Array, weight: Array, bias: Array | None, out: Array) -> None:
        """``out = x @ weight.T + bias``."""
        matmul(x, weight.T, out)
        if bias is not None:
            out += bias

    def affine_grad(self, gy: Array, x: Array, weight: Array, bias: Array | None) -> None:
        """``weight = gy.T @ x``, ``bias = gy.sum(axis=0)``."""
        matmul(gy.T, x, weight)
        if bias is not None:
            matmul(row_of_ones(gy), gy, bias[None])

    def add_bias(self, out: Array, bias: Array) -> None:
        """Add a bias to every row."""
        out += bias

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` for all s."""
        rows = len(a_index) * a.shape[1]
        _matmul(*split(rows * b.shape[2] * (a.shape[2] + 1) * out.shape[3]), a, a_index, b, b_index, out, out_index)

    def dense_matvec(
        self,
        a: Array,
        a_index: Array,
        x: Array,
        x_index: Array,
        add: Array | None,
        add_index: Array | None,
        out: Array,
        out_index: Array,
    ) -> None:
        """``out[out_index[s]] = a[a_index[s]] @ x[x_index[s]] + add[add_index[s]]`` for all s."""
        steps, (_, m, k, _) = len(a_index), a.shape
        parts = min(parts_for(steps * m * (k + 1) * out.shape[2]), max(steps, 1))
        plus, plus_index = (out, out_index) if add is None else (add, add_index)
        _matvec(team(parts), parts, a, a_index, x, x_index, plus, plus_index, add is not None, out, out_index)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Run ``v = a[s] @ v + add[s]; out[s] = v`` along every chunk."""
        (steps, n, _, _), batch = a.shape, out.shape[2]
        tasks = (len(chunk_ptr) - 1) * _lane_blocks(a.dtype, batch)
        plus = out if add is None else add
        run_chains(team(parts_for(steps * n * (n + 1) * batch)), tasks, a, chunk_ptr, x, plus, add is not None, out)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce every chunk of affine maps to one matrix and one vector."""
        (steps, n, _, own), chunks = a.shape, len(chunk_ptr) - 1
        tasks = chunks * _lane_blocks(a.dtype, own)
        # every task has its own scratch: two columns of a lane block, or one shared matrix
        size = 2 * n * simd.VECTOR_BYTES // a.dtype.itemsize if own > 1 else n * n
        scratch = np.empty((tasks, size), a.dtype)
        reduce_matrices(team(parts_for(steps * n * n * (n + 1) * own)), tasks, a, chunk_ptr, out_matrix, scratch)
        if add is None or out_vector is None:
            return
        batch = add.shape[2]
        tasks = chunks * _lane_blocks(a.dtype, batch)
        scratch = np.empty((tasks, n * simd.VECTOR_BYTES // a.dtype.itemsize), a.dtype)
        reduce_vectors(team(parts_for(steps * n * (n + 1) * batch)), tasks, a, chunk_ptr, add, out_vector, scratch)


def _lane_blocks(dtype: np.dtype, batch: int) -> int:
    """Return how many vectors a batch fills."""
    return -(-batch * dtype.itemsize // simd.VECTOR_BYTES)


# The functions below are compiled: their arguments are arrays and flags.


@simd.device
def _wide_rows(a, b, out, first, last, k, n, batch, b_wide):
    """Rows first ... last of ``out = a @ b`` for a per-sample `a`."""
    width = simd.lanes(a)
    whole = batch - batch % width
    for lane in range(0, whole, width):
        for i in range(first, last, 4):
            for j in range(0, n, 2):
                tile(a, b, n, j, batch, lane, b_wide, out, i, last, j, k, n, batch, lane, True)
    if whole < batch:
        for i in range(first, last, 4):
            for j in range(0, n, 2):
                tile(a, b, n, j, batch, whole, b_wide, out, i, last, j, k, n, batch, whole, False)


@parallel(**SERIAL)
def _matmul(part, parts, a, a_index, b, b_index, out, out_index):
    """Some rows of the level, counted over all of its products."""
    _, m, n, batch = out.shape
    k, a_wide, b_wide = a.shape[2], a.shape[3] == batch and batch > 1, b.shape[3] == batch
    row, high = span(part, parts, len(a_index) * m)
    a_all, b_all, out_all = simd.pointer(a), simd.pointer(b), simd.pointer(out)
    a_at, b_at, out_at = simd.pointer(a_index), simd.pointer(b_index), simd.pointer(out_index)
    a_size = m * k * (batch if a_wide else 1)
    b_size = k * n * (batch if b_wide else 1)
    while row < high:
        s = row // m
        first = row - s * m
        last = min(m, first + high - row)
        left, right = simd.advance(a_all, a_at[s] * a_size), simd.advance(b_all, b_at[s] * b_size)
        target = simd.advance(out_all, out_at[s] * (m * n * batch))
        if not a_wide:
            shared_rows(left, right, target, first, last, k, n * batch)
        elif b_wide:
            _wide_rows(left, right, target, first, last, k, n, batch, True)
        else:
            _wide_rows(left, right, target, first, last, k, n, batch, False)
        row += last - first


@parallel(**SERIAL)
def _matvec(part, parts, a, a_index, x, x_index, add, add_index, has_add, out, out_index):
    _, m, batch = out.shape
    k, wide, zero = a.shape[2], a.shape[3] == batch, a.dtype.type(0)
    low, high = span(part, parts, len(a_index))
    a_at, x_at = simd.pointer(a_index), simd.pointer(x_index)
    add_at, out_at = simd.pointer(add_index), simd.pointer(out_index)
    for s in range(low, high):
        block = simd.advance(simd.pointer(a), a_at[s] * (m * k * a.shape[3]))
        vector = simd.advance(simd.pointer(x), x_at[s] * (k * batch))
        plus = simd.advance(simd.pointer(add), add_at[s] * (m * batch))
        target = simd.advance(simd.pointer(out), out_at[s] * (m * batch))
        for lane in range(0, batch, simd.lanes(block)):
            matvec_of_block(block, vector, batch, lane, plus, has_add, target, m, k, batch, lane, wide, zero)


# Several products of dense matrices in one call, for a thread next to others that run Python.
#
# Between two calls a thread needs the interpreter's lock, and waits until another one gives it up: in a net of small
# layers that takes longer than the products.


def matmul_many(pairs: Sequence[tuple[Array, Array]]) -> list[Array] | None:
    """Return ``a @ b`` of every pair, bitwise equal to `matmul`; None if it would take another path.

    The thread that calls computes alone.

    Parameters
    ----------
    pairs
        (m, k) and (k, n) each, all of one real dtype.
    """
    dtype = pairs[0][0].dtype
    found = [_description(a, b) if a.dtype == b.dtype == dtype else None for a, b in pairs if is_numpys()]
    if None in found or not found:
        return None
    outs = [np.empty((a.shape[0], b.shape[1]), dtype) for a, b in pairs]
    addresses = [(a.ctypes.data, b.ctypes.data, out.ctypes.data) for (a, b), out in zip(pairs, outs, strict=True)]
    with threads.one_blas_thread():
        blas = blas_of(dtype), blas_of(dtype, alone=True)
        _many_products(*blas, np.array(found, np.int64), np.array(addresses, np.int64))
    return outs


def _description(a: Array, b: Array) -> tuple[int, ...] | None:
    """Return a product's description, without parts if it is computed as a whole; None if it is not computed here."""
    (m, k), n = a.shape, b.shape[1]
    if m * n * k > SMALL:
        cut, sizes = describe(a, b)
        return None if cut.outer == K or layout_of(a) is None or layout_of(b) is None else tuple(sizes.tolist())
    a_layout, b_layout = layout_of(a), layout_of(b)
    # NumPy does not ask the BLAS for these, or for another function: that of a matrix with its transpose.
    itself = a.ctypes.data == b.ctypes.data
    if a_layout is None or b_layout is None or itself or k == 1 or m * n <= 1 or m * n * k == 0:
        return None
    (a_turned, lda), (b_turned, ldb) = a_layout, b_layout
    return m, n, k, lda, ldb, n, a_turned, b_turned, 0, 0, 0, 0, 0, 0, a.itemsize


@numba.njit(**JIT)
def _many_products(blas, numpys, sizes, addresses):
    for i in range(len(sizes)):
        own, (a, b, c) = sizes[i], (addresses[i, 0], addresses[i, 1], addresses[i, 2])
        if own[PARTS] == 0:
            product(
                numpys, own[M], own[N], own[K], a, own[A_TRANSPOSED], own[LDA], b, own[B_TRANSPOSED], own[LDB], False,
                c, own[LDC],
            )  # fmt: skip
        for part in range(own[PARTS]):
            low, high = part_range(part, own[PARTS], own[STEP], own[own[OUTER]])
            for first in range(low, high, own[STEP]):
                strip(blas, own, a, b, c, low, first, min(first + own[STEP], high))


# An optimizer's update by a gradient that is a matrix product and is never there as a whole.
#
# Backward-fusion to its end (Jiang et al. 2021, §3): some rows of the gradient are computed, looked at and used while
# they are in the cache. They go neither to memory nor back.


LEAST = 1 << 17
"""Numbers of a gradient from which this is worth it: half a second cache's, in float32."""
_ROOM = 1 << 22
"""Bytes for each thread's rows. So much is laid in pages of 2 MiB where the system has them: in small ones, some of it
falls out of the cache while parameter and buffers stream by, and the whole takes up to 1.6 times as long."""
_local = threading.local()


def worth_update_by_product(a: Array, b: Array) -> bool:
    """Say whether `update_by_product` takes the gradient ``a @ b``: it is large, and its factors are thin."""
    (m, k), n = a.shape, b.shape[1]
    contiguous = all(matrix.flags.c_contiguous or matrix.flags.f_contiguous for matrix in (a, b))
    return contiguous and k <= min(THIN, m, n) and m * n >= LEAST and m * n * k > SMALL and n <= CHUNK


def bytes_at_once(a: Array, b: Array) -> int:
    """Return how many bytes of the gradient ``a @ b`` `update_by_product` has at once, on all threads together."""
    cut, _ = describe(a, b)
    return _workers(cut) * cut.step * b.shape[1] * b.itemsize


def update_by_product(
    rule: UpdateRule, param: Array, a: Array, b: Array, buffers: Sequence[Array | None], options: np.ndarray,
    steps: np.ndarray,
) -> float:  # fmt: skip
    """Update a parameter by the gradient ``a @ b``; return the sum of the gradient's squares.

    Arguments as in `Kernels.optimizer_update`, for one parameter; the factors are as in
    `sparsebp.kernels.host.matmul`, and `worth_update_by_product`. Results are bitwise equal to ``matmul``,
    ``square_sums`` and ``optimizer_update``. Where the squares of some rows are not finite, those rows are not updated.
    """
    check_update(rule, [param], [param], [[buffer] for buffer in buffers], options, steps)
    (m, n), k = param.shape, a.shape[1]
    cut, sizes = describe(a, b)
    addresses = np.array([0 if array is None else array.ctypes.data for array in (param, None, *buffers)], np.int64)
    sums = np.empty(-(-m // (CHUNK // n)))
    count = _workers(cut)
    room = _room(count, cut.step * n, param.dtype)
    taken = np.zeros(count, np.int64)
    with threads.one_blas_thread():
        _update(
            team_for(cut.parts, m * n * k), cut.parts, rule_address(rule, param.dtype), blas_of(param.dtype),
            param.dtype.type(0), sizes, a.ctypes.data, b.ctypes.data, addresses, options, steps, sums, room, taken,
        )  # fmt: skip
    total = np.empty(1)
    add_chunks(np.array([0, len(sums)]), sums, total)
    return float(total[0])


def _room(count: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Return scratch for a few rows of a gradient for each thread; the next call reuses it."""
    room: np.ndarray | None = getattr(_local, dtype.char, None)
    if room is None or room.shape[0] < count or room.shape[1] < size:
        room = np.empty((count, max(size, _ROOM // dtype.itemsize)), dtype)
        setattr(_local, dtype.char, room)
    return room


def _workers(cut: Plan) -> int:
    """Return how many parts may be worked on at a time."""
    return min(cut.parts, threads.count())


@parallel(**JIT)
def _update(part, parts, rule, blas, like, sizes, a, b, addresses, options, steps, sums, room, taken):
    """Run a part in rows that no other part is using."""
    place, at = 0, taken.ctypes.data
    while not atomic_exchange(at + 8 * place, 0, 1):  # there are as many as threads, so one is free
        place = (place + 1) % len(taken)
    _update_part(part, parts, rule, blas, like, sizes, a, b, addresses, options, steps, sums, room[place])
    atomic_store(at + 8 * place, 0)


@numba.njit(**INNER_JIT)
def _update_part(part, parts, rule, blas, like, sizes, a, b, addresses, options, steps, sums, rows):
    m, n, item, step = sizes[M], sizes[N], sizes[ITEM], sizes[STEP]
    at = np.empty((1, len(addresses)), np.int64)
    begins = np.zeros(2, np.int64)
    low, high = part_range(part, parts, step, m)
    chunk = chunk_rows(n)
    for first in range(low, high, step):
        last, skipped = min(first + step, high), first * n * item
        strip(blas, sizes, a, b, rows.ctypes.data - skipped, low, first, last)
        finite = True
        for row in range(first, last, chunk):
            total = square_sum(rows[(row - first) * n : (min(row + chunk, last) - first) * n])
            sums[row // chunk] = total
            finite &= math.isfinite(total)
        if finite:
            for column in range(len(addresses)):
                at[0, column] = 0 if addresses[column] == 0 else addresses[column] + skipped
            at[0, 1] = rows.ctypes.data
            begins[1] = (last - first) * n
            update_range(rule, like, at, begins, options, steps, 0, begins[1])
