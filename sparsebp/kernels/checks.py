"""Checks of the table of kernels: those of every row, those that a row names, and the sizes and options they know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import FUNCTIONS, LOSS_FUNCTIONS, SLOPES, Array, UpdateRule, check_choice
from sparsebp.core.errors import DTypeError, LayoutError, OptionError, ShapeError
from sparsebp.kernels.operands import _CLASSES

NONLINEARITIES = ("tanh", "relu")
CANDIDATES = ("identity", "tanh", "positive")
"""Functions of a minGRU's candidate; `positive` is x + 1/2 where x >= 0, else the sigmoid."""
CHUNK = 32
"""Steps between two states that a selective scan keeps for its way back."""
HELD_INPUTS = (1, 4, 8)
"""Input sizes for which kernels that hold the input's weights, or the sums of their gradients, are compiled."""

MOST_INPUTS = HELD_INPUTS[-1]
"""Largest input size that a device's forward kernel projects itself."""

SUMS_AT_MOST = 4
"""Memory for sums of weight gradients, over the memory of the gates' gradients that they replace."""

FEW_SUMS = 1 << 13
"""Numbers of sums that a host keeps for any length: the calls of products take longer than to write them."""

Sizes = tuple[int, int, int]
"""``(T, B, H)``: steps, samples, hidden size."""


def room_for(features: int) -> int:
    """Return the smallest of `HELD_INPUTS` with room for all features; 0 if there is none."""
    return min((inputs for inputs in HELD_INPUTS if inputs >= features), default=0)


def room_for_sums(registers: int, gates: int, hidden: int, features: int, itemsize: int) -> int:
    """Number of inputs of a device's backward that accumulates weight gradients, 0 if it does not.

    A thread holds its rows of the weights and of their sums in registers. In float64, values that are loaded ahead take
    the free ones.
    """
    if registers == 0 or itemsize != 4:
        return 0
    room = room_for(features)
    return room if gates * (2 * hidden + room) <= registers else 0


FLOAT64, INT64 = np.dtype(np.float64), np.dtype(np.int64)

UPDATE_OPTIONS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "nadam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize", "momentum_decay"),
    "radam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "adamax": ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "maximize"),
    "adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize"),
}
"""The columns of an optimizer's options. ``decoupled``: the decay shrinks the parameter (AdamW)."""
UPDATE_BUFFERS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
}
"""The buffers of each parameter."""
OPTIONAL_BUFFERS = ("momentum_buffer", "max_exp_avg_sq", "grad_avg")
"""May be None: for a parameter without momentum, without AMSGrad, or whose second moment is not centered."""


# What every row is checked with.


def exact(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Check dtype, shape and C-contiguity of one array that is read."""
    if getattr(array, "shape", None) == shape and array.dtype == dtype and array.flags.c_contiguous:
        return
    backend.check_array(name, array, dtype=dtype, shape=shape)


def written(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Check one array as `exact` does, and that it may be written."""
    exact(name, array, dtype, shape)
    if not getattr(array.flags, "writeable", True):
        backend.check_array(name, array, written=True)


def batch_of(**arrays: Array) -> int:
    """Return the batch size of operands whose last axis is 1 (shared) or B (per sample)."""
    batch = 1
    for array in arrays.values():
        length = array.shape[-1]
        if length in (1, batch):
            continue
        if batch != 1:
            got = ", ".join(f"{name} {value.shape}" for name, value in arrays.items())
            raise ShapeError(
                "Operands have different batch sizes", expected="last axes of 1 or one batch size", got=got
            )
        batch = length
    return batch


def check_class(name: str, array: Array, kind: str) -> np.dtype:
    """Return the dtype of an array, after checking that `kind` includes it."""
    if array.dtype not in _CLASSES[kind]:
        expected = " or ".join(dtype.name for dtype in _CLASSES[kind])
        raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=array.dtype)
    return array.dtype


def refuse_empty(name: str) -> None:
    """Raise the error of an array of `n_rows + 1` entries that has none."""
    raise ShapeError(f"{name} is empty", expected="n_rows + 1 entries", got="0")


# What rows name.


def check_function(function: str) -> None:
    """Check whose slopes `pointwise_slopes` takes."""
    check_choice("function", function, SLOPES)


def check_pointwise(function: str) -> None:
    """Check the function of `pointwise`."""
    check_choice("function", function, FUNCTIONS)


def check_loss(function: str) -> None:
    """Check the function of `element_loss`."""
    check_choice("function", function, LOSS_FUNCTIONS)


def check_axis(size: int) -> None:
    """Check the axis of a softmax."""
    if size == 0:
        raise ShapeError("There is nothing to take the softmax of", expected="an axis of 1 or more", got=0)


