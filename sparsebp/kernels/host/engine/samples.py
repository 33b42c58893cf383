"""Operands that are either shared by the batch or per sample, read a vector of samples at a time.

An entry's values lie side by side (batch last). A *lane block* is as many samples as fit a vector, beginning at sample
`lane`; its `n` may be fewer at the end of the batch. The flags `wide` (per sample) and `full` (the block is whole) are
constants at every call, so that LLVM, which inlines these functions, drops the branch that is not taken. Whole blocks
are worth a path of their own: beyond the caches, masked stores ran at a third of the speed of plain ones.

Numba does not notice changes of this file in what it has cached: delete ``__pycache__`` after editing it.
"""

from __future__ import annotations

from typing import Any

from sparsebp.kernels.host.engine import simd


@simd.device
def take(values: Any, entry: int, batch: int, lane: int, n: int, wide: bool, full: bool) -> Any:
    """Return the values of one entry for a lane block; a shared value in all lanes."""
    if not wide:
        return simd.broadcast(values, entry)
    if full:
        return simd.load(values, entry * batch + lane)
    return simd.load_n(values, entry * batch + lane, n)


@simd.device
def put(values: Any, entry: int, batch: int, lane: int, n: int, full: bool, value: Any) -> None:
    """Store the values of one entry for a lane block."""
    if full:
        simd.store(values, entry * batch + lane, value)
    else:
        simd.store_n(values, entry * batch + lane, value, n)
