"""Expressions of one element, which a loop computes for each index, and their derivatives by the slopes of `tracing`.

Equal expressions are one object, so what is used twice is computed once. Derivatives are exact about zeros: no path
adds nothing, whatever is infinite on it, and neither does a branch that `where` does not take.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from sparsebp.core.errors import TracingError
from sparsebp.jacobians import tracing


class UnrecordedError(TracingError):
    """Something has no local form; the message says what."""


class Expression(NDArrayOperatorsMixin):
    """An operation and its operands; or ``"leaf"`` and its number, or ``"number"`` and its value.

    NumPy's functions of expressions are expressions, without a zero that is added or a one that multiplies: the slopes
    of `tracing` are written in them.
    """

    __slots__ = ("args", "key", "op", "table")

    def __init__(self, table: Table, op: str, args: tuple[Any, ...]) -> None:
        self.table, self.op, self.args, self.key = table, op, args, len(table.known)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Return the expression of a ufunc."""
        return self.table.derived(ufunc.__name__, *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the expression of `numpy.where`, the only function in slopes."""
        return self.table.derived(func.__name__, *args)

    def __bool__(self) -> bool:
        return not self.is_number(0)

    def is_number(self, value: float | None = None) -> bool:
        """Return whether this is a number: any, or this one."""
        return self.op == "number" and (value is None or self.args[0] == value)


class Table:
    """All expressions of one record."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Expression] = {}

    def make(self, op: str, *args: Any) -> Expression:
        """Return an expression as it is."""
        if op in ("add", "multiply") and args[0].key > args[1].key:
            args = args[::-1]
        key = (op, *(a.key if isinstance(a, Expression) else repr(a) for a in args))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = Expression(self, op, args)
        return found

    def number(self, value: Any) -> Expression:
        """Return a number."""
        return self.make("number", float(value))

    def lifted(self, value: Any) -> Expression:
        """Return an expression as it is, of a number its own."""
        return value if isinstance(value, Expression) else self.number(value)

    def recorded(self, op: str, args: Sequence[Expression]) -> Expression:
        """Return what a ufunc computes, in operations that loops have."""
        if op in ("positive", "conjugate"):
            return args[0]
        if op == "square":
            return self.make("multiply", args[0], args[0])
        if op == "reciprocal":
            return self.make("divide", self.number(1), args[0])
        if op in FACTORS:
            return self.make("multiply", args[0], self.number(FACTORS[op]))
        if op in ("power", "float_power"):
            base, exponent = args
            if exponent.op == "number" and exponent.args[0] in (1, 2, 3, 4):
                return self._power(base, int(exponent.args[0]))
            return self.make("power", *args)
        return self.make(RENAMED.get(op, op), *args)

    def _power(self, base: Expression, count: int) -> Expression:
        if count == 1:
            return base
        half = self._power(base, count // 2)
        square = self.make("multiply", half, half)
        return square if count % 2 == 0 else self.make("multiply", square, base)

    def derived(self, op: str, *args: Any) -> Expression:
        """Return an operation within a derivative, where 0 times anything is 0."""
        given = [self.lifted(a) for a in args]
        return SHORTER[op](self, *given) if op in SHORTER else self.recorded(op, given)


FACTORS = {"deg2rad": math.pi / 180, "radians": math.pi / 180, "rad2deg": 180 / math.pi, "degrees": 180 / math.pi}
RENAMED = {"fabs": "absolute", "logical_not": "invert", "bitwise_and": "logical_and", "bitwise_or": "logical_or",
           "bitwise_xor": "logical_xor"}  # fmt: skip


# What is shorter within derivatives.


def _through(t: Table, op: str, choice: Expression, *others: Expression) -> Expression | None:
    """Return op(where(c, a, 0), …) as where(c, op(a, …), 0): a branch that is not taken adds nothing."""
    if choice.op == "where":
        condition, a, b = choice.args
        if b.is_number(0):
            return t.derived("where", condition, t.derived(op, a, *others), b)
        if a.is_number(0):
            return t.derived("where", condition, a, t.derived(op, b, *others))
    return None


def _add(t: Table, a: Expression, b: Expression) -> Expression:
    if a.is_number(0) or b.is_number(0):
        return b if a.is_number(0) else a
    if a.op == b.op == "number":
        return t.number(a.args[0] + b.args[0])
    if a is b:
        return _multiply(t, t.number(2), a)
    if b.op == "negative":
        return t.make("subtract", a, b.args[0])
    if a.op == "negative":
        return t.make("subtract", b, a.args[0])
    return t.make("add", a, b)


def _subtract(t: Table, a: Expression, b: Expression) -> Expression:
    if b.is_number(0):
        return a
    if a.op == b.op == "number":
        return t.number(a.args[0] - b.args[0])
    return _negative(t, b) if a.is_number(0) else t.make("subtract", a, b)


def _negative(t: Table, a: Expression) -> Expression:
    if a.op == "number":
        return t.number(-a.args[0])
    if a.op == "negative":
        return a.args[0]
    found = _through(t, "negative", a)
    return t.make("negative", a) if found is None else found


def _multiply(t: Table, a: Expression, b: Expression) -> Expression:
    if a.is_number(0) or b.is_number(0):
        return t.number(0)
    if a.op == b.op == "number":
        return t.number(a.args[0] * b.args[0])
    for one, other in ((a, b), (b, a)):
        if one.is_number(1):
            return other
        if one.is_number(-1):
            return _negative(t, other)
        if one.op == "negative":
            return _negative(t, _multiply(t, one.args[0], other))
        found = _through(t, "multiply", one, other)
        if found is not None:
            return found
    for one, other in ((a, b), (b, a)):  # numbers in front
        if one.op == "number" and other.op == "multiply":
            for k in (0, 1):
                if other.args[k].op == "number":
                    return _multiply(t, t.number(one.args[0] * other.args[k].args[0]), other.args[1 - k])
    return t.make("multiply", a, b)


def _divide(t: Table, a: Expression, b: Expression) -> Expression:
    if a.is_number(0) or b.is_number(1):
        return a
    if a.op == "negative":
        return _negative(t, _divide(t, a.args[0], b))
    found = _through(t, "divide", a, b)
    return t.make("divide", a, b) if found is None else found


def _where(t: Table, condition: Expression, a: Expression, b: Expression) -> Expression:
    return a if a is b else t.make("where", condition, a, b)


SHORTER: dict[str, Any] = {
    "add": _add, "subtract": _subtract, "negative": _negative, "multiply": _multiply, "divide": _divide,
    "where": _where,
}  # fmt: skip


# Derivatives.


def parts_of(roots: Iterable[Expression], known: Container[int] = ()) -> list[Expression]:
    """Return all expressions that these are made of, down to `known` keys, operands before what they enter."""
    found: dict[int, Expression] = {}
    left = list(roots)
    while left:
        e = left.pop()
        if e.key not in found:
            found[e.key] = e
            left += [] if e.key in known else [a for a in e.args if isinstance(a, Expression)]
    return [found[key] for key in sorted(found)]


def leaves_of(roots: Iterable[Expression]) -> list[int]:
    """Return the numbers of the leaves in expressions."""
    return sorted(e.args[0] for e in parts_of(roots) if e.op == "leaf")


def renumbered(root: Expression, number: Sequence[int]) -> Expression:
    """Return an expression with other numbers of its leaves."""
    if list(number) == list(range(len(number))):
        return root
    found: dict[int, Expression] = {}
    for e in parts_of([root]):
        args = (found[a.key] if isinstance(a, Expression) else number[a] if e.op == "leaf" else a for a in e.args)
        found[e.key] = root.table.make(e.op, *args)
    return found[root.key]


def is_costly(root: Expression) -> bool:
    """Return whether an expression has functions such as exponentials, rather than arithmetic alone."""
    return any(e.op not in CHEAP for e in parts_of([root]))


CHEAP = ("leaf", "number", "add", "subtract", "multiply", "divide", "negative", "where", "maximum", "minimum",
         "absolute", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "sqrt")  # fmt: skip
KINKED = ("where", "maximum", "minimum", "fmax", "fmin", "absolute", "sign", "heaviside", "floor", "ceil", "trunc",
          "rint", "remainder", "fmod", "floor_divide", "copysign", "equal", "less")  # fmt: skip
"""Operations that branch on values: where rounding differs, they may take another branch."""


def gradient(root: Expression, leaves: Iterable[int]) -> dict[int, Expression]:
    """Return derivatives by leaves, by one reverse sweep; those that are zero are left out."""
    t, wanted, order = root.table, set(leaves), parts_of([root])
    moves = set[int]()
    for e in order:
        if (e.op == "leaf" and e.args[0] in wanted) or any(
                isinstance(a, Expression) and a.key in moves for a in e.args):  # fmt: skip
            moves.add(e.key)
    adjoints = {root.key: t.number(1)}
    found: dict[int, Expression] = {}
    for e in reversed(order):
        g = adjoints.get(e.key)
        if g is None or e.key not in moves or g.is_number(0):
            continue
        if e.op == "leaf":
            found[e.args[0]] = g
            continue
        for a, part in zip(e.args, _pulled(t, e, g), strict=True):
            if part is not None and isinstance(a, Expression) and a.key in moves:
                adjoints[a.key] = _add(t, adjoints[a.key], part) if a.key in adjoints else part
    return found


def _pulled(t: Table, e: Expression, g: Expression) -> list[Expression | None]:
    """Return what an adjoint adds to those of the operands."""
    if e.op == "where":
        zero = t.number(0)
        return [None, _where(t, e.args[0], g, zero), _where(t, e.args[0], zero, g)]
    if e.op == "divide":
        quotient = _divide(t, g, e.args[1])
        return [quotient, _negative(t, _multiply(t, quotient, e))]
    slopes = tracing.SLOPES.get(e.op) or tracing.SPECIAL.get(e.op)
    if slopes is None:
        raise UnrecordedError(f"The derivative of {e.op} cannot be compiled")
    with np.errstate(all="ignore"):
        return [None if slope is None else _multiply(t, g, t.lifted(slope(e, *e.args))) for slope in slopes]


def evaluated(root: Expression, leaves: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the value of an expression, by NumPy and SciPy."""
    from scipy import special

    found: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for e in parts_of([root]):
            if e.op in ("leaf", "number"):
                found[e.key] = leaves[e.args[0]] if e.op == "leaf" else e.args[0]
            else:
                found[e.key] = getattr(np if hasattr(np, e.op) else special, e.op)(*(found[a.key] for a in e.args))
    return np.asarray(found[root.key])
