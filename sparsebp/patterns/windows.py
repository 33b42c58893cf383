"""Where sliding windows lie: kernel, stride, padding and dilation, of convolutions and of pooling, over any axes.

Patterns and layers read the same options, so what they mean is said once, here; no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeGuard

from sparsebp.core.arguments import check_flag, check_integer, shown
from sparsebp.core.errors import OptionError, ShapeError

Lengths: TypeAlias = int | Sequence[int]
"""One integer for all axes, or one per axis."""

Padding: TypeAlias = int | Sequence[int] | Sequence[tuple[int, int]] | str
"""One integer, one per axis, a pair (before, after) per axis, ``"same"`` or ``"valid"``."""

Layout = Literal["chw", "hwc"]
"""Order of a flattened sample: channels first (as torch.nn has it) or last."""


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution; hashable, one entry per axis everywhere.

    Parameters
    ----------
    kernel
        Taps of a window.
    stride
        Distance between windows.
    padding
        Zeros (before, after) the input; a negative number leaves out elements at the end.
    dilation
        Distance between the taps of a window.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, ndim: int, kernel_size: Lengths, stride: Lengths = 1, padding: Padding = 0, dilation: Lengths = 1
    ) -> Windows:
        """Read the options as torch.nn's convolutions take them, for `ndim` axes; padding may differ at both ends.

        ``"same"`` keeps the length for stride 1; where the padding is odd, the end gets the larger part, as in PyTorch.

        Raises
        ------
        OptionError
            An option is out of range or has another number of axes, or ``"same"`` meets a stride above 1.
        """
        kernel = lengths("kernel_size", kernel_size, ndim, 1)
        strides = lengths("stride", stride, ndim, 1)
        dilations = lengths("dilation", dilation, ndim, 1)
        return cls(kernel, strides, _pairs(padding, kernel, strides, dilations), dilations)

    @classmethod
    def transposed(
        cls, ndim: int, kernel_size: Lengths, stride: Lengths = 1, padding: Padding = 0, output_padding: Lengths = 0,
        dilation: Lengths = 1,
    ) -> Windows:  # fmt: skip
        """Read the options as torch.nn's transposed convolutions take them; the windows slide over their output.

        `output_padding` elements at the end of the output are in no window unless the padding reaches over them: they
        shorten the padding there, which may become negative.

        Raises
        ------
        OptionError
            As for `of`, or `output_padding` is as large as both stride and dilation.
        """  # fmt: skip
        windows = cls.of(ndim, kernel_size, stride, padding, dilation)
        extra = lengths("output_padding", output_padding, ndim, 0)
        if any(n >= max(s, d) for n, s, d in zip(extra, windows.stride, windows.dilation, strict=True)):
            raise OptionError(
                "output_padding is too large",
                expected=f"less than stride {windows.stride} or dilation {windows.dilation}",
                got=extra,
                remedy="Use a smaller output_padding: it only tells apart outputs of one input length",
            )
        ends = zip(windows.padding, extra, strict=True)
        return replace(windows, padding=tuple((before, after - n) for (before, after), n in ends))

    @property
    def before(self) -> tuple[int, ...]:
        """How much padding stands before the input."""
        return tuple(before for before, _ in self.padding)

    @property
    def reach(self) -> tuple[int, ...]:
        """What a window spans of the padded input: ``dilation * (kernel - 1) + 1``."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    def padded_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the input with its padding."""
        return tuple(n + before + after for n, (before, after) in zip(input_size, self.padding, strict=True))

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many windows fit on each axis: ``(padded - reach) // stride + 1``.

        Raises
        ------
        ShapeError
            A window is larger than the padded input.
        """
        return _output_size(self, tuple(input_size))

    def input_size(self, output_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input on which so many windows fit exactly: the output of a transposed convolution.

        Raises
        ------
        ShapeError
            There are no windows, or they lie in the padding alone.
        """
        axes = zip(output_size, self.stride, self.reach, self.padding, strict=True)
        sizes = tuple((n - 1) * s + r - before - after for n, s, r, (before, after) in axes)
        if min(output_size, default=1) < 1 or min(sizes, default=1) < 1:
            raise ShapeError(
                "The transposed convolution has no output",
                expected="at least 1 element on every axis of input and output",
                got=f"input {tuple(output_size)}, output {sizes}",
                remedy="Use less padding, or a larger input",
            )
        return sizes


