"""Adaptive average pooling: as many windows as asked for, whatever the size of the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsebp import backend
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.patterns import adaptive_pool_pattern


@dataclass(frozen=True)
class AdaptiveSaved:
    """The input's shape and the transposed Jacobian of one channel."""

    shape: tuple[int, ...]
    channel: Any


class AdaptiveAvgPool(Layer):
    """Adaptive average pooling over the last `dims` axes of (B, C, …): products with one channel's Jacobian."""

    replayable = True

    dims: int

    def __init__(self, output_size: Any) -> None:
        super().__init__()
        sizes = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * self.dims
        if len(sizes) != self.dims:
            raise OptionError(
                f"output_size does not fit {self.dims} axes",
                expected=f"one size, or {self.dims}",
                got=repr(output_size),
                remedy="Pass the sizes as torch.nn takes them, None to keep an axis",
            )
        self.output_size = tuple(None if n is None else check_integer("output_size", n, 1) for n in sizes)

    def forward(self, x: Array) -> tuple[Array, AdaptiveSaved]:
        """Return the windows' averages (B, C, *output_size) for x (B, C, …).

        Raises
        ------
        DTypeError, DeviceError
            x is not a float32 or float64 array.
        ShapeError
            x has another number of axes.
        OptionError
            A spatial axis of x is empty.
        """
        from sparsebp.jacobians import avg_pool_jacobian_t

        xp = check_input(x, shape=(None,) * (self.dims + 2))
        channel = avg_pool_jacobian_t(self._pattern(1, x.shape), xp, x.dtype)
        return _apply(channel.T, x, self._out_shape(x.shape)), AdaptiveSaved(x.shape, channel)

    def input_grad(self, gy: Array, saved: AdaptiveSaved) -> Array:
        """Return the gradient (B, C, …) at x: the transposed Jacobian times gy."""
        check_gy(gy, self._out_shape(saved.shape), saved.channel.dtype, saved.channel.data)
        return _apply(saved.channel, gy, saved.shape)

    def jacobian_t(self, saved: AdaptiveSaved) -> Any:
        """Return the windows' weights on the layer's pattern, shared by the batch."""
        from sparsebp.jacobians import avg_pool_jacobian_t

        xp = backend.namespace(saved.channel.data)
        return avg_pool_jacobian_t(self._pattern(saved.shape[1], saved.shape), xp, saved.channel.dtype)

    def _pattern(self, channels: int, shape: tuple[int, ...]) -> Any:
        return adaptive_pool_pattern(channels, shape[2:], self._out_shape(shape)[2:])

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        kept = (n if want is None else want for n, want in zip(shape[2:], self.output_size, strict=True))
        return (*shape[:2], *kept)


class AdaptiveAvgPool1d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, L), as `torch.nn.AdaptiveAvgPool1d`.

    Parameters
    ----------
    output_size
        Number of windows; None keeps the length.

    Raises
    ------
    OptionError
        It is not positive.
    """

    dims = 1


class AdaptiveAvgPool2d(AdaptiveAvgPool):
    """Adaptive average pooling over (B, C, H, W), as `torch.nn.AdaptiveAvgPool2d`.

    Parameters
    ----------
    output_size
        An integer or a pair (height, width); None keeps an axis.

    Raises
    ------
    OptionError
        A size is not positive.
    """

    dims = 2


def _apply(jacobian: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Multiply every channel of every sample by `jacobian`; return the result in `shape`."""
    xp = backend.namespace(x)
    columns = xp.ascontiguousarray(x.reshape(shape[0] * shape[1], jacobian.shape[1]).T)
    return xp.ascontiguousarray((jacobian @ columns).T).reshape(shape)
