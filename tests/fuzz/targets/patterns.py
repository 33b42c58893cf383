"""Patterns: valid and broken CSR structures against SciPy and a plain check; what they are is told by dense masks."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse

from fuzz.case import accepted, expect, refused, same
from fuzz.draw import JUNK, chance, normal, one_of, pattern, real, size
from matrices import dense, of_mask
from sparsebp import SparsityPattern, TransposedJacobian, interop


def case(rng: np.random.Generator) -> None:
    one_of(rng, _good, _good, _broken, _broken, _junk, _scipy, _matrix)(rng)


def _good(rng: np.random.Generator) -> None:
    m, n = size(rng), size(rng)
    p = pattern(rng, m, n)
    mask = np.zeros((m, n), bool)
    mask[p.row_of_entry, p.indices] = True
    expect(p.shape == (m, n) and p.nnz == mask.sum() and p.indptr.dtype == p.indices.dtype == np.int32, f"{p!r}")
    t = p.T
    same("T", t.indptr, np.concatenate([[0], np.cumsum(mask.sum(axis=0))]).astype(np.int32), exact=True)
    same("T", t.indices, np.nonzero(mask.T)[1].astype(np.int32), exact=True)
    data = rng.standard_normal(p.nnz)
    full = np.zeros((m, n))
    full[mask] = data
    same("transpose_permutation", data[p.transpose_permutation], full.T[mask.T], exact=True)
    expect(p.kind in ("identity", _kind(mask)), f"kind {p.kind} of\n{mask}")
    copy = pickle.loads(pickle.dumps(p))
    expect(copy == p and hash(copy) == hash(p) and copy.digest == p.digest and copy.kind == p.kind, "pickle")
    other = mask.copy()
    if mask.size:
        at = int(rng.integers(mask.size))
        other.reshape(-1)[at] ^= True
        expect(of_mask(other) != p, "equal to another pattern")
        expect(of_mask(other).digest != p.digest, "digest of another pattern")
    for array in (p.indptr, p.indices, p.row_of_entry, p.transpose_permutation):
        expect(not array.flags.writeable, "an array of a pattern can be written to")


def _kind(mask: np.ndarray) -> str:
    m, n = mask.shape
    if mask.all():
        return "dense"
    if mask.sum(axis=1).max(initial=0) > 1:
        return "general"
    return "diagonal" if m == n and np.array_equal(mask, np.eye(n, dtype=bool)) else "selection"


def _broken(rng: np.random.Generator) -> None:
    """Change some numbers, dtypes and lengths; a plain check says what is still right."""
    p = pattern(rng, size(rng), size(rng))
    arrays = {"indptr": p.indptr.astype(np.int64), "indices": p.indices.astype(np.int64)}
    for _ in range(int(rng.integers(1, 3))):
        name = one_of(rng, *arrays)
        a = arrays[name].copy()
        way = int(rng.integers(5))
        if way == 0 and a.size:
            a[rng.integers(a.size)] = one_of(rng, -1, 0, 1, 2**31, 2**62, -(2**63), p.shape[1], p.nnz, p.nnz + 1)
        elif way == 1 and a.size > 1:
            i, j = rng.integers(0, a.size, 2)
            a[[i, j]] = a[[j, i]]
        elif way == 2:
            a = a[: rng.integers(0, a.size + 1)]
        elif way == 3:
            a = np.concatenate([a, a[-1:]])
        elif a.size:
            a[rng.integers(a.size)] += one_of(rng, -1, 1)
        arrays[name] = a
    if all(a.min(initial=0) >= 0 for a in arrays.values()) and chance(rng, 0.3):
        arrays = {name: a.astype(one_of(rng, np.uint64, np.uint32, np.int64)) for name, a in arrays.items()}
    shape = one_of(rng, p.shape, p.shape, p.shape, p.shape[::-1], (p.shape[0] + 1, p.shape[1]))
    good, sortable = _checked(arrays["indptr"], arrays["indices"], shape)
    if good:
        with accepted(f"{arrays}, {shape}"):
            SparsityPattern(arrays["indptr"], arrays["indices"], shape)
    else:
        refused(f"{arrays}, {shape}", SparsityPattern, arrays["indptr"], arrays["indices"], shape)
    if not sortable:
        refused(f"canonical {arrays}, {shape}", SparsityPattern.canonical, arrays["indptr"], arrays["indices"], shape)
        return
    with accepted(f"canonical {arrays}, {shape}"):
        canonical = SparsityPattern.canonical(arrays["indptr"], arrays["indices"], shape)
    rows = np.repeat(np.arange(shape[0]), np.diff(arrays["indptr"].astype(np.int64)))
    mask = np.zeros(shape, bool)
    mask[rows, arrays["indices"].astype(np.int64)] = True
    expect(canonical == of_mask(mask), f"canonical {canonical!r}")


def _checked(indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int]) -> tuple[bool, bool]:
    """Say whether this is a canonical pattern, and whether it is one but for the order of its columns."""
    p, i = indptr.tolist(), indices.tolist()
    rows = len(p) == shape[0] + 1 and p[0] == 0 and p[-1] == len(i) and all(a <= b for a, b in pairwise(p))
    inside = rows and all(0 <= c < shape[1] for c in i)
    return inside and all(a < b for start, end in pairwise(p) for a, b in pairwise(i[start:end])), inside


def _junk(rng: np.random.Generator) -> None:
    """Anything in place of an argument: our own error, or a pattern that was meant."""
    p = pattern(rng, size(rng), size(rng))
    arguments: list[Any] = [p.indptr, p.indices, p.shape]
    arguments[int(rng.integers(3))] = one_of(rng, *JUNK)
    one_of(rng, SparsityPattern, SparsityPattern.canonical)(*arguments)
    maker = one_of(rng, *(getattr(SparsityPattern, name) for name in ("dense", "diagonal", "identity", "from_scipy")))
    junk = [one_of(rng, *JUNK) for _ in range(2 if maker == SparsityPattern.dense else 1)]
    made = maker(*junk)
    expect(all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in junk), f"{junk}: {made!r}")


def _scipy(rng: np.random.Generator) -> None:
    """SciPy's matrices: sums are kept, structure is ours, and data are those of the entries."""
    m, n, dtype = size(rng), size(rng), real(rng)
    full = np.where(rng.random((m, n)) < 0.4, normal(rng, (m, n), dtype), dtype.type(0))
    matrix = one_of(rng, sparse.csr_array, sparse.csr_matrix)(full)
    index = one_of(rng, np.int32, np.int64)
    matrix.indptr, matrix.indices = matrix.indptr.astype(index), matrix.indices.astype(index)
    if chance(rng, 0.3) and matrix.nnz:  # unsorted rows are refused, and the remedy's way gives the same matrix
        for r in range(m):
            row = slice(matrix.indptr[r], matrix.indptr[r + 1])
            matrix.indices[row], matrix.data[row] = matrix.indices[row][::-1].copy(), matrix.data[row][::-1].copy()
        matrix.has_sorted_indices = matrix.has_canonical_format = False
        if (np.diff(matrix.indptr) > 1).any():
            refused("an unsorted matrix", interop.scipy.from_scipy, matrix)
        matrix.sum_duplicates()
    with accepted("a canonical matrix"):
        jacobian = interop.scipy.from_scipy(matrix, copy=chance(rng, 0.5))
    same("from_scipy", jacobian.to_dense(), full, exact=True)
    same("to_scipy", jacobian.to_scipy().toarray(), full, exact=True)
    before = jacobian.pattern.indices.copy()
    matrix.indices[:] = 0
    same("a pattern after its matrix has changed", jacobian.pattern.indices, before, exact=True)