def check_nonlinearity(nonlinearity: str) -> None:
    """Check an RNN's nonlinearity."""
    check_choice("nonlinearity", nonlinearity, NONLINEARITIES)


def check_mean(mean: Array | None, count: int) -> None:
    """Check that there are numbers to take the mean of, if it is asked for."""
    if mean is not None and count == 0:
        raise ShapeError("There is nothing to take the mean of", expected="a row or more", got="none")


def check_line(windows: int, taps: int) -> None:
    """Check the sizes of a line of `max_pool_values`."""
    if windows < 1 or taps < 1:
        raise OptionError("A line holds at least one window and one tap", got=f"windows={windows}, taps={taps}")


def check_shift(shift: int) -> None:
    """Check where the entry of B begins in a word of `Pairs`."""
    if not 0 <= shift <= 32:
        raise ShapeError("The entry of B begins outside the word", expected="a shift from 0 to 32", got=shift)


def check_blocks(rows: int, m: int, k: int, n: int) -> None:
    """Check the sizes of `Blocks`."""
    if min(m, k, n) < 1 or rows % m:
        raise ShapeError("Block sizes do not fit", expected=f"m, k, n >= 1, m a divisor of {rows} rows", got=(m, k, n))


def check_columns(n: int) -> None:
    """Check the number of `Columns`."""
    if n < 0:
        raise ShapeError("The number of columns is negative", expected="columns >= 0", got=n)


def check_together(name: str, array: Array | None, other_name: str, other: Array | None) -> None:
    """Check that both arrays are given, or neither."""
    if (array is None) != (other is None):
        missing = name if array is None else other_name
        raise ShapeError(
            f"{missing} is missing", expected=f"{name} and {other_name}, or neither", got=f"{missing}=None"
        )


def check_fresh(fresh: bool, **initial: Array) -> None:
    """Check that the arrays of an initial state may be written if it is to be a fresh one."""
    for name, array in initial.items() if fresh else ():
        backend.check_array(name, array, written=True)


def check_steps(name: str, array: Array) -> None:
    """Check that a sequence (T, B, H) has steps and a hidden size."""
    if array.shape[0] < 1:
        raise ShapeError(
            f"{name} has no steps, and empty sequences are not allowed", expected="T >= 1", got=array.shape
        )
    if array.shape[2] < 1:
        raise ShapeError(f"{name} has a hidden size of zero", expected="(T, B, H) with H >= 1", got=array.shape)


def check_chunks(chunks: int, steps: int) -> None:
    """Check the number of chunks of a sequence."""
    if not 1 <= chunks <= steps:
        raise OptionError("Wrong number of chunks", expected=f"1 <= chunks <= T = {steps}", got=chunks)


def check_outgoing(name: str, ga: Array | None, sums: Any) -> None:
    """Check that a backward has somewhere to write: gradients at the pre-activations, or sums."""
    if ga is None and sums is None:
        raise OptionError(f"{name} is missing", expected=f"{name}, or sums in its place", got="None and None")


def input_size(rows: int, w_ih: Array | None, most: int) -> int:
    """Return the last axis of x: `rows` for a product, else the number of features, at most `most`."""
    if w_ih is None:
        return rows
    features = int(w_ih.shape[1])
    if not 1 <= features <= most:
        raise ShapeError("Forward does not project this input size", expected=f"w_ih of shape ({rows}, 1 to {most})",
                         got=w_ih.shape, remedy="Pass x @ w_ih.T in place of x")  # fmt: skip
    return features


def check_shared(name: str, shared: Array, b: Array) -> None:
    """Check that the factors or resets of a linear recurrence fit its terms."""
    if any(n not in (1, full) for n, full in zip(shared.shape, b.shape, strict=True)):
        got = f"{shared.shape} and {b.shape}"
        raise ShapeError(f"{name} does not fit b", expected="each axis 1 or as long as b's", got=got)


def parts_of(x: Array, h: Array) -> int:
    """Return into how many parts of H numbers a row of x falls: 2 of a minGRU, 3 of a minLSTM."""
    return 3 if x.shape[2] == 3 * h.shape[2] else 2


def check_states(kept: int, steps: int) -> None:
    """Check the number of states that a selective scan keeps."""
    if kept != kept_states(steps):
        raise ShapeError("states has the wrong length", expected=kept_states(steps), got=kept)


