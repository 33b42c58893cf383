"""Functions of arrays on the host as operations of JAX, which XLA calls without a copy.

An `Operation` is a primitive of JAX with an implementation for NumPy arrays. On a CPU, XLA calls a handler of
`sparsebp.kernels.host.xla`: a kernel itself, where there is a handler for it, or the implementation, which is given
XLA's own buffers. Elsewhere, and where the version of XLA's interface for handlers does not fit, it is a
`jax.pure_callback`.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import re
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sparsebp.kernels.host import xla as handlers
from sparsebp.kernels.host.engine.threads import publish

Shapes = tuple[tuple[int, ...], ...]
Run = Callable[..., None]


class Native(NamedTuple):
    """A handler that is a kernel itself.

    Attributes
    ----------
    name
        Another one for every handler.
    handler
        Returns the handler's address; compiles it, if need be.
    attributes
        What it is passed besides arrays: integers.
    """

    name: str
    handler: Callable[[], int]
    attributes: dict[str, int]


class Operation:
    """A function of arrays, computed on the host, as a primitive of JAX.

    Parameters
    ----------
    name
        In the text of jaxprs.
    shapes
        ``shapes(*shapes, **options)`` returns the results' shapes; their dtype is that of the first operand.
    run
        ``run(given, results, **options)`` computes on lists of C-contiguous arrays of NumPy, and writes to `results`.
    native
        ``native(dtype, **options)`` returns the handler that computes the same.

    Notes
    -----
    Derivatives are added by `jvp` and `transpose`, mapped axes by `batch`; without the latter, mapped axes come first,
    and have size 1 where an operand is not mapped.
    """

    def __init__(
        self, name: str, shapes: Callable[..., Shapes], run: Run, native: Callable[..., Native] | None = None
    ) -> None:
        self.primitive = Primitive(f"sparsebp_{name}")
        self.primitive.multiple_results = True
        self._shapes, self._run, self._native = shapes, run, native
        self._jitted = jax.jit(self._bind, static_argnames=("options",))
        self.primitive.def_impl(lambda *arrays, **options: self._jitted(*arrays, options=tuple(options.items())))
        self.primitive.def_abstract_eval(self._results)
        mlir.register_lowering(self.primitive, mlir.lower_fun(self._called_back, multiple_results=True))
        mlir.register_lowering(self.primitive, self._lowered, platform="cpu")
        batching.primitive_batchers[self.primitive] = self._first_axes

    def __call__(self, *arrays: Any, **options: Any) -> list[Any]:
        """Return the results."""
        found: list[Any] = self.primitive.bind(*_alike_on_devices(arrays), **options)
        return found

    def jvp(self, rule: Callable[..., Any]) -> None:
        """Take ``rule(primals, tangents, **options)`` for derivatives, as of `jax.interpreters.ad`."""
        ad.primitive_jvps[self.primitive] = rule

    def transpose(self, rule: Callable[..., Any]) -> None:
        """Take ``rule(cotangents, *operands, **options)`` for the transpose in its linear operands."""
        ad.primitive_transposes[self.primitive] = rule

    def batch(self, rule: Callable[..., Any]) -> None:
        """Take ``rule(operands, axes, **options)`` for mapped axes."""
        batching.primitive_batchers[self.primitive] = rule

    def _bind(self, *arrays: Any, options: tuple[tuple[str, Any], ...]) -> list[Any]:
        return self(*arrays, **dict(options))

    def _results(self, *avals: Any, **options: Any) -> list[Any]:
        like = avals[0]
        return [like.update(shape=shape) for shape in self._shapes(*(aval.shape for aval in avals), **options)]

    def _first_axes(self, operands: Sequence[Any], axes: Sequence[Any], **options: Any) -> tuple[list[Any], list[int]]:
        first = [v[None] if axis is None else jax.numpy.moveaxis(v, axis, 0)
                 for v, axis in zip(operands, axes, strict=True)]  # fmt: skip
        found = self(*first, **options)
        return found, [0] * len(found)

    # How XLA calls it.

    def _lowered(self, context: Any, *operands: Any, **options: Any) -> Any:
        if not fits():
            lower = mlir.lower_fun(self._called_back, multiple_results=True)
            return lower(context, *operands, **options)
        if self._native is not None:
            native = self._native(context.avals_in[0].dtype, **options)
            register(native.name, native.handler)
            publish()
            attributes = native.attributes
            return jax.ffi.ffi_lowering(native.name)(context, *operands, **_int64(attributes))
        register(_PYTHON, partial(handlers.python_handler, _call))
        given, results = (
            [(a.shape, np.dtype(a.dtype)) for a in avals] for avals in (context.avals_in, context.avals_out)
        )
        call = _Call(partial(self._run, **options), given, results)
        context.module_context.add_keepalive(call.held())
        return jax.ffi.ffi_lowering(_PYTHON)(context, *operands, **_int64({"number": call.number}))

    def _called_back(self, *operands: Any, **options: Any) -> Any:
        results = [jax.ShapeDtypeStruct(shape, operands[0].dtype)
                   for shape in self._shapes(*(v.shape for v in operands), **options)]  # fmt: skip
        back: Any = _Callback(self._run, tuple(sorted(options.items())), tuple((r.shape, r.dtype) for r in results))
        return jax.pure_callback(back, results, *operands)


class Tangent:
    """A function written in JAX, linear in some of its operands, whose transpose is one operation.

    Parameters
    ----------
    name
        In the text of jaxprs.
    function
        ``function(*operands, **options)`` returns a list of arrays.
    transpose
        As that of an `Operation`.
    """

    def __init__(self, name: str, function: Callable[..., list[Any]], transpose: Callable[..., Any]) -> None:
        self.primitive = Primitive(f"sparsebp_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(function)
        self.primitive.def_abstract_eval(partial(self._results, function))
        mlir.register_lowering(self.primitive, mlir.lower_fun(function, multiple_results=True))
        ad.primitive_jvps[self.primitive] = derivative(function)
        ad.primitive_transposes[self.primitive] = transpose

    def batch(self, rule: Callable[..., Any]) -> None:
        """Take ``rule(operands, axes, **options)`` for mapped axes."""
        batching.primitive_batchers[self.primitive] = rule

    def __call__(self, *arrays: Any, **options: Any) -> list[Any]:
        """Return the results."""
        found: list[Any] = self.primitive.bind(*_alike_on_devices(arrays), **options)
        return found

    @staticmethod
    def _results(function: Callable[..., list[Any]], *avals: Any, **options: Any) -> list[Any]:
        found = jax.eval_shape(partial(function, **options), *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in avals))
        return [avals[0].update(shape=result.shape) for result in found]


def _alike_on_devices(arrays: Sequence[Any]) -> list[Any]:
    """Within `jax.shard_map`, return arrays that all differ between devices where one does.

    The transpose of that step sums the gradients of an array that the devices share.
    """
    of_each = [_mesh_axes(array) for array in arrays]
    axes = frozenset().union(*of_each)
    return [array if own == axes else jax.lax.pcast(array, tuple(sorted(axes - own)), to="varying")
            for array, own in zip(arrays, of_each, strict=True)]  # fmt: skip


def _mesh_axes(array: Any) -> frozenset[str]:
    """Return the axes of a mesh along which an array differs."""
    aval: Any = jax.typeof(array)
    found: frozenset[str] = aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # before JAX 0.10
    return found


def derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for the derivatives of a function that is written in JAX."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **options: Any) -> Any:
        moving = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_moving(*values: Any) -> Any:
            operands = list(primals)
            for k, value in zip(moving, values, strict=True):
                operands[k] = value
            return function(*operands, **options)

        return jax.jvp(of_moving, [primals[k] for k in moving], [tangents[k] for k in moving])

    return rule


def no_tangent(value: Any) -> ad.Zero:
    """Return the derivative of what counts as constant."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def sum_to(shape: tuple[int, ...], grad: Any) -> Any:
    """Return a gradient summed over the axes along which an operand of this shape was shared."""
    axes = tuple(axis for axis, (own, full) in enumerate(zip(shape, grad.shape, strict=True)) if own != full)
    return grad.sum(axes, keepdims=True) if axes else grad


