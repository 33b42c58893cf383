"""``cupy.ndarray``: values on the device, reached from the host by transfers that are counted, and by nothing else."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from strict_cupy import memory
from strict_cupy.device import DEVICE, current_stream

_ALIKE = (bool, int, float, complex, np.generic)
"""What CuPy's kernels take in place of an array: numbers."""


class Flags:
    """As of ``cupy.ndarray.flags``: CuPy has these three and no more."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata

    @property
    def fnc(self) -> bool:
        return self.f_contiguous and not self.c_contiguous


class ndarray:
    """As ``cupy.ndarray``. `host`: its memory as NumPy sees it; nobody else reads that."""

    __array_priority__ = 100
    __slots__ = ("__weakref__", "_memory", "base", "host")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        dtype = np.dtype(dtype)
        if dtype.kind not in "biufc":
            raise ValueError(f"Unsupported dtype {dtype}")
        shape = tuple(int(n) for n in shape) if np.iterable(shape) else (int(shape),)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if memptr is None:
            memptr = memory.allocate(size)
        self._memory, self.base = memptr.mem, None
        self.host = np.ndarray(shape, dtype, memptr.mem.buffer.data, memptr.offset, strides, order)  # type: ignore[call-overload]

    @classmethod
    def of_view(cls, view: np.ndarray, base: ndarray) -> ndarray:
        """Return the array of a view of the memory of `base`."""
        array = cls.__new__(cls)
        array._memory, array.base, array.host = base._memory, base if base.base is None else base.base, view
        return array

    @classmethod
    def of_memory(cls, held: memory.Memory, host: np.ndarray) -> ndarray:
        """Return the array of a piece of memory that `host` views."""
        array = cls.__new__(cls)
        array._memory, array.base, array.host = held, None, host
        return array

    # ---- what the host knows -----------------------------------------------------------------------------------------

    shape = property(lambda self: self.host.shape, lambda self, shape: self._set_shape(shape))
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: Flags(self.host.flags))
    T = property(lambda self: self.transpose())
    mT = property(lambda self: self.swapaxes(-1, -2))

    @property
    def data(self) -> memory.MemoryPointer:
        """Where it lies."""
        offset = self.host.ctypes.data - self._memory.buffer.ctypes.data if self.host.size else 0
        return memory.MemoryPointer(self._memory, offset)

    @property
    def device(self) -> Any:
        return self.data.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.host.flags.c_contiguous else self.strides
        return {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "strides": strides,
                "data": (self.data.ptr, False), "version": 3, "stream": None}  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    # ---- reads by the host -------------------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        stream = current_stream() if stream is None else stream
        if out is not None:
            if not isinstance(out, np.ndarray):
                raise TypeError("Only numpy.ndarray can be obtained fromcupy.ndarray")
            if (out.dtype, out.shape) != (self.dtype, self.shape):
                raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array of shape {self.shape}")
        elif not self.size:
            return np.empty(self.shape, self.dtype)
        host = np.empty(self.shape, self.dtype, "F" if order == "F" else "C") if out is None else out
        if stream.is_capturing():
            raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
        source = self.host
        DEVICE.submit(lambda: np.copyto(host, source), stream.ptr, "d2h", "get", self.nbytes)
        if blocking:
            DEVICE.read(stream.ptr)
        return host

    def __bool__(self) -> bool:
        if not self.size:
            warnings.warn("The truth value of an empty array is ambiguous.", DeprecationWarning, stacklevel=2)
            return False
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self.get())

    def __format__(self, format_spec: str) -> str:
        return format(self.get(), format_spec)

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)

    def __reduce__(self) -> Any:
        from strict_cupy.functions import array

        return array, (self.get(order="A"),)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.host.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        arr = np.ascontiguousarray(arr)
        self.data.copy_from_host_async(arr.ctypes.data, arr.nbytes, stream)

    # ---- views and copies --------------------------------------------------------------------------------------------

    def _view(self, view: np.ndarray) -> ndarray:
        return ndarray.of_view(view, self)

    def _set_shape(self, shape: Any) -> None:
        self.host = np.reshape(self.host, shape, copy=False)

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> ndarray:
        """Return a view of another shape, a copy where there is none."""
        wanted = shape[0] if len(shape) == 1 else shape
        try:
            return self._view(np.reshape(self.host, wanted, order=order, copy=False))  # type: ignore[call-overload]
        except ValueError:
            np.empty(self.shape, np.bool_).reshape(wanted, order=order)  # is it that the sizes differ?
            return compute("reshape", lambda a: a.reshape(wanted, order=order), self)

    def ravel(self, order: str = "C") -> ndarray:
        """Return a flat view, a copy where there is none."""
        return self.reshape(-1, order=order)

    def flatten(self, order: str = "C") -> ndarray:
        return compute("flatten", lambda a: a.flatten(order), self)

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        """Return a view, with the bytes as another dtype."""
        return self._view(self.host.view() if dtype is None else self.host.view(dtype))

    def copy(self, order: str = "C") -> ndarray:
        result = ndarray(self.shape, self.dtype, order="F" if order == "F" else "C")
        assign(result, self)
        return result

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return compute("astype", lambda a: a.astype(dtype, order=order, casting=casting or "unsafe"), self)

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            if value.shape:
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            assign(self, value)
            return
        value = np.asarray(value, dtype=self.dtype)
        if value.shape:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if value == 0 and self.host.flags.c_contiguous:
            self.data.memset_async(0, self.nbytes)
        elif self.size:
            target = self.host
            DEVICE.submit(lambda: target.fill(value[()]), current_stream().ptr, "kernel", "cupy.fill")

    # ---- indexing ----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> ndarray:
        parts, plain, masks = _index(index)
        if plain:
            return self._view(self.host[parts if ... in parts else (*parts, ...)])
        if masks:  # how many there are, the host reads
            if len(masks) > 1 or len(parts) > 1:
                raise ValueError("Currently, CuPy only supports one boolean array in an index")
            found = masks[0].get()
            return compute("take", lambda a: a[found], self)
        arrays = [part for part in parts if isinstance(part, ndarray)]
        return compute("take", lambda a, *given: a[_with(parts, given)], self, *arrays)

    def __setitem__(self, index: Any, value: Any) -> None:
        parts, plain, _ = _index(index)
        if plain:
            target = self[index]
            if isinstance(value, ndarray):
                assign(target, value)
            else:
                target.fill(value)
            return
        check_operands(value)
        arrays, target_of = [part for part in parts if isinstance(part, ndarray)], self.host
        views = [a.host for a in arrays]
        values = value.host if isinstance(value, ndarray) else value

        def run() -> None:
            target_of[_with(parts, views)] = values

        DEVICE.submit(run, current_stream().ptr, "kernel", "cupy.scatter_update")

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from strict_cupy import functions

        function = functions.UFUNCS.get(ufunc.__name__)
        if function is None or method != "__call__":
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return function(*inputs, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from strict_cupy import functions

        module = functions if function.__module__ == "numpy" else None
        found = getattr(module, function.__name__, None)
        if found is None or not all(issubclass(t, ndarray) for t in types):
            return NotImplemented
        return found(*args, **kwargs)

    def __eq__(self, other: object) -> Any:
        return self._compare("equal", other, np.zeros)

    def __ne__(self, other: object) -> Any:
        return self._compare("not_equal", other, np.ones)

    def _compare(self, name: str, other: Any, otherwise: Callable[..., Any]) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, *_ALIKE)):
            from strict_cupy import functions

            if other is None or type(other).__eq__ is object.__eq__:
                return functions.full(self.shape, otherwise is np.ones, bool)
            return NotImplemented
        if isinstance(other, np.ndarray) and other.ndim == 0:
            other = other.item()
        return _operate(name, self, other)

    def __getattr__(self, name: str) -> Any:
        """Return a method that `functions` makes: reductions and the like."""
        from strict_cupy import functions

        if name in functions.METHODS:
            return functools.partial(functions.method(name), self)
        raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")

    def dot(self, b: ndarray, out: ndarray | None = None) -> ndarray:
        from strict_cupy import functions

        return functions.dot(self, b, out)


def _operator(name: str, reflected: bool = False, in_place: bool = False) -> Callable[..., Any]:
    def operator(self: ndarray, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, *_ALIKE)):
            theirs = getattr(other, "__array_ufunc__", NotImplemented)
            if theirs is None or (theirs is NotImplemented and not np.iterable(other)):
                return NotImplemented
        if in_place:
            return _operate(name, self, other, out=self)
        return _operate(name, other, self) if reflected else _operate(name, self, other)

    return operator


_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
for _short, _name in _BINARY.items():
    setattr(ndarray, f"__{_short}__", _operator(_name))
    setattr(ndarray, f"__r{_short}__", _operator(_name, reflected=True))
    if _short != "matmul":
        setattr(ndarray, f"__i{_short}__", _operator(_name, in_place=True))
for _short, _name in {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}.items():
    setattr(ndarray, f"__{_short}__", _operator(_name))


def _unary(name: str) -> Callable[[ndarray], Any]:
    return lambda self: _operate(name, self)


def _read(name: str) -> Callable[[ndarray], Any]:
    return lambda self: getattr(self.get(), name)()


def _viewed(name: str) -> Callable[..., ndarray]:
    return lambda self, *args, **named: self._view(getattr(self.host, name)(*args, **named))


for _short, _name in {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_short}__", _unary(_name))
for _name in ("__int__", "__float__", "__repr__", "__str__", "item", "tolist"):
    setattr(ndarray, _name, _read(_name))
for _name in ("transpose", "swapaxes", "squeeze", "diagonal"):
    setattr(ndarray, _name, _viewed(_name))


def _operate(name: str, *operands: Any, **options: Any) -> Any:
    from strict_cupy import functions

    return (functions.matmul if name == "matmul" else functions.UFUNCS[name])(*operands, **options)


# ---- work ------------------------------------------------------------------------------------------------------------


def check_operands(*operands: Any) -> None:
    """Refuse what CuPy's kernels refuse: NumPy's arrays, also of no axes, and anything that is no number.

    Raises
    ------
    TypeError
        One of them is such.
    """
    for value in operands:
        if not isinstance(value, (ndarray, *_ALIKE)):
            raise TypeError(f"Unsupported type {type(value)}")


def assign(target: ndarray, source: ndarray, casting: str = "same_kind") -> None:
    """Copy values into an array of the same shape, or one that `source` is broadcast to."""
    np.broadcast_to(source.host, target.shape)  # raises as CuPy does
    if not target.size:
        return
    into, out_of = target.host, source.host
    if target.dtype == source.dtype and target.strides == source.strides and into.flags.c_contiguous:
        if into.ctypes.data != out_of.ctypes.data:
            target.data.copy_from_device_async(source.data, source.nbytes)
        return
    DEVICE.submit(lambda: _copy(into, out_of), current_stream().ptr, "kernel", "cupy.copy")


def compute(name: str, function: Callable[..., Any], *operands: Any, out: ndarray | None = None) -> Any:
    """Launch one of CuPy's kernels: `function` of NumPy's on the operands' values, into new arrays or into `out`.

    What comes out, and whether the operands fit together, NumPy says at once by zeros of their shapes.
    """
    with np.errstate(all="ignore"):
        example = function(*(np.zeros(a.shape, a.dtype) if isinstance(a, ndarray) else a for a in operands))
    several = isinstance(example, (tuple, list))
    examples = [np.asarray(each) for each in (example if several else [example])]
    if out is not None:
        if not isinstance(out, ndarray):
            raise TypeError(f"return arrays must be of ArrayType, got {type(out)}")
        np.copyto(np.empty(out.shape, out.dtype), examples[0], casting="same_kind")
        results = [out]
    else:
        results = [ndarray(each.shape, each.dtype) for each in examples]
    views = [a.host if isinstance(a, ndarray) else a for a in operands]
    targets = [result.host for result in results]

    def run() -> None:
        with np.errstate(all="ignore"):
            found = function(*views)
        for target, value in zip(targets, found if several else [found], strict=True):
            _copy(target, np.asarray(value))

    if any(target.size for target in targets):
        DEVICE.submit(run, current_stream().ptr, "kernel", f"cupy.{name}")
    return type(example)(results) if several else results[0]


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def _index(index: Any) -> tuple[tuple[Any, ...], bool, list[ndarray]]:
    """Return the parts of an index, whether they make a view, and the masks among them.

    Lists and arrays of the host are sent to the device, as CuPy does.
    """
    from strict_cupy import functions

    parts = list(index) if isinstance(index, tuple) else [index]
    plain, masks = True, []
    for i, part in enumerate(parts):
        if part is None or part is Ellipsis or isinstance(part, slice):
            continue
        if np.isscalar(part) and not isinstance(part, (bool, np.bool_)):
            continue
        if not isinstance(part, ndarray):
            parts[i] = functions.array(part)
        if parts[i].dtype.kind not in "biu":
            raise IndexError("arrays used as indices must be of integer or boolean type")
        plain = False
        if parts[i].dtype.kind == "b":
            masks.append(parts[i])
    return tuple(parts), plain, masks


def _with(parts: tuple[Any, ...], arrays: Any) -> tuple[Any, ...]:
    given = iter(arrays)
    return tuple(next(given) if isinstance(part, ndarray) else part for part in parts)
