"""The only seam between NumPy and CuPy: namespace, device, dtype, transfer.

No module but this and its neighbours `cublas`, `graphs` and `host_pool` asks which library an array belongs to. CuPy is
imported when a CuPy array or a GPU is first needed, so the package works without it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, MissingDependencyError, ShapeError

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
COMPLEX_DTYPES: tuple[Any, ...] = (np.dtype(np.complex64), np.dtype(np.complex128))
_REAL_DTYPES = dict(zip(COMPLEX_DTYPES, FLOAT_DTYPES, strict=True)) | {dtype: dtype for dtype in FLOAT_DTYPES}
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


_PLAIN = {np.ndarray}


def namespace(*arrays: Array, **named: Array) -> ModuleType:
    """Return ``numpy`` or ``cupy``, the module of all arrays; NumPy if there are none.

    Keywords name the arrays in messages; wrap those that may be None in `given`.

    Raises
    ------
    DeviceError
        NumPy and CuPy arrays are mixed.
    DTypeError
        An argument is neither, masked, or a ``numpy.matrix``.
    """
    kinds = {*map(type, arrays), *map(type, named.values())}
    if kinds == _PLAIN:  # nearly always, and several times as fast
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and len(kinds) == 1 and cupy.ndarray in kinds:  # nearly always on a device
        return cupy
    found = {_namespace_of(array) for array in arrays}
    found.update(_namespace_of(array, name) for name, array in named.items())
    if len(found) > 1:
        got = ", ".join(type(array).__module__.split(".")[0] for array in (*arrays, *named.values()))
        raise DeviceError("Arrays on the host and on a device are mixed", got=got,
                          expected="all arrays from NumPy or all from CuPy", remedy="Move them with "
                          "sparsebp.core.backend.to_device(...) or sparsebp.core.backend.to_host(...)")  # fmt: skip
    return found.pop() if found else np


def given(**named: Array | None) -> dict[str, Array]:
    """Return the arrays that are not None."""
    return {name: array for name, array in named.items() if array is not None}


def _namespace_of(array: Array, name: str = "An argument") -> ModuleType:
    if isinstance(array, (np.ndarray, np.generic)):
        check_plain(array, name)
        return np
    cupy = sys.modules.get("cupy")  # CuPy arrays only exist once CuPy has been imported
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy
    if is_sparse(array):
        raise DTypeError(f"{name} is a sparse matrix", expected="a NumPy or CuPy array",
                          got=f"{type(array).__module__}.{type(array).__qualname__}",
                          remedy="Pass its .toarray() where a dense array is meant")  # fmt: skip
    got = f"{type(array).__module__}.{type(array).__qualname__}"
    raise DTypeError(f"{name} is not an array", expected="a NumPy or CuPy array", got=got, remedy=array_remedy(array))


def array_remedy(value: Any) -> str:
    """Return how to make an array of something else; NumPy cannot read every tensor of PyTorch."""
    if getattr(value, "requires_grad", False):
        return "It requires grad: pass numpy.asarray(tensor.detach()), without its autograd graph"
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        return "Pass numpy.asarray(tensor.float()): NumPy has no bfloat16"
    return "Convert it with numpy.asarray(...), or cupy.from_dlpack(...) for another framework's device tensor"


def asarray(name: str, value: Any) -> Array:
    """Return `value` as an array: of CuPy if it is on a GPU, else of NumPy. bfloat16 becomes float32.

    Raises
    ------
    DTypeError
        An array is masked, or a tensor requires grad, or has values that NumPy cannot read.
    TypeError, ValueError
        NumPy's own: a ragged list, say.
    """
    if isinstance(value, np.ndarray):
        check_plain(value, name)
        return value
    try:
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has none
            value = value.float()
        return cupy().asarray(value) if has_device_memory(value) else np.asarray(value)
    except RuntimeError as error:
        raise DTypeError(f"{name} cannot be read as an array", expected="an array, or a tensor without autograd graph",
                          got=str(error), remedy=array_remedy(value)) from error  # fmt: skip


def has_device_memory(value: Any) -> bool:
    """Whether an object is an array on a GPU, of whatever library, that can be read."""
    try:
        return hasattr(value, "__cuda_array_interface__")
    except RuntimeError:  # of a tensor that requires grad
        return False


def is_half(value: Any) -> bool:
    """Whether an array or tensor is of float16 or bfloat16, whose values float32 and float64 have too."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.") in ("float16", "bfloat16")