def kept_states(steps: int) -> int:
    """Return how many states a selective scan keeps: before each chunk of steps, and the last one."""
    return -(-steps // CHUNK) + 1


def check_groups(groups: int, channels: int, rows: int) -> None:
    """Check the groups of a convolution."""
    if groups < 1 or channels % groups or rows % groups:
        raise OptionError(
            "groups does not fit the channels", expected=f"a divisor of {channels} and {rows}", got=groups
        )


def check_windows(axes: int, **values: tuple[int, ...]) -> None:
    """Check the options of windows."""
    for name, value in values.items():
        least = int(name != "before")
        if len(value) != axes or min(value) < least:
            raise OptionError(
                f"{name} does not fit the windows", expected=f"{axes} integers >= {least}", got=repr(value)
            )


def check_winner(winner: Array, kernel: tuple[int, ...]) -> None:
    """Check that `winner` can hold the kernel's taps."""
    if winner.dtype == "uint8" and kernel[0] * kernel[1] > 256:
        raise DTypeError("winner cannot hold the places of the kernel", expected="int32", got="uint8")


def check_row_weights(channels: int, weight: Array | None) -> None:
    """Check that weights repeat with the rows."""
    if weight is not None and (channels < 1 or len(weight) % channels or not len(weight)):
        raise ShapeError("The weights do not fit the rows", expected=f"a multiple of {channels} weights",
                         got=len(weight))  # fmt: skip


def check_limits(limits: tuple[float, float] | None, *y: Array | None) -> None:
    """Check the limits of kernels that also clamp; a mask `y` is given exactly if limits are."""
    if any((array is None) != (limits is None) for array in y):
        got = "limits alone" if limits is not None else "y alone"
        raise OptionError("y and limits belong together", expected="both y and limits, or neither", got=got)
    if limits is not None and not limits[0] < limits[1]:
        raise OptionError("The limits are in the wrong order", expected="low < high", got=f"{limits[0]}, {limits[1]}")


# Sequences of arrays.


def check_update(
    rule: UpdateRule,
    params: Sequence[Array],
    grads: Sequence[Array],
    buffers: Sequence[Sequence[Array | None]],
    options: Array,
    steps: Array,
) -> None:
    """Check the arguments of `optimizer_update`."""
    check_update_options(rule, len(params), buffers, options, steps)
    columns = {"params": params, "grads": grads} | dict(zip(UPDATE_BUFFERS[rule], buffers, strict=True))
    _check_together({f"{name}[{i}]": a for name, of in columns.items() for i, a in enumerate(of) if a is not None})
    for name, arrays in columns.items():
        _check_length(name, arrays, len(params))
    check_arrays(params, "params")
    for name, arrays in columns.items():
        for i, (array, param) in enumerate(zip(arrays, params, strict=True)):
            if array is None and name in OPTIONAL_BUFFERS:
                continue
            _check_is_array(f"{name}[{i}]", array)
            exact(f"{name}[{i}]", array, param.dtype, param.shape)
            if name != "grads":
                backend.check_array(f"{name}[{i}]", array, written=True)


def check_update_options(
    rule: UpdateRule, count: int, buffers: Sequence[Sequence[Array | None]], options: Array, steps: Array
) -> None:
    """Check the arguments of `optimizer_update` that are quick to check."""
    if rule not in UPDATE_OPTIONS:
        raise OptionError("Unknown update rule", expected=" or ".join(UPDATE_OPTIONS), got=rule)
    _check_length(f"The buffers of {rule}", buffers, len(UPDATE_BUFFERS[rule]))
    exact("options", options, FLOAT64, (count, len(UPDATE_OPTIONS[rule])))
    exact("steps", steps, INT64, (count,))


def check_written(arrays: Sequence[Array]) -> None:
    """Check as `check_arrays`, and that all may be written."""
    check_arrays(arrays)
    for i, array in enumerate(arrays):
        backend.check_array(f"arrays[{i}]", array, written=True)


def check_arrays(arrays: Sequence[Array], name: str = "arrays") -> None:
    """Check that all are C-contiguous arrays of one real dtype and one namespace."""
    _check_together({f"{name}[{i}]": array for i, array in enumerate(arrays)})
    for i, array in enumerate(arrays):
        if i == 0:
            check_class(f"{name}[0]", array, "real")
        exact(f"{name}[{i}]", array, arrays[0].dtype, array.shape)


def _check_together(arrays: dict[str, Array]) -> None:
    """Check that all are arrays of one namespace: each by itself first, since NumPy scalars mix with any array."""
    for name, array in arrays.items():
        _check_is_array(name, array)
    backend.namespace(**arrays)


def check_near(name: str, array: Array, arrays: Sequence[Array]) -> None:
    """Check that an array is where the arrays of a sequence are."""
    if arrays and type(array) is not type(arrays[0]):
        _check_together({name: array, "arrays[0]": arrays[0]})


def _check_is_array(name: str, array: Array) -> None:
    backend.namespace(**{name: array})
    if isinstance(array, np.generic):  # without memory of its own that a kernel could read
        raise LayoutError(f"{name} is not an array", got=type(array).__name__, remedy="Pass numpy.asarray(...) of it")


def _check_length(name: str, items: Sequence[object], count: int) -> None:
    if len(items) != count:
        raise ShapeError(f"{name} has the wrong length", expected=count, got=len(items))
