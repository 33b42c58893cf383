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

HOST_OPERATION = 3e-6
"""Seconds that one NumPy operation takes at least, with the indexing around it; on a GPU each is a kernel call."""
HOST_PRODUCT = 2.0
"""Rate of a BLAS's matrix product over the model's rate. Measured: 80 GFLOP/s a thread in VGG-11's convolutions."""
HOST_PASS = 0.5
"""Share of one thread's bandwidth that NumPy's passes, which run on one thread, reach. Measured: LeNet-5, VGG-11."""
VALUES = 1 / 3
"""Share of the bandwidth at which Jacobians' values are written: they are gathered, or turned to have the batch last.
Measured: 0.9 ns a value on two threads in VGG-11."""


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
    if m.is_device:
        rate, bandwidth, call = m.rate(itemsize) * m.workers, m.bandwidth, m.call
    else:
        rate, call = HOST_PRODUCT * m.rate(itemsize) * m.workers, HOST_OPERATION
        bandwidth = HOST_PASS * m.bandwidth / m.workers
    return sum(calls * call + flops / rate + values * itemsize / bandwidth for flops, values, calls in works)


def values_seconds(entries: Iterable[int], m: Machine, itemsize: int) -> float:
    """Return the estimated time to write Jacobians' values: so many in each, read from a layer's state by an index."""
    return sum(m.call / m.issuers + count * (2 * itemsize + 4) / (VALUES * m.bandwidth) for count in entries)


def least_scan_seconds(entries: int, batch: int, m: Machine, itemsize: int) -> float:
    """Return a time below which no scan over Jacobians with so many shared entries comes, values included.

    No scan does less work than the linear one, which multiplies every entry with the whole batch once.
    """
    rate = m.rate(itemsize) * m.efficiency("matvec", batch) * m.workers
    written, read = entries * (2 * itemsize + 4) / (VALUES * m.bandwidth), entries * (itemsize + 4) / m.bandwidth
    return written + max(2 * entries * batch / rate, read)
