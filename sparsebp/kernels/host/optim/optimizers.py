"""Optimizer updates on the host: one pass over memory for all parameters together.

The work of a number is the same wherever it falls, so results depend neither on the number of threads nor on which
parameters are updated in one call. What is done with a number is in `sparsebp.kernels.host.optim.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sparsebp.core.types import Array, UpdateRule
from sparsebp.kernels.api.optimizers import OPTIONAL_BUFFERS, UPDATE_BUFFERS
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.simd import VECTOR_BYTES, address, advance, intrinsic, lanes, pointer
from sparsebp.kernels.host.engine.team import parallel, team
from sparsebp.kernels.host.optim.rules import RULES
from sparsebp.kernels.host.optim.tensors import GRAIN, entry_at, table_of

_ACCESS = {
    rule: "wr" + "".join("o" if name in OPTIONAL_BUFFERS else "w" for name in names)
    for rule, names in UPDATE_BUFFERS.items()
}
_WORTH_THREADS = 1 << 20  # moved numbers: some 60 µs
_ALIGN_FROM = 4096  # numbers, fewer of which are not worth a start of their own
Check = Callable[[], None]
CHUNK = 1 << 14  # numbers that one partial sum of squares covers at most, see `chunk_rows`


class OptimizerKernels:
    """Optimizers' part of `sparsebp.kernels.api.Kernels` on the host; shapes and dtypes are stated there."""

    def optimizer_update(
        self,
        rule: UpdateRule,
        params: Sequence[Array],
        grads: Sequence[Array],
        buffers: Sequence[Sequence[Array | None]],
        options: np.ndarray,
        steps: np.ndarray,
        check: Check,
    ) -> None:
        """Update all parameters in place."""
        _run(rule, (params, grads, *buffers), _ACCESS[rule], options, steps, check)

    def scale_arrays(self, arrays: Sequence[Array], factor: float | Array, check: Check) -> None:
        """Multiply all arrays by one number, in place."""
        _run_on_all("scale", arrays, float(factor), check)

    def clamp_arrays(self, arrays: Sequence[Array], limit: float, check: Check) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays."""
        _run_on_all("clamp", arrays, limit, check)

    def square_sums(self, arrays: Sequence[Array], out: Array, check: Check) -> None:
        """Sum of the squares of each array, in float64: of its chunks, then of those in order."""
        if not arrays:
            return
        addresses, begins, rows = table_of((arrays,), "r", check)
        lengths, chunks = np.empty(len(rows), np.int64), np.empty(len(begins), np.int64)
        _cut_chunks(begins, rows, lengths, chunks)
        sums, like = np.empty(int(chunks[-1])), arrays[0].dtype.type(1)
        parts = _parts(int(begins[-1]))
        _chunk_sums(team(parts), parts, addresses, begins, like, lengths, chunks, sums)
        add_chunks(chunks, sums, out)


def _parts(work: int) -> int:
    return 1 if work < _WORTH_THREADS else parts_for(work)


def _run(
    rule: str, columns: Sequence[Sequence[Any]], access: str, options: np.ndarray,
    steps: np.ndarray, check: Check,
) -> None:  # fmt: skip
    if not columns[0]:
        check()
        return
    addresses, begins, _ = table_of(columns, access, check)
    like = columns[0][0].dtype.type(1)
    parts = _parts(int(begins[-1]) * len(columns))
    function = rule_address(rule, like.dtype)
    _update(team(parts), parts, function, like, addresses, begins, options, steps)


def _run_on_all(rule: str, arrays: Sequence[Array], value: float, check: Check) -> None:
    options, steps = np.full((len(arrays), 1), value), np.zeros(len(arrays), np.int64)
    _run(rule, (arrays,), "w", options, steps, check)


@numba.njit(**INNER_JIT)
def update_range(rule, like, addresses, begins, options, steps, low, high):  # type: ignore[no-untyped-def]
    """Apply the rule at an address to the numbers from `low` to `high` of the concatenation."""
    if low == high:
        return
    for i in range(entry_at(begins, low), len(begins) - 1):
        if begins[i] >= high:
            return
        size = begins[i + 1] - begins[i]
        # both neighbours of a cut round it down alike
        first = max(low - begins[i], 0) // GRAIN * GRAIN
        last = size if high >= begins[i + 1] else (high - begins[i]) // GRAIN * GRAIN
        at, middle = advance(pointer(addresses), i * addresses.shape[1]), first
        o = advance(pointer(options), i * options.shape[1])
        if last - first >= _ALIGN_FROM:
            # a vector that straddles two cache lines costs two accesses: go on from a line's beginning
            width = lanes(address(at[0], like))
            middle += -at[0] % VECTOR_BYTES * width // VECTOR_BYTES
        if middle > first:
            _apply(rule, like, at, o, steps[i], first, middle)
        _apply(rule, like, at, o, steps[i], middle, last)


@intrinsic
def _apply(typingctx: Any, rule: Any, like: Any, at: Any, o: Any, step: Any, first: Any, last: Any) -> Any:
    """Call the rule at an address for the numbers from `first` to `last` of one array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, *_rule_types(like)), codegen


