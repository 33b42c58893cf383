"""The entry points of cuSPARSE that a benchmark calls, SpGEMMreuse and what it needs, as NVIDIA documents them.

`LIBRARY` takes the place of ``ctypes.CDLL("libcusparse.so.12")``. Each stage is called twice: without buffers it says
how large they must be, with them it works. Stages come in their order, for the same matrices, and find the buffers that
they still need. What the real library answers with a status does so here; what it takes without a word, such as a
buffer that is too small or has been freed, is an error.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from strict_cupy import memory
from strict_cupy.device import DEVICE, current_device

_SUCCESS, _NOT_INITIALIZED, _INVALID_VALUE, _NOT_SUPPORTED = 0, 1, 3, 10
_TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float64)}  # cudaDataType
_INDEX_32, _BASE_ZERO, _AS_IT_IS = 2, 0, 0
_ALGORITHMS = (0, 1, 2)  # default, deterministic, not deterministic; the others of SpGEMM have no structure to reuse
_CREATED, _ESTIMATED, _COUNTED, _COPIED = range(4)


class _Handle:
    def __init__(self) -> None:
        self.stream, self.device = 0, current_device()


class _Matrix:
    def __init__(self, rows: int, columns: int, nnz: int, dtype: np.dtype) -> None:
        self.shape, self.nnz, self.dtype = (rows, columns), nnz, dtype
        self.pointers = (0, 0, 0)

    def array(self, number: int) -> np.ndarray:
        """Return the host's view of the offsets of rows (0), the columns (1) or the values (2)."""
        count, dtype = (self.shape[0] + 1, np.int32) if number == 0 else (self.nnz, (np.int32, self.dtype)[number - 1])
        size = count * np.dtype(dtype).itemsize
        _check(self.pointers[number], size, "an array of a matrix")
        return np.frombuffer((ctypes.c_uint8 * size).from_address(self.pointers[number]), dtype)

    def dense(self, values: np.ndarray) -> np.ndarray:
        """Return the whole matrix with these values; two in one place are added."""
        found = np.zeros(self.shape, values.dtype)
        np.add.at(found, (np.repeat(np.arange(self.shape[0]), np.diff(self.array(0))), self.array(1)), values)
        return found


class _Plan:
    """A `cusparseSpGEMMDescr_t`: the stage that is done, its matrices, and the buffers by number."""

    def __init__(self) -> None:
        self.stage = _CREATED
        self.matrices: tuple[int, ...] = ()
        self.sizes: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.structure = np.zeros((0, 0), bool)
        self.first: list[np.ndarray] = []


