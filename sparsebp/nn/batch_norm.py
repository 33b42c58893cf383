"""BatchNorm2d: every channel brought to mean 0 and variance 1, over the batch or by running statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.errors import OptionError, ShapeError
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.types import Array

_AXES = (0, 2, 3)


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
        `num_features` is below 1, or `momentum` outside 0 … 1.

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
        if num_features < 1:
            raise OptionError("Invalid num_features", expected="1 or more", got=num_features, remedy="Pass C of x")
        if momentum is not None and not 0 <= momentum <= 1:
            raise OptionError(
                "Invalid momentum", expected="a number from 0 to 1, or None", got=momentum, remedy="Pass 0.1, say"
            )
        self.num_features, self.eps, self.momentum = num_features, float(eps), momentum
        dtype = backend.float_dtype(dtype)
        if affine:
            self.params = {"weight": np.ones(num_features, dtype), "bias": np.zeros(num_features, dtype)}
        if track_running_stats:
            self.buffers = {
                "running_mean": np.zeros(num_features, dtype), "running_var": np.ones(num_features, dtype),
                "num_batches_tracked": np.zeros((), np.int64),
            }  # fmt: skip

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array, bool]]:
        """Return the normalised x; `saved` is it before the affine map, 1/sqrt(var + eps), and if the batch gave them.

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
            mean = x.mean(axis=_AXES)
            var = x.var(axis=_AXES)
            if self.training and self.buffers:
                self._track(mean, var * (count / (count - 1)))
        else:
            mean, var = self.buffers["running_mean"], self.buffers["running_var"]
        scale = 1 / xp.sqrt(var + self.eps)
        unit = (x - _wide(mean)) * _wide(scale)
        y = unit * _wide(self.params["weight"]) + _wide(self.params["bias"]) if self.params else unit
        return y, (unit, scale, batch)

    def input_grad(self, gy: Array, saved: tuple[Array, Array, bool]) -> Array:
        """Return the input gradient, through the statistics where they are the batch's."""
        unit, scale, batch = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        g = gy * _wide(self.params["weight"]) if self.params else gy
        if batch:
            g = g - g.mean(axis=_AXES, keepdims=True) - unit * (g * unit).mean(axis=_AXES, keepdims=True)
        return g * _wide(scale)

    def weight_grad(self, gy: Array, saved: tuple[Array, Array, bool]) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel."""
        unit = saved[0]
        check_gy(gy, unit.shape, unit.dtype, unit)
        return {"weight": (gy * unit).sum(axis=_AXES), "bias": gy.sum(axis=_AXES)} if self.params else {}

    def capture_obstacle(self) -> str | None:
        """The average over all batches (``momentum=None``) divides by a count that the host reads."""
        reads = self.training and self.buffers and self.momentum is None
        return "reads the number of batches on the host (momentum=None)" if reads else None

    def couples_samples(self, saved: tuple[Array, Array, bool]) -> bool:
        """Whether the statistics were the batch's."""
        return saved[2]

    def jacobian_t(self, saved: tuple[Array, Array, bool]) -> Any:
        """Return the diagonal of ``weight / sqrt(running_var + eps)``, shared by the batch.

        Raises
        ------
        OptionError
            The statistics were the batch's, so that every output depends on every sample.
        """
        unit, scale, batch = saved
        if batch:
            raise OptionError(
                "Batch statistics couple the samples, so no sample has a Jacobian of its own",
                expected="a forward with running statistics", got="a forward that normalised by the batch",
                remedy="Call eval() before the forward (with track_running_stats=True), or use input_grad",
            )  # fmt: skip
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import pointwise_pattern

        slope = scale * self.params["weight"] if self.params else scale
        values = backend.namespace(unit).repeat(slope, unit.shape[2] * unit.shape[3])
        return TransposedJacobian(pointwise_pattern(len(values)), values)

    def _track(self, mean: Array, var: Array) -> None:
        count = self.buffers["num_batches_tracked"]
        count += 1
        factor = 1 / float(count) if self.momentum is None else self.momentum  # synchronize! (for momentum=None)
        for name, new in (("running_mean", mean), ("running_var", var)):
            running = self.buffers[name]
            running *= 1 - factor
            running += factor * new


def _wide(channels: Array) -> Array:
    return channels.reshape(1, -1, 1, 1)
