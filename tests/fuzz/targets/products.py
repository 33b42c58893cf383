"""Products on fixed patterns against dense products: dtypes, batches, out=, read-only memory, plans used again."""

from __future__ import annotations

import numpy as np

from fuzz.case import Wrong, accepted, expect, refused, same
from fuzz.draw import JUNK, WRONG_DTYPES, chance, normal, one_of, pattern, real, size
from matrices import dense
from sparsebp import SparsityPattern, plan_product
from sparsebp.core.errors import MemoryLimitError

HIGH = 17


def case(rng: np.random.Generator) -> None:
    m, k, n = (size(rng, 0, HIGH) for _ in range(3))
    a, b = pattern(rng, m, k), pattern(rng, k, n)
    limit = one_of(rng, None, None, 0, 50, 500, 5000)
    try:
        plan = plan_product(a, b, memory_limit=limit)
    except MemoryLimitError:
        expect(limit is not None, "a limit that nobody gave")
        return
    ones = dense(a) @ dense(b)
    mask = np.zeros((m, n), bool)
    mask[plan.pattern.row_of_entry, plan.pattern.indices] = True
    expect(np.array_equal(mask, ones > 0), f"the product's pattern of {a!r} and {b!r}: {plan.strategy}")
    if a.kind != "identity" and b.kind != "identity":
        expect(plan.products == int(ones.sum()), f"{plan.products} products, not {int(ones.sum())}")
    for _ in range(3):
        _call(rng, plan, a, b)


def _call(rng: np.random.Generator, plan, a: SparsityPattern, b: SparsityPattern) -> None:
    batch, dtype = size(rng, 0, 5), real(rng)
    data = []
    for p in (a, b):
        values = normal(rng, (p.nnz,) if chance(rng, 0.4) else (p.nnz, batch), dtype)
        if p.kind == "identity":
            values[...] = 1
        values.flags.writeable = chance(rng, 0.8)
        data.append(values)
    shape = (plan.pattern.nnz,) if all(d.ndim == 1 for d in data) else (plan.pattern.nnz, batch)
    out = np.full(shape, np.nan, dtype) if chance(rng, 0.5) else None
    if chance(rng, 0.25):
        _bad(rng, plan, data, out, shape)
        return
    with accepted(f"{plan!r}"):
        found = plan(*data, out=out)
    expect(out is None or found is out, "out is not returned")
    full = dense(a, data[0], max(batch, 1) if batch or all(d.ndim == 1 for d in data) else 0)
    wanted = full @ dense(b, data[1], len(full)) if len(full) else np.zeros((0, a.shape[0], b.shape[1]))
    values = wanted[:, plan.pattern.row_of_entry, plan.pattern.indices].T
    same(plan.strategy, found, values[:, 0] if len(shape) == 1 else values, dtype)
    if chance(rng, 0.2) and all(d.flags.writeable for d in data):  # the same plan, the same arrays, other values
        data[0] *= 2
        if a.kind != "identity":
            same("values changed in place", plan(*data), 2 * (values[:, 0] if len(shape) == 1 else values), dtype)


def _bad(rng: np.random.Generator, plan, data: list, out: np.ndarray | None, shape: tuple[int, ...]) -> None:
    way = int(rng.integers(7))
    which = int(rng.integers(2))
    array = data[which]
    if way == 0:
        data[which] = one_of(rng, *JUNK)
        if isinstance(data[which], np.ndarray) and data[which].dtype in ("f4", "f8"):
            return
    elif way == 1:
        data[which] = np.zeros(array.shape, one_of(rng, *WRONG_DTYPES))
    elif way == 2:
        data[which] = np.zeros((array.shape[0] + 1, *array.shape[1:]), array.dtype)
    elif way == 3:
        if array.size < 2:
            return
        data[which] = np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim == 1 else np.asfortranarray(array)
        if data[which].flags.c_contiguous:
            return
    elif way == 4:
        out = np.empty((shape[0] + 1, *shape[1:]), array.dtype)
    elif way == 5:
        out = np.zeros(shape, array.dtype)
        out.flags.writeable = False
    elif way == 6:
        if not array.size or array.shape != shape:
            return
        out = array
        if not array.flags.writeable:
            return
    before = None if out is None else out.copy()
    refused(f"case {way} of {plan!r}", plan, *data, out=out)
    if before is not None and not np.array_equal(before, out, equal_nan=True):
        raise Wrong(f"out was written to although the call was refused ({way})")
