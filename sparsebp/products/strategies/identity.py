"""One operand is an identity: the other operand's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies.strategy import StrategyOfKinds


class Identity(StrategyOfKinds):
    """A copy; scans leave it out."""

    name = "identity"
    own_pattern = False

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        """Either is an identity."""
        return "identity" in (a.kind, b.kind)

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        """The other one."""
        return b if a.kind == "identity" else a

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[bool]:
        """Return whether C has the values of B."""
        return (cls.result(a, b) is b,)

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Copy."""
        out[...] = right if operands[0] else left
