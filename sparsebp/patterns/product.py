"""Symbolic work of products on a fixed pattern: `plan_product` does it once, the plan's calls touch values only."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from sparsebp.errors import MemoryLimitError, ShapeError
from sparsebp.patterns.plan import ProductPlan
from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.patterns.validate import index_dtype

_CACHE_SIZE = 64
_PART_WORK = 2048  # products in one part at least; with a batch of 64 that is one grain of the kernels


def plan_product(a: SparsityPattern, b: SparsityPattern, *, memory_limit: int | None = None) -> ProductPlan:
    """Do the symbolic work of C = A @ B once.

    Parameters
    ----------
    a, b
        Patterns of shapes (m, k) and (k, n).
    memory_limit
        Most bytes that the plan's arrays may take, None for no limit.

    Returns
    -------
    ProductPlan
        The same object again for patterns of the same content, as long as it is among the last 64.

    Raises
    ------
    ShapeError
        The shapes do not chain.
    MemoryLimitError
        The plan would take more than `memory_limit`; products are counted before anything is allocated.
    """
    if a.shape[1] != b.shape[0]:
        raise ShapeError(
            "The shapes do not chain",
            expected=f"B with {a.shape[1]} rows, as many as A has columns",
            got=f"A {a.shape}, B {b.shape}",
            remedy="Swap the operands, or pass a transposed pattern (.T)",
        )
    key = (a, b)
    with _lock:
        plan = _cache.get(key)
        if plan is not None:
            _cache.move_to_end(key)
    if plan is not None:
        _check_memory(plan.index_bytes, plan.products, memory_limit)
        return plan
    plan = _make_plan(a, b, memory_limit)
    with _lock:
        _cache[key] = plan
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return plan


_cache: OrderedDict[tuple[SparsityPattern, SparsityPattern], ProductPlan] = OrderedDict()
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
        _check_memory(8 * m * n, m * inner * n, memory_limit)
        return ProductPlan(a, b, SparsityPattern.dense(m, n), "dense", m * inner * n, {"zero": np.zeros(1, np.int64)})
    return _make_general_plan(a, b, memory_limit)


def _make_general_plan(a: SparsityPattern, b: SparsityPattern, memory_limit: int | None) -> ProductPlan:
    from sparsebp.patterns.symbolic import SymbolicProduct, row_cuts

    m, n = a.shape[0], b.shape[1]
    symbolic = SymbolicProduct(a, b)
    products, product_ptr = symbolic.products, symbolic.product_ptr
    _check_memory(2 * products, products, memory_limit)

    c_indptr = symbolic.count()
    nnz, longest = int(c_indptr[-1]), int(np.diff(c_indptr).max(initial=0))
    pattern_bytes = index_dtype(nnz, (m, n)).itemsize * (m + 1 + nnz)
    gathers = products == nnz
    if gathers:
        needed = pattern_bytes + 2 * index_dtype(max(a.nnz, b.nnz), (0, 0)).itemsize * nnz
    else:
        position = np.dtype(np.uint16 if longest <= 2**16 else np.uint32)
        needed = pattern_bytes + 8 * (m + 1) + position.itemsize * products
    _check_memory(needed, products, memory_limit)

    pattern = symbolic.pattern(c_indptr)
    if gathers:
        a_index, b_index = symbolic.pairs(pattern)
        return ProductPlan(a, b, pattern, "gather", products, {"a_index": a_index, "b_index": b_index})
    work = product_ptr + c_indptr
    arrays = {
        "product_ptr": product_ptr,
        "positions": symbolic.positions(pattern, position),
        "row_cuts": row_cuts(work, min(64, 1 + int(work[-1]) // _PART_WORK)),
    }
    arrays.update(_common_index(a, b, pattern))
    return ProductPlan(a, b, pattern, "positions", products, arrays)


def _common_index(a: SparsityPattern, b: SparsityPattern, c: SparsityPattern) -> dict[str, np.ndarray]:
    """Return int64 copies of the kernel's index arrays if the patterns' index types differ, else nothing."""
    arrays = {"a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "c_indptr": c.indptr}
    if len({array.dtype for array in arrays.values()}) == 1:
        return {}
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def _check_memory(needed: int, products: int, memory_limit: int | None) -> None:
    if memory_limit is not None and needed > memory_limit:
        raise MemoryLimitError(
            "The product's plan needs more memory than allowed",
            expected=f"at most {memory_limit} bytes",
            got=f"{needed} bytes or more for {products} products",
            remedy="Raise memory_limit, or run the chain with algorithm='linear', which multiplies no matrices",
        )