def _rule_types(like: Any) -> tuple[Any, ...]:
    """Return the types of a rule's arguments."""
    word = types.int64
    return like, types.CPointer(word), types.CPointer(types.float64), word, word, word


@cache
def rule_address(rule: str, dtype: np.dtype) -> int:
    """Return where a rule's code is: compiled alone, as hardly a program uses more than one or two."""
    kept = numba.cfunc(types.void(*_rule_types(numba.from_dtype(dtype))), **JIT)(RULES[rule])
    _compiled.append(kept)
    return int(kept.address or 0)


_compiled: list[Any] = []


@parallel(**JIT)
def _update(part, parts, rule, like, addresses, begins, options, steps):  # type: ignore[no-untyped-def]
    low, high = span(part, parts, begins[-1])
    update_range(rule, like, addresses, begins, options, steps, low, high)


# ---- sums of squares: a partial sum for each chunk of an array, added in order ---------------------------------------


@numba.njit(fastmath={"reassoc", "contract"}, **INNER_JIT)
def square_sum(values):  # type: ignore[no-untyped-def]
    """Return the sum of the squares of a chunk."""
    total = 0.0
    for i in range(len(values)):
        value = np.float64(values[i])
        total += value * value
    return total


@numba.njit(**INNER_JIT)
def chunk_rows(width):  # type: ignore[no-untyped-def]
    """Return how many rows of `width` numbers a chunk holds; 0: a row is longer than a chunk."""
    return CHUNK // max(width, 1)


@numba.njit(**JIT)
def _cut_chunks(begins, rows, lengths, chunks):  # type: ignore[no-untyped-def]
    """Write the length of each array's chunks, whole rows where they fit, and at which number its chunks begin."""
    chunks[0] = 0
    for i in range(len(rows)):
        size = begins[i + 1] - begins[i]
        width = size // max(rows[i], 1)
        lengths[i] = chunk_rows(width) * width
        if lengths[i] == 0:
            lengths[i] = CHUNK
        chunks[i + 1] = chunks[i] - (-size // lengths[i])


@parallel(**JIT)
def _chunk_sums(part, parts, addresses, begins, like, lengths, chunks, sums):  # type: ignore[no-untyped-def]
    """Work on some chunks; array i has those from ``chunks[i]`` on."""
    low, high = span(part, parts, len(sums))
    for chunk in range(low, high):
        i = entry_at(chunks, chunk)
        size, first = begins[i + 1] - begins[i], (chunk - chunks[i]) * lengths[i]
        values = numba.carray(address(addresses[i, 0], like), size)
        sums[chunk] = square_sum(values[first : min(first + lengths[i], size)])


@numba.njit(**JIT)
def add_chunks(chunks, sums, out):  # type: ignore[no-untyped-def]
    """Add the sums of each array's chunks, in order."""
    for i in range(len(out)):
        total = 0.0
        for chunk in range(chunks[i], chunks[i + 1]):
            total += sums[chunk]
        out[i] = total
