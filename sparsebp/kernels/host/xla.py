"""Kernels that XLA calls by itself, on its own threads and without the interpreter.

XLA calls a *handler*, a C function of one address. Behind it lies an ``XLA_FFI_CallFrame`` of ``xla/ffi/api/c_api.h``,
version 0.3 of that interface: the operands, the results that the handler writes, and attributes. All of it is read here
in words of eight bytes. A handler returns 0, or the address of an error that XLA made for it; JAX raises it in Python.

A linear recurrence has handlers of its own, forward and backward. `python_handler` calls a function of Python for all
others: it takes the interpreter's lock, but neither copies nor wraps an array.
"""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray
from numba.core import types

from sparsebp.kernels.host import chains, recurrence
from sparsebp.kernels.host.chains import ACROSS, NARROW, Rows
from sparsebp.kernels.host.engine import shipped
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import WORD, address, intrinsic, keep_alive, word_at
from sparsebp.kernels.host.engine.threads import ALONE, PUBLISHED, atomic_add, atomic_load
from sparsebp.kernels.host.recurrence import divide

MAJOR, MINOR = 0, 3
"""The interface's version for which the places below are right; XLA serves a handler of an older minor one."""
INVALID_ARGUMENT, INTERNAL = 3, 13
"""XLA's codes of errors."""
FRAME_WORDS, ARGUMENTS, ARGUMENT_COUNT, RESULTS, RESULT_COUNT, ATTRIBUTES = 22, 9, 7, 14, 12, 20
"""Words of a frame, and where the operands, the results and the attributes stand, and how many there are."""
DATA = 3
"""The word of a buffer that is the address of its numbers."""
ERROR_CREATE = 6
"""The word of XLA's functions that makes an error."""
ERROR_SIZE = 28
_EXTENSION, _API, _STAGE, _TYPE, _DIMS = 1, 2, 4, 2, 5
_EXECUTE, _METADATA = 3, 1
_COMPLEX, BOOLEAN = (15, 18), 1

# Names for the linker: an address inside the machine code would be another process's when it comes from the disk.
_TEAM, _GATE, _PYTHON = "sparsebp_xla_team", "sparsebp_xla_gate", "sparsebp_xla_python"
_gate = np.zeros(2, np.int64)
"""Whether the interpreter is closed to handlers, and how many are in it or wait for its lock."""
binding.add_symbol(_TEAM, PUBLISHED.ctypes.data)
binding.add_symbol(_GATE, _gate.ctypes.data)
_LENGTHS = np.frombuffer(b"OptionError: A length is out of range. Expected: integers from 0 to T.\0", np.uint8)
_ENDED = np.frombuffer(b"The interpreter has ended before this computation\0", np.uint8)


def forward_handler(dtype: np.dtype) -> int:
    """Return the address of the handler of a linear recurrence whose reals are of this dtype.

    Operands a, b, h0 and, for some, lengths (B,) int32 and resets (T or 1, B or 1, H or 1); attribute ``reverse``;
    result h.
    """
    return int(_compiled(_forward_32 if dtype == np.float32 else _forward_64).address)


def backward_handler(dtype: np.dtype) -> int:
    """Return the address of the handler of its gradients.

    Operands a, h, the gradient at h, h0 and, for some, lengths and resets; results: the gradients at a (T or 1, B, H),
    b and h0.
    """
    return int(_compiled(_backward_32 if dtype == np.float32 else _backward_64).address)


def close() -> None:
    """Refuse further calls of Python, and wait until none is left.

    JAX waits for all computations at the interpreter's end, and holds its lock while it does.
    """
    _gate[0] = 1
    while _gate[1]:
        time.sleep(1e-3)


def _after_fork() -> None:
    _gate[1] = 0  # those in it are the parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
_callbacks: list[Any] = []
"""What XLA may call, kept as long as the process."""


def python_handler(function: Any) -> int:
    """Return the address of a handler that calls ``function(frame)``, which returns what a handler returns.

    There is one in a process: `function` is that of the first call.
    """
    if not _callbacks:
        _callbacks.append(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(function))
        binding.add_symbol(_PYTHON, ctypes.cast(_callbacks[0], ctypes.c_void_p).value)
    return int(_compiled(_python).address)


