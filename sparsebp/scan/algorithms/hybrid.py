"""The hybrid scan of BPPSA §5.3: k levels of up-sweep, a linear middle, then the down-sweep.

Products grow denser with every level of the up-sweep; stopping it early trades them for a chain over the
``⌈(n + 1) / 2^k⌉`` blocks that the k levels have made. In the rows of Fig. 3 with D = ⌈log₂(n+1)⌉, the up-sweep goes
from L0 to Lk, the middle yields the vectors of row L(2D-1-k), and the down-sweep goes on to L2D: k + 1 levels. The
products of the first of these are the ones that the chain has come by already, so that level only moves data, as in
Algorithm 1.
"""

from __future__ import annotations

from sparsebp.scan.algorithms.blelloch import IDENTITY, blelloch, down_sweep, last_product, tree_levels, up_sweep
from sparsebp.scan.algorithms.linear import linear
from sparsebp.scan.steps import AbstractStep, Recipe, Span


def hybrid(n: int, up_levels: int) -> Recipe:
    """Return the hybrid scan with `up_levels` levels of up-sweep.

    With 0 it is the linear scan, with ⌈log₂(n+1)⌉ - 1 or more it is Algorithm 1.
    """
    depth = tree_levels(n)
    if up_levels == 0 or up_levels >= depth - 1:
        same = linear(n) if up_levels == 0 else blelloch(n)
        return Recipe("hybrid", n, same.steps, same.levels, up_levels=min(up_levels, depth - 1))
    a = [Span(i, i + 1) for i in range(n + 1)]
    steps = up_sweep(a, up_levels)
    middle: list[AbstractStep] = []
    prefix, size = IDENTITY, 2**up_levels
    for start in range(0, n + 1, size):
        end = min(start + size - 1, n)
        block, a[end] = a[end], prefix
        if end == n:  # the last block's total is not part of an exclusive scan
            break
        if prefix == IDENTITY:
            prefix = block
        else:
            middle.append(AbstractStep(up_levels, "middle", prefix, block))
            prefix = middle[-1].target
    steps += middle
    steps += down_sweep(a, up_levels - 1)
    levels = {"up-sweep": up_levels, "middle": len(middle), "down-sweep": up_levels + 1, "output": 1}
    return Recipe("hybrid", n, (*steps, last_product(n)), levels, up_levels=up_levels)
