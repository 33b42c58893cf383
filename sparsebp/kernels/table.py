"""How a row of the table of kernels is read, and how a call is checked against it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.backend import check_array, namespace
from sparsebp.kernels import checks
from sparsebp.kernels.operands import _CLASSES, _OPERANDS

_ARRAY = re.compile(r"(\w+) \((.*)\) (\w+)(\??)( strided)?( written)?( = None)?")
_SIZE = re.compile(r"([A-Z]\w*)( \+ 1)?")


class Argument(NamedTuple):
    """An array argument, as the row states it; ``there`` is a Python condition for its presence, "" if always."""

    name: str
    dims: list[str]
    dtype: str
    there: str
    strided: bool
    written: bool

    def sizes(self, bound: set[str]) -> list[str]:
        """Return the name of the size that each axis tells; an underscore if it is known or not a name."""
        found: list[str] = []
        for dim in self.dims:
            size = _SIZE.fullmatch(dim)
            found.append(size[1] if size and size[1] not in (*bound, *found) else "_")
        return found


class _Row:
    """A kernel's row. Its function is made at the first access and replaces the row in the class."""

    def __init__(self, arguments: str, text: str, checks: tuple[str, ...]) -> None:
        self.items, self.text, self.checks = [item.strip() for item in arguments.split(";")], text, checks

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        parameters, arrays, lines = _parse(self.items)
        call = f"self._run.{self.name}({', '.join(re.split('[ :]', item)[0] for item in self.items)})"
        head = f"def {self.name}(self, {', '.join(parameters)}) -> None:"
        scope = {**vars(checks), **_SCOPE}
        exec("\n    ".join([head, *lines, *_statements(arrays, self.checks), call]), scope)
        function: Any = scope[self.name]
        listed = (re.sub(r"^(\w+):? ", r"\1 : ", item) for item in self.items)
        function.__doc__ = "\n".join([inspect.cleandoc(self.text), "", "Parameters", "----------", *listed])
        function.__module__, function.__qualname__ = owner.__module__, f"{owner.__name__}.{self.name}"
        function.arrays = {array.name: array for array in arrays}
        setattr(owner, self.name, function)
        return function.__get__(instance, owner)


def kernel(arguments: str, text: str, *checks: str) -> Callable[..., None]:
    """Return a method that checks its arguments, then calls the implementation's method of the same name.

    Parameters
    ----------
    arguments
        In the notation of `sparsebp.kernels.spec`.
    text
        The docstring, to which the arguments are added.
    *checks
        Python statements: checks that the notation cannot express, and ``"Size = …"``. They see arguments, fields and
        sizes. The number of axes of arrays that tell a size or may be missing is checked before.
    """
    row: Any = _Row(arguments, text, checks)
    return row


def _parse(items: list[str]) -> tuple[list[str], list[Argument], list[str]]:
    """Return the function's parameters, all arrays, and the lines that take tuples apart."""
    parameters, arrays, lines = [], [], []
    for item in items:
        if array := _ARRAY.fullmatch(item):
            parameters.append(f"{array[1]}: Array{' | None' * bool(array[4])}{array[7] or ''}")
            arrays.append(_argument(array))
            continue
        parameters.append(item)
        name, kind = item.split(": ")
        if kind.split()[0] in _OPERANDS:
            fields, stated = _OPERANDS[kind.split()[0]]
            there = f"{name} is not None" if "None" in kind else ""
            nothing = f" if {there} else (None,) * {len(fields)}" if there else ""
            lines.append(f"{', '.join(fields)} = {name}{nothing}")
            arrays += [_argument(field, there) for field in map(_ARRAY.fullmatch, stated) if field]
    return parameters, arrays, lines


def _argument(array: re.Match[str], there: str = "") -> Argument:
    name, dims, dtype, optional, strided, written, _ = array.groups()
    there = f"{name} is not None" if optional else there
    return Argument(name, dims.split(", ") if dims else [], dtype, there, bool(strided), bool(written))


def _statements(arrays: list[Argument], checks: tuple[str, ...]) -> list[str]:
    """Return the lines that check arrays: quick comparisons, with the words of the error behind them."""
    differ = "".join(f" or {_when(a)}type({a.name}) is not kind" for a in arrays[1:])
    named = ", ".join(f"({a.name!r}, {a.name}, {a.there or True})" for a in arrays)
    lines = [
        f"kind = type({arrays[0].name})",
        f"if kind not in _PASSED{differ}:",
        f"    namespace(**{{name: array for name, array, there in [{named}] if there}})",
        "    _PASSED.add(kind)",
    ]
    for kind in _CLASSES:
        if one := next((array.name for array in arrays if array.dtype == kind and not array.there), ""):
            lines.append(f"_{kind} = check_class({one!r}, {one}, {kind!r})")
    shared = [array.name for array in arrays if "B*" in array.dims]
    bound = {check.partition(" = ")[0] for check in checks}
    common = bool(shared) and "B" not in bound and not any("B" in a.dims and not a.written for a in arrays)
    bound |= {"B"} if common else set()
    pending = list(arrays)
    while pending:  # few arrays tell the sizes, so that an error names the one that does not fit the others
        array = max(pending, key=lambda a: (not a.there, len({*a.sizes(bound)} - {"_"})))
        pending.remove(array)
        sizes, axes = array.sizes(bound), len(array.dims)
        told = [(size, dim) for size, dim in zip(sizes, array.dims, strict=True) if size != "_"]
        if told or array.there or (common and array.name in shared):
            lines.append(f"if {_when(array)}{array.name}.ndim != {axes}:")
            lines.append(f"    check_array({array.name!r}, {array.name}, shape=(None,) * {axes}, contiguous=False)")
        if told:
            inside = [f"{', '.join(sizes)}, = {array.name}.shape"]
            for size in (size for size, dim in told if size != dim):
                inside += [f"{size} -= 1", f"if {size} < 0: refuse_empty({array.name!r})"]
            lines += [f"if {array.there}:", *(f"    {line}" for line in inside)] if array.there else inside
        bound.update(size for size, _ in told)
    if common:
        given = ", ".join(f"{name}={name}" for name in shared)
        lines += [f"B = {shared[0]}.shape[-1]", f"if not B{''.join(f' == {name}.shape[-1]' for name in shared)}:"]
        lines += [f"    B = batch_of({given})"]
    lines += checks
    for array in arrays:
        last = f"1 if {array.name}.shape[-1:] == (1,) else B"
        shape = "".join(f"{last if dim == 'B*' else dim}, " for dim in array.dims)
        fits = f"{array.name}.dtype == _{array.dtype} and {array.name}.shape == ({shape})"
        fits += f" and {array.name}.flags.c_contiguous" * (not array.strided)
        fits += f" and getattr({array.name}.flags, 'writeable', True)" * array.written
        wanted = f"dtype=_{array.dtype}, shape=({shape}), contiguous={not array.strided}, written={array.written}"
        lines.append(f"if {_when(array)}not ({fits}):")
        lines.append(f"    check_array({array.name!r}, {array.name}, {wanted})")
    return lines


def _when(array: Argument) -> str:
    return f"{array.there} and " * bool(array.there)


_SCOPE = {
    "_PASSED": {np.ndarray},  # types that `namespace` has taken
    **{f"_{name}": np.dtype(name) for name in ("float64", "int64", "int32", "uint16", "bool")},
    "check_array": check_array,
    "namespace": namespace,
}
"""Names that the functions see in addition to those of `sparsebp.kernels.checks`."""
