"""Which functions CuPy has, with which arguments: read from ``surface.txt``, which `describe` wrote where CuPy is.

In ``tests``, ``python -c "import cupy; from strict_cupy import surface as s; s.FILE.write_text(s.describe(cupy))"``
writes it anew.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType

import numpy as np

VERSION = "14.2"
"""Of CuPy, whose surface this is."""
FILE = Path(__file__).with_name("surface.txt")
_METHOD = re.compile(r"_ndarray_base\.(\w+\(self.*?\))( ->.*)?")
_C_TYPE = re.compile(r"\b(?:int|Py_ssize_t|tuple|_ndarray_base) (?=\w)")


def read() -> tuple[dict[str, Signature], dict[str, Signature], frozenset[str]]:
    """Return the functions, the methods of arrays, and the names of the ufuncs."""
    functions: dict[str, Signature] = {}
    methods: dict[str, Signature] = {}
    ufuncs: set[str] = set()
    for line in FILE.read_text().splitlines():
        if line.startswith("ufuncs "):
            ufuncs.update(line.split()[1:])
            continue
        name, arguments = line.removeprefix("ndarray.").split("(", 1)
        found = inspect.signature(eval(f"lambda {arguments[:-1]}: None"))
        (methods if line.startswith("ndarray.") else functions)[name] = found
    return functions, methods, frozenset(ufuncs)


def describe(cupy: ModuleType) -> str:
    """Return the surface of a CuPy: what NumPy has too, by the same name."""
    functions, ufuncs = [], []
    for name in sorted(dir(cupy)):
        value, numpys = getattr(cupy, name), getattr(np, name, None)
        if name.startswith("_") or isinstance(value, type) or not callable(value) or not callable(numpys):
            continue
        if isinstance(value, cupy.ufunc):
            ufuncs += [name] * isinstance(numpys, np.ufunc)
        elif value is not numpys and (found := _signature(value)) is not None:
            functions.append(f"{name}{found}")
    methods = []
    for name in sorted(dir(cupy.ndarray)):
        said = _METHOD.fullmatch((getattr(cupy.ndarray, name).__doc__ or "").split("\n")[0])
        if said and not name.startswith("_"):
            methods.append(f"ndarray.{_C_TYPE.sub('', said[1])}")
    lines = textwrap.wrap(" ".join(ufuncs), 110)
    return "\n".join([*functions, *methods, *(f"ufuncs {line}" for line in lines)]) + "\n"


def _signature(function: object) -> Signature | None:
    try:
        found = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # compiled, and does not say
        return None
    parameters = [
        each.replace(annotation=Parameter.empty, default=_written(each.default)) for each in found.parameters.values()
    ]
    return found.replace(parameters=parameters, return_annotation=Signature.empty)


def _written(default: object) -> object:
    """Return a default that can be read again: a type by its name."""
    return default.__name__ if isinstance(default, type) and default is not Parameter.empty else default
