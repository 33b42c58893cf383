"""The algorithms of a scan as lists of steps: pure integers, no arrays, no patterns."""

from __future__ import annotations

from sparsebp.core.errors import OptionError
from sparsebp.scan.algorithms.chunked import chunk_cuts, chunked
from sparsebp.scan.algorithms.tree import blelloch, hybrid, linear, tree_levels
from sparsebp.scan.steps import Recipe

__all__ = ["blelloch", "chunk_cuts", "chunked", "hybrid", "linear", "recipe", "tree_levels"]


def recipe(algorithm: str, n: int, *, up_levels: int | None = None, chunks: int = 1) -> Recipe:
    """Return the steps of `algorithm` for `n` Jacobians.

    Parameters
    ----------
    algorithm
        ``"linear"``, ``"blelloch"``, ``"hybrid"`` or ``"chunked"``.
    n
        Number of Jacobians, at least 1.
    up_levels
        Levels of the up-sweep, for ``"hybrid"`` alone.
    chunks
        How many, for ``"chunked"`` alone.

    Raises
    ------
    OptionError
        The algorithm has no steps of its own (``"auto"`` is resolved before) or is unknown.
    """
    if algorithm == "linear":
        return linear(n)
    if algorithm == "blelloch":
        return blelloch(n)
    if algorithm == "hybrid":
        return hybrid(n, up_levels or 0)
    if algorithm == "chunked":
        return chunked(n, chunks)
    raise OptionError(
        "Unknown scan algorithm",
        expected="linear, blelloch, hybrid or chunked",
        got=repr(algorithm),
        remedy="Pass one of them",
    )
