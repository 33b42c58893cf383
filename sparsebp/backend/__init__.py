"""The one seam between NumPy and CuPy: namespace, device, dtype, transfer, synchronisation.

No other file asks which of the two an array belongs to. CuPy is imported when a CuPy array or a GPU is first asked for,
so the package works without it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, MissingDependencyError, ShapeError
from sparsebp.core.types import Array

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


_PLAIN = {np.ndarray}


def namespace(*arrays: Array, **named: Array) -> ModuleType:
    """Return ``numpy`` or ``cupy``, the module that all arrays belong to.

    Parameters
    ----------
    *arrays
        Arrays; None is none.
    **named
        Arrays by the names that the message shall have; those that may be missing through `given`.

    Raises
    ------
    DeviceError
        NumPy and CuPy arrays are mixed, or an argument is neither, masked, or a ``numpy.matrix``.
    """
    kinds = {*map(type, arrays), *map(type, named.values())}
    if kinds == _PLAIN:  # as nearly always: several times as fast
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and len(kinds) == 1 and cupy.ndarray in kinds:  # nearly always on a device
        return cupy
    found = {_namespace_of(array) for array in arrays}
    found.update(_namespace_of(array, name) for name, array in named.items())
    if len(found) > 1:
        raise DeviceError(
            "Arrays on the host and on a device are mixed",
            expected="all arrays from NumPy or all from CuPy",
            got=", ".join(type(array).__module__.split(".")[0] for array in (*arrays, *named.values())),
            remedy="Move them with sparsebp.backend.to_device(...) or sparsebp.backend.to_host(...)",
        )
    return found.pop() if found else np


def given(**named: Array | None) -> dict[str, Array]:
    """Return the arrays that are not None."""
    return {name: array for name, array in named.items() if array is not None}


def _namespace_of(array: Array, name: str = "An argument") -> ModuleType:
    if isinstance(array, (np.ndarray, np.generic)):
        _check_plain(array, name)
        return np
    cupy = sys.modules.get("cupy")  # an array of CuPy's can only exist once CuPy has been imported
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy
    raise DeviceError(
        f"{name} is not an array",
        expected="a NumPy or CuPy array",
        got=f"{type(array).__module__}.{type(array).__qualname__}",
        remedy="Convert it with numpy.asarray(...), or cupy.from_dlpack(...) for another framework's device tensor",
    )


def _check_plain(array: Array, name: str) -> None:
    """Refuse arrays that mean something else by the same operations: the kernels would drop masks without a word."""
    if isinstance(array, np.ma.MaskedArray):
        remedy = "Pass array.filled(value), with a value for what is masked"
    elif isinstance(array, np.matrix):
        remedy = "Convert it with numpy.asarray(...)"
    else:
        return
    raise DeviceError(f"{name} is not a plain array", expected="a NumPy or CuPy array",
                      got=f"{type(array).__module__}.{type(array).__qualname__}", remedy=remedy)  # fmt: skip


def cupy() -> ModuleType:
    """Import and return CuPy, after making sure that a GPU answers.

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
        raise MissingDependencyError(
            "CuPy is not installed, and the device kernels need it",
            remedy="Install the extra of your CUDA version: pip install 'sparsebp[cuda13]' or 'sparsebp[cuda12]'",
        ) from error
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            "No GPU can be used", expected="a CUDA device", got=str(error), remedy="Use device='cpu'"
        ) from error
    if count == 0:
        raise DeviceError("No GPU can be used", expected="a CUDA device", got="none", remedy="Use device='cpu'")
    return cp


def has_gpu() -> bool:
    """Say whether CuPy is installed and sees a GPU."""
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
    raise DeviceError("Unknown device", expected="'cpu' or 'cuda'", got=repr(device), remedy="Pass one of the two")


def check_module(xp: ModuleType) -> ModuleType:
    """Return an argument that is ``numpy`` or ``cupy``.

    Raises
    ------
    DeviceError
        It is something else.
    """
    if xp is not np and (xp is None or xp is not sys.modules.get("cupy")):
        raise DeviceError("xp is no module of arrays", expected="numpy or cupy", got=repr(xp)[:80],
                          remedy="Pass xp=numpy")  # fmt: skip
    return xp


def device_of(array: Array) -> str:
    """Return ``"cpu"`` or ``"cuda"``: where `array` lives."""
    return "cpu" if namespace(array) is np else "cuda"


def is_host(xp: ModuleType) -> bool:
    """Say whether the arrays of `xp` live in the host's memory."""
    return xp is np


def device_number(xp: ModuleType) -> int | None:
    """Return the number of the current device of `xp`; None on the host, which has no other."""
    return None if xp is np else int(xp.cuda.Device().id)


def device_attributes(xp: ModuleType) -> dict[str, int]:
    """Return what the driver says of the current device of `xp`: nothing on the host."""
    return {} if xp is np else dict(xp.cuda.Device().attributes)


def device_memory(xp: ModuleType) -> int:
    """Return the bytes of memory of the current device of `xp`, which is not NumPy."""
    return int(xp.cuda.runtime.memGetInfo()[1])