@dataclass(frozen=True)
class PoolWindows(Windows):
    """The windows of a pooling layer; make them with `PoolWindows.of`.

    Parameters
    ----------
    ceil_mode
        Whether a last window may reach past the padded input.
    """

    ceil_mode: bool = False

    @classmethod
    def of(
        cls,
        ndim: int,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        padding: Any = 0,
        dilation: Lengths = 1,
        ceil_mode: bool = False,
    ) -> PoolWindows:
        """Read the options as torch.nn's pooling layers take them; `stride` None: windows that do not overlap.

        Raises
        ------
        OptionError
            A size is not a positive integer, there are not `ndim` of them, or the padding is more than half of the
            kernel.
        """
        kernel = lengths("kernel_size", kernel_size, ndim, 1)
        strides = lengths("stride", kernel_size if stride is None else stride, ndim, 1)
        pads, dilations = lengths("padding", padding, ndim, 0), lengths("dilation", dilation, ndim, 1)
        windows = cls(kernel, strides, tuple((pad, pad) for pad in pads), dilations, check_flag("ceil_mode", ceil_mode))
        for pad, length in zip(pads, kernel, strict=True):
            if pad > length // 2:
                raise OptionError(
                    "The padding is more than half of the kernel",
                    expected=f"padding <= {length // 2} for a kernel of {length}",
                    got=pad,
                    remedy="Use less padding or a larger kernel",
                )
        return windows

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many windows there are along each axis of an input (torch.nn.MaxPool2d, "Shape").

        Raises
        ------
        ShapeError
            The kernel is larger than the padded input, or its dilation steps over all of the input.
        """
        out = []
        for length, reach, stride, pad, step in zip(
            input_size, self.reach, self.stride, self.before, self.dilation, strict=True
        ):
            room = length + 2 * pad - reach
            count = (room + (stride - 1 if self.ceil_mode else 0)) // stride + 1
            if self.ceil_mode and (count - 1) * stride >= length + pad:
                count -= 1  # the last window must begin in the input or in the padding before it
            if length < 1 or count < 1:
                raise ShapeError(
                    "The kernel is larger than the padded input",
                    expected=f"at least {reach} elements with the padding",
                    got=f"{length} + 2 * {pad}",
                    remedy="Use a smaller kernel, more padding, or a larger input",
                )
            steps_over = ((start - pad) % step >= length for start in range(0, min(count * stride, pad), stride))
            if any(steps_over):
                raise ShapeError(
                    "The dilation steps over the whole input, so that a window holds padding only",
                    expected=f"an input of at least {step} elements",
                    got=length,
                    remedy="Use less dilation, no padding, or a larger input",
                )
            out.append(count)
        return tuple(out)


LONGEST = 2**48
"""The largest number of steps along an axis: kernels count them in 64 bits, and add and multiply."""


def lengths(name: str, value: Lengths, ndim: int, least: int) -> tuple[int, ...]:
    """Return `value` as `ndim` integers, each at least `least` and at most `LONGEST`.

    Raises
    ------
    OptionError
        It is something else.
    """
    try:
        given = list(value) if _is_sequence(value) else [value] * ndim
        result = tuple(check_integer(name, n, least, LONGEST) for n in given)
    except OptionError:
        result = ()
    if len(result) != ndim:
        raise OptionError(
            f"{name} does not fit {ndim} axes",
            expected=f"an integer or {ndim} integers, from {least} to {LONGEST}",
            got=shown(value),
            remedy=f"Pass one {name} for all axes, or one per axis",
        )
    return result


def check_channels(in_channels: int, out_channels: int, groups: int) -> tuple[int, int, int]:
    """Return the numbers after checking that they are integers from 1 on, and `groups` divides both channels.

    Raises
    ------
    OptionError
        They are not.
    """
    named = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
    in_channels, out_channels, groups = (check_integer(name, value, 1) for name, value in named.items())
    if in_channels % groups or out_channels % groups:
        raise OptionError(
            "The groups do not divide the channels",
            expected="in_channels and out_channels that are positive multiples of groups",
            got=f"in_channels={in_channels}, out_channels={out_channels}, groups={groups}",
            remedy="Choose a common divisor of both; groups=in_channels is a depthwise convolution",
        )
    return in_channels, out_channels, groups


def _pairs(
    padding: Padding, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    ndim = len(kernel)
    if isinstance(padding, str) and padding == "valid":
        return ((0, 0),) * ndim
    if isinstance(padding, str) and padding == "same":
        if max(stride, default=1) > 1:
            raise OptionError(
                'padding="same" needs stride 1',
                expected="stride 1 on every axis",
                got=stride,
                remedy="Give the padding in numbers",
            )
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if _is_sequence(padding) and len(padding) == ndim and all(_is_sequence(pair) for pair in padding):
        before_after = [lengths("a pair of padding", pair, 2, 0) for pair in padding]
        return tuple((before, after) for before, after in before_after)
    if isinstance(padding, str):
        raise OptionError(
            "Unknown padding",
            expected="integers, pairs (before, after), 'same' or 'valid'",
            got=repr(padding),
            remedy="Pass one of them",
        )
    return tuple((n, n) for n in lengths("padding", padding, ndim, 0))  # type: ignore[arg-type]


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


@lru_cache(maxsize=1024)  # asked for at every call of a layer, and it takes as long as a small kernel
def _output_size(windows: Windows, input_size: tuple[int, ...]) -> tuple[int, ...]:
    padded = windows.padded_size(input_size)
    if any(r > n for r, n in zip(windows.reach, padded, strict=True)):
        raise ShapeError(
            "The kernel is larger than the padded input",
            expected=f"at least {windows.reach} elements with padding, for kernel {windows.kernel} and "
            f"dilation {windows.dilation}",
            got=f"{padded}: input {input_size} with padding {windows.padding}",
            remedy="Use a smaller kernel or dilation, more padding, or a larger input",
        )
    return tuple((n - r) // s + 1 for n, r, s in zip(padded, windows.reach, windows.stride, strict=True))
