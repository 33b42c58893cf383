"""What a function finds outside its arguments, and whether that is still the same.

A record is of one function in one environment: variables of modules and enclosing functions, attributes of `self`,
arrays that may be written to in place. The code says which of them it can reach, also through functions that it calls.
Code that reads or writes anything else (files, clocks, random numbers, `global`) is not known.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sparsebp.jacobians.tape.expressions import UnrecordedError
from sparsebp.jacobians.tape.loops import same

PURE = {"numpy", "scipy", "math", "cmath", "operator", "itertools", "functools", "builtins", "collections", "typing",
        "numbers", "copy", "enum"}  # fmt: skip
"""Modules whose functions depend on their arguments alone, but for `IMPURE`."""
IMPURE = {"random", "load", "loadtxt", "fromfile", "genfromtxt", "memmap", "lru_cache", "cache", "count", "cycle",
          "errstate", "seterr", "attrgetter", "methodcaller"}  # fmt: skip
OPEN = {"eval", "exec", "globals", "locals", "vars", "getattr", "setattr", "delattr", "open", "input", "id", "hash",
        "__import__", "next"}  # fmt: skip
"""Built-in functions that reach what the code does not name."""
NUMBERS = (int, float, complex, str, bytes, bool, type(None), type(...), slice, range, np.generic, np.dtype)
UNUSED = {f"__{name}__" for name in (
    "init", "new", "post_init", "init_subclass", "class_getitem", "set_name", "del", "repr", "str", "format", "dir",
    "sizeof", "hash", "reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "copy", "deepcopy", "setattr",
    "delattr", "setitem", "delitem")}  # fmt: skip
"""Special methods that no expression calls; all others are a part of the code that is reached with an object."""
MISSING = object()
LARGE = 1 << 15
"""Bytes of an array from which it is compared in place."""


class Environment:
    """The environment of a function and of constants among its arguments, as it was when this object was made.

    Raises
    ------
    UnrecordedError
        The code reaches something that cannot be compared later.
    """

    def __init__(self, f: Callable[..., Any], *constants: Any) -> None:
        self._bindings: list[tuple[Mapping[str, Any], str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._fields: list[tuple[Any, str, Any]] = []  # code and defaults of functions, classes of objects
        self._contents: list[tuple[Any, Any]] = []  # lists, dictionaries and sets
        self._arrays: list[tuple[np.ndarray, tuple[int, ...], Any]] = []
        self._names: set[str] = set()  # attributes that any code may ask for
        self._holders: list[tuple[Any, Mapping[str, Any], set[str]]] = []  # owner, attributes, those that were visited
        self._seen: dict[int, Any] = {}
        self._visit_all((f, *constants))
        while any(self._look_into(*holder) for holder in self._holders):
            pass

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        try:
            return (
                all(mapping.get(name, MISSING) is value for mapping, name, value in self._bindings)
                and all(cell.cell_contents is value for cell, value in self._cells)
                and all(getattr(owner, name) is value for owner, name, value in self._fields)
                and all(_holds_the_same(container, kept) for container, kept in self._contents)
                and all(a.shape == shape and _same(a, kept) for a, shape, kept in self._arrays)
            )
        except Exception:  # a cell without contents, a changed kind of array
            return False

    def _visit(self, value: Any) -> None:
        builtin = type(value).__module__.split(".")[0] in PURE
        if (builtin and isinstance(value, NUMBERS)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        module = getattr(value, "__module__", None) or ""
        pure = module.split(".")[0] in PURE and not module.startswith("numpy.random")
        if isinstance(value, np.ndarray):
            self._note_array(value)
        elif isinstance(value, types.ModuleType):
            self._visit_module(value)
        elif isinstance(value, functools.partial):
            self._visit_all((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._visit_all((value.__func__, value.__self__))
        elif isinstance(value, (tuple, list, set, frozenset)):
            self._visit_all(value)
            if not isinstance(value, (tuple, frozenset)):
                self._contents.append((value, _content(value)))
            self._visit_class(value, builtin)
        elif isinstance(value, dict):
            self._visit_all(value.values())
            self._contents.append((value, _content(value)))
            self._visit_class(value, builtin)
        elif isinstance(value, types.FunctionType) and not pure:
            self._visit_function(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType)):
            owner = value.__self__
            if isinstance(owner, np.ufunc):  # add.reduce
                return
            if not (isinstance(owner, types.ModuleType) and owner.__name__.split(".")[0] in PURE) and not pure:
                raise unknown(value)
            if owner is builtins and value.__name__ in OPEN:
                raise unknown(value)
        elif isinstance(value, (type, np.ufunc, types.FunctionType)) or (pure and _is_function(value)):
            if not pure and not isinstance(value, np.ufunc):
                raise unknown(value)
            if getattr(value, "__name__", "") in IMPURE:
                raise unknown(value)
        else:
            self._visit_object(value)

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._visit(value)

    def _note_array(self, value: np.ndarray) -> None:
        if type(value) is not np.ndarray or value.dtype.kind not in "fciub":
            raise unknown(value)
        self._arrays.append((value, value.shape, _copy(value)))

    def _visit_module(self, module: types.ModuleType) -> None:
        self._holders.append((module, vars(module), set()))

    def _visit_object(self, value: Any) -> None:
        """Look into an object with attributes: later those that code may ask for, at once all that NumPy's may use."""
        kind = type(value)
        own = getattr(value, "__dict__", None)
        plain = kind.__getattribute__ is object.__getattribute__ or kind is types.SimpleNamespace
        slots = [name for base in kind.__mro__ if "__slots__" in vars(base) for name, slot in vars(base).items()
                 if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name)]  # fmt: skip
        if (own is None and not slots and not isinstance(value, NUMBERS)) or not plain or hasattr(kind, "__getattr__"):
            raise unknown(value)
        self._fields += [(value, name, getattr(value, name)) for name in slots]
        self._visit_all(getattr(value, name) for name in slots)
        if kind.__module__.split(".")[0] in PURE:
            for name, part in (own or {}).items():
                self._bind(own or {}, name, part)
        else:
            self._visit_class(value, builtin=False)

    def _visit_class(self, value: Any, builtin: bool) -> None:
        """Note the attributes of an object and of its class, and look into special methods, which no name asks for."""
        if builtin:
            return
        self._fields.append((value, "__class__", type(value)))
        if (own := getattr(value, "__dict__", None)) is not None:
            self._holders.append((value, own, set()))
        for base in type(value).__mro__:
            if base.__module__.split(".")[0] in PURE:
                continue
            self._holders.append((base, vars(base), set()))
            for name, method in vars(base).items():
                if isinstance(method, types.FunctionType) and name[:2] == "__" and name not in UNUSED:
                    self._visit(method)

    def _look_into(self, owner: Any, attributes: Mapping[str, Any], done: set[str]) -> bool:
        """Visit attributes that code may ask for; return whether there were new ones."""
        new = (self._names & attributes.keys()) - done
        done |= new
        if not isinstance(owner, types.ModuleType):  # a name that comes may hide one of a class
            absent = self._names - attributes.keys() - done
            done |= absent
            self._bindings += [(attributes, name, MISSING) for name in absent]
        pure = isinstance(owner, types.ModuleType) and owner.__name__.split(".")[0] in PURE
        for name in new:
            value = attributes[name]
            if isinstance(value, types.MemberDescriptorType) or type(value).__module__ == "_collections":
                continue  # a slot, or a field of a named tuple
            if pure:
                if name in IMPURE:
                    raise unknown(value)
                continue
            self._bindings.append((attributes, name, value))
            self._visit(value.fget if isinstance(value, property) else value.__func__ if isinstance(
                value, (staticmethod, classmethod)) else value)  # fmt: skip
        return bool(new)

    def _bind(self, mapping: Mapping[str, Any], name: str, value: Any) -> None:
        self._bindings.append((mapping, name, value))
        self._visit(value)

    def _visit_function(self, f: types.FunctionType) -> None:
        self._visit_all((f.__defaults__ or (), f.__kwdefaults__ or {}))
        self._fields += [(f, name, getattr(f, name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]
        if f.__dict__:
            self._holders.append((f, f.__dict__, set()))
        for cell in f.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not yet bound
                raise unknown(f) from None
            self._cells.append((cell, value))
            self._visit(value)
        self._visit_code(f.__code__, f.__globals__, set(f.__code__.co_freevars))

    def _visit_code(self, code: types.CodeType, names: dict[str, Any], outside: set[str]) -> None:
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
                    step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in outside):  # fmt: skip
                raise UnrecordedError(f"{code.co_name} writes to {step.argval!r} outside of it and cannot be compiled")
            if step.opname == "IMPORT_NAME" and step.argval.split(".")[0] not in PURE:
                raise UnrecordedError(f"{code.co_name} imports {step.argval} and cannot be compiled")
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if step.argval in names:
                    self._bind(names, step.argval, names[step.argval])
                elif step.argval in OPEN:
                    raise unknown(getattr(builtins, step.argval))
                else:  # a name that comes may hide one of Python's
                    self._bindings.append((names, step.argval, MISSING))
        self._names |= set(code.co_names)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._visit_code(inner, names, outside & set(inner.co_freevars))


def _is_function(value: Any) -> bool:
    """Return whether this is a function of an extension module, rather than an object that can be called."""
    return callable(value) and hasattr(value, "__name__") and not isinstance(value, np.vectorize)


def unknown(value: Any) -> UnrecordedError:
    """Return the error of something whose changes cannot be seen."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__name__
    return UnrecordedError(f"The function reaches {name}, which may change unseen, and cannot be compiled")


def _content(container: Any) -> list[Any]:
    """Return what a container holds, in its order."""
    return [part for item in container.items() for part in item] if isinstance(container, dict) else [*container]


def _holds_the_same(container: Any, kept: list[Any]) -> bool:
    """Return whether a container holds the same objects; those that are kept live, so that no other has their place."""
    return [*map(id, _content(container))] == [*map(id, kept)]


def _copy(a: np.ndarray) -> Any:
    return a.copy() if a.nbytes > LARGE else (a.dtype, a.tobytes())


def _same(a: np.ndarray, kept: Any) -> bool:
    """Return whether an array holds the same bytes."""
    if isinstance(kept, tuple):
        return bool(a.dtype == kept[0]) and a.tobytes() == kept[1]
    return bool(a.dtype == kept.dtype) and same(a, kept)
