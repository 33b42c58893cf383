"""A function of NumPy's, recorded: stages that fill one array of numbers, x first.

Each array of the function is a list of *pieces*: an expression of one element, and for each of its leaves the places in
the numbers that the elements read. Slices, pads, rolls and concatenations move places and compute nothing. A *group* is
a stage that stores an expression's values, or adds them up; a *linear* stage multiplies by a constant sparse matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsebp.jacobians.tape.expressions import (
    Expression,
    Table,
    UnrecordedError,
    is_costly,
    leaves_of,
    parts_of,
    renumbered,
)
from sparsebp.jacobians.tape.loops import CODE
from sparsebp.jacobians.tracing import Level, Term, Traced, numbered, raw

MOST_LEAVES, MOST_PARTS = 20, 300
"""Of an expression that is not stored in between: code grows with the square of its leaves."""
MOST_PIECES = 8
"""Expressions in one array that is not stored in between."""
MOST_TERMS = 4
"""Of sums that are expressions rather than stored: those over vectors in space, and quaternions."""
MOST_STAGES = 64
MOST_PRODUCTS = 1 << 24
"""Products of two traced arrays that are summed."""

OF_BOOLS = ("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor",
            "invert")  # fmt: skip
RECORDED = {
    *CODE, *OF_BOOLS, "positive", "conjugate", "square", "reciprocal", "float_power", "fabs", "deg2rad", "radians",
    "rad2deg", "degrees",
} - {"where"}  # fmt: skip
"""Ufuncs that loops have."""


class Piece(NamedTuple):
    """Elements that one expression gives: where in the array (None: all of it), and the places that each leaf reads."""

    expression: Expression
    leaves: tuple[np.ndarray, ...]
    at: np.ndarray | None = None


class Elements:
    """What an array carries."""

    def __init__(self, size: int, pieces: list[Piece]) -> None:
        self.size, self.pieces = size, pieces
        self.stored: Elements | None = None

    @property
    def whole(self) -> bool:
        """Whether one expression gives all elements."""
        return len(self.pieces) == 1 and self.pieces[0].at is None

    @property
    def places(self) -> np.ndarray | None:
        """The places in the numbers, if that is all there is to these elements."""
        piece = self.pieces[0] if self.whole else None
        return piece.leaves[0] if piece is not None and piece.expression.op == "leaf" else None


class Group(NamedTuple):
    """Stores the values of an expression in places of the numbers, or adds them there."""

    expression: Expression
    leaves: tuple[np.ndarray, ...]
    to: np.ndarray
    adds: bool


class Linear(NamedTuple):
    """Stores a constant sparse matrix times numbers at `places`.

    Of a dense one, zeros are in `whole` alone: they count where they meet NaN.
    """

    matrix: Any
    whole: Any
    places: np.ndarray
    to: np.ndarray


class Recorder(Level):
    """The level of a record. Values at it are NaN, so that what were read from them could not pass for a constant."""

    records = True

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype, self.table, self.size = np.dtype(dtype), Table(), 0
        self.inputs: list[tuple[int, int, tuple[int, ...]]] = []  # place among the arguments, first number, shape
        self.constants: list[tuple[int, np.ndarray]] = []
        self.stages: list[Group | Linear] = []
        self._constant_at: dict[bytes, int] = {}
        self._hashes: dict[int, tuple[np.ndarray, int]] = {}

    def refuse(self, what: str) -> UnrecordedError:
        """Return the error of something without a local form, and note it: the function may catch it."""
        error = UnrecordedError(f"{what} cannot be compiled")
        self.refusals.append(error)
        return error

    def input(self, place: int, value: Any) -> Traced:
        """Return an argument: x, or floats."""
        shape = np.shape(value)
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype != self.dtype:
            raise self.refuse(f"An argument of {value.dtype} beside x of {self.dtype}")
        start = self._allocate(math.prod(shape))
        self.inputs.append((place, start, shape))
        found = Traced(np.full(shape, np.nan, self.dtype), self._at(start, math.prod(shape)), self)
        found.scalar = not isinstance(value, np.ndarray)
        return found

    def output(self, y: Any) -> Elements:
        """Return the elements of what the function returned."""
        if self.refusals:
            raise self.refusals[0]
        return self._of(y)

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> int:
        start, self.size = self.size, self.size + size
        if self.size >= 1 << 31:
            raise self.refuse("A program of more than 2**31 numbers")
        return start

    def _at(self, start: int, size: int) -> Elements:
        return Elements(size, [Piece(self.table.make("leaf", 0), (np.arange(start, start + size, dtype=np.int32),))])

    def _stored(self, values: np.ndarray) -> np.ndarray:
        """Return the places of constants: equal ones once."""
        values = np.array(values, self.dtype).ravel()  # f may write to its own
        if np.isnan(values).any():
            raise self.refuse("A value that is read from x (a maximum, a solve), or NaN among constants,")
        bits = values.view(f"u{values.itemsize}")  # zeros have signs
        few, which = (bits, np.arange(len(bits)))
        if len(bits) <= 64 or (bits == bits[0]).all():
            few, which = np.unique(bits, return_inverse=True)
        few = few.view(values.dtype)
        key = few.tobytes()
        start = self._constant_at.get(key)
        if start is None:
            start = self._constant_at[key] = self._allocate(len(few))
            self.constants.append((start, few))
        return (start + which).astype(np.int32)

    def _constant(self, value: Any, dtype: Any) -> Elements:
        """Return constants; small whole numbers are a part of the code."""
        values = np.asarray(value)
        if values.dtype.kind not in "fiub":
            raise self.refuse(f"A constant of {values.dtype}")
        first = float(values.flat[0]) if values.size else 0.0
        short = abs(first) <= 16 and first * 2 == int(first * 2)
        if short and (values == first).all() and (first or not np.signbit(values).any()):
            found = Elements(values.size, [Piece(self.table.number(first), ())])
        else:
            found = Elements(values.size, [Piece(self.table.make("leaf", 0), (self._stored(values),))])
        return self._converted(found, float, bool) if dtype is bool else found

    def _of(self, x: Any, dtype: Any = float) -> Elements:
        """Return the elements of an operand as floats, or bools."""
        if isinstance(x, Traced):
            if x.dtype == bool:
                return self._converted(x.carried, bool, dtype)
            elements = x.carried
            if elements.stored is not None and any(is_costly(p.expression) for p in elements.pieces):
                elements = elements.stored
            return self._converted(elements, float, dtype)
        return self._constant(x, dtype)

    def _converted(self, elements: Elements, before: Any, after: Any) -> Elements:
        if before == after:
            return elements
        make, zero, one = self.table.make, self.table.number(0), self.table.number(1)
        convert = (lambda e: make("not_equal", e, zero)) if after is bool else (lambda e: make("where", e, one, zero))
        return Elements(elements.size, [p._replace(expression=convert(p.expression)) for p in elements.pieces])

    # ---- moves -------------------------------------------------------------------------------------------------------

    def _take(self, elements: Elements, numbers: np.ndarray) -> list[Piece]:
        """Return the pieces of some elements, in this order."""
        if elements.whole:
            piece = elements.pieces[0]
            return [Piece(piece.expression, tuple(leaf[numbers] for leaf in piece.leaves), np.arange(len(numbers)))]
        label, within = self._labels(elements)
        found = []
        for k, piece in enumerate(elements.pieces):
            at = np.flatnonzero(label[numbers] == k)
            inside = within[numbers[at]]
            found.append(Piece(piece.expression, tuple(leaf[inside] for leaf in piece.leaves), at))
        return found

    @staticmethod
    def _labels(elements: Elements) -> tuple[np.ndarray, np.ndarray]:
        """Return for each element its piece, and its number within it."""
        label, within = np.zeros(elements.size, np.int32), np.arange(elements.size, dtype=np.int32)
        for k, piece in enumerate(elements.pieces):
            if piece.at is not None:
                label[piece.at], within[piece.at] = k, np.arange(len(piece.at))
        return label, within

    def _joined(self, pieces: list[Piece], size: int) -> Elements:
        """Return pieces as an array; those of one expression become one."""
        alike: dict[int, list[Piece]] = {}
        for piece in pieces:
            if piece.at is None or len(piece.at):
                alike.setdefault(piece.expression.key, []).append(piece)
        found = []
        for group in alike.values():
            at = np.concatenate([p.at if p.at is not None else np.arange(size) for p in group])
            order = np.argsort(at, kind="stable") if len(group) > 1 else None
            joined = (np.concatenate(parts) for parts in zip(*(p.leaves for p in group), strict=True))
            leaves = tuple(leaf if order is None else leaf[order] for leaf in joined)
            at = at if order is None else at[order]
            found.append(Piece(group[0].expression, leaves, None if len(at) == size else at))
        elements = Elements(size, found or [Piece(self.table.number(0), ())])
        return elements if len(found) <= MOST_PIECES else self.stored(elements)

    def _gathered(self, operands: list[Elements], numbers: np.ndarray, constants: Any) -> Elements:
        """Return elements by number, from 1; for each 0 comes one of the constants."""
        if len(operands) == 1 and operands[0].whole and len(numbers) and numbers.min() > 0:
            piece = operands[0].pieces[0]
            return Elements(len(numbers), [piece._replace(leaves=tuple(leaf[numbers - 1] for leaf in piece.leaves))])
        found, first = [], 1
        for elements in operands:
            mine = np.flatnonzero((numbers >= first) & (numbers < first + elements.size))
            for piece in self._take(elements, numbers[mine] - first):
                found.append(piece._replace(at=mine[piece.at]))
            first += elements.size
        mine = np.flatnonzero(numbers == 0)
        if len(mine):
            found.append(Piece(self.table.make("leaf", 0), (self._stored(constants[mine]),), mine))
        return self._joined(found, len(numbers))

    def _spread(self, elements: Elements, shape: tuple[int, ...], to: tuple[int, ...]) -> Elements:
        """Return elements broadcast."""
        if shape == to or (elements.whole and not elements.pieces[0].leaves):
            return Elements(math.prod(to), elements.pieces) if shape != to else elements
        numbers = np.broadcast_to(np.arange(1, elements.size + 1).reshape(shape), to).ravel()
        return self._gathered([elements], numbers, None)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _stage(self, stage: Group | Linear) -> None:
        if len(stage.to):
            self.stages.append(stage)
        if len(self.stages) > MOST_STAGES:
            raise self.refuse(f"A program of more than {MOST_STAGES} groups")

    def stored(self, elements: Elements) -> Elements:
        """Return elements as numbers that a stage stores."""
        if elements.places is not None:
            return elements
        if elements.stored is None:
            start = self._allocate(elements.size)
            for p in elements.pieces:
                at = np.arange(elements.size) if p.at is None else p.at
                self._stage(Group(p.expression, p.leaves, (start + at).astype(np.int32), adds=False))
            elements.stored = self._at(start, elements.size)
        return elements.stored

    def _summed(self, elements: Elements, rows: np.ndarray, size: int) -> Elements:
        """Return sums of elements: row by row; of row -1, none."""
        start = self._allocate(size)
        for p in elements.pieces:
            mine = rows if p.at is None else rows[p.at]
            kept = mine >= 0
            leaves = p.leaves if kept.all() else tuple(leaf[kept] for leaf in p.leaves)
            self._stage(Group(p.expression, leaves, (start + mine[kept]).astype(np.int32), adds=True))
        return self._at(start, size)

    def _short_sums(self, elements: Elements, terms: np.ndarray) -> Elements:
        """Return sums of elements, (sums, terms), as expressions: norms and dot products of short vectors."""
        found, *others = (self._gathered([elements], numbers + 1, None) for numbers in terms.T)
        for other in others:
            found = self._combined("add", [found, other], len(terms))
        return found

    def _product(self, matrix: Any, elements: Elements, *, dense: bool = False) -> Elements:
        """Return a constant sparse matrix times elements; `dense`: one that holds all of its zeros."""
        matrix = matrix.tocsr().astype(self.dtype)
        matrix.sum_duplicates()
        if np.isnan(matrix.data).any():
            raise self.refuse("NaN in a matrix")
        per_column = np.bincount(matrix.indices, minlength=matrix.shape[1])
        if per_column.max(initial=0) > 1:
            places, start = self.stored(elements).places, self._allocate(matrix.shape[0])
            to = np.arange(start, start + matrix.shape[0], dtype=np.int32)
            whole, matrix = matrix, matrix.copy() if dense else matrix
            if dense:
                matrix.eliminate_zeros()
            self._stage(Linear(matrix, whole, places, to))  # type: ignore[arg-type]
            return self._at(start, matrix.shape[0])
        if (matrix.data != 1).any():
            weights = np.zeros(elements.size, self.dtype)
            weights[matrix.indices] = matrix.data
            elements = self._combined("multiply", [elements, self._constant(weights, float)], elements.size)
        terms = np.diff(matrix.indptr)
        if len(terms) and (terms == terms[0]).all() and 0 < terms[0] <= MOST_TERMS:
            return self._short_sums(elements, matrix.indices.reshape(-1, terms[0]))
        rows = np.full(elements.size, -1)
        rows[matrix.indices] = np.repeat(np.arange(matrix.shape[0]), terms)
        return self._summed(elements, rows, matrix.shape[0])

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def _combined(self, op: str, operands: list[Elements], size: int) -> Elements:
        """Return an operation on elements, of this size all."""
        if all(x.whole for x in operands):
            found = self._built(op, [x.pieces[0] for x in operands])
            if found is not None:
                return Elements(size, [found])
            most = max((x for x in operands if x.places is None), key=lambda x: len(x.pieces[0].leaves))
            return self._combined(op, [self.stored(x) if x is most else x for x in operands], size)
        labels = [self._labels(x) for x in operands]
        code = np.zeros(size, np.int64)
        for x, (label, _) in zip(operands, labels, strict=True):
            code = code * len(x.pieces) + label
        codes = np.unique(code)
        if len(codes) > MOST_PIECES:
            return self._combined(op, [x if x.whole else self.stored(x) for x in operands], size)
        pieces = []
        for one in codes:
            at = np.flatnonzero(code == one)
            parts = []
            for x, (label, within) in zip(operands, labels, strict=True):
                piece, inside = x.pieces[label[at[0]]], within[at]
                parts.append(Piece(piece.expression, tuple(leaf[inside] for leaf in piece.leaves)))
            built = self._built(op, parts)
            if built is None:
                return self._combined(op, [self.stored(x) for x in operands], size)
            pieces.append(built._replace(at=at))
        return self._joined(pieces, size)

    def _built(self, op: str, pieces: Sequence[Piece]) -> Piece | None:
        """Return an operation on pieces of one length; None: it is too large to be one expression."""
        leaves: list[np.ndarray] = []
        known: dict[int, list[int]] = {}
        args = []
        for piece in pieces:
            number = []
            for leaf in piece.leaves:
                alike = known.setdefault(self._hash(leaf), [])
                same = next((k for k in alike if leaves[k] is leaf or np.array_equal(leaves[k], leaf)), None)
                if same is None:
                    same = len(leaves)
                    alike.append(same)
                    leaves.append(leaf)
                number.append(same)
            args.append(renumbered(piece.expression, number))
        found = self.table.make("where", *args) if op == "where" else self.table.recorded(op, args)
        if (len(leaves) > MOST_LEAVES or len(parts_of([found])) > MOST_PARTS) and any(
                p.expression.op not in ("leaf", "number") for p in pieces):  # fmt: skip
            return None
        return Piece(found, tuple(leaves))

    def _hash(self, leaf: np.ndarray) -> int:
        known = self._hashes.get(id(leaf))
        if known is None:
            known = self._hashes[id(leaf)] = leaf, hash(leaf.tobytes())
        return known[1]

    def _checked(self, dtype: Any) -> Any:
        """Return float or bool, of the only dtypes that loops have."""
        if dtype in (bool, self.dtype):
            return float if dtype == self.dtype else bool
        raise self.refuse(f"An array of {np.dtype(dtype)} where x is {self.dtype}")

    # ---- the operations of a level -----------------------------------------------------------------------------------

    def ufunc(self, name: str, inputs: Sequence[Any], y: Any) -> Elements:
        """Record a ufunc; y has the shape and the dtype of its result."""
        if name not in RECORDED:
            raise self.refuse(f"numpy.{name}")
        self._checked(y.dtype)
        bools = [raw(x).dtype == bool for x in inputs]
        if any(raw(x).dtype.kind not in "fiub" for x in inputs):
            raise self.refuse(f"numpy.{name} of these arrays")
        kind = bool if name in OF_BOOLS or (all(bools) and y.dtype == bool) else float
        if kind is float and all(bools):
            raise self.refuse(f"numpy.{name} of bools")
        if kind is bool and name not in (*OF_BOOLS, "equal", "not_equal"):
            raise self.refuse(f"numpy.{name} of bools")
        operands = [self._spread(self._of(x, kind), np.shape(x), y.shape) for x in inputs]
        return self._combined(name, operands, y.size)

    def nothing(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._constant(np.zeros(shape), self._checked(np.dtype(dtype)))

    def elementwise(self, shape: tuple[int, ...], dtype: Any, terms: list[Term]) -> Any:
        x, slope = terms[0][:2]
        if len(terms) > 1 or x.shape != shape or not isinstance(slope(), int):  # 1, of a conversion
            raise self.refuse("This function of elements")
        return self._of(x, self._checked(dtype))

    def constant(self, value: Any) -> Any:
        return self._constant(value, self._checked(value.dtype))

    def jump(self, name: str) -> Any:
        raise self.refuse(f"numpy.{name}")

    def choose(self, operands: list[Traced], choice: Any, value: Any, view: Any = None) -> Any:
        kind = self._checked(value.dtype)
        elements = [self._of(x, kind) for x in operands]
        numbers = choice(*numbered(operands)).ravel()
        if kind is bool and (numbers == 0).any():
            raise self.refuse("An array of bools with constants")
        return self._gathered(elements, numbers, np.ravel(value))

    def select(self, condition: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        kind = self._checked(dtype)
        sides = [self._of(x, kind) for x in (a, b)]
        if not isinstance(condition, Traced):
            numbers = [np.arange(first, first + x.size).reshape(np.shape(given)) for first, x, given in zip(
                (1, 1 + sides[0].size), sides, (a, b), strict=True)]  # fmt: skip
            return self._gathered(sides, np.broadcast_to(np.where(condition, *numbers), shape).ravel(), None)
        operands = [self._of(condition, bool), *sides]
        spread = [self._spread(x, np.shape(given), shape) for x, given in zip(operands, (condition, a, b), strict=True)]
        return self._combined("where", spread, math.prod(shape))

    def linear(self, x: Traced, shape: tuple[int, ...], dtype: Any, push: Any, pull: Any, structure: Any) -> Any:
        self._checked(dtype)
        matrix = None if structure is None else structure()
        if matrix is None or matrix.dtype == bool or matrix.dtype.kind not in "fiu":
            raise self.refuse("A linear map without a sparse matrix (a solve, an FFT, a running sum)")
        return self._product(matrix, self._of(x))

    def contract(self, operands: list[Any], labels: list[str], out: str, shape: tuple[int, ...], dtype: Any) -> Any:
        from scipy.sparse import csr_array

        self._checked(dtype)
        sizes = {c: n for x, names in zip(operands, labels, strict=True)
                 for c, n in zip(names, x.shape, strict=True)}  # fmt: skip
        every = out + "".join(c for c in sizes if c not in out)
        whole = tuple(sizes[c] for c in every)
        if math.prod(whole) > MOST_PRODUCTS:
            raise self.refuse("A product of two arrays of this size")

        def spread(x: Any, names: str, one: int) -> np.ndarray:
            """Return which element of an operand stands in each product."""
            axes = np.arange(one, one + math.prod(x.shape)).reshape(x.shape)
            order = [names.index(c) for c in every if c in names]
            return np.broadcast_to(np.transpose(axes, order).reshape([n if c in names else 1 for c, n in zip(
                every, whole, strict=True)]), whole).ravel()  # fmt: skip

        rows = np.repeat(np.arange(math.prod(shape)), math.prod(whole[len(out) :]))
        for x, constant, names, others in zip(operands, operands[::-1], labels, labels[::-1], strict=True):
            if not isinstance(constant, Traced):
                values = np.ravel(constant)[spread(constant, others, 0)]
                matrix = csr_array((values, (rows, spread(x, names, 0))), shape=(math.prod(shape), x.size))
                return self._product(matrix, self._of(x), dense=True)
        both = [self._gathered([self._of(x)], spread(x, names, 1), None)
                for x, names in zip(operands, labels, strict=True)]  # fmt: skip
        product = self._combined("multiply", both, len(rows))
        terms = math.prod(whole[len(out) :])
        if 0 < terms <= MOST_TERMS:
            return self._short_sums(product, np.arange(len(rows)).reshape(-1, terms))
        return self._summed(product, rows, math.prod(shape))


def used(group: Group) -> Group:
    """Return a group without leaves that its expression does not read."""
    kept = leaves_of([group.expression])
    number = [kept.index(k) if k in kept else 0 for k in range(len(group.leaves))]
    return group._replace(expression=renumbered(group.expression, number), leaves=tuple(group.leaves[k] for k in kept))
