"""Vectors of `simd` whose lanes change places: every second number of two vectors, and two vectors in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from sparsebp.kernels.host.engine.simd import SimdType, intrinsic


def _shuffle(places: Callable[[int], list[int]]) -> Any:
    """Return the function of two vectors whose lane i is ``places(lanes)[i]`` of both, one behind the other."""

    @intrinsic
    def shuffled(typingctx: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, SimdType) or a != b:
            return None
        order = ir.Constant(ir.VectorType(ir.IntType(32), a.lanes), places(a.lanes))
        return a(a, b), lambda context, builder, sig, args: builder.shuffle_vector(args[0], args[1], order)

    return shuffled


evens = _shuffle(lambda lanes: list(range(0, 2 * lanes, 2)))
odds = _shuffle(lambda lanes: list(range(1, 2 * lanes, 2)))
low_in_turn = _shuffle(lambda lanes: [i // 2 + i % 2 * lanes for i in range(lanes)])
high_in_turn = _shuffle(lambda lanes: [i // 2 + i % 2 * lanes for i in range(lanes, 2 * lanes)])
