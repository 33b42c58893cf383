"""What goes element by element, or channel by channel: batch normalisation, cutting off, the loss."""

from __future__ import annotations

from sparsebp.backend import given
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import INT64, Family, exact, rank, real_dtype, written


class PointwiseKernels(Family):
    """Kernels on channels, arrays (B, C, n) with numbers (C,); on arrays cut off at two values; and the loss."""

    def channel_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, mean: Array, var: Array, scale: Array,
        out: Array, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Normalise every channel by its mean and variance (divided by the number) over batch and positions.

        ``scale = 1 / sqrt(var + eps)`` and ``out = (x - mean) * scale * weight + bias``, without what is None. With
        `limits` (low, high), `out` is what `clamp` makes of that.

        x, out (B, C, n); weight, bias (C,); mean, var, scale (C,), written.
        """
        channels = {**given(weight=weight, bias=bias), "mean": mean, "var": var, "scale": scale}
        _check_channels(arrays={"x": x, "out": out}, channels=channels, out=("mean", "var", "scale", "out"))
        _check_limits(limits)
        self._run.channel_normalise(x, weight, bias, eps, mean, var, scale, out, limits)

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """``out = (x - mean) * factor + offset``, with the numbers of the channel.

        x, out (B, C, n); mean, factor, offset (C,).
        """
        channels = {"mean": mean, "factor": factor, "offset": offset}
        _check_channels(arrays={"x": x, "out": out}, channels=channels)
        self._run.channel_scale(x, mean, factor, offset, out)

    def channel_products(
        self, gy: Array, x: Array, mean: Array, sums: Array, products: Array, y: Array | None = None,
        limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """``sums = Σ gy`` and ``products = Σ gy * (x - mean)`` of every channel, over batch and positions.

        With `y` and `limits` (low, high), gy is what `clamp_grad` makes of it.

        gy, x, y (B, C, n); mean (C,); sums, products (C,), written.
        """
        channels = {"mean": mean, "sums": sums, "products": products}
        _check_channels(arrays={"gy": gy, "x": x, **given(y=y)}, channels=channels, out=("sums", "products"))
        _check_limits(limits, y)
        self._run.channel_products(gy, x, mean, sums, products, y, limits)

    def channel_back(
        self, gy: Array, x: Array, mean: Array, scale: Array, weight: Array | None, sums: Array, products: Array,
        out: Array, known: bool = False, y: Array | None = None, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """The transpose of `channel_normalise` at x, for its mean and scale, and the sums of `channel_products`.

        ``out = (gy - sums / N - (x - mean) * products * scale**2 / N) * scale * weight``, N elements a channel. With
        `y` and `limits` (low, high), gy is what `clamp_grad` makes of it.

        gy, x, y, out (B, C, n); mean, scale, weight (C,); sums, products (C,), written, or read if they are `known`.
        """
        channels = {"mean": mean, "scale": scale, **given(weight=weight), "sums": sums, "products": products}
        arrays, out_names = {"gy": gy, "x": x, **given(y=y), "out": out}, ("sums", "products", "out")
        _check_channels(arrays=arrays, channels=channels, out=out_names)
        _check_limits(limits, y)
        self._run.channel_back(gy, x, mean, scale, weight, sums, products, out, known, y, limits)

    def channel_track(
        self, mean: Array, var: Array, momentum: float, correction: float, running_mean: Array, running_var: Array
    ) -> None:
        """Move running statistics by `momentum` towards ``mean`` and ``var * correction``, in place. All (C,)."""
        _check_numbers({"mean": mean, "var": var}, {"running_mean": running_mean, "running_var": running_var})
        self._run.channel_track(mean, var, momentum, correction, running_mean, running_var)

    def channel_factors(self, var: Array, eps: float, weight: Array | None, scale: Array, factor: Array) -> None:
        """``scale = 1 / sqrt(var + eps)`` and ``factor = scale * weight``, `scale` without a weight. All (C,)."""
        _check_numbers({"var": var, **given(weight=weight)}, {"scale": scale, "factor": factor})
        self._run.channel_factors(var, eps, weight, scale, factor)

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """``out = min(max(x, low), high)``; a NaN stays a NaN. x, out (n,); low < high, which may be infinite."""
        _check_clamp(x, low, high, out)
        self._run.clamp(x, low, high, out)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """``out = gy where low < y <= high or y is NaN, else 0``: `high` is the last y of slope 1. gy, y, out (n,)."""
        _check_clamp(gy, low, high, out, y=y)
        self._run.clamp_grad(gy, y, low, high, out)

    def gelu(self, x: Array, approximate: bool, out: Array) -> None:
        """``out = x Φ(x)``; if `approximate`, with ``(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`` for Φ. x, out (n,)."""
        _check_elements(out, x=x)
        self._run.gelu(x, approximate, out)

    def gelu_grad(self, gy: Array, x: Array, approximate: bool, out: Array) -> None:
        """``out = gy (Φ(x) + x Φ'(x))``, Φ as in `gelu`. gy, x, out (n,)."""
        _check_elements(out, gy=gy, x=x)
        self._run.gelu_grad(gy, x, approximate, out)

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Per-row softmax cross-entropy and its gradient in one pass.

        logits (N, C); target (N,) int64 in [0, C); losses (N,), written; grad (N, C), written: softmax - one-hot.
        A row that is not finite gives a loss that is not finite.
        """
        dtype = real_dtype("logits", logits)
        n, classes = rank("logits", logits, 2)
        exact("logits", logits, dtype, (n, classes))
        exact("target", target, INT64, (n,))
        written("losses", losses, dtype, (n,))
        written("grad", grad, dtype, (n, classes))
        self._run.softmax_cross_entropy(logits, target, losses, grad)


def _check_channels(*, arrays: dict[str, Array], channels: dict[str, Array], out: tuple[str, ...] = ("out",)) -> None:
    """Check arrays (B, C, n), all of one shape, and arrays (C,), by name; the first of `arrays` tells the dtype.

    Those named by `out` are written.
    """
    (first, array), *_ = arrays.items()
    dtype, shape = real_dtype(first, array), rank(first, array, 3)
    for name, other in arrays.items():
        (written if name in out else exact)(name, other, dtype, shape)
    for name, other in channels.items():
        (written if name in out else exact)(name, other, dtype, (shape[1],))


def _check_numbers(read: dict[str, Array], written_to: dict[str, Array]) -> None:
    """Check arrays (C,), by name; the first one tells the dtype and C."""
    (first, array), *_ = read.items()
    dtype, shape = real_dtype(first, array), rank(first, array, 1)
    for name, other in read.items():
        exact(name, other, dtype, shape)
    for name, other in written_to.items():
        written(name, other, dtype, shape)


def _check_clamp(x: Array, low: float, high: float, out: Array, **others: Array) -> None:
    """Check the arguments of `clamp` and, with `others` of the same length, of `clamp_grad`."""
    _check_elements(out, **{"gy" if others else "x": x}, **others)
    _check_order(low, high)


def _check_limits(limits: tuple[float, float] | None, *y: Array | None) -> None:
    """Check the limits of kernels that clamp as well; a mask `y` goes with limits, and with none of them is None."""
    if any((array is None) != (limits is None) for array in y):
        raise OptionError(
            "What is between the limits is not said", expected="both y and limits, or neither",
            got="limits alone" if limits is not None else "y alone", remedy="Pass the other one as well",
        )  # fmt: skip
    if limits is not None:
        _check_order(*limits)


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise OptionError(
            "The limits are in the wrong order", expected="low < high", got=f"low={low}, high={high}",
            remedy="Swap them",
        )  # fmt: skip


def _check_elements(out: Array, **read: Array) -> None:
    """Check arrays (n,) that are read, by name, and one that is written; the first one tells the dtype and n."""
    (first, array), *_ = read.items()
    dtype, shape = real_dtype(first, array), rank(first, array, 1)
    for name, other in read.items():
        exact(name, other, dtype, shape)
    written("out", out, dtype, shape)