class Library:
    """cuSPARSE. `stale`: values that change after the first product are not looked at."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}
        self._made = 0
        self.stale = False

    # ---- handles and descriptors -------------------------------------------------------------------------------------

    def _new(self, out: Any, item: Any) -> int:
        self._made += 1
        out._obj.value = 0xC05E00 + self._made
        self._open[out._obj.value] = item
        return _SUCCESS

    def _close(self, number: Any, kind: type) -> int:
        if not isinstance(self._open.get(number.value), kind):
            return _INVALID_VALUE
        del self._open[number.value]
        return _SUCCESS

    def cusparseCreate(self, handle: Any) -> int:
        return self._new(handle, _Handle())

    def cusparseDestroy(self, handle: Any) -> int:
        return self._close(handle, _Handle)

    def cusparseSetStream(self, handle: Any, stream: Any) -> int:
        found = self._open.get(handle.value)
        if not isinstance(found, _Handle):
            return _NOT_INITIALIZED
        found.stream = stream.value or 0
        return _SUCCESS

    def cusparseCreateCsr(
        self, matrix: Any, rows: Any, columns: Any, nnz: Any, offsets: Any, indices: Any, values: Any, offset_type: int,
        index_type: int, base: int, dtype: int,
    ) -> int:  # fmt: skip
        """Describe a matrix; since CUDA 12.2 the offsets of its rows must be there even if it has no entries yet."""
        entries = bool(indices.value and values.value) or not nnz.value
        if dtype not in _TYPES or not offsets.value or not entries or min(rows.value, columns.value, nnz.value) < 0:
            return _INVALID_VALUE
        if (offset_type, index_type, base) != (_INDEX_32, _INDEX_32, _BASE_ZERO):  # of a base of one nothing is here
            return _NOT_SUPPORTED
        found = _Matrix(rows.value, columns.value, nnz.value, _TYPES[dtype])
        found.pointers = (offsets.value, indices.value or 0, values.value or 0)
        return self._new(matrix, found)

    def cusparseCsrSetPointers(self, matrix: Any, offsets: Any, indices: Any, values: Any) -> int:
        found = self._open.get(matrix.value)
        if not isinstance(found, _Matrix) or not (offsets.value and indices.value and values.value):
            return _INVALID_VALUE
        found.pointers = (offsets.value, indices.value, values.value)
        return _SUCCESS

    def cusparseSpMatGetSize(self, matrix: Any, rows: Any, columns: Any, nnz: Any) -> int:
        found = self._open.get(matrix.value)
        if not isinstance(found, _Matrix):
            return _INVALID_VALUE
        (rows._obj.value, columns._obj.value), nnz._obj.value = found.shape, found.nnz
        return _SUCCESS

    def cusparseDestroySpMat(self, matrix: Any) -> int:
        return self._close(matrix, _Matrix)

    def cusparseSpGEMM_createDescr(self, plan: Any) -> int:
        return self._new(plan, _Plan())

    def cusparseSpGEMM_destroyDescr(self, plan: Any) -> int:
        return self._close(plan, _Plan)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def cusparseSpGEMMreuse_workEstimation(
        self, handle: Any, op_a: int, op_b: int, a: Any, b: Any, c: Any, algorithm: int, plan: Any, *buffers: Any
    ) -> int:
        def work(found: _Plan, stream: int) -> None:
            found.matrices, found.stage = (a.value, b.value, c.value), _ESTIMATED

        return self._stage((handle, op_a, op_b, a, b, c, algorithm, plan), _CREATED, {1: 0}, (), buffers, work)

    def cusparseSpGEMMreuse_nnz(
        self, handle: Any, op_a: int, op_b: int, a: Any, b: Any, c: Any, algorithm: int, plan: Any, *buffers: Any
    ) -> int:
        """Find the structure, for which the host waits."""

        def work(found: _Plan, stream: int) -> None:
            DEVICE.read(stream)
            left, right, result = (self._open[each.value] for each in (a, b, c))
            ones = [matrix.dense(np.ones(matrix.nnz, np.float32)) for matrix in (left, right)]
            found.structure = ones[0] @ ones[1] > 0
            result.nnz, found.stage = int(found.structure.sum()), _COUNTED

        sizes = {2: 512, 3: 3 * self._entries(a, b), 4: 4 * self._entries(a, b)}
        return self._stage((handle, op_a, op_b, a, b, c, algorithm, plan), _ESTIMATED, sizes, (1,), buffers, work)

    def cusparseSpGEMMreuse_copy(
        self, handle: Any, op_a: int, op_b: int, a: Any, b: Any, c: Any, algorithm: int, plan: Any, *buffers: Any
    ) -> int:
        def work(found: _Plan, stream: int) -> None:
            offsets, columns = (self._open[c.value].array(number) for number in (0, 1))

            def run() -> None:
                offsets[...] = np.concatenate(([0], np.cumsum(found.structure.sum(axis=1))))
                columns[...] = np.nonzero(found.structure)[1]

            DEVICE.submit(run, stream, "kernel", "cusparseSpGEMMreuse_copy")
            found.stage = _COPIED

        sizes = {5: 5 * self._entries(a, b)}
        return self._stage((handle, op_a, op_b, a, b, c, algorithm, plan), _COUNTED, sizes, (3, 4), buffers, work)

    def cusparseSpGEMMreuse_compute(
        self, handle: Any, op_a: int, op_b: int, alpha: Any, a: Any, b: Any, beta: Any, c: Any, dtype: int,
        algorithm: int, plan: Any,
    ) -> int:  # fmt: skip
        """Set C's values to alpha·A·B + beta·C."""

        def work(found: _Plan, stream: int) -> None:
            left, right, result = (self._open[each.value] for each in (a, b, c))
            values = [left.array(2), right.array(2)]
            out, factor, kept = result.array(2), alpha._obj.value, beta._obj.value

            def run() -> None:
                if not (self.stale and found.first):
                    found.first = [array.copy() for array in values]
                dense = left.dense(found.first[0]) @ right.dense(found.first[1])
                product = (factor * dense[found.structure]).astype(out.dtype)
                out[...] = product if kept == 0 else product + kept * out

            DEVICE.submit(run, stream, "kernel", "cusparseSpGEMMreuse_compute")

        matrices = [self._open.get(each.value) for each in (a, b, c)]
        if any(not isinstance(each, _Matrix) or each.dtype != _TYPES.get(dtype) for each in matrices):
            return _INVALID_VALUE
        return self._stage((handle, op_a, op_b, a, b, c, algorithm, plan), _COPIED, {}, (4, 5), (), work)

    def _entries(self, a: Any, b: Any) -> int:
        """Return a number of bytes that grows with the operands, and is never none."""
        return sum(getattr(self._open.get(each.value), "nnz", 0) for each in (a, b)) + 1

    def _stage(
        self, common: tuple[Any, ...], after: int, sizes: dict[int, int], needed: tuple[int, ...],
        buffers: tuple[Any, ...], work: Any,
    ) -> int:  # fmt: skip
        """Say how large the buffers of a stage must be, or check them and all that came before, and work."""
        handle, op_a, op_b, a, b, c, algorithm, plan = common
        context, found = self._open.get(handle.value), self._open.get(plan.value)
        if not isinstance(context, _Handle) or context.device != current_device():
            return _NOT_INITIALIZED
        if algorithm not in _ALGORITHMS or (op_a, op_b) != (_AS_IT_IS, _AS_IT_IS):
            return _NOT_SUPPORTED
        matrices = [self._open.get(each.value) for each in (a, b, c)]
        if not isinstance(found, _Plan) or not all(isinstance(each, _Matrix) for each in matrices):
            return _INVALID_VALUE
        left, right, result = matrices
        if result.shape != (left.shape[0], right.shape[1]) or left.shape[1] != right.shape[0]:
            return _INVALID_VALUE
        if found.stage != after or (found.matrices and found.matrices != (a.value, b.value, c.value)):
            return _INVALID_VALUE
        for number in needed:
            _check(found.buffers[number], found.sizes[number], f"buffer {number}")
        told, given = buffers[::2], buffers[1::2]
        if not all(each.value for each in given):  # a question
            sizes = {number: max(size, 512) for number, size in sizes.items()}
            for size, out in zip(sizes.values(), told, strict=True):
                out._obj.value = size
            found.sizes |= sizes
            return _SUCCESS
        for number, size, pointer in zip(sizes, told, given, strict=True):
            if number not in found.sizes or size._obj.value < found.sizes[number]:
                return _INVALID_VALUE  # nobody has asked, or not listened
            _check(pointer.value, found.sizes[number], f"buffer {number}")
            found.buffers[number] = pointer.value
        work(found, context.stream)
        return _SUCCESS


def _check(pointer: int, size: int, what: str) -> None:
    """Refuse memory that the device has not given to anybody, or not as much of it."""
    if not memory.holds(pointer, size):
        raise RuntimeError(f"cuSPARSE is given {what}, of {size} bytes, that is not on the device, or not so large")


LIBRARY = Library()
