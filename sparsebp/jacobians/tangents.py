"""The level of directional derivatives, and the memory of its large arrays."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from sparsebp.jacobians.tracing import Level, Term, Traced, careful_einsum, finite, raw_at

SMALL = 1 << 17
"""Bytes of an array that the allocator keeps by itself."""


class Pool:
    """Large arrays that are used again as soon as nothing else refers to them.

    The system hands out new memory page by page, which takes longer than the arithmetic on it.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, list[np.ndarray]] = {}
        self.left = 1 << 26  # bytes that it may still keep
        self.alone = self._uses([np.empty(0)])[0]  # as this interpreter counts

    @staticmethod
    def _uses(buffers: list[np.ndarray]) -> list[int]:
        return [sys.getrefcount(buffer) for buffer in buffers]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array as `numpy.empty` does."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < SMALL:
            return np.empty(shape, dtype)
        unit = 1 << max(size.bit_length() - 4, 0)
        size = -(-size // unit) * unit  # one for arrays of nearly the same size
        buffers = self.buffers.setdefault(size, [])
        for buffer, uses in zip(buffers, self._uses(buffers), strict=True):
            if uses == self.alone:
                return np.ndarray(shape, dtype, buffer)
        if size > self.left:
            return np.empty(shape, dtype)
        self.left -= size
        buffers.append(np.empty(size, np.uint8))
        return np.ndarray(shape, dtype, buffers[-1])


class Duals(Level):
    """Tangents of shape (p, *shape): p directional derivatives at once, of the value's own dtype.

    What does not move adds nothing, also where its slope is infinite: 0 · ∞ = 0. Unless `masked`, it is NaN, as of
    the adjoints of a reverse sweep, which begin anew then: see `Tape`.
    """

    tangents = True

    def __init__(self, directions: int, pool: Pool | None = None, masked: bool = True) -> None:
        super().__init__()
        self.directions, self.pool, self.masked = directions, pool or Pool(), masked

    def nothing(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.zeros((self.directions, *shape), dtype)

    def broadcast(self, x: Traced, ndim: int) -> np.ndarray:
        """Return tangents with as many axes as a result has, and one in front."""
        t: np.ndarray = x.carried
        return t if x.ndim == ndim else t.reshape(self.directions, *(1,) * (ndim - x.ndim), *x.shape)

    def elementwise(self, shape: tuple[int, ...], dtype: Any, terms: list[Term]) -> Any:
        found, own, full = None, False, (self.directions, *shape)
        with np.errstate(all="ignore"):
            for x, slope, *cuts in terms:
                part, s = self.broadcast(x, len(shape)), slope()
                sign = s if isinstance(s, int) and s in (1, -1) else None
                if sign is None:
                    t, into = part, None
                    if dtype == np.result_type(s, t) and full in (t.shape, (self.directions, *np.shape(s))):
                        into = self.pool.empty(full, dtype)
                    part, sign = np.multiply(s, t, out=into), 1
                    if self.masked and not (finite(s) and (not cuts or np.all(s) or finite(t))):
                        part = np.where((t == 0) | (s == 0) if cuts else t == 0, 0, part)
                    fresh = True
                else:
                    fresh = False
                if found is None:
                    found, own = (part, fresh) if sign == 1 else (-part, True)
                else:
                    into = found if own and found.shape == full and found.dtype == dtype else None
                    if into is None and dtype == np.result_type(found, part) and full in (found.shape, part.shape):
                        into = self.pool.empty(full, dtype)
                    found, own = (np.add if sign == 1 else np.subtract)(found, part, out=into), True
        if found is None:
            return self.nothing(shape, dtype)
        found = found.astype(dtype, copy=False)
        return found if found.shape == full else np.broadcast_to(found, full)

    def choose(self, operands: list[Traced], choice: Any, value: Any, view: Any = None) -> Any:
        if view is not None:
            return view[0](operands[0].carried)
        found = self.pool.empty((self.directions, *value.shape), value.dtype)
        for d in range(self.directions):
            found[d] = choice(*(x.carried[d] for x in operands))
        return found

    def select(self, condition: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        sides = [self.broadcast(x, len(shape)) if isinstance(x, Traced) else 0 for x in (a, b)]
        found = np.where(condition, *sides).astype(dtype, copy=False)
        return np.broadcast_to(found, (self.directions, *shape))

    def linear(self, x: Traced, shape: tuple[int, ...], dtype: Any, push: Any, pull: Any, structure: Any) -> Any:
        with np.errstate(all="ignore"):
            return push(x.carried).astype(dtype, copy=False)

    def contract(self, operands: list[Any], labels: list[str], out: str, shape: tuple[int, ...], dtype: Any) -> Any:
        found: Any = 0
        for k, x in enumerate(operands):
            if isinstance(x, Traced):
                values = [raw_at(self, y) for y in operands]
                names = list(labels)
                values[k], names[k] = x.carried, "Z" + labels[k]
                with np.errstate(all="ignore"):
                    part = np.einsum(f"{names[0]},{names[1]}->Z{out}", *values, optimize=True)
                    if self.masked and not finite(part):
                        other, cuts = 1 - k, not isinstance(operands[1 - k], Traced)
                        part = careful_einsum(f"{names[k]},{names[other]}->Z{out}", values[k], values[other], cuts)
                found = found + part
        return found.astype(dtype, copy=False)