class _Callback(NamedTuple):
    """What `jax.pure_callback` calls; equal ones are one for JAX, which compiles each once."""

    run: Run
    options: tuple[tuple[str, Any], ...]
    results: tuple[Any, ...]

    def __call__(self, *arrays: Any) -> list[np.ndarray]:
        results = [np.empty(*result) for result in self.results]
        self.run([np.ascontiguousarray(array) for array in arrays], results, **dict(self.options))
        return results


# Handlers.


@cache
def fits() -> bool:
    """Whether the version of XLA's interface, as its header says, is one that the handlers are made for."""
    try:
        text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
        major, minor = (int(re.findall(rf"define XLA_FFI_API_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR"))
    except (AttributeError, OSError, LookupError, RuntimeError):
        return False
    return major == handlers.MAJOR and minor >= handlers.MINOR and ctypes.sizeof(ctypes.c_void_p) == 8


_PYTHON = "sparsebp_python"
atexit.register(handlers.close)  # after JAX's, and so called before it
_registered: set[str] = set()


def register(name: str, handler: Callable[[], int]) -> None:
    """Make a handler known to XLA in this process."""
    if name not in _registered:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler()), platform="cpu")
        _registered.add(name)


def _int64(attributes: dict[str, int]) -> dict[str, Any]:
    return {name: np.int64(value) for name, value in attributes.items()}