def is_sparse(value: Any) -> bool:
    """Whether `value` is a sparse matrix, of SciPy, CuPy or a library with the same attributes."""
    return isinstance(getattr(value, "format", None), str) and hasattr(value, "nnz") and hasattr(value, "shape")


def namespace_of_sparse(matrix: Any) -> ModuleType:
    """Return the module of a sparse matrix's arrays."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(getattr(matrix, "data", None), cupy.ndarray) else np


def check_plain(array: Any, name: str) -> None:
    """Refuse array types for which the same operations mean something else: kernels would silently drop masks."""
    if isinstance(array, np.ma.MaskedArray):
        remedy = "Pass array.filled(value)"
    elif isinstance(array, np.matrix):
        remedy = "Convert it with numpy.asarray(...)"
    else:
        return
    raise DTypeError(f"{name} is not a plain array", expected="a NumPy or CuPy array",
                      got=f"{type(array).__module__}.{type(array).__qualname__}", remedy=remedy)  # fmt: skip


def cupy() -> ModuleType:
    """Import and return CuPy, checking for a GPU.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    DeviceError
        CuPy is installed but sees no GPU.
    """
    try:
        import cupy as cp
    except ImportError as error:
        raise MissingDependencyError("CuPy is not installed, and the device kernels need it", remedy="Install the "
                                     "extra of your CUDA version: pip install 'sparsebp[cuda13]' or 'sparsebp[cuda12]'"
                                     ) from error  # fmt: skip
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError("No GPU can be used", expected="a CUDA device", got=str(error),
                          remedy="Use device='cpu'") from error  # fmt: skip
    if count == 0:
        raise DeviceError("No GPU can be used", expected="a CUDA device", got="none", remedy="Use device='cpu'")
    return cp


def has_gpu() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        cupy()
    except (MissingDependencyError, DeviceError):
        return False
    return True


def device_namespace(device: str) -> ModuleType:
    """Return the array module for ``device``: ``"cpu"`` or ``"cuda"``."""
    if isinstance(device, str) and device == "cpu":
        return np
    if isinstance(device, str) and device == "cuda":
        return cupy()
    raise DeviceError("Unknown device", expected="'cpu' or 'cuda'", got=repr(device))


def check_module(xp: ModuleType) -> ModuleType:
    """Check that an argument is ``numpy`` or ``cupy``, and return it."""
    if xp is not np and (xp is None or xp is not sys.modules.get("cupy")):
        raise DeviceError("xp is not an array module", expected="numpy or cupy", got=repr(xp)[:80])
    return xp


def device_of(array: Array) -> str:
    """Return the device of `array`: ``"cpu"`` or ``"cuda"``."""
    return "cpu" if namespace(array) is np else "cuda"


is_host: Callable[[ModuleType], bool] = functools.partial(operator.is_, np)
"""Whether `xp` is NumPy; asked often, so without a Python call."""


def device_number(xp: ModuleType) -> int | None:
    """Return the number of the current device of `xp`; None for NumPy."""
    return None if xp is np else int(xp.cuda.Device().id)


def on_device(xp: ModuleType, number: int | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the calling thread works on that device; every thread begins on the first one."""
    return contextlib.nullcontext() if number is None else xp.cuda.Device(number)


def device_attributes(xp: ModuleType) -> dict[str, int]:
    """Return the driver's attributes of the current device of `xp`; empty for NumPy."""
    return {} if xp is np else dict(xp.cuda.Device().attributes)


def device_memory(xp: ModuleType) -> int:
    """Return the bytes of memory of the current device of CuPy."""
    return int(xp.cuda.runtime.memGetInfo()[1])


