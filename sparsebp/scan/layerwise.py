"""Layer by layer, or by scan? The two estimates that decide it, and the answer in place of a plan.

Back-propagation layer by layer multiplies by a layer's weights without its Jacobian; a scan writes the Jacobians'
values first. Both are counted on the same machine model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sparsebp.backend.machine import Machine
from sparsebp.scan.describe import estimates_line

MARGIN = 0.8
"""A scan is taken if it promises at most this share of the time layer by layer: estimates are rough."""


@dataclass(frozen=True)
class LayerByLayer:
    """What stands where a `ScanPlan` would if no scan runs.

    Attributes
    ----------
    reason
        Why.
    estimates
        Seconds that the cost model expects, of ``"bp"`` and of the scans that it was compared with, the values of their
        Jacobians included.
    """

    reason: str
    estimates: Mapping[str, float]
    algorithm: str = "bp"

    def describe(self) -> str:
        """Return the choice and its reason as text."""
        return "\n".join(["Layer by layer, without a scan", f"Why: {self.reason}", *estimates_line(self.estimates)])


def layerwise_seconds(works: Iterable[tuple[int, int, int]], m: Machine, itemsize: int) -> float:
    """Return the estimated time of one layer after the other.

    Parameters
    ----------
    works
        Of each layer: floating-point operations, of matrix products above all; values read and written; array
        operations.
    m
        Machine. On the host its workers share the products, and one does the rest.
    itemsize
        Bytes of a value.
    """
    p = m.prices
    if p is None:
        operation, flop, byte = m.call, 1.0 / (m.rate(itemsize) * m.workers), 1.0 / m.bandwidth
    else:
        operation, byte = p.operation, p.array
        flop = 0.5 * p.blas * (p.double if itemsize == 8 else 1.0) / m.workers
    return sum(calls * operation + flops * flop + values * itemsize * byte for flops, values, calls in works)


def values_seconds(entries: Iterable[int], m: Machine, itemsize: int) -> float:
    """Return the estimated time to write Jacobians' values: so many in each, read from a layer's state by an index."""
    return sum(m.call / m.issuers + count * _written(m, itemsize) for count in entries)


def least_scan_seconds(entries: int, batch: int, m: Machine, itemsize: int) -> float:
    """Return a time below which no scan over Jacobians with so many shared entries comes, values included.

    No scan does less work than the linear one, which multiplies every entry with the whole batch once.
    """
    read = entries * (itemsize + 4) * m.moved(1.0)  # as if it lay in the cache
    return entries * _written(m, itemsize) + (m.products(entries * batch, "matvec", batch, itemsize) + read) / m.workers


def _written(m: Machine, itemsize: int) -> float:
    """Return the seconds in which all workers together write one value of a Jacobian."""
    each = 3.0 * m.workers / m.bandwidth if m.prices is None else m.prices.value
    return (2 * itemsize + 4) * each / m.workers