@cache
def _compiled(handler: Any) -> Any:
    return shipped.cfunc(types.intp(types.intp), handler, **JIT)


_python_of_frame: Any = types.ExternalFunction(_PYTHON, types.int64(types.int64))


# The functions below are compiled: their arguments are addresses and numbers.
# mypy: disable-error-code="no-untyped-def"


def _address_of(name: str) -> Any:
    """Return a compiled function that returns the address that the linker knows by a name."""

    @intrinsic
    def found(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, WORD, name)
            return builder.ptrtoint(place, WORD)

        return types.int64(), codegen

    return found


_published, _gate_address = _address_of(_TEAM), _address_of(_GATE)


@intrinsic
def _create_error(typingctx, function, arguments):
    """Call XLA's function that makes an error; return the error's address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORD])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), codegen


@numba.njit(**INNER_JIT)
def _word(base, place):
    return word_at(base + 8 * place)


@numba.njit(**INNER_JIT)
def _to_execute(frame):
    """Whether a handler is called to compute; at its registration, XLA asks which version it is made for."""
    extension = _word(frame, _EXTENSION)
    if extension != 0 and _word(extension, 1) & 0xFFFFFFFF == _METADATA:
        version = address(_word(extension, 3) + 24, np.int32(0))
        version[0], version[1] = MAJOR, MINOR
        return False
    return _word(frame, _STAGE) & 0xFFFFFFFF == _EXECUTE


@numba.njit(**INNER_JIT)
def _error(frame, message):
    given = np.zeros(4, np.int64)
    given[0], given[2], given[3] = ERROR_SIZE, message, INVALID_ARGUMENT
    error = _create_error(_word(_word(frame, _API), ERROR_CREATE), given.ctypes.data)
    keep_alive(given)
    return error


@numba.njit(**INNER_JIT)
def _argument(frame, k):
    return _word(_word(frame, ARGUMENTS), k)


@numba.njit(**INNER_JIT)
def _result(frame, k):
    return _word(_word(frame, RESULTS), k)


@numba.njit(**INNER_JIT)
def _sizes(buffer, pairs):
    """Return the sizes of a buffer (T, B, W), W in reals."""
    dims = _word(buffer, _DIMS)
    return _word(dims, 0), _word(dims, 1), _word(dims, 2) * (2 if pairs else 1)


@numba.njit(**INNER_JIT)
def _is_complex(buffer):
    kind = _word(buffer, _TYPE) & 0xFFFFFFFF
    return kind == _COMPLEX[0] or kind == _COMPLEX[1]


@numba.njit(**INNER_JIT)
def _rows(buffer, sizes, of_unit, like):
    """Return the rows of a buffer of these sizes; those of an axis of length one are shared."""
    steps, batch, width = sizes
    values = carray(address(_word(buffer, DATA), like), (steps * batch * width,))
    return Rows(values, 0, batch * width if steps > 1 else 0, width if batch > 1 else 0, of_unit)


@numba.njit(**INNER_JIT)
def _same_rows(rows, values):
    """Return the rows with other values."""
    return Rows(values, rows.first, rows.of_step, rows.of_sample, rows.of_unit)


@numba.njit(**INNER_JIT)
def _extra(frame, first):
    """Return whether there are lengths, operand `first`, and the sizes of the resets, the last one, or (0, 1, 1)."""
    count = _word(frame, ARGUMENT_COUNT)
    last = _argument(frame, count - 1)
    resets = count > first and _word(last, _TYPE) & 0xFFFFFFFF == BOOLEAN
    return count - resets > first, _sizes(last, False) if resets else (0, 1, 1)


@numba.njit(**INNER_JIT)
def _resets(frame, sizes):
    """Return the rows of the resets."""
    if sizes[0] == 0:
        return Rows(np.zeros(1, np.uint8), 0, 0, 0, 0)
    last = _argument(frame, _word(frame, ARGUMENT_COUNT) - 1)
    return _rows(last, sizes, 1 if sizes[2] > 1 else 0, np.uint8(0))


@numba.njit(**INNER_JIT)
def _merged(of_a, of_reset, sizes, pairs, lengths):
    """Return the sizes of a, of resets and of h with all samples of a step in one row, where these may be one."""
    one = 2 if pairs else 1
    whole_a = (of_a[1] == 1 and of_a[2] == one) or (of_a[1] == sizes[1] and of_a[2] == sizes[2])
    whole_reset = of_reset[1] * of_reset[2] == 1 or (of_reset[1] == sizes[1] and of_reset[2] * one == sizes[2])
    if not whole_a or not whole_reset or (lengths and sizes[2] > one):
        return of_a, of_reset, sizes
    joined = (of_a[0], 1, of_a[1] * of_a[2]), (of_reset[0], 1, of_reset[1] * of_reset[2])
    return joined[0], joined[1], (sizes[0], 1, sizes[1] * sizes[2])


@numba.njit(**INNER_JIT)
def _is_narrow(sizes, pairs):
    return sizes[1] * sizes[2] <= NARROW * (2 if pairs else 1)


@numba.njit(**INNER_JIT)
def _by_chains(sizes, pairs, of_reset, own_lengths, summed):
    """Whether the kernel of chains runs: for few states, lengths of each unit, or sums over steps with its resets."""
    return _is_narrow(sizes, pairs) or own_lengths or (summed and of_reset[2] > 1)


@numba.njit(**INNER_JIT)
def _chains(sizes, pairs):
    """Return sizes (T, B, W) in numbers."""
    return sizes[0], sizes[1], sizes[2] // (2 if pairs else 1)


@numba.njit(**INNER_JIT)
def _apart(rows, pairs):
    """Return rows whose units are numbers."""
    return Rows(rows.values, 0, rows.of_step, rows.of_sample, rows.of_unit * (2 if pairs else 1))


@numba.njit(**INNER_JIT)
def _ends(lengths, sizes, pairs, given):
    """Return the steps of every chain, or nothing; lengths are of chains, too, where all are in one row."""
    _, batch, width = _chains(sizes, pairs)
    found = np.empty(batch * width if given else 0, np.int64)
    for i in range(len(found)):
        found[i] = lengths[i * len(lengths) // len(found)]
    return found


@numba.njit(**INNER_JIT)
def _lengths(frame, k, steps, batch, given):
    """Return the lengths of all samples, and whether they are right."""
    found, fit = np.empty(batch, np.int64), True
    values = carray(
        address(_word(_argument(frame, k), DATA), np.int32(0)) if given else address(0, np.int32(0)), (batch,)
    )
    for i in range(batch):
        found[i] = values[i] if given else steps
        fit = fit and 0 <= found[i] <= steps
    return found, fit


@numba.njit(**INNER_JIT)
def _run_forward(frame, like):
    a, b, h0, h = _argument(frame, 0), _argument(frame, 1), _argument(frame, 2), _result(frame, 0)
    pairs, (given, of_reset) = _is_complex(b), _extra(frame, 3)
    steps, samples, _ = _sizes(b, pairs)
    lengths, fit = _lengths(frame, 3, steps, samples, given)
    if not fit:
        return _error(frame, _LENGTHS.ctypes.data)
    of_a, of_reset, sizes = _merged(_sizes(a, pairs), of_reset, _sizes(b, pairs), pairs, given)
    _, batch, width = sizes
    form, resets, reset = (of_a[2] < width, pairs), of_reset[0] > 0, _resets(frame, of_reset)
    state = _rows(h0, (1, batch, width), 1, like)
    rows = (_rows(a, of_a, 0 if form[0] else 1, like), _rows(b, sizes, 1, like), state, _rows(h, sizes, 1, like))
    team, threads = atomic_load(_published()), atomic_load(_published() + 8)
    if _by_chains(sizes, pairs, of_reset, given and samples > batch, False):
        x, y, start, out = rows
        own = _apart(x, pairs), _apart(y, pairs), _apart(start, pairs), _apart(out, pairs)
        layout = _chains(sizes, pairs), ACROSS, pairs, _reverse(frame), resets
        ends = _ends(lengths, sizes, pairs, given)
        if _is_narrow(sizes, pairs):
            chains.forward(ALONE, 1, layout, np.empty(0, np.float64), ends, reset, own)
        else:
            parts = divide(3 * steps * batch * width, threads <= 1, batch, width)[0]
            chains.forward(team if parts > 1 else ALONE, parts, layout, rows[0].values[:0], ends, reset, own)
        return 0
    parts, samples, block = divide(3 * steps * batch * width, threads <= 1, batch, width)
    run = (sizes, (samples, block), lengths, resets, _reverse(frame), False, form)
    recurrence._forward(team if parts > 1 else ALONE, parts, run, (*rows, reset))
    return 0


@numba.njit(**INNER_JIT)
def _run_backward(frame, like):
    a, h, gh, h0 = _argument(frame, 0), _argument(frame, 1), _argument(frame, 2), _argument(frame, 3)
    ga, gb, gh0 = _result(frame, 0), _result(frame, 1), _result(frame, 2)
    pairs, (given, of_reset) = _is_complex(h), _extra(frame, 4)
    steps, samples, _ = _sizes(h, pairs)
    lengths, fit = _lengths(frame, 4, steps, samples, given)
    if not fit:
        return _error(frame, _LENGTHS.ctypes.data)
    of_a, of_reset, sizes = _merged(_sizes(a, pairs), of_reset, _sizes(h, pairs), pairs, given)
    _, batch, width = sizes
    form, resets, reset = (of_a[2] < width, pairs), of_reset[0] > 0, _resets(frame, of_reset)
    factors, state, summed = _rows(a, of_a, 0 if form[0] else 1, like), (1, batch, width), of_a[0] != steps
    at_a = _rows(ga, (of_a[0], batch, width), 1, like)
    start, out, at_out = _rows(h0, state, 1, like), _rows(h, sizes, 1, like), _rows(gh, sizes, 1, like)
    at_start, at_b = _rows(gh0, state, 1, like), _rows(gb, sizes, 1, like)
    team, threads = atomic_load(_published()), atomic_load(_published() + 8)
    if _by_chains(sizes, pairs, of_reset, given and samples > batch, summed):
        layout = _chains(sizes, pairs), ACROSS, pairs, _reverse(frame), resets, summed
        own = (
            _apart(factors, pairs), _apart(start, pairs), _apart(out, pairs), _apart(at_out, pairs),
            _apart(at_start, pairs), _apart(at_a, pairs), _apart(at_b, pairs),
        )  # fmt: skip
        ends = _ends(lengths, sizes, pairs, given)
        if _is_narrow(sizes, pairs):
            chains.backward(ALONE, 1, layout, np.empty(0, np.float64), ends, reset, own)
        else:
            parts = divide(5 * steps * batch * width, threads <= 1, batch, width)[0]
            chains.backward(team if parts > 1 else ALONE, parts, layout, factors.values[:0], ends, reset, own)
        return 0
    pieces = _same_rows(at_a, np.zeros(len(at_a.values) if summed else 0, at_a.values.dtype))
    rows = (factors, factors, start, out, at_out, at_start, pieces, at_a, at_b, reset)
    parts, samples, block = divide(5 * steps * batch * width, threads <= 1, batch, width)
    run = (sizes, (samples, block), lengths, resets, _reverse(frame), summed, form)
    recurrence._backward(team if parts > 1 else ALONE, parts, run, rows)
    return 0


@numba.njit(**INNER_JIT)
def _reverse(frame):
    """Return the first attribute, an int64, as a flag."""
    return _word(_word(_word(_word(frame, ATTRIBUTES), 0), 1), 0) != 0


def _forward_32(frame):
    return _run_forward(frame, np.float32(0)) if _to_execute(frame) else 0


def _forward_64(frame):
    return _run_forward(frame, np.float64(0)) if _to_execute(frame) else 0


def _backward_32(frame):
    return _run_backward(frame, np.float32(0)) if _to_execute(frame) else 0


def _backward_64(frame):
    return _run_backward(frame, np.float64(0)) if _to_execute(frame) else 0


def _python(frame):
    if not _to_execute(frame):
        return 0
    atomic_add(_gate_address() + 8, 1)
    found = _error(frame, _ENDED.ctypes.data) if atomic_load(_gate_address()) else _python_of_frame(frame)
    atomic_add(_gate_address() + 8, -1)
    return found
