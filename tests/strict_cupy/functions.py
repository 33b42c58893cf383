"""CuPy's functions: NumPy's on the memory of the device, with CuPy's arguments, one launch each.

Those that have a rule of their own stand here; all others of `surface` are made from NumPy's function of that name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from strict_cupy import memory, surface
from strict_cupy.arrays import assign, check_operands, compute, ndarray
from strict_cupy.counts import note
from strict_cupy.device import DEVICE, current_stream

FUNCTIONS, METHODS, _NAMES = surface.read()
_HELD_AT_ONCE = 8
"""Arrays that CuPy concatenates by copying each; of more it sends a table of where they are."""


# ---- from the host ---------------------------------------------------------------------------------------------------


def array(
    obj: Any, dtype: Any = None, copy: Any = True, order: str = "K", subok: bool = False, ndmin: int = 0, *,
    blocking: bool = False,
) -> ndarray:  # fmt: skip
    """Return an array of these values; what comes from the host is sent through pinned memory."""
    if isinstance(obj, ndarray):
        if not copy and (dtype is None or np.dtype(dtype) == obj.dtype) and _laid_out(obj, order):
            found = obj
        else:
            found = obj.astype(obj.dtype if dtype is None else dtype, order=order or "K")
        return found if found.ndim >= ndmin else found.reshape((1,) * (ndmin - found.ndim) + found.shape)
    if isinstance(obj, (list, tuple)) and any(isinstance(each, ndarray) for each in _leaves(obj)):
        return stack([array(each, dtype) for each in obj])
    host = np.array(obj, dtype=dtype, copy=None, ndmin=ndmin)
    if host.dtype.kind not in "biufc":
        raise ValueError(f"Unsupported dtype {host.dtype}")
    fortran = order == "F" or (order in ("K", "A") and host.flags.fnc)
    result = ndarray(host.shape, host.dtype, order="F" if fortran else "C")
    if not host.ndim:
        result.fill(host)
        return result
    pinned = memory.alloc_pinned_memory(host.nbytes)
    if host.size:
        np.frombuffer(pinned, host.dtype, host.size).reshape(host.shape, order="F" if fortran else "C")[...] = host
        result.data.copy_from_host_async(pinned.ptr, host.nbytes)
    if blocking:
        current_stream().synchronize()
    return result


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    """Return `a` as an array of the device."""
    return array(a, dtype, bool(copy), order or "K", blocking=blocking)


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    """Return `a` if it is C-contiguous, else a copy. As CuPy's, it takes nothing from the host."""
    if not isinstance(a, ndarray):
        raise TypeError(
            f"Argument 'a' has incorrect type (expected cupy._core.core._ndarray_base, got {type(a).__name__})"
        )
    if dtype is not None and np.dtype(dtype) != a.dtype:
        return a.astype(dtype, order="C")
    return a if a.host.flags.c_contiguous else a.copy()


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray:
    """Return `a` on the host."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return np.asarray(a)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    check_operands(dst, src)
    if not isinstance(src, ndarray):
        if where is None:
            dst.fill(src)
        else:
            _in_place("copyto", lambda d, w: np.copyto(d, src, where=w), dst, where)
        return
    if not np.can_cast(src.dtype, dst.dtype, casting):
        raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
    if where is None:
        assign(dst, src)
    else:
        check_operands(where)
        _in_place("copyto", lambda d, s, w: np.copyto(d, s, casting="unsafe", where=w), dst, src, where)


def _in_place(name: str, function: Callable[..., None], *operands: Any) -> None:
    views = [a.host if isinstance(a, ndarray) else a for a in operands]
    DEVICE.submit(lambda: function(*views), current_stream().ptr, "kernel", f"cupy.{name}")


def _laid_out(a: ndarray, order: Any) -> bool:
    return order in (None, "K", "A") or (a.host.flags.f_contiguous if order == "F" else a.host.flags.c_contiguous)


def _leaves(value: Any) -> Iterable[Any]:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, (list, tuple)):
            yield from _leaves(each)
        else:
            yield each


# ---- new arrays ------------------------------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """Return memory that nobody has written."""
    return ndarray(shape, dtype, order=order)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    result = ndarray(shape, dtype, order=order)
    result.data.memset_async(0, result.nbytes)
    return result


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    """Return one number everywhere."""
    if dtype is None:
        dtype = fill_value.dtype if isinstance(fill_value, ndarray) else np.asarray(fill_value).dtype
    result = ndarray(shape, dtype, order=order)
    result.fill(fill_value)
    return result


def empty_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    """Return memory of an array's shape and dtype that nobody has written."""
    if subok is not None:
        raise TypeError("subok is not supported yet")
    fortran = order == "F" or (order in ("K", "A") and a.flags.fnc)
    return ndarray(a.shape if shape is None else shape, dtype or a.dtype, order="F" if fortran else "C")


