"""Scans against the sequential one in float64: all algorithms, injections, sharing, dtypes, batches that change."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.case import accepted, expect, refused, same
from fuzz.draw import JUNK, NO_ARRAYS, WRONG_DTYPES, chance, normal, one_of, pattern, real, size
from sparsebp import SparsityPattern, plan_scan
from sparsebp.core.errors import MemoryLimitError

ALGORITHMS = ("linear", "blelloch", "hybrid", "chunked", "auto")


def case(rng: np.random.Generator) -> None:
    one_of(rng, _run, _run, _run, _options)(rng)


def _chain(rng: np.random.Generator) -> tuple[list[SparsityPattern], bool]:
    """Return patterns that chain, and whether data may be stacked."""
    n, rows = size(rng, 1, 13), size(rng, 1, 7)
    if chance(rng, 0.3):
        p = SparsityPattern.dense(rows, rows) if chance(rng, 0.6) else pattern(rng, rows, rows)
        return [p] * n, True
    patterns = []
    for _ in range(n):
        patterns.append(pattern(rng, size(rng, 0 if chance(rng, 0.1) else 1, 7), rows))
        rows = patterns[-1].shape[0]
    return patterns, False


def _given(rng: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {"algorithm": one_of(rng, *ALGORITHMS)}
    if chance(rng, 0.5):
        options["workers"] = one_of(rng, None, 1, 2, 3, 7, 1000, np.int64(2))
    if options["algorithm"] == "chunked" and chance(rng, 0.5):
        options["chunks"] = one_of(rng, 1, 2, np.int64(3), 1000)
    if options["algorithm"] == "hybrid" and chance(rng, 0.7):
        options["up_levels"] = int(rng.integers(0, 6))
    if chance(rng, 0.3):
        options["fold"] = chance(rng, 0.5)
    if chance(rng, 0.3):
        options["batch"] = size(rng, 1, 7)
    if chance(rng, 0.2):
        options["memory_limit"] = int(10 ** rng.uniform(0, 7))
    return options


def _run(rng: np.random.Generator) -> None:
    patterns, stackable = _chain(rng)
    options = _given(rng)
    try:
        with accepted(f"{options}"):
            plan = plan_scan(patterns, **options)
    except MemoryLimitError:
        expect("memory_limit" in options, "a limit that nobody gave")
        return
    for _ in range(3):  # batch, dtype, sharing and injections change from call to call
        _call(rng, plan, patterns, stackable, options)


def _call(rng: np.random.Generator, plan: Any, patterns: list, stackable: bool, options: dict) -> None:
    dtype, batched = real(rng), chance(rng, 0.8)
    batch = size(rng, 1, 5) if batched else 1
    tail = (batch,) if batched else ()
    g = normal(rng, (patterns[0].shape[1], *tail), dtype)
    stacked, all_shared = stackable and chance(rng, 0.6), chance(rng, 0.5)
    data = []
    for p in patterns:
        shared = all_shared if stacked else chance(rng, 0.4)
        values = normal(rng, (p.nnz,) if shared else (p.nnz, *tail), dtype)
        values /= np.sqrt(max(1, p.nnz / max(1, p.shape[0])))
        data.append(np.ones_like(values) if p.kind == "identity" else values)
    injections: Any = None
    if chance(rng, 0.6):
        present = rng.random(len(patterns)) < one_of(rng, 0.3, 1.0)
        injections = [
            normal(rng, (p.shape[0], *tail), dtype) if here else None for p, here in zip(patterns, present, strict=True)
        ]
    wanted = _sequential(patterns, data, g, injections, batch)
    given: Any = np.stack(data) if stacked else data
    if stacked and injections is not None and all(v is not None for v in injections) and chance(rng, 0.5):
        injections = np.stack(injections)
    if chance(rng, 0.2):
        _bad(rng, plan, g, given, injections)
        return
    for array in [g, *given]:
        array.flags.writeable = chance(rng, 0.9)
    try:
        with accepted(f"g {g.shape}, {[d.shape for d in data]}"):
            found = plan(g, given, injections)
    except MemoryLimitError:
        expect("memory_limit" in options, "a limit that nobody gave")
        return
    expect(len(found) == len(patterns), "number of results")
    for i, (y, right) in enumerate(zip(found, wanted, strict=True)):
        same(f"{plan.algorithm}, y[{i}]", y, right if batched else right[:, 0], dtype, factor=4)


def _sequential(patterns: list, data: list, g: np.ndarray, injections: Any, batch: int) -> list[np.ndarray]:
    """Return the linear scan in float64."""
    y, found = g.reshape(-1, batch).astype(np.float64), []
    for i, (p, d) in enumerate(zip(patterns, data, strict=True)):
        products = (d if d.ndim == 2 else d[:, None]) * y[p.indices]
        y = np.zeros((p.shape[0], batch))
        np.add.at(y, p.row_of_entry, products)
        if injections is not None and injections[i] is not None:
            y = y + injections[i].reshape(-1, batch)
        found.append(y)
    return found


def _bad(rng: np.random.Generator, plan: Any, g: np.ndarray, data: Any, injections: Any) -> None:
    way = int(rng.integers(8))
    junk = one_of(rng, *NO_ARRAYS)
    if way == 0:
        refused(f"g {junk!r}", plan, junk, data, injections)
    elif way == 1:
        refused(f"data {junk!r}", plan, g, junk, injections)
    elif way == 2:
        refused(f"injections {junk!r}", plan, g, data, junk)
    elif way == 3:
        data = list(data)
        data[int(rng.integers(len(data)))] = one_of(rng, junk, None)
        refused("junk in data", plan, g, data, injections)
    elif way == 4:
        wrong = np.zeros(g.shape, one_of(rng, *WRONG_DTYPES))
        refused(f"g of {wrong.dtype}", plan, wrong, data, injections)
    elif way == 5:
        refused("data too short", plan, g, data[:-1], injections)
    elif way == 6:
        other = g.astype(np.float64 if g.dtype == np.float32 else np.float32)
        refused("two dtypes", plan, other, data, injections)
    else:
        injections = [None] * len(plan.patterns)
        injections[int(rng.integers(len(injections)))] = junk
        refused(f"injections {junk!r} in a list", plan, g, data, injections)


def _options(rng: np.random.Generator) -> None:
    """Junk in place of one argument."""
    patterns, _ = _chain(rng)
    arguments: dict[str, Any] = {"patterns": patterns} | _given(rng)
    junk = one_of(rng, *JUNK)
    name = one_of(
        rng,
        "patterns",
        "algorithm",
        "workers",
        "chunks",
        "up_levels",
        "memory_limit",
        "fold",
        "batch",
        "dtype",
        "shared",
        "xp",
    )
    if name in ("workers", "chunks", "up_levels", "memory_limit", "shared") and junk is None:
        return
    if isinstance(junk, (int, np.integer)) and not isinstance(junk, bool) and junk > 0:
        return
    if name == "fold" and isinstance(junk, (bool, np.bool_)):
        return
    if name == "memory_limit" and type(junk) is int and junk == 0:
        return
    if name == "up_levels":
        arguments["algorithm"] = "hybrid"
        if type(junk) is int and junk == 0:
            return
    arguments[name] = junk
    if name == "dtype" and (junk is None or getattr(junk, "dtype", None) == np.float64):  # what NumPy takes for float64
        return
    refused(f"{name}={junk!r}", plan_scan, **arguments)