def as_namespace(array: Array, xp: ModuleType) -> Array:
    """Return `array` as an array of `xp` on its current device, copied only if it is elsewhere."""
    return to_host(array) if xp is np else xp.asarray(array)


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array; a device array is copied, and that synchronises."""
    xp = namespace(array)
    return array if xp is np else xp.asnumpy(array)  # synchronize!


def to_device(array: Array, device: str) -> Array:
    """Return `array` on ``device`` (``"cpu"`` or ``"cuda"``), copied only if it is elsewhere."""
    return as_namespace(array, device_namespace(device))


def synchronize(xp: ModuleType) -> None:
    """Wait until the current stream of `xp`'s device is done (nothing to do for NumPy)."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def streams(xp: ModuleType, count: int) -> list[contextlib.AbstractContextManager[Any]]:
    """Return contexts in which work runs on streams of their own, the first of the highest priority; no-ops for NumPy.

    They wait for the default stream, and it for them, so that only work in different contexts runs side by side.
    """
    if xp is np:
        return [contextlib.nullcontext() for _ in range(count)]
    greatest = 1 - count
    return [xp.cuda.Stream(priority=greatest + number) for number in range(count)]


def record(xp: ModuleType) -> Any:
    """Return an event of what the current stream has been given so far; None for NumPy, where that is done."""
    if xp is np:
        return None
    event = xp.cuda.Event(disable_timing=True)
    event.record()
    return event


def wait(xp: ModuleType, event: Any) -> None:
    """Let the current stream wait for an event of another one; the host does not wait."""
    if event is not None:
        xp.cuda.get_current_stream().wait_event(event)


class Recorder(Protocol):
    """What gives work to a stream that may be captured into a graph, as `sparsebp.backend.graphs.GraphRecorder`."""

    def constant(self, host: np.ndarray) -> Array:
        """Return the values of a host array on the device."""

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the matrix product."""


_recording = threading.local()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let `constant` and `matmul` of this thread ask `recorder`."""
    before, _recording.recorder = getattr(_recording, "recorder", None), recorder
    try:
        yield
    finally:
        _recording.recorder = before


def constant(xp: ModuleType, host: np.ndarray) -> Array:
    """Return a host array's values on the current device of `xp`; `host` is not to be changed later.

    While work is recorded they are sent once; ``xp.asarray`` would send them anew whenever the work is replayed.
    """
    recorder = getattr(_recording, "recorder", None)
    return xp.asarray(host) if recorder is None or xp is np else recorder.constant(host)


def kept(xp: ModuleType, host: np.ndarray) -> Array:
    """Return a host array's values on the current device of `xp`, for an array that is kept and used on any stream.

    The host waits until they are there, so that no later work needs to, on whatever stream and from whatever thread.
    They are sent on the legacy stream: memory that was freed while others still read it is not overwritten early.
    """
    recorder = getattr(_recording, "recorder", None)
    if xp is np:
        return host
    if recorder is not None:  # the same, past the stream and the memory of a graph
        return recorder.constant(host)
    with xp.cuda.Stream.null as stream:
        array = xp.asarray(host)
        stream.synchronize()  # synchronize!
    return array


def order_of(xp: ModuleType) -> int | None:
    """Return what stands for the current stream, whose work runs in order; None on the host, where nothing is queued.

    Memory that is used again belongs to one of them: another one's work may come before what has been queued.
    """
    return None if xp is np else int(xp.cuda.get_current_stream().ptr)


def is_recorded() -> bool:
    """Say whether the work of this thread may be captured, to be replayed whenever and with all memory that it uses."""
    return getattr(_recording, "recorder", None) is not None


def matmul(a: Array, b: Array) -> Array:
    """Return ``a @ b``: on a GPU by cuBLAS, as the arrays lie, also while work is recorded."""
    recorder = getattr(_recording, "recorder", None)
    if recorder is not None:
        return recorder.matmul(a, b)
    xp = namespace(a, b)
    if xp is np:
        return a @ b
    from sparsebp.backend.cublas import products

    return products(xp).matmul(a, b)


def float_dtype(dtype: Any) -> np.dtype:
    """Return `dtype` as float32 or float64, the two that the kernels take.

    Raises
    ------
    DTypeError
        It is another dtype.
    """
    try:
        resolved: Any = np.dtype(dtype)
    except TypeError:  # no dtype at all
        resolved = repr(dtype)
    if resolved not in FLOAT_DTYPES:
        raise DTypeError(
            "Unsupported dtype", expected="float32 or float64", got=resolved, remedy="Convert with .astype(...)"
        )
    return resolved


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or have == want for have, want in zip(shape, wanted, strict=True)
    )


def check_array(
    name: str,
    array: Array,
    *,
    dtype: Any = None,
    shape: tuple[int | None, ...] | None = None,
    contiguous: bool = True,
    written: bool = False,
) -> None:
    """Check one array argument; ``None`` in `shape` stands for any length. `written`: it must not be read-only.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        It is no array, or differs; the message names it, what was expected and what came.
    """
    if type(array) is not np.ndarray:
        _namespace_of(array, name)
    if dtype is not None and array.dtype != dtype:
        raise DTypeError(
            f"{name} has the wrong dtype",
            expected=np.dtype(dtype),
            got=array.dtype,
            remedy=f"Convert it with {name}.astype({np.dtype(dtype).name!r}); nothing is converted silently",
        )
    if shape is not None and array.shape != shape and not _fits(array.shape, shape):
        wanted = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ShapeError(
            f"{name} has the wrong shape", expected=wanted, got=array.shape, remedy="Pass an array of that shape"
        )
    if contiguous and not array.flags.c_contiguous:
        raise LayoutError(
            f"{name} is not C-contiguous",
            expected="a C-contiguous array",
            got=f"strides {array.strides} for shape {array.shape}",
            remedy=f"Pass numpy.ascontiguousarray({name})",
        )
    if written and not getattr(array.flags, "writeable", True):  # CuPy's arrays always are
        raise LayoutError(
            f"{name} is read-only, and it is written",
            expected="a writeable array",
            got="flags.writeable = False",
            remedy="Pass a copy, or a fresh array",
        )