def _matrix(rng: np.random.Generator) -> None:
    """Values on a pattern: transposed, dense, and times a vector."""
    m, n, batch, dtype = size(rng), size(rng), size(rng, 0, 5), real(rng)
    p = pattern(rng, m, n)
    shared = chance(rng, 0.4)
    data = normal(rng, (p.nnz,) if shared else (p.nnz, batch), dtype)
    if p.kind == "identity":
        data[...] = 1
    if chance(rng, 0.2):
        data.flags.writeable = False
    with accepted("values on a pattern"):
        j = TransposedJacobian(p, data)
    full = dense(p, data, batch)
    g = normal(rng, (n, batch) if chance(rng, 0.7) else (n,), dtype)
    wanted = np.einsum("bmn,nb->mb", full, g if g.ndim == 2 else np.repeat(g[:, None], batch, 1))
    with accepted("J @ g"):
        found = j @ g
    if shared and g.ndim == 1:
        wanted = np.asarray(sparse.csr_array((data, p.indices, p.indptr), p.shape) @ g).reshape(-1)
    same("J @ g", found, wanted, dtype)
    if batch:
        sample = int(rng.integers(batch))
        same("T", j.T.to_dense(sample), full[sample].T, dtype, exact=True)
    elif not shared:
        refused("a sample that is not there", j.to_dense, 0)
