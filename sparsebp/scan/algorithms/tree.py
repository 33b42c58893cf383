"""The linear, the hybrid and the Blelloch scan: no level of up-sweep, some, and all.

BPPSA §3.2, Algorithm 1 works in place on ``a = [g, J_1, …, J_n]`` and leaves the exclusive scan there; here it is acted
out on spans. Two of its costs are only apparent and make no step:

- a product with the symbolic identity (line 7 sets ``a[n]`` to it) is a move of data. All products of the first
  down-sweep level are such;
- an up-sweep product that lands in ``a[n]`` is overwritten on line 7 before anybody reads it.

The exclusive scan ends with the gradient of x_1. The gradient of x_0 follows as one last matrix–vector product, the
phase ``output``.

Products grow denser with every level of the up-sweep; stopping it after k of them trades them for a chain over the
``⌈(n + 1) / 2^k⌉`` blocks that they have made: the hybrid scan of BPPSA §5.3. In the rows of Fig. 3 with
D = ⌈log₂(n+1)⌉, the up-sweep goes from L0 to Lk, the middle yields the vectors of row L(2D-1-k), and the down-sweep
goes on to L2D: k + 1 levels, of which the first only moves data, as in Algorithm 1.
"""

from __future__ import annotations

from sparsebp.scan.steps import AbstractStep, Recipe, Span

IDENTITY = Span(0, 0)
"""The symbolic identity: the product of no elements."""


def tree_levels(n: int) -> int:
    """Return ⌈log₂(n + 1)⌉: the levels of the down-sweep for n Jacobians. The up-sweep has one fewer."""
    return n.bit_length()  # for n >= 1, n.bit_length() is the least D with 2**D >= n + 1


def linear(n: int) -> Recipe:
    """Return the n matrix–vector products ``y_i = J_i y_{i-1}`` of back-propagation (BPPSA Eq. 3), a level each."""
    steps = tuple(AbstractStep(i, "linear", Span(0, i + 1), Span(i + 1, i + 2)) for i in range(n))
    return Recipe("linear", n, steps, {"linear": n})


def blelloch(n: int) -> Recipe:
    """Return Algorithm 1 for n Jacobians, and the last product for the gradient of x_0."""
    steps, levels = _sweeps(n, tree_levels(n) - 1)
    return Recipe("blelloch", n, steps, levels)


def hybrid(n: int, up_levels: int) -> Recipe:
    """Return the hybrid scan with `up_levels` levels of up-sweep.

    With 0 it is the linear scan, with ⌈log₂(n+1)⌉ - 1 or more it is Algorithm 1.
    """
    k = min(up_levels, tree_levels(n) - 1)
    steps, levels = _sweeps(n, k) if up_levels else (linear(n).steps, {"linear": n})
    return Recipe("hybrid", n, steps, levels, up_levels=k)


def _sweeps(n: int, k: int) -> tuple[tuple[AbstractStep, ...], dict[str, int]]:
    """Return the steps with k levels of up-sweep, and the number of levels by phase."""
    a = [Span(i, i + 1) for i in range(n + 1)]
    depth = tree_levels(n)
    up = _up_sweep(a, k)
    middle = _middle(a, k)
    down = _down_sweep(a, k - 1)
    last = AbstractStep(2 * depth, "output", Span(0, n), Span(n, n + 1))
    levels = {"up-sweep": k, "middle": len(middle), "down-sweep": k + 1, "output": 1}
    if k == depth - 1:  # Algorithm 1 has no middle
        del levels["middle"]
    return (*up, *middle, *down, last), levels


def _up_sweep(a: list[Span], levels: int) -> list[AbstractStep]:
    """Run lines 1–6 for d = 0 … levels - 1, in place on `a`; return the products."""
    n, steps = len(a) - 1, []
    for d in range(levels):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            if right < n:  # a[n] is overwritten on line 7
                steps.append(AbstractStep(d, "up-sweep", a[left], a[right]))
                a[right] = steps[-1].target
    return steps


def _middle(a: list[Span], k: int) -> list[AbstractStep]:
    """Replace the blocks that k levels have made by their exclusive scan, one after the other; return the products.

    After all levels there are two blocks: line 7, and the first down-sweep level, which only moves data.
    """
    n, steps, prefix, size = len(a) - 1, list[AbstractStep](), IDENTITY, 2**k
    for start in range(0, n + 1, size):
        end = min(start + size - 1, n)
        block, a[end] = a[end], prefix
        if end == n:  # the last block's total is not part of an exclusive scan
            break
        if prefix == IDENTITY:
            prefix = block
        else:
            steps.append(AbstractStep(k, "middle", prefix, block))
            prefix = steps[-1].target
    return steps


def _down_sweep(a: list[Span], first: int) -> list[AbstractStep]:
    """Run lines 8–15 for d = first … 0, in place on `a`; return the products.

    The level of depth d starts from row ``2·⌈log₂(n+1)⌉ - 1 - d`` of BPPSA Fig. 3: row L0 is the input, row
    ``L(⌈log₂(n+1)⌉)`` the array after line 7.
    """
    n, steps = len(a) - 1, []
    last_row = 2 * tree_levels(n) - 1
    for d in range(first, -1, -1):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            prefix, block = a[right], a[left]
            a[left] = prefix
            if prefix == IDENTITY:
                a[right] = block
            else:
                steps.append(AbstractStep(last_row - d, "down-sweep", prefix, block))
                a[right] = steps[-1].target
    return steps
