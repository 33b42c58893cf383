"""What the command line trains, prunes, compares and verifies: configurations with their data and models."""

from __future__ import annotations

from sparsebp.recipes import verify
from sparsebp.recipes.compare import Comparison, compare_histories
from sparsebp.recipes.prune_checkpoint import prune_checkpoint

__all__ = ["Comparison", "compare_histories", "prune_checkpoint", "verify"]


def __dir__() -> list[str]:
    return sorted(__all__)
