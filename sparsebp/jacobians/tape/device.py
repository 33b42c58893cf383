"""Loops of the tape as CUDA kernels, a thread for each turn: the same text, translated from Python to C++.

Nothing is added by atomic operations, whose order differs between runs. Values that several threads would add to one
place are stored as *parts*, and these are summed in a planned order.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp.core import graphs
from sparsebp.core.check import Array
from sparsebp.jacobians.tape.loops import Leaf, Loop, Root, Where
from sparsebp.kernels.device import emitted
from sparsebp.kernels.device.launch import WARP, launch_emitted

LONGEST_SUM, SHORT_SUM = 512, 8
"""Parts of a sum: of more, they are split among several warps; of up to so many, on average, one thread sums them."""

KERNEL = """#include "tape.cuh"

extern "C" __global__ void __launch_bounds__(256) run(real* numbers, real* adjoints, real* out, real* parts,
                                                      const unsigned* index, const int64* at, int64 samples,
                                                      int64 all) {{
    const int64 count = index_of(all, samples);
    {before}
    for (int64 t = int64(blockIdx.x) * blockDim.x + threadIdx.x; t < all; t += int64(gridDim.x) * blockDim.x) {{
        const int64 i = index_of(t, samples), b = t - i * samples;
        {inside}
    }}
}}
"""
ARRAYS = ("numbers", "adjoints", "out", "parts")
"""Arrays with a number for each sample."""
SUMS = """#include "tape.cuh"

