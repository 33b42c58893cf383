"""The strategies of products, the quickest first. A new one is a file here, a line below, and a price."""

from __future__ import annotations

from typing import Any

from sparsebp.products.strategies.accumulate import Accumulate
from sparsebp.products.strategies.blocks import AddBlocks
from sparsebp.products.strategies.dense import Dense
from sparsebp.products.strategies.filled import Filled
from sparsebp.products.strategies.gather import Gather
from sparsebp.products.strategies.identity import Identity
from sparsebp.products.strategies.pairs import SumPairs
from sparsebp.products.strategies.positions import Positions
from sparsebp.products.strategies.runs import AddRuns
from sparsebp.products.strategies.scale import ScaleColumns, ScaleRows
from sparsebp.products.strategies.select_columns import SelectColumns
from sparsebp.products.strategies.select_rows import SelectRows
from sparsebp.products.strategies.strategy import Strategy, StrategyOfKinds

OF_KINDS: tuple[type[StrategyOfKinds], ...] = (Identity, ScaleRows, ScaleColumns, Dense)
"""Of these, the first that takes the kinds of A and B is the only one."""
OF_STRUCTURE: tuple[type[Strategy], ...] = (
    SelectRows, SelectColumns, Filled, AddRuns, AddBlocks, Gather, SumPairs, Positions, Accumulate,
)  # fmt: skip
"""What is left to the others, when the structure of the product has been looked at; the last always fits."""


OF_KINDS_AND_STRUCTURE: tuple[type[Strategy], ...] = tuple(quicker for told in OF_KINDS for quicker in told.quicker)
"""Preferred to one of `OF_KINDS` where the structure allows it."""


def by_kinds(a: Any, b: Any) -> type[StrategyOfKinds] | None:
    """Return the strategy that the kinds of A and B tell, None if their structure must be looked at."""
    return next((strategy for strategy in OF_KINDS if strategy.takes(a, b)), None)


__all__ = [
    "OF_KINDS",
    "OF_KINDS_AND_STRUCTURE",
    "OF_STRUCTURE",
    "Filled",
    "Gather",
    "Identity",
    "Positions",
    "Strategy",
    "StrategyOfKinds",
    "by_kinds",
]