def as_namespace(array: Array, xp: ModuleType) -> Array:
    """Return `array` as an array of `xp` on its current device, copied only if it lies elsewhere."""
    return to_host(array) if xp is np else xp.asarray(array)


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array; a device array is copied, and that synchronises."""
    xp = namespace(array)
    return array if xp is np else xp.asnumpy(array)  # synchronize!


def is_on_device(value: Any) -> bool:
    """Whether an object is an array of CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def from_device(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return objects with copies on the host in place of CuPy's arrays, which synchronises if there are any."""
    return tuple(to_host(value) if is_on_device(value) else value for value in values)


def to_device(array: Array, device: str) -> Array:
    """Return `array` on ``"cpu"`` or ``"cuda"``, copied only if it lies elsewhere."""
    return as_namespace(array, device_namespace(device))


def synchronize(xp: ModuleType) -> None:
    """Wait for the current stream of `xp`'s device; does nothing for NumPy."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def copy(target: Array, source: Array) -> None:
    """Copy an array into another of its shape and dtype, both C-contiguous; on a device it is no kernel of CuPy's."""
    if type(target) is np.ndarray:
        target[...] = source
    else:
        target.data.copy_from_device_async(source.data, source.nbytes)


def float_dtype(dtype: Any) -> np.dtype:
    """Return `dtype` as float32 or float64, the dtypes of the kernels; DTypeError for any other."""
    try:
        resolved: Any = np.dtype(dtype)
    except TypeError:
        resolved = repr(dtype)
    if resolved not in FLOAT_DTYPES:
        raise DTypeError("Unsupported dtype", expected="float32 or float64", got=resolved)
    return resolved


def number_dtype(dtype: Any) -> np.dtype:
    """Return a real or complex dtype of floats; DTypeError for any other."""
    if dtype in FLOAT_DTYPES or dtype in COMPLEX_DTYPES:
        return np.dtype(dtype)
    raise DTypeError("Unsupported dtype", expected="float32 or float64, complex64 or complex128", got=dtype)


def real_dtype(dtype: Any) -> np.dtype:
    """Return the dtype of the real parts of numbers."""
    return _REAL_DTYPES[np.dtype(dtype)]


def exact_floats(name: str, integers: np.ndarray, dtype: Any) -> np.ndarray:
    """Return integers or bools as floats of `dtype`; DTypeError if one of them might be rounded."""
    most = 2 ** (np.finfo(dtype).nmant + 1)
    if integers.size and not -most <= int(integers.min()) <= int(integers.max()) <= most:
        raise DTypeError(f"{name} holds integers that {np.dtype(dtype)} would round", expected=f"at most {most}",
                         got=integers.dtype, remedy=f"Convert {name} with .astype(...)")  # fmt: skip
    return integers.astype(dtype)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or have == want for have, want in zip(shape, wanted, strict=True)
    )


def check_array(
    name: str, array: Array, *, dtype: Any = None, shape: tuple[int | None, ...] | None = None, contiguous: bool = True,
    written: bool = False,
) -> None:  # fmt: skip
    """Check one array argument; ``None`` in `shape` stands for any length, `written` for an array that is written to.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        The argument is not an array, or differs.
    """
    if type(array) is not np.ndarray:
        _namespace_of(array, name)
    if dtype is not None and array.dtype != dtype:
        raise DTypeError(f"{name} has the wrong dtype", expected=np.dtype(dtype), got=array.dtype, remedy="Convert it "
                         f"with {name}.astype({np.dtype(dtype).name!r}); nothing is converted silently")  # fmt: skip
    if shape is not None and array.shape != shape and not _fits(array.shape, shape):
        wanted = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
        same = [n for n in shape if n != 1] == [n for n in array.shape if n != 1]  # not of a transpose
        remedy = f"Pass {name}.reshape({', '.join(map(str, (-1, *shape[1:])))})" if shape and same else None
        raise ShapeError(f"{name} has the wrong shape", expected=wanted, got=array.shape, remedy=remedy)
    if contiguous and not array.flags.c_contiguous:
        raise LayoutError(f"{name} is not C-contiguous", expected="a C-contiguous array",
                          got=f"strides {array.strides} for shape {array.shape}",
                          remedy=f"Pass numpy.ascontiguousarray({name})")  # fmt: skip
    if written and not getattr(array.flags, "writeable", True):  # CuPy's arrays always are
        raise LayoutError(f"{name} is read-only", expected="a writeable array", got="flags.writeable = False")
