"""Convolutions and max pooling."""

from __future__ import annotations

from sparsebp.backend import namespace
from sparsebp.core.errors import DTypeError, OptionError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import Family, exact, rank, real_dtype, written

_WINNERS = ("uint8", "int32")


class WindowKernels(Family):
    """Kernels over sliding windows.

    Window o begins at input ``o * stride - before``; its tap t lies ``t * dilation`` further. What lies outside the
    input is zero for a convolution and never a maximum. The options are one integer an axis.
    """

    def convolve(
        self,
        weight: Array,
        x: Array,
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        out: Array,
    ) -> None:
        """``out[b, o, w] = Σ weight[o, c, t] · x[b, c, w * stride + t * dilation - before]``, c of the group of o.

        weight (O, C / groups, taps on three axes); x (B, C, D, H, W); out (B, O, windows on three axes), overwritten.
        """
        _check_convolution(weight, x, out, stride, before, dilation, groups, "y")
        self._run.convolve(weight, x, stride, before, dilation, groups, out)

    def convolve_t(
        self,
        weight: Array,
        y: Array,
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        out: Array,
    ) -> None:
        """The transpose of `convolve`: from the gradient at its output to that at its input.

        weight (O, C / groups, taps on three axes); y (B, O, windows on three axes); out (B, C, D, H, W), overwritten.
        """
        _check_convolution(weight, out, y, stride, before, dilation, groups, "x")
        self._run.convolve_t(weight, y, stride, before, dilation, groups, out)

    def correlate(
        self,
        y: Array,
        x: Array,
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        out: Array,
    ) -> None:
        """The gradient at the weights of `convolve`, for y the gradient at its output.

        y (B, O, windows on three axes); x (B, C, D, H, W); out (O, C / groups, taps on three axes), overwritten.
        """
        _check_convolution(out, x, y, stride, before, dilation, groups, "weight")
        self._run.correlate(y, x, stride, before, dilation, groups, out)

    def max_pool(
        self,
        x: Array,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        y: Array,
        winner: Array,
    ) -> None:
        """The maximum of every window, and its place counted in C order over the kernel.

        The first maximum wins; NaN wins over all, of several the last. Every window must meet the input.

        x (N, H, W); y (N, windows on two axes), written; winner as y, uint8 (kernels of up to 256 taps) or int32,
        written; the options are two integers each.
        """
        dtype, (planes, _, _), (_, *outputs) = real_dtype("x", x), rank("x", x, 3), rank("y", y, 3)
        _pool(kernel, stride, before, dilation, winner)
        exact("x", x, dtype, x.shape)
        written("y", y, dtype, (planes, *outputs))
        written("winner", winner, winner.dtype, (planes, *outputs))
        self._run.max_pool(x, kernel, stride, before, dilation, y, winner)

    def max_pool_grad(
        self,
        gy: Array,
        winner: Array,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        out: Array,
    ) -> None:
        """Every window's gradient goes to its maximum; where windows overlap they are added in their order.

        gy, winner (N, windows on two axes); out (N, H, W), overwritten.
        """
        dtype, (planes, _, _), (_, *inputs) = real_dtype("gy", gy), rank("gy", gy, 3), rank("out", out, 3)
        _pool(kernel, stride, before, dilation, winner)
        exact("gy", gy, dtype, gy.shape)
        exact("winner", winner, winner.dtype, gy.shape)
        written("out", out, dtype, (planes, *inputs))
        self._run.max_pool_grad(gy, winner, kernel, stride, before, dilation, out)


def _check_convolution(
    weight: Array, x: Array, y: Array, stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...],
    groups: int, out: str,
) -> None:  # fmt: skip
    """Check the arguments of a convolution with output y; `out` says which of x, weight and y is written."""
    names = {role: "out" if role == out else role for role in ("x", "weight", "y")}
    dtype, (batch, channels, *_) = real_dtype(names["x"], x), rank(names["x"], x, 5)
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
