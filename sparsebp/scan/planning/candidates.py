"""What there is to choose from: the algorithms with their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparsebp.backend.machine import Machine
from sparsebp.scan.algorithms import recipe, tree_levels
from sparsebp.scan.planning.fold import fold_recipe
from sparsebp.scan.steps import Recipe


class Candidate(NamedTuple):
    """An algorithm with its parameter."""

    algorithm: str
    up_levels: int | None = None
    chunks: int | None = None

    def __str__(self) -> str:
        """As the arguments of `plan_scan`, shortened."""
        if self.up_levels is not None:
            return f"{self.algorithm} (up_levels={self.up_levels})"
        return self.algorithm if self.chunks is None else f"{self.algorithm} (chunks={self.chunks})"

    @property
    def arguments(self) -> str:
        """As the arguments of `plan_scan`."""
        extra = "" if self.up_levels is None else f", up_levels={self.up_levels}"
        extra += "" if self.chunks is None else f", chunks={self.chunks}"
        return f"algorithm={self.algorithm!r}{extra}"

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies matrices at all."""
        return self.algorithm != "linear" and self.up_levels != 0

    def recipe(self, ends: tuple[int, ...]) -> Recipe:
        """Return its steps for a chain that is folded into pieces with these ends; without products, of all members."""
        n = len(ends) if self.multiplies else ends[-1]
        found = recipe(self.algorithm, n, up_levels=self.up_levels, chunks=self.chunks or 1)
        return fold_recipe(found, ends) if self.multiplies else found


def candidates(n: int, chunks: Sequence[int]) -> list[Candidate]:
    """Return every algorithm that differs from the others for n Jacobians, those with the fewest products first."""
    depth = tree_levels(n)
    found = [Candidate("linear")]
    found += [Candidate("chunked", chunks=c) for c in chunks if 3 <= c <= n]  # fewer chunks are the linear scan
    found += [Candidate("hybrid", up_levels=k) for k in range(1, depth - 1)]
    return [*found, Candidate("blelloch")] if n > 1 else found


def options_for(
    algorithm: str, n: int, up_levels: int | None, chunks: int | None, m: Machine, batch: int
) -> list[Candidate]:
    """Return what there is to choose from for n elements, those with the fewest products first."""
    own = -(-m.workers // batch)  # chunks that keep all workers busy
    if algorithm == "chunked":
        return [Candidate("chunked", chunks=min(n, chunks or own))]
    if algorithm == "hybrid":
        if up_levels is not None:
            return [Candidate("hybrid", up_levels=up_levels)]
        return [
            c._replace(algorithm="hybrid", up_levels=c.up_levels or 0)
            for c in candidates(n, ())
            if c.algorithm in ("linear", "hybrid")
        ]
    if algorithm == "auto":
        most = min(n, 8 * own)
        return candidates(n, sorted({own, m.workers, *(4**k for k in range(1, 16)), most} & set(range(most + 1))))
    return [Candidate(algorithm)]
