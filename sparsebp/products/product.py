"""Symbolic work of products on a fixed pattern: `plan_product` does it once, the plan's calls touch values only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError, within_memory
from sparsebp.core.locks import forkable_lock
from sparsebp.patterns.sparsity import SparsityPattern, check_patterns
from sparsebp.products.plan import ProductPlan
from sparsebp.products.strategies import OF_STRUCTURE, Strategy, by_kinds
from sparsebp.products.symbolic import SymbolicProduct

_CACHE_SIZE = 64


def plan_product(a: SparsityPattern, b: SparsityPattern, *, memory_limit: int | None = None) -> ProductPlan:
    """Do the symbolic work of C = A @ B once.

    Parameters
    ----------
    a, b
        Patterns of shapes (m, k) and (k, n).
    memory_limit
        Most bytes that the plan's arrays may take, None for no limit. Where an index of the products does not fit, the
        plan keeps none and sums in a dense row; only C's pattern itself must fit.

    Returns
    -------
    ProductPlan
        The same object again for patterns of the same content, as long as it is among the last 64.

    Raises
    ------
    PatternError, ShapeError
        An operand is no pattern, or the shapes do not chain.
    OptionError
        `memory_limit` is no integer, or negative.
    MemoryLimitError
        The plan would take more than `memory_limit` even so, for which entries are counted before anything is
        allocated; or there is no memory for it.
    """
    check_patterns(a=a, b=b)
    if memory_limit is not None:
        memory_limit = check_integer("memory_limit", memory_limit, 0)
    if a.shape[1] != b.shape[0]:
        raise ShapeError(
            "The shapes do not chain",
            expected=f"B with {a.shape[1]} rows, as many as A has columns",
            got=f"A {a.shape}, B {b.shape}",
            remedy="Swap the operands, or pass a transposed pattern (.T)",
        )
    for limit in (None, memory_limit):  # a plan made without a limit serves, if it fits
        key = (a, b, limit)
        with _lock:
            plan = _cache.get(key)
            if plan is not None and (memory_limit is None or plan.index_bytes <= memory_limit):
                _cache.move_to_end(key)
                return plan
    with within_memory(
        f"The plan of a product of shapes {a.shape} and {b.shape} does not fit in memory",
        "Pass memory_limit=, which makes a plan that keeps less, or multiply smaller parts",
    ):
        plan = _make_plan(a, b, memory_limit)
    with _lock:
        _cache[key] = plan
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return plan


_cache: OrderedDict[tuple[SparsityPattern, SparsityPattern, int | None], ProductPlan] = OrderedDict()
_lock = forkable_lock(drop=_cache.clear)


def candidates(a: SparsityPattern, b: SparsityPattern, memory_limit: int | None) -> Iterator[Strategy]:
    """Yield the strategies to choose from, the quickest first."""
    told = by_kinds(a, b)
    if told is not None:
        product = SymbolicProduct(a, b)
        yield from (found for found in (strategy(product) for strategy in told.quicker) if found.fits)
        yield told(product)
    else:
        yield from candidates_of_structure(a, b, memory_limit)


def candidates_of_structure(
    a: SparsityPattern, b: SparsityPattern, memory_limit: int | None = None
) -> Iterator[Strategy]:
    """Yield those that fit whatever the kinds tell; the last keeps nothing per product and always fits."""
    product = SymbolicProduct(a, b, memory_limit)
    yield from (found for found in (strategy(product) for strategy in OF_STRUCTURE) if found.fits)


def plan_by(strategy: Strategy) -> ProductPlan:
    """Plan a product by this strategy and no other.

    Raises
    ------
    OptionError
        The strategy does not fit the product: its kernel would read and write past its arrays.
    """
    if not strategy.fits:
        a, b = strategy.product.a, strategy.product.b
        raise OptionError(
            f"The strategy {strategy.name!r} cannot compute this product", expected="one that fits",
            got=f"A {a.shape} of kind {a.kind} with {a.nnz} entries, B {b.shape} of kind {b.kind} with {b.nnz}",
            remedy="Use plan_product, which chooses one that fits",
        )  # fmt: skip
    return _plan(strategy)


def _plan(strategy: Strategy) -> ProductPlan:
    """Make C's pattern, the arrays that the strategy keeps, and the plan. The strategy fits."""
    product, pattern = strategy.product, strategy.pattern
    return ProductPlan(product.a, product.b, pattern, type(strategy), strategy.products, strategy.arrays())


def _make_plan(a: SparsityPattern, b: SparsityPattern, memory_limit: int | None) -> ProductPlan:
    for strategy in candidates(a, b, memory_limit):
        needed = strategy.pattern_bytes
        if memory_limit is not None and needed > memory_limit:
            break
        needed += strategy.index_bytes
        if memory_limit is None or needed <= memory_limit:
            return _plan(strategy)
    raise MemoryLimitError(  # the last strategy takes least
        "The product's plan needs more memory than allowed",
        expected=f"at most {memory_limit} bytes",
        got=f"{needed} bytes or more for {strategy.products} products",
        remedy="Raise memory_limit, or run the chain with algorithm='linear', which multiplies no matrices",
    )
