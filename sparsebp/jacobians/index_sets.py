"""The level of patterns: for each element of an array the inputs that it depends on, whatever their values."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from sparsebp.core.errors import MemoryLimitError
from sparsebp.jacobians.tracing import Level, Term, Traced, numbered
from sparsebp.patterns.pattern import SparsityPattern

MOST_ENTRIES = 1 << 27
"""Most entries of the index sets of one array: 640 MB."""
LARGE = 256
"""Most inputs in the index set of one element that are listed for each element anew."""


class Sets(Level):
    """Index sets: a sparse matrix of bools, with a row for each element in C order and a column for each input.

    Large sets, as of a sum over all of x, are kept once. Further columns stand for them until the pattern is made.
    """

    structural = True

    def __init__(self, inputs: int) -> None:
        from scipy.sparse import csr_array

        super().__init__()
        self.inputs, self.csr = inputs, csr_array
        self.columns = 2 * inputs + 1
        self.large: list[np.ndarray] = []  # the inputs of each large set, and its column by their digest
        self.column_of: dict[bytes, int] = {}
        self.listed = 0  # inputs in all of them

    def input(self, x: np.ndarray) -> Traced:
        """Return the input: element i depends on itself."""
        n = np.arange(x.size + 1)
        return Traced(x, self.csr((np.ones(x.size, bool), n[:-1], n), (x.size, self.columns)), self)

    def nothing(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.csr((math.prod(shape), self.columns), dtype=bool)

    def shared(self, sets: Any) -> Any:
        """Return sets with large ones in columns of their own."""
        lengths = np.diff(sets.indptr)
        long = lengths > LARGE
        if not long.any():
            return sets
        column, left = np.zeros(len(lengths), np.int64), self.columns - self.inputs - len(self.large)
        for row in np.flatnonzero(long).tolist():
            inputs = self._inputs(sets.indices[sets.indptr[row] : sets.indptr[row + 1]])
            key = hashlib.blake2b(inputs.tobytes()).digest()
            if key not in self.column_of and not left:  # as many as inputs: no saving
                long[row] = False
                continue
            if key not in self.column_of:
                self.listed += len(inputs)
                self.check(self.listed)
                self.column_of[key] = self.inputs + len(self.large)
                self.large.append(inputs)
                left -= 1
            column[row] = self.column_of[key]
        kept = np.repeat(~long, lengths)
        ends = np.append(0, np.cumsum(np.where(long, 1, lengths)))
        indices = np.empty(ends[-1], sets.indices.dtype)
        indices[ends[:-1][long]] = column[long]
        others = np.ones(ends[-1], bool)
        others[ends[:-1][long]] = False
        indices[others] = sets.indices[kept]
        return self.csr((np.ones(len(indices), bool), indices, ends), sets.shape)

    def _inputs(self, columns: np.ndarray) -> np.ndarray:
        """Return the inputs in a set, in order."""
        own = columns < self.inputs
        if own.all():
            return np.sort(columns).astype(np.int32)
        there = np.zeros(self.inputs, bool)
        there[columns[own]] = True
        for column in columns[~own].tolist():
            there[self.large[column - self.inputs]] = True
        return np.flatnonzero(there).astype(np.int32)

    def pattern(self, sets: Any, symmetric: bool) -> SparsityPattern:
        """Return index sets as a pattern; `symmetric`: its union with its transpose."""
        if self.large:
            ends = np.append(np.arange(self.inputs + 1), self.inputs + np.cumsum([len(large) for large in self.large]))
            indices = np.concatenate([np.arange(self.inputs, dtype=np.int32), *self.large])
            rows = self.csr((np.ones(len(indices), bool), indices, ends), (len(ends) - 1, self.inputs))
            lengths = np.bincount(np.repeat(np.arange(sets.shape[0]), np.diff(sets.indptr)),
                                  np.diff(ends)[sets.indices], sets.shape[0])  # fmt: skip
            self.check(np.minimum(lengths, self.inputs).sum())
            sets = self.csr((sets.data, sets.indices, sets.indptr), (sets.shape[0], len(ends) - 1)) @ rows
        else:
            sets = self.csr((sets.data, sets.indices, sets.indptr), (sets.shape[0], self.inputs))
        return pattern_of(sets, symmetric)

    def rows(self, sets: Any, index: np.ndarray) -> Any:
        """Return rows of a matrix."""
        lengths = np.diff(sets.indptr)[index]
        self.check(lengths.sum(dtype=np.int64))
        return sets[index]

    @staticmethod
    def check(entries: Any) -> None:
        """Check that a result is not too large."""
        if entries > MOST_ENTRIES:
            raise MemoryLimitError("The function is not sparse enough: an array inside depends on too much of x",
                                   expected=f"at most {MOST_ENTRIES} entries", got=int(entries),
                                   remedy="Pass pattern=, or leave out what couples everything")  # fmt: skip

    def elementwise(self, shape: tuple[int, ...], dtype: Any, terms: list[Term]) -> Any:
        found: Any = None
        seen: list[Any] = []
        for x, *_ in terms:
            if any(x.carried is sets for sets in seen):
                continue
            seen.append(x.carried)
            sets = x.carried
            if x.shape != shape:
                sets = self.rows(sets, np.broadcast_to(np.arange(x.size).reshape(x.shape), shape).ravel())
            found = sets if found is None else found + sets
        return self.nothing(shape, dtype) if found is None else found

    def choose(self, operands: list[Traced], choice: Any, value: Any, view: Any = None) -> Any:
        from scipy.sparse import vstack

        sets = vstack([self.nothing((1,), None), *(x.carried for x in operands)], format="csr")
        return self.rows(sets, choice(*numbered(operands)).ravel())

    def select(self, condition: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        sides = [x for x in (a, b) if isinstance(x, Traced)]
        if isinstance(condition, Traced):
            return self.elementwise(shape, dtype, [(x, lambda: 1) for x in sides])

        def choice(*numbers: np.ndarray) -> np.ndarray:
            left = iter(numbers)
            both = [next(left) if isinstance(x, Traced) else 0 for x in (a, b)]
            return np.broadcast_to(np.where(condition, *both), shape)

        return self.choose(sides, choice, None)

    def linear(self, x: Traced, shape: tuple[int, ...], dtype: Any, push: Any, pull: Any, structure: Any) -> Any:
        matrix = structure()
        found = self.csr((np.ones(matrix.nnz, bool), matrix.indices, matrix.indptr), matrix.shape) @ x.carried
        self.check(found.nnz)
        return self.shared(found)

    def contract(self, operands: list[Any], labels: list[str], out: str, shape: tuple[int, ...], dtype: Any) -> Any:
        if not isinstance(operands[1], Traced):
            operands, labels = operands[::-1], labels[::-1]  # the constant first, of which nonzeros count alone
        sizes = {label: n for x, names in zip(operands, labels, strict=True)
                 for label, n in zip(names, x.shape, strict=True)}  # fmt: skip
        first, free = operands[0], [label for label in labels[1] if label not in labels[0]]
        many = math.prod(sizes[label] for label in free)
        self.check(many * (first.size if isinstance(first, Traced) else np.count_nonzero(first)))
        places = np.arange(first.size) if isinstance(first, Traced) else np.flatnonzero(first)
        coordinates = np.unravel_index(places, first.shape) if first.shape else ()
        at = {label: c[:, None] for label, c in zip(labels[0], coordinates, strict=True)}
        grid = np.unravel_index(np.arange(many), [sizes[label] for label in free]) if free else ()
        at |= {label: c[None] for label, c in zip(free, grid, strict=True)}
        whole = (len(places), many)

        def flat(names: str) -> np.ndarray:
            found = np.zeros(whole, np.int64)
            for label in names:
                found = found * sizes[label] + at[label]
            return found.ravel()

        found = self.nothing(shape, dtype)
        for x, names in zip(operands, labels, strict=True):
            if isinstance(x, Traced):
                entries = np.ones(math.prod(whole), bool), (flat(out), flat(names))
                found = found + self.csr(entries, (math.prod(shape), x.size)) @ x.carried
        self.check(found.nnz)
        return self.shared(found)


def pattern_of(sets: Any, symmetric: bool) -> SparsityPattern:
    """Return index sets as a pattern; `symmetric`: its union with its transpose."""
    sets = sets + sets.T.tocsr() if symmetric else sets
    sets.sort_indices()
    return SparsityPattern(sets.indptr, sets.indices, sets.shape)
