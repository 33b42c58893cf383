"""The modified Blelloch scan, BPPSA §3.2, Algorithm 1, acted out on spans.

The algorithm works in place on ``a = [g, J_1, …, J_n]`` and leaves the exclusive scan there. Two of its costs are only
apparent and make no step here:

- a product with the symbolic identity (line 7 sets ``a[n]`` to it) is a move of data. All products of the first
  down-sweep level are such;
- an up-sweep product that lands in ``a[n]`` is overwritten on line 7 before anybody reads it.

The exclusive scan ends with the gradient of x_1. The gradient of x_0 follows as one last matrix–vector product, the
phase ``output``.
"""

from __future__ import annotations

from sparsebp.scan.steps import AbstractStep, Recipe, Span

IDENTITY = Span(0, 0)
"""The symbolic identity: the product of no elements."""


def tree_levels(n: int) -> int:
    """Return ⌈log₂(n + 1)⌉: the levels of the down-sweep for n Jacobians. The up-sweep has one fewer."""
    return n.bit_length()  # for n >= 1, n.bit_length() is the least D with 2**D >= n + 1


def up_sweep(a: list[Span], levels: int) -> list[AbstractStep]:
    """Run lines 1–6 for d = 0 … levels - 1, in place on `a`; return the products."""
    n, steps = len(a) - 1, []
    for d in range(levels):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            if right < n:  # a[n] is overwritten on line 7
                steps.append(AbstractStep(d, "up-sweep", a[left], a[right]))
                a[right] = steps[-1].target
    return steps


def down_sweep(a: list[Span], first: int) -> list[AbstractStep]:
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


def last_product(n: int) -> AbstractStep:
    """Return the product that turns the exclusive scan's end into the gradient of x_0."""
    return AbstractStep(2 * tree_levels(n), "output", Span(0, n), Span(n, n + 1))


def blelloch(n: int) -> Recipe:
    """Return Algorithm 1 for n Jacobians, and the last product for the gradient of x_0."""
    depth = tree_levels(n)
    a = [Span(i, i + 1) for i in range(n + 1)]
    steps = up_sweep(a, depth - 1)
    a[n] = IDENTITY
    steps += down_sweep(a, depth - 1)
    levels = {"up-sweep": depth - 1, "down-sweep": depth, "output": 1}
    return Recipe("blelloch", n, (*steps, last_product(n)), levels)
