"""Random chains of Jacobians for the scan's tests: sizes, kinds, sharing and injections, with the sequential answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from matrices import of_mask
from sparsebp import SparsityPattern

KINDS = ("general", "general", "dense", "diagonal", "identity", "selection")


@dataclass
class Chain:
    """Patterns with values; ``expected(...)`` multiplies densely, one step after the other."""

    patterns: list[SparsityPattern]
    data: list[np.ndarray]
    g: np.ndarray
    injections: list[np.ndarray | None] | None

    @property
    def shared(self) -> list[bool]:
        return [d.ndim == 1 for d in self.data]

    @property
    def batch(self) -> int:
        return self.g.shape[1]

    def expected(self) -> list[np.ndarray]:
        y, found = self.g, []
        for i, (p, d) in enumerate(zip(self.patterns, self.data, strict=True)):
            y = np.stack([dense(p, d, b) @ y[:, b] for b in range(self.batch)], axis=1)
            if self.injections is not None and self.injections[i] is not None:
                y = y + self.injections[i]
            found.append(y)
        return found


def dense(pattern: SparsityPattern, data: np.ndarray, sample: int) -> np.ndarray:
    matrix = np.zeros(pattern.shape, data.dtype)
    matrix[pattern.row_of_entry, pattern.indices] = data if data.ndim == 1 else data[:, sample]
    return matrix


def random_pattern(rng: np.random.Generator, kind: str, rows: int, columns: int) -> SparsityPattern:
    """A pattern of about that kind; `rows` is given up where the kind is square."""
    if kind == "dense":
        return SparsityPattern.dense(rows, columns)
    if kind == "diagonal":
        return SparsityPattern.diagonal(columns)
    if kind == "identity":
        return SparsityPattern.identity(columns)
    if kind == "selection":
        mask = np.zeros((rows, columns), bool)
        mask[np.arange(rows), rng.integers(0, columns, rows)] = True
        mask[rng.random(rows) < 0.3] = False
    else:
        mask = rng.random((rows, columns)) < rng.choice([0.1, 0.4, 0.8])
    return of_mask(mask)


def make_chain(rng: np.random.Generator, n: int, batch: int, dtype=np.float64, most: int = 9) -> Chain:
    """A chain of n Jacobians with random kinds, sizes 1 … most, sharing and injections."""
    size = int(rng.integers(1, most + 1))
    g = rng.standard_normal((size, batch)).astype(dtype)
    patterns, data = [], []
    for _ in range(n):
        p = random_pattern(rng, str(rng.choice(KINDS)), int(rng.integers(1, most + 1)), size)
        shape = (p.nnz,) if rng.random() < 0.4 else (p.nnz, batch)
        values = rng.standard_normal(shape) / np.sqrt(max(1, p.nnz / max(1, p.shape[0])))
        if p.kind == "identity":
            values = np.ones(shape)
        patterns.append(p)
        data.append(values.astype(dtype))
        size = p.shape[0]
    injections: list[np.ndarray | None] | None = None
    if rng.random() < 0.7:
        present = rng.random(n) < rng.choice([0.0, 0.5, 1.0])
        injections = [
            rng.standard_normal((p.shape[0], batch)).astype(dtype) if here else None
            for p, here in zip(patterns, present, strict=True)
        ]
    return Chain(patterns, data, g, injections)


def make_stack(rng: np.random.Generator, n: int, size: int, batch: int, shared: bool, dtype=np.float64) -> Chain:
    """A chain of n dense blocks of one size."""
    shape = (n, size * size) if shared else (n, size * size, batch)
    data = (rng.standard_normal(shape) / np.sqrt(size)).astype(dtype)
    injections = rng.standard_normal((n, size, batch)).astype(dtype) if rng.random() < 0.6 else None
    g = rng.standard_normal((size, batch)).astype(dtype)
    return Chain([SparsityPattern.dense(size, size)] * n, data, g, injections)


@st.composite
def chains(draw: st.DrawFn, longest: int = 40) -> Chain:
    n = draw(st.one_of(st.sampled_from([1, 2, 3, 4, 5, 8, 9]), st.integers(1, longest)))
    batch = draw(st.sampled_from([1, 2, 3, 5, 17]))
    return make_chain(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), n, batch)


@st.composite
def algorithms(draw: st.DrawFn) -> dict:
    name = draw(st.sampled_from(["linear", "blelloch", "hybrid", "chunked", "auto"]))
    options = {"algorithm": name, "fold": draw(st.booleans())}
    if name == "hybrid":
        return options | {"up_levels": draw(st.integers(0, 6))}
    if name in ("chunked", "auto"):
        return options | {
            "chunks" if name == "chunked" else "workers": draw(st.sampled_from([None, 1, 2, 3, 4, 7, 1000]))
        }
    return options
