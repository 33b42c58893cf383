"""Operands that are either shared by the batch or per sample, read a vector of samples at a time.

An entry's values lie side by side (batch last). A *block* is as many samples as fit a vector, from sample `s` on; its
`n` may be fewer at the end of the batch. The flags `batched` (per sample) and `full` (the block is whole) are
constants at every call, so that LLVM, which inlines these functions, drops the branch that is not taken. Whole blocks
are worth a path of their own: beyond the caches, masked stores ran at a third of the speed of plain ones.

Numba does not notice changes of this file in what it has cached: delete ``__pycache__`` after editing it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd


class Values(NamedTuple):
    """Two operands and what is made of them, flat; inside compiled code, pointers."""

    a: Any
    b: Any
    out: Any
    batch: int
    a_batched: bool
    b_batched: bool


def flat(a: Array, b: Array, out: Array) -> Values:
    """Return the values of arrays (nnz, B*), and whether they are per sample."""
    batch = out.shape[1]
    return Values(a.reshape(-1), b.reshape(-1), out.reshape(-1), batch, a.shape[1] == batch, b.shape[1] == batch)


@simd.device
def pointers(values: Any) -> Any:
    """Return the same with pointers in place of arrays."""
    a, b, out = simd.pointer(values.a), simd.pointer(values.b), simd.pointer(values.out)
    return Values(a, b, out, values.batch, values.a_batched, values.b_batched)


@simd.device
def take(values: Any, entry: int, batch: int, s: int, n: int, batched: bool, full: bool) -> Any:
    """Return the values of one entry for a block; a shared value in all lanes."""
    if not batched:
        return simd.broadcast(values, entry)
    if full:
        return simd.load(values, entry * batch + s)
    return simd.load_n(values, entry * batch + s, n)


@simd.device
def put(values: Any, entry: int, batch: int, s: int, n: int, full: bool, value: Any) -> None:
    """Store the values of one entry for a block."""
    if full:
        simd.store(values, entry * batch + s, value)
    else:
        simd.store_n(values, entry * batch + s, value, n)
