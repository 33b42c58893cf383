"""BatchNorm2d: every channel brought to mean 0 and variance 1, over the batch or by running statistics."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import memory
from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn import initial
from sparsebp.nn.layer import Layer, check_gy, check_input

Saved = tuple[Array, Array, Array, bool]


class BatchNorm2d(Layer):
    """Normalise the channels of x (B, C, H, W), as `torch.nn.BatchNorm2d`.

    Parameters
    ----------
    num_features
        C.
    eps
        Added to the variance.
    momentum
        Weight of the new batch in the running statistics; None for the average over all batches.
    affine
        Whether there are a weight and a bias.
    track_running_stats
        Whether running statistics are kept; without them the batch's are used in evaluation as well.
    dtype
        float32 or float64.

    Raises
    ------
    OptionError
        `num_features` is below 1, `eps` negative, `momentum` outside 0 … 1, or a flag no truth value.

    Notes
    -----
    Parameters: ``weight``, ``bias`` (C,). Buffers: ``running_mean``, ``running_var`` (C,), ``num_batches_tracked`` ().
    Source: Ioffe & Szegedy, "Batch Normalization", 2015, Algorithms 1 and 2.
    """

    replayable = True

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, *, dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_features, self.eps = check_integer("num_features", num_features, 1), check_number("eps", eps, 0)
        self.momentum = None if momentum is None else check_number("momentum", momentum, 0, 1)
        shape, dtype = (self.num_features,), backend.float_dtype(dtype)
        if check_flag("affine", affine):
            self.params = {"weight": initial.full(shape, 1, dtype), "bias": initial.full(shape, 0, dtype)}
        if check_flag("track_running_stats", track_running_stats):
            self.buffers = {
                "running_mean": initial.full(shape, 0, dtype), "running_var": initial.full(shape, 1, dtype),
                "num_batches_tracked": np.zeros((), np.int64),
            }  # fmt: skip

    def forward(self, x: Array) -> tuple[Array, Saved]:
        """Return the normalised x; `saved` is x, the mean, 1/sqrt(var + eps), and whether the batch gave them.

        Raises
        ------
        ShapeError
            The batch's statistics are asked of one value a channel.
        """
        like = self.params.get("weight", self.buffers.get("running_mean"))
        dtype = None if like is None else like.dtype
        xp = check_input(x, dtype=dtype, shape=(None, self.num_features, None, None), like=like)
        batch = self.training or not self.buffers
        if batch:
            count = x.shape[0] * x.shape[2] * x.shape[3]
            if count < (2 if self.training else 1):
                raise ShapeError(
                    "The batch has too few values for statistics of its own", expected="2 or more a channel",
                    got=x.shape, remedy="Pass a larger batch, or call eval()",
                )  # fmt: skip
            mean, var = xp.empty(self.num_features, x.dtype), xp.empty(self.num_features, x.dtype)
            kernels.get(xp).channel_moments(_flat(xp, x), mean, var)
            if self.training and self.buffers:
                self._track(mean, var * (count / (count - 1)))
        else:
            mean, var = self.buffers["running_mean"].copy(), self.buffers["running_var"]  # a later forward changes them
        scale = 1 / xp.sqrt(var + self.eps)
        offset = self.params["bias"] if self.params else xp.zeros_like(mean)
        y = memory.empty(xp, x.shape, x.dtype)
        kernels.get(xp).channel_scale(_flat(xp, x), mean, self._factor(scale), offset, _flat(xp, y))
        return y, (x, mean, scale, batch)

    def input_grad(self, gy: Array, saved: Saved) -> Array:
        """Return the input gradient, through the statistics where they are the batch's."""
        x, mean, scale, batch = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        gx = memory.empty(xp, x.shape, x.dtype)
        k, factor = kernels.get(xp), self._factor(scale)
        if batch:
            sums, products = self._sums(xp, gy, saved)
            count = x.size // self.num_features
            offset, slope = sums / count, products * scale * scale / count
            k.channel_centre(_flat(xp, gy), _flat(xp, x), mean, offset, slope, factor, _flat(xp, gx))
        else:
            zeros = xp.zeros_like(mean)
            k.channel_scale(_flat(xp, gy), zeros, factor, zeros, _flat(xp, gx))
        return gx

    def weight_grad(self, gy: Array, saved: Saved) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel."""
        x, _, scale, _ = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        if not self.params:
            return {}
        sums, products = self._sums(xp, gy, saved)
        return {"weight": products * scale, "bias": sums}

    def capture_obstacle(self) -> str | None:
        """The average over all batches (``momentum=None``) divides by a count that the host reads."""
        reads = self.training and self.buffers and self.momentum is None
        return "reads the number of batches on the host (momentum=None)" if reads else None

    def couples_samples(self, saved: Saved) -> bool:
        """Whether the statistics were the batch's."""
        return saved[3]

    def jacobian_t(self, saved: Saved) -> Any:
        """Return the diagonal of ``weight / sqrt(running_var + eps)``, shared by the batch.

        Raises
        ------
        OptionError
            The statistics were the batch's, so that every output depends on every sample.
        """
        x, _, scale, batch = saved
        if batch:
            raise OptionError(
                "Batch statistics couple the samples, so no sample has a Jacobian of its own",
                expected="a forward with running statistics", got="a forward that normalised by the batch",
                remedy="Call eval() before the forward (with track_running_stats=True), or use input_grad",
            )  # fmt: skip
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import pointwise_pattern

        values = backend.namespace(x).repeat(self._factor(scale), x.shape[2] * x.shape[3])
        return TransposedJacobian(pointwise_pattern(len(values)), values)

    def _factor(self, scale: Array) -> Array:
        """Return what the forward multiplies with."""
        return scale * self.params["weight"] if self.params else scale

    def _sums(self, xp: ModuleType, gy: Array, saved: Saved) -> tuple[Array, Array]:
        """Return Σ gy and Σ gy (x - mean) of every channel."""
        x, mean, _, _ = saved
        sums, products = xp.empty_like(mean), xp.empty_like(mean)
        kernels.get(xp).channel_products(_flat(xp, gy), _flat(xp, x), mean, sums, products)
        return sums, products

    def _track(self, mean: Array, var: Array) -> None:
        count = self.buffers["num_batches_tracked"]
        count += 1
        factor = 1 / float(count) if self.momentum is None else self.momentum  # synchronize! (for momentum=None)
        for name, new in (("running_mean", mean), ("running_var", var)):
            running = self.buffers[name]
            running *= 1 - factor
            running += factor * new


def _flat(xp: ModuleType, x: Array) -> Array:
    """Return x (B, C, H, W) as a contiguous (B, C, H * W)."""
    return xp.ascontiguousarray(x).reshape(*x.shape[:2], x.shape[2] * x.shape[3])