extern "C" __global__ void __launch_bounds__(256) run(const real* parts, const unsigned* order, const unsigned* ends,
                                                      const unsigned* to, real* out, int lanes, int64 samples,
                                                      int64 count) {
    sum_parts(parts, order, ends, to, out, lanes, samples, count);
}
"""
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
             ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}  # fmt: skip


def as_cuda(text: str) -> str:
    """Return a loop's text in CUDA C++, for one sample or several; what depends on the sample is in the loop.

    Products of "kinked" loops are rounded by themselves, as on the host: a fused multiply-add may take another branch.
    """
    (function,) = ast.parse(text).body
    kinked = text.startswith("# kinked")
    before, inside, of_sample = [], [], set(ARRAYS)
    for statement in function.body:  # type: ignore[attr-defined]
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.For):
            inside += [_statement(one, kinked) for one in statement.body]
        elif ast.unparse(statement) == "kind = numbers.dtype.type":
            continue
        elif names & of_sample:
            of_sample.add(statement.targets[0].id)
            inside.append(_statement(statement, kinked))
        else:
            before.append(_statement(statement, kinked))
    return KERNEL.format(before="\n    ".join(before), inside="\n        ".join(inside))


def _statement(node: ast.stmt, kinked: bool) -> str:
    match node:
        case ast.Assign([ast.Name(name)], value):
            return f"const auto {name} = {_cpp(value, kinked)};"
        case ast.Assign([target], value):
            return f"{_cpp(target, kinked)} = {_cpp(value, kinked)};"
        case ast.AugAssign(target, ast.Add(), value):
            return f"{_cpp(target, kinked)} += {_cpp(value, kinked)};"
        case ast.If(test, [one], []):
            return f"if ({_cpp(test, kinked)}) {_statement(one, kinked)}"
    raise NotImplementedError(ast.unparse(node))


def _cpp(node: ast.expr, kinked: bool) -> str:
    """Return an expression in C++; every operation is in parentheses."""

    def of(node: ast.expr) -> str:
        return _cpp(node, kinked)

    match node:
        case ast.Constant():
            return ast.unparse(node)
        case ast.Name(name):
            return {"kind": "real", "abs": "np::absolute"}.get(name, name)
        case ast.Attribute(ast.Name(module), name):  # a number of `math`
            return f"{module}::{name}()"
        case ast.Call(ast.Attribute(ast.Name("np"), "uint64"), [value]):
            return of(value)
        case ast.Call(ast.Attribute(ast.Name(module), name), values):
            return f"{module}::{name}({', '.join(map(of, values))})"
        case ast.Call(name, values):
            return f"{of(name)}({', '.join(map(of, values))})"
        case ast.BinOp(left, ast.Pow(), right):
            return f"np::power({of(left)}, {of(right)})"
        case ast.BinOp(left, ast.Mult(), right) if kinked:
            return f"np::multiply({of(left)}, {of(right)})"
        case ast.BinOp(left, operator, right) | ast.Compare(left, [operator], [right]):
            return f"({of(left)} {OPERATORS[type(operator)]} {of(right)})"
        case ast.UnaryOp(operator, value):
            return f"({'!' if isinstance(operator, ast.Not) else '-'}{of(value)})"
        case ast.IfExp(test, one, other):
            return f"({of(test)} ? {of(one)} : {of(other)})"
        case ast.Subscript(ast.Name("index"), ast.Tuple([turn, ast.Constant(column)])):
            return f"index[{column!r} * count + {of(turn)}]"
        case ast.Subscript(ast.Name(array), place) if array in ARRAYS:
            return f"{array}[{of(place)} * samples + b]"
        case ast.Subscript(array, place):
            return f"{of(array)}[{of(place)}]"
    raise NotImplementedError(ast.unparse(node))


class DeviceLoop(Loop):
    """A loop as a kernel.

    Parameters
    ----------
    device
        The launchers of the arrays' namespace.
    leaves, roots, count
        As of `Loop`.
    """

    _vectors = ()

    def __init__(self, device: Any, leaves: Sequence[Leaf], roots: Sequence[Root], count: int) -> None:
        self._device, self.count = device, count
        self._added: list[tuple[str, Sums]] = []
        self._parts = 0
        roots = self._apart(roots)
        self._file = emitted(as_cuda(self._text(leaves, roots)))
        self._used = {leaf.where for leaf in leaves} | {root.where for root in roots}
        kept: Any = lambda array: graphs.kept(device.xp, array) if len(array) else None  # noqa: E731
        self._index = kept(np.array(self._table, np.uint32))  # column by column
        self._at = kept(np.array(self._steps, np.int64))

    def __call__(self, numbers: Array, adjoints: Array, out: Array) -> None:
        """Run; all arrays have one dtype."""
        arrays = {"numbers": numbers, "adjoints": adjoints, "out": out}
        batch = numbers.shape[1:]
        parts = self._device.xp.empty((self._parts, *batch), numbers.dtype) if self._parts else None
        given = (arrays[name] if name in self._used else None for name in arrays)
        samples = np.int64(math.prod(batch))
        turns = self.count * int(samples)
        launch_emitted(self._device, self._file, numbers, turns, *given, parts, self._index, self._at, samples)
        for where, sums in self._added:
            sums(parts, arrays[where])

    def _condition(self, root: Root, place: str) -> str:
        if not (root.places == root.nowhere).any():
            return ""
        self._steps.append(root.nowhere)
        return f"if {place} != at[{len(self._steps) - 1}]: "

    def _apart(self, roots: Sequence[Root]) -> list[Root]:
        """Return roots of which no two write to one place: parts, where several values are added there."""
        found = list(roots)
        for where in ("numbers", "adjoints", "out"):
            mine = [k for k, root in enumerate(roots) if root.adds and root.where == where]
            if not mine:
                continue
            writers = np.bincount(np.concatenate([roots[k].places for k in mine]))
            several = [k for k in mine
                       if (writers[roots[k].places[roots[k].places != roots[k].nowhere]] > 1).any()]  # fmt: skip
            first = self._parts
            for k in several:
                places = self._parts + np.arange(self.count)
                found[k] = Root(roots[k].expression, "parts", places, adds=False)
                self._parts += self.count
            if several:
                to = np.concatenate([np.where(roots[k].places == roots[k].nowhere, -1, roots[k].places)
                                     for k in several])  # fmt: skip
                self._added.append((where, Sums(self._device, first, to)))
        return found


class DeviceMultiplied:
    """As `chain.Multiplied`."""

    def __init__(self, device: Any, matrix: Any, places: np.ndarray, to: np.ndarray, where: Where,
                 *, adds: bool) -> None:  # fmt: skip
        self._device, self._where, self._adds = device, where, adds
        arrays = matrix.indptr.astype(np.int64), places[matrix.indices].astype(np.int64), matrix.data.reshape(-1, 1)
        self._matrix = [graphs.kept(device.xp, array) for array in arrays]
        self._to = graphs.kept(device.xp, to.astype(np.int64))

    def __call__(self, numbers: Array, adjoints: Array, out: Array) -> None:
        """Multiply, in the array that it is for."""
        x = {"numbers": numbers, "adjoints": adjoints, "out": out}[self._where]
        products = self._device.xp.empty((len(self._to), *x.shape[1:]), x.dtype)
        self._device.csr_matvec(*self._matrix, *(one.reshape(len(one), -1) for one in (x, products)))
        if self._adds:
            x[self._to] += products
        else:
            x[self._to] = products


class Sums:
    """Adds parts to places of an array, in the same order at every call.

    Parameters
    ----------
    device
        The launchers.
    first, to
        The first part, and the place of each part from there on; -1 is nowhere.
    """

    def __init__(self, device: Any, first: int, to: np.ndarray) -> None:
        self._device = device
        order = np.argsort(to, kind="stable")
        order = order[np.searchsorted(to[order], 0) :]
        places, starts = np.unique(to[order], return_index=True)
        order, ends, levels = order + first, np.append(starts, len(order)), []
        while (lengths := np.diff(ends)).max() > LONGEST_SUM:
            pieces = -(-lengths // LONGEST_SUM)
            last = np.cumsum(pieces)
            within = np.arange(last[-1]) - np.repeat(last - pieces, pieces)
            levels.append((order, np.append(np.repeat(ends[:-1], pieces) + LONGEST_SUM * within, ends[-1])))
            order, ends = np.arange(last[-1]), np.append(0, last)
        levels.append((order, ends))
        lanes = (np.int32(WARP if len(order) > SHORT_SUM * len(ends) else 1) for order, ends in levels)
        self._levels = [(*(graphs.kept(device.xp, array.astype(np.uint32)) for array in level), own)
                        for level, own in zip(levels, lanes, strict=True)]  # fmt: skip
        self._to = graphs.kept(device.xp, places.astype(np.uint32))
        self._file = emitted(SUMS)

    def __call__(self, parts: Array, out: Array) -> None:
        """Add to an array."""
        batch = parts.shape[1:]
        samples = np.int64(math.prod(batch))
        for number, (order, ends, lanes) in enumerate(self._levels, 1):
            last, size = number == len(self._levels), len(ends) - 1
            sums, to = (out, self._to) if last else (self._device.xp.empty((size, *batch), parts.dtype), None)
            given = (parts, order, ends, to, sums, lanes, samples)
            launch_emitted(self._device, self._file, parts, size * int(lanes * samples), *given)
            parts = sums
