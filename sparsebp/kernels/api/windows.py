"""Argument checks of the kernels over sliding windows."""

from __future__ import annotations

from sparsebp.backend import namespace
from sparsebp.core.errors import DTypeError, OptionError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import exact, rank, real, written

_WINNERS = ("uint8", "int32")


def check_convolution(
    weight: Array, x: Array, y: Array, stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...],
    groups: int, out: str,
) -> None:  # fmt: skip
    """Check the arguments of `Kernels.convolve`, `Kernels.convolve_t` and `Kernels.correlate`; `out` is written."""
    names = {role: "out" if role == out else role for role in ("x", "weight", "y")}
    dtype, (batch, channels, *_) = real(names["x"], x), rank(names["x"], x, 5)
    rows, _, *kernel = rank(names["weight"], weight, 5)
    outputs = rank(names["y"], y, 5)[2:]
    if groups < 1 or channels % groups or rows % groups:
        raise OptionError(
            "groups does not fit the channels", expected=f"a divisor of {channels} and of {rows}", got=groups,
            remedy="Pass 1 for a convolution over all channels",
        )  # fmt: skip
    _sizes(3, stride=stride, before=before, dilation=dilation)
    shapes = {"x": x.shape, "weight": (rows, channels // groups, *kernel), "y": (batch, rows, *outputs)}
    for name, array in (("x", x), ("weight", weight), ("y", y)):
        check = written if name == out else exact
        check(names[name], array, dtype, shapes[name])


def check_max_pool(
    x: Array, kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...],
    y: Array, winner: Array,
) -> None:  # fmt: skip
    """Check the arguments of `Kernels.max_pool`."""
    dtype, (planes, _, _), (_, *outputs) = real("x", x), rank("x", x, 3), rank("y", y, 3)
    _pool(kernel, stride, before, dilation, winner)
    exact("x", x, dtype, x.shape)
    written("y", y, dtype, (planes, *outputs))
    written("winner", winner, winner.dtype, (planes, *outputs))


def check_max_pool_grad(
    gy: Array, winner: Array, kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...],
    dilation: tuple[int, ...], out: Array,
) -> None:  # fmt: skip
    """Check the arguments of `Kernels.max_pool_grad`."""
    dtype, (planes, _, _), (_, *inputs) = real("gy", gy), rank("gy", gy, 3), rank("out", out, 3)
    _pool(kernel, stride, before, dilation, winner)
    exact("gy", gy, dtype, gy.shape)
    exact("winner", winner, winner.dtype, gy.shape)
    written("out", out, dtype, (planes, *inputs))


def _pool(
    kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...], winner: Array
) -> None:
    namespace(winner=winner)
    if winner.dtype not in _WINNERS:
        raise DTypeError(
            "winner has the wrong dtype", expected="uint8 or int32", got=winner.dtype,
            remedy="Allocate it with one of the two",
        )  # fmt: skip
    if winner.dtype == "uint8" and kernel[0] * kernel[1] > 256:
        raise DTypeError(
            "winner cannot hold the places of the kernel", expected="int32", got="uint8", remedy="Allocate int32"
        )
    _sizes(2, kernel=kernel, stride=stride, before=before, dilation=dilation)


def _sizes(axes: int, **values: tuple[int, ...]) -> None:
    for name, value in values.items():
        if len(value) != axes or min(value) < (0 if name == "before" else 1):
            raise OptionError(
                f"{name} does not fit the windows", expected=f"{axes} integers, at least {int(name != 'before')}",
                got=repr(value), remedy="Pass one for every axis",
            )  # fmt: skip
