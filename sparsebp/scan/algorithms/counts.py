"""How many products of which kind each level has, in closed form: the recipe's shape without its steps.

A chain of 30 000 equal blocks is judged by these counts in microseconds, where building every candidate's list of steps
would take seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from sparsebp.scan.algorithms.chunked import chunk_cuts
from sparsebp.scan.algorithms.tree import tree_levels


class LevelCount(NamedTuple):
    """One level, or one chain of them: products by kind, and how many follow each other.

    Attributes
    ----------
    phase
        As in `ScanStep`.
    mm, mv
        Matrix–matrix and matrix–vector products, all together.
    rounds
        Dependent rounds: 1 for a level of independent products, the length for a chain.
    """

    phase: str
    mm: int
    mv: int
    rounds: int


def level_counts(algorithm: str, n: int, *, up_levels: int = 0, chunks: int = 1) -> list[LevelCount]:
    """Return the levels of `algorithm` for n Jacobians. Levels without products are left out.

    The phases of ``chunked`` are one entry each, the work of all chunks together.
    """
    if algorithm == "chunked":
        return _chunked(n, chunks)
    depth = tree_levels(n)
    if algorithm == "blelloch":
        up_levels = depth - 1
    if algorithm == "linear" or (algorithm == "hybrid" and up_levels == 0):
        return [LevelCount("linear", 0, n, n)]
    k = min(up_levels, depth - 1)
    levels = [LevelCount("up-sweep", n // 2 ** (d + 1) - 1, 1, 1) for d in range(k)]
    if k < depth - 1:
        blocks = -(-(n + 1) // 2**k)
        levels.append(LevelCount("middle", 0, blocks - 2, blocks - 2))
    levels += [LevelCount("down-sweep", 0, (n - 2**d) // 2 ** (d + 1), 1) for d in range(k - 1, -1, -1)]
    levels.append(LevelCount("output", 0, 1, 1))
    return [level for level in levels if level.mm + level.mv]


def _chunked(n: int, chunks: int) -> list[LevelCount]:
    cuts = chunk_cuts(n, chunks)
    count, longest = len(cuts) - 1, cuts[1]
    if count == 1:
        return [LevelCount("reduce", 0, n, n)]
    inner = cuts[-2] - cuts[1]  # Jacobians of the chunks that are neither first nor last
    levels = [
        LevelCount("reduce", inner - (count - 2), longest, longest),
        LevelCount("combine", 0, count - 2, count - 2),
        LevelCount("apply", 0, inner - (count - 2) + n - cuts[-2], max(longest - 1, n - cuts[-2])),
    ]
    return [level for level in levels if level.mm + level.mv]
