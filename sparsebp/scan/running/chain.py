"""The chain that a scan is planned for, with the products planned so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.candidates import Candidate
from sparsebp.scan.planning.fill_in import FillIn
from sparsebp.scan.planning.sizing import SizedRecipe, Sizes, is_stack, size_recipe
from sparsebp.scan.running.product import PlannedProducts

DOUBT = 2.0
"""By how much an estimate of memory must pass the limit before it is believed without planning."""


@dataclass(frozen=True)
class Chain:
    """The patterns of a chain, how they are folded, and what the numbers are counted for.

    Attributes
    ----------
    patterns
        One a Jacobian; equal ones are the same object.
    ends
        Ends of the folded pieces, see `sparsebp.scan.planning.fold.piece_ends`.
    sizes
        Batch, bytes of a value, sharing.
    products
        Plans made so far.
    """

    patterns: tuple[SparsityPattern, ...]
    ends: tuple[int, ...]
    sizes: Sizes
    products: PlannedProducts = field(default_factory=PlannedProducts)

    def estimate(
        self,
        candidate: Candidate,
        fill_in: FillIn,
        memory_limit: int | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> SizedRecipe:
        """Size one candidate without planning its products. Raises `MemoryLimitError` beyond the limit."""
        recipe = candidate.recipe(self.ends)
        return size_recipe(recipe, self.patterns, self.sizes, fill_in, memory_limit=memory_limit, watch=watch)

    def build(self, candidate: Candidate, memory_limit: int | None, fill_in: FillIn | None = None) -> SizedRecipe:
        """Plan one candidate. Raises `MemoryLimitError` beyond the limit, from estimates alone where they are clear."""
        if memory_limit is not None and candidate.multiplies and not is_stack(self.patterns):
            self.estimate(candidate, fill_in or FillIn(), round(DOUBT * memory_limit))
        recipe = candidate.recipe(self.ends)
        return size_recipe(recipe, self.patterns, self.sizes, self.products, memory_limit=memory_limit)