# Calls of Python by number. A compiled computation keeps its calls, and these the plans in their options. It may be
# dropped while XLA still runs it, so they stay for a while.

_numbers = itertools.count(secrets.randbits(62))
"""Never one twice; what another process has compiled has numbers that mean nothing here."""
_calls: dict[int, _Call] = {}
_dropped: deque[tuple[float, int]] = deque()
"""When nothing compiled kept a call any more, and its number."""
STAY = 600.0
"""Seconds for which such a call stays; then, with the next compilation, it goes."""


class _Held:
    """What a compiled computation keeps."""


def _drop(number: int) -> None:
    _dropped.append((time.monotonic(), number))


class _Call:
    """A function of arrays and the shapes and dtypes of its operands and results, known by a number."""

    def __init__(self, run: Run, given: Sequence[Any], results: Sequence[Any]) -> None:
        self.number = next(_numbers)
        self._run = run
        self._given, self._results = ([_Buffer(*array) for array in arrays] for arrays in (given, results))
        _calls[self.number] = self
        while _dropped and _dropped[0][0] < time.monotonic() - STAY:
            del _calls[_dropped.popleft()[1]]

    def held(self) -> _Held:
        """Return what keeps the call, as long as somebody keeps that."""
        held = _Held()
        weakref.finalize(held, _drop, self.number).atexit = False
        return held

    def __call__(self, given: Sequence[int], results: Sequence[int]) -> None:
        """Compute on buffers at these addresses."""
        operands = [buffer.at(place) for buffer, place in zip(self._given, given, strict=True)]
        for operand in operands:
            operand.flags.writeable = False
        self._run(operands, [buffer.at(place) for buffer, place in zip(self._results, results, strict=True)])


class _Buffer:
    """The shape and dtype of a buffer."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._bytes = ctypes.c_char * size if size else None

    def at(self, place: int) -> np.ndarray:
        """Return the array that stands at an address."""
        if self._bytes is None:
            return np.empty(self._shape, self._dtype)
        memory: Any = self._bytes.from_address(place)
        return np.ndarray(self._shape, self._dtype, memory)


_Frame = ctypes.c_int64 * handlers.FRAME_WORDS
_Words = ctypes.POINTER(ctypes.c_int64)


def _call(at: int) -> int:
    """Make the call that a frame asks for; return 0 or the address of XLA's error."""
    frame = _Frame.from_address(at)
    try:
        number = _word(_word(_word(frame[handlers.ATTRIBUTES], 0), 1), 0)
        call = _calls.get(number)
        if call is None:
            raise RuntimeError("A computation of another process, or whose plan is gone. Compile it again")
        call(
            _data(frame, handlers.ARGUMENTS, handlers.ARGUMENT_COUNT),
            _data(frame, handlers.RESULTS, handlers.RESULT_COUNT),
        )
    except BaseException as error:  # there is nobody else to tell: not even an interrupt goes on from here
        return _error(frame, f"{type(error).__name__}: {error}")
    return 0


def _word(base: int, place: int) -> int:
    return int(ctypes.c_int64.from_address(base + 8 * place).value)


def _data(frame: Any, buffers: int, count: int) -> list[int]:
    """Return the addresses of the numbers in some buffers of a frame."""
    return [_word(_word(frame[buffers], k), handlers.DATA) for k in range(frame[count])]


def _error(frame: Any, message: str) -> int:
    text = ctypes.create_string_buffer(message.encode())
    given = (ctypes.c_int64 * 4)(handlers.ERROR_SIZE, 0, ctypes.addressof(text), handlers.INVALID_ARGUMENT)
    create = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(_word(frame[2], handlers.ERROR_CREATE))
    return int(create(ctypes.addressof(given)))
