"""The sliding windows of a pooling layer: arguments, checks and output sizes, as torch.nn has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from sparsebp.core.arguments import check_flag
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.patterns.windows import lengths


@dataclass(frozen=True)
class PoolWindow:
    """Windows that slide over one or more spatial axes; make one with `PoolWindow.of`.

    Attributes
    ----------
    kernel, stride, padding, dilation
        One integer for each axis.
    ceil_mode
        Whether a last window may reach past the padded input.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @classmethod
    def of(
        cls, dims: int, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Self:
        """Check the arguments and spread single integers over `dims` axes.

        Parameters
        ----------
        dims
            Number of spatial axes.
        kernel, stride, padding, dilation
            An integer, or one for each axis. `stride` None: that of the kernel, so that windows do not overlap.
        ceil_mode
            Whether the number of windows is rounded up.

        Raises
        ------
        OptionError
            A size is not a positive integer, there are not `dims` of them, or the padding is more than half of the
            kernel.
        """
        window = cls(
            lengths("kernel_size", kernel, dims, 1),
            lengths("stride", kernel if stride is None else stride, dims, 1),
            lengths("padding", padding, dims, 0),
            lengths("dilation", dilation, dims, 1),
            check_flag("ceil_mode", ceil_mode),
        )
        for pad, length in zip(window.padding, window.kernel, strict=True):
            if pad > length // 2:
                raise OptionError(
                    "The padding is more than half of the kernel",
                    expected=f"padding <= {length // 2} for a kernel of {length}",
                    got=pad,
                    remedy="Use less padding or a larger kernel",
                )
        return window

    @property
    def reach(self) -> tuple[int, ...]:
        """How many elements a window spans along each axis: ``dilation * (kernel - 1) + 1``."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    def out_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many windows there are along each axis of an input of `size` (torch.nn.MaxPool2d, "Shape").

        Raises
        ------
        ShapeError
            The kernel is larger than the padded input, or its dilation steps over all of the input.
        """
        out = []
        for length, reach, stride, pad, step in zip(
            size, self.reach, self.stride, self.padding, self.dilation, strict=True
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
