"""Symbolic work of products on a fixed pattern: `plan_product` does it once, the plan's calls touch values only."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import MemoryLimitError, ShapeError
from sparsebp.patterns.sparsity import SparsityPattern, check_patterns
from sparsebp.patterns.validate import index_dtype
from sparsebp.products.plan import ProductPlan

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
        The plan would take more than `memory_limit` even so; entries are counted before anything is allocated.
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
    plan = _make_plan(a, b, memory_limit)
    with _lock:
        _cache[key] = plan
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return plan


_cache: OrderedDict[tuple[SparsityPattern, SparsityPattern, int | None], ProductPlan] = OrderedDict()
_lock = threading.Lock()


def _make_plan(a: SparsityPattern, b: SparsityPattern, memory_limit: int | None) -> ProductPlan:
    if a.kind == "identity":
        return ProductPlan(a, b, b, "identity", 0, {})
    if b.kind == "identity":
        return ProductPlan(a, b, a, "identity", 0, {})
    if a.kind == "diagonal":
        return ProductPlan(a, b, b, "scale_rows", b.nnz, {})
    if b.kind == "diagonal":
        return ProductPlan(a, b, a, "scale_columns", a.nnz, {})
    (m, inner), n = a.shape, b.shape[1]
    if a.kind == b.kind == "dense" and m * inner * n > 0:
        needed = index_dtype(m * n, (m, n)).itemsize * (m + 1 + m * n) + np.dtype(np.int64).itemsize
        _check_memory(needed, m * inner * n, memory_limit)
        return ProductPlan(a, b, SparsityPattern.dense(m, n), "dense", m * inner * n, {"zero": np.zeros(1, np.int64)})
    return _make_general_plan(a, b, memory_limit)


def _make_general_plan(a: SparsityPattern, b: SparsityPattern, memory_limit: int | None) -> ProductPlan:
    from sparsebp.products.strategies import Product

    product = Product(a, b)
    _check_memory(product.pattern_bytes, product.products, memory_limit)
    for candidate in product.candidates():
        needed = product.pattern_bytes + candidate.index_bytes
        if memory_limit is None or needed <= memory_limit:
            break
    _check_memory(needed, product.products, memory_limit)  # of the last, which takes least
    return product.plan(candidate)


def _check_memory(needed: int, products: int, memory_limit: int | None) -> None:
    if memory_limit is not None and needed > memory_limit:
        raise MemoryLimitError(
            "The product's plan needs more memory than allowed",
            expected=f"at most {memory_limit} bytes",
            got=f"{needed} bytes or more for {products} products",
            remedy="Raise memory_limit, or run the chain with algorithm='linear', which multiplies no matrices",
        )