def zeros_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    result = empty_like(a, dtype, order, subok, shape)
    result.data.memset_async(0, result.nbytes)
    return result


def ones_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    return full_like(a, 1, dtype, order, subok, shape)


def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    result = empty_like(a, dtype, order, subok, shape)
    result.fill(fill_value)
    return result


# ---- with rules of their own -----------------------------------------------------------------------------------------


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """Return elements of `x` or `y`; without them, where the condition holds, which the host reads."""
    if x is None and y is None:
        return nonzero(condition)
    if x is None or y is None:
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    check_operands(condition, x, y)
    return compute("where", np.where, condition, x, y)


def nonzero(a: ndarray) -> tuple[ndarray, ...]:
    """Return where an array is not zero; the host reads how many there are."""
    found = np.nonzero(a.get())
    return compute("nonzero", lambda _: found, a)


def concatenate(tup: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
    """Return arrays behind one another: a copy each, or, of more than eight, a table of pointers and one kernel."""
    return _joined("concatenate", np.concatenate, tup, axis, out, dtype, casting)


def stack(tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
    """Return arrays along a new axis."""
    return _joined("stack", np.stack, tup, axis, out, dtype, casting)


def _joined(
    name: str, function: Callable[..., Any], tup: Any, axis: Any, out: Any, dtype: Any, casting: str
) -> ndarray:
    arrays = list(tup)
    if not all(isinstance(a, ndarray) for a in arrays):
        raise TypeError("Only cupy arrays can be concatenated")
    if len(arrays) > _HELD_AT_ONCE and len({a.dtype for a in arrays}) == 1:
        array(np.array([a.data.ptr for a in arrays]))
    else:
        for _ in arrays[1:]:
            note("kernel", "cupy.copy")
    options = {"axis": axis, "casting": casting} | ({} if dtype is None else {"dtype": dtype})
    return compute(name, lambda *given: function(given, **options), *arrays, out=out)


def matmul(a: Any, b: Any, out: Any = None, **options: Any) -> ndarray:
    """Return the matrix product, by cuBLAS."""
    if options.keys() - {"dtype", "casting", "axes", "axis", "keepdims", "order", "signature"}:
        raise TypeError(f"Wrong arguments {options}")
    check_operands(a, b)
    _no_cublas_in_capture()
    return compute("matmul", lambda x, y: np.matmul(x, y, **options), a, b, out=out)


def _no_cublas_in_capture() -> None:
    if current_stream().is_capturing():
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")


def einsum(*operands: Any, **kwargs: Any) -> ndarray:
    """Return a sum of products, by cuBLAS where there are several factors."""
    factors = [each for each in operands if not isinstance(each, (str, list, tuple))]
    check_operands(*factors)
    if len(factors) > 1:
        _no_cublas_in_capture()
    return _generic("einsum", np.einsum, operands, kwargs)


def may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """Say whether two arrays may have memory in common."""
    return isinstance(a, ndarray) and isinstance(b, ndarray) and np.may_share_memory(a.host, b.host)


shares_memory = may_share_memory


# ---- all others ------------------------------------------------------------------------------------------------------

_VIEWS = frozenset(
    [
        "transpose", "swapaxes", "moveaxis", "rollaxis", "expand_dims", "squeeze", "broadcast_to", "diagonal", "split",
        "array_split", "hsplit", "vsplit", "dsplit", "broadcast_arrays", "atleast_1d", "atleast_2d", "atleast_3d",
        "flip", "fliplr", "flipud", "rot90", "matrix_transpose", "permute_dims", "real",
    ]
)  # fmt: skip
_PRODUCTS = frozenset(["dot", "vdot", "inner", "tensordot"])
_OF_NUMBERS = frozenset(
    ["arange", "eye", "identity", "linspace", "logspace", "tri", "indices", "tril_indices", "triu_indices"]
)
_ABOUT = frozenset(
    ["ndim", "shape", "result_type", "promote_types", "can_cast", "issubdtype", "isscalar", "isdtype",
     "broadcast_shapes"]
)  # fmt: skip
_READ = frozenset(
    ["argwhere", "flatnonzero", "unique", "bincount", "extract", "union1d", "intersect1d", "setdiff1d", "setxor1d"]
)
"""How many elements they return depends on the values, so that the host reads."""


def _generic(name: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compute a function of arrays that may stand within lists."""
    found: list[ndarray] = []

    def out_of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(out_of, value))
        if isinstance(value, np.ndarray):
            raise TypeError(f"Unsupported type {type(value)}")
        if not isinstance(value, ndarray):
            return value
        found.append(value)
        return _Place(len(found) - 1)

    places, out = out_of(args), options.pop("out", None)
    named = {key: out_of(value) for key, value in options.items()}
    if not found and name not in _OF_NUMBERS:
        raise TypeError(f"{name}: expected cupy.ndarray, got {[type(value).__name__ for value in args]}")

    def run(*arrays: np.ndarray) -> Any:
        def into(value: Any) -> Any:
            if isinstance(value, _Place):
                return arrays[value]
            return type(value)(map(into, value)) if isinstance(value, (list, tuple)) else value

        return function(*into(places), **{key: into(value) for key, value in named.items()})

    if name in _READ:
        for each in found:
            each.get()
        result = run(*(each.host for each in found))
        return compute(name, lambda *_: result, *found)
    return compute(name, run, *found, out=out)


class _Place(int):
    """Which of the arrays stands here."""


def _made(name: str) -> Callable[..., Any]:
    signature, function = FUNCTIONS[name], getattr(np, name)

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)  # raises TypeError on what CuPy does not have
        if name in _ABOUT:
            return function(*(a.host if isinstance(a, ndarray) else a for a in given.args), **given.kwargs)
        if name in _VIEWS:
            return _viewed(name, function, given.args, given.kwargs)
        if name in _PRODUCTS:
            check_operands(*given.args[:2])
            _no_cublas_in_capture()
        positional = list(given.args)
        options = dict(given.kwargs)
        if "out" in given.arguments and "out" not in options:  # by its name, so that `compute` has it
            names = list(given.arguments)
            at = names.index("out")
            options |= dict(zip(names[at:], positional[at:], strict=True))
            del positional[at:]
        return _generic(name, function, tuple(positional), {k: v for k, v in options.items() if v is not None})

    return made


def _viewed(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arrays = [a for a in args if isinstance(a, ndarray)]
    if not arrays:
        raise TypeError(f"{name}: expected cupy.ndarray, got {[type(value).__name__ for value in args]}")
    result = function(*(a.host if isinstance(a, ndarray) else a for a in args), **kwargs)
    if isinstance(result, (list, tuple)):
        owners = arrays if len(arrays) == len(result) else arrays[:1] * len(result)
        return type(result)(ndarray.of_view(each, owner) for each, owner in zip(result, owners, strict=True))
    return ndarray.of_view(result, arrays[0])


def _method(name: str) -> Callable[..., Any]:
    signature, function = METHODS[name], getattr(np.ndarray, name, None) or getattr(np, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        self, out = given.pop("self"), given.pop("out", None)
        arrays = {key: value for key, value in given.items() if isinstance(value, (ndarray, np.ndarray))}
        check_operands(*arrays.values())
        rest = {key: value for key, value in given.items() if key not in arrays and value is not None}

        def run(a: np.ndarray, *values: np.ndarray) -> Any:
            return function(a, **rest, **dict(zip(arrays, values, strict=True)))

        return compute(name, run, self, *arrays.values(), out=out)

    return method


class ufunc:
    """As ``cupy.ufunc``: takes numbers and arrays of the device, and of the keywords only CuPy's."""

    def __init__(self, name: str) -> None:
        self.__name__, self._function = name, getattr(np, name)
        self.nin, self.nout = self._function.nin, self._function.nout

    def __call__(self, *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind", **wrong: Any) -> Any:
        if wrong:
            raise TypeError(f"Wrong arguments {wrong}")
        if not self.nin <= len(args) <= self.nin + self.nout:
            raise TypeError(f"Wrong number of arguments for {self.__name__!r}: {len(args)}")
        if len(args) > self.nin:
            (out,) = args[self.nin :]
        if isinstance(out, tuple):
            (out,) = out
        inputs = args[: self.nin]
        check_operands(*inputs, *(() if out is None else (out,)))
        options = {"casting": casting} | ({} if dtype is None else {"dtype": dtype})
        return compute(self.__name__, lambda *values: self._function(*values, **options), *inputs, out=out)

    def reduce(self, a: ndarray, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`{self.__name__}.reduce` is not supported yet")
        found: ndarray = (a.sum if self.__name__ == "add" else a.prod)(axis, dtype, out, keepdims)
        return found


UFUNCS: dict[str, Any] = {name: ufunc(name) for name in _NAMES if hasattr(np, name)} | {"matmul": matmul}


def method(name: str) -> Callable[..., Any]:
    """Return a method of arrays by its name, as a function of the array."""
    found = _methods.get(name)
    if found is None:
        found = _methods[name] = _method(name)
    return found


_methods: dict[str, Callable[..., Any]] = {}


def __getattr__(name: str) -> Any:
    """Make a function that has no rule of its own."""
    if name in UFUNCS:
        return UFUNCS[name]
    if name in FUNCTIONS and hasattr(np, name):
        made = globals()[name] = _made(name)
        return made
    raise AttributeError(f"module 'cupy' has no attribute {name!r}")
