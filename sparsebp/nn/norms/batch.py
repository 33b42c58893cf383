"""Normalisation of channels over the batch: of images, and of vectors and sequences."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import memory
from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.arrays import full, parameter_dtype
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.layer import Layer, check_gy, check_input

BatchNormSaved = tuple[Array, Array, Array, bool]
Sums = list[tuple[Array, Array, Any]]
"""Σ gy and Σ gy (x - mean) of every channel, and an event of the stream that computed them; none yet, or one."""
Cut = tuple[Array, tuple[float, float]]
"""What a layer behind has cut off, and above which value and up to which one its slope is 1."""


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
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    bias
        Whether there is a bias beside the weight.

    Raises
    ------
    OptionError
        `num_features` is below 1, `eps` not positive, `momentum` outside 0 … 1, or a flag no truth value.

    Notes
    -----
    Parameters: ``weight``, ``bias`` (C,). Buffers: ``running_mean``, ``running_var`` (C,), ``num_batches_tracked`` ().
    Source: Ioffe & Szegedy, "Batch Normalization", 2015, Algorithms 1 and 2.
    """

    replayable = True

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, device: Any = None, dtype: Any = np.float32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_features, self.eps = check_integer("num_features", num_features, 1), check_number("eps", eps, 0)
        if self.eps == 0:
            raise OptionError("eps is zero", expected="a positive number", got=eps, remedy="Leave it out")
        self.momentum = None if momentum is None else check_number("momentum", momentum, 0, 1)
        shape, dtype, bias = (self.num_features,), parameter_dtype(dtype, device), check_flag("bias", bias)
        if check_flag("affine", affine):
            self.params["weight"] = full(shape, 1, dtype)
            if bias:
                self.params["bias"] = full(shape, 0, dtype)
        if check_flag("track_running_stats", track_running_stats):
            self.buffers = {
                "running_mean": full(shape, 0, dtype), "running_var": full(shape, 1, dtype),
                "num_batches_tracked": np.zeros((), np.int64),
            }  # fmt: skip

    def forward(self, x: Array) -> tuple[Array, BatchNormSaved]:
        """Return the normalised x; `saved` is x, the mean, 1/sqrt(var + eps), and whether the batch gave them.

        Raises
        ------
        ShapeError
            The batch's statistics are asked of one value a channel.
        """
        return self.forward_between(x, None)

    def forward_between(self, x: Array, limits: tuple[float, float] | None) -> tuple[Array, BatchNormSaved]:
        """Return the normalised x between `limits`, in the same pass over memory, and what `forward` saves.

        Raises
        ------
        ShapeError
            As `forward`.
        """
        like = self.params.get("weight", self.buffers.get("running_mean"))
        dtype = None if like is None else like.dtype
        xp = check_input(x, dtype=dtype, shape=(None, self.num_features, None, None), like=like)
        batch = self.training or not self.buffers
        if batch and x.size == 0:  # as in PyTorch: it is counted, and has no statistics
            if self.training and self.buffers:
                self.buffers["num_batches_tracked"] += 1
            batch, mean, var = False, xp.zeros(self.num_features, x.dtype), xp.ones(self.num_features, x.dtype)
        elif batch:
            count = x.shape[0] * x.shape[2] * x.shape[3]
            if count < (2 if self.training else 1):
                raise ShapeError(
                    "The batch has too few values for statistics of its own", expected="2 or more a channel",
                    got=x.shape, remedy="Pass a larger batch, or call eval()",
                )  # fmt: skip
            mean, var, scale = (xp.empty(self.num_features, x.dtype) for _ in range(3))
            y = memory.empty(xp, x.shape, x.dtype)
            weight, bias = self.params.get("weight"), self.params.get("bias")
            numbers = self.eps, mean, var, scale
            kernels.get(xp).channel_normalise(_flat(xp, x), weight, bias, *numbers, _flat(xp, y), limits)
            if self.training and self.buffers:
                self._track(xp, mean, var, count / (count - 1))
            return y, (x, mean, scale, True)
        else:
            mean, var = self.buffers["running_mean"].copy(), self.buffers["running_var"]  # a later forward changes them
        scale, factor = xp.empty_like(mean), xp.empty_like(mean)
        kernels.get(xp).channel_factors(var, self.eps, self.params.get("weight"), scale, factor)
        offset = self.params["bias"] if "bias" in self.params else xp.zeros_like(mean)
        y = memory.empty(xp, x.shape, x.dtype)
        kernels.get(xp).channel_scale(_flat(xp, x), mean, factor, offset, _flat(xp, y))
        if limits is not None:
            kernels.get(xp).clamp(y.reshape(-1), *limits, y.reshape(-1))
        return y, (x, mean, scale, batch)

    def gradients(self, gy: Array, saved: BatchNormSaved) -> Gradients:
        """Return the gradients; the sums that both need are taken by the one that comes first."""
        kept: Sums = []
        return Gradients(self, gy, saved, partial(self.input_grad, gy, saved, kept),
                         partial(self.weight_grad, gy, saved, kept))  # fmt: skip

    def gradients_between(self, gy: Array, saved: BatchNormSaved, cut: Cut) -> Gradients:
        """Return the gradients for `gy` at the output of a layer behind that cuts off: `cut` is its output, and where.

        The statistics were the batch's. Numbers are those of `gradients` for that layer's input gradient, which is not
        written to memory.
        """
        kept: Sums = []
        return Gradients(self, gy, saved, partial(self._input_grad, gy, saved, kept, cut),
                         partial(self._weight_grad, gy, saved, kept, cut))  # fmt: skip

    def input_grad(self, gy: Array, saved: BatchNormSaved, kept: Sums | None = None) -> Array:
        """Return the input gradient, through the statistics where they are the batch's.

        The sums that this takes come from `kept` if they are there, and are added to it if not.
        """
        return self._input_grad(gy, saved, kept, None)

    def _input_grad(self, gy: Array, saved: BatchNormSaved, kept: Sums | None, cut: Cut | None) -> Array:
        x, mean, scale, batch = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        gx, k = memory.empty(xp, x.shape, x.dtype), kernels.get(xp)
        if batch:
            known = bool(kept)
            sums, products = self._sums(xp, mean, kept)
            arrays = _flat(xp, gy), _flat(xp, x), mean, scale, self.params.get("weight"), sums, products, _flat(xp, gx)
            k.channel_back(*arrays, known, *_mask(xp, cut))
            if kept is not None and not known:
                kept.append((sums, products, backend.record(xp)))
            return gx
        zeros = xp.zeros_like(mean)
        k.channel_scale(_flat(xp, gy), zeros, self._factor(scale), zeros, _flat(xp, gx))
        return gx

    def weight_grad(self, gy: Array, saved: BatchNormSaved, kept: Sums | None = None) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel.

        The sums come from `kept` if they are there, and are added to it if not.
        """
        return self._weight_grad(gy, saved, kept, None)

    def _weight_grad(
        self, gy: Array, saved: BatchNormSaved, kept: Sums | None, cut: Cut | None
    ) -> dict[str, Array]:  # fmt: skip
        x, mean, scale, _ = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        if not self.params:
            return {}
        known = bool(kept)
        sums, products = self._sums(xp, mean, kept)
        if not known:
            kernels.get(xp).channel_products(_flat(xp, gy), _flat(xp, x), mean, sums, products, *_mask(xp, cut))
            if kept is not None:
                kept.append((sums, products, backend.record(xp)))
        own = sums if kept is None else sums.copy()  # I may still read them when a caller has written to the gradients
        grads = {"weight": products * scale, "bias": own}
        return {name: grads[name] for name in self.params}

    def _sums(self, xp: ModuleType, mean: Array, kept: Sums | None) -> tuple[Array, Array]:
        """Return the sums that are kept, or room for them."""
        if not kept:
            return xp.empty_like(mean), xp.empty_like(mean)
        sums, products, mark = kept[0]
        backend.wait(xp, mark)
        return sums, products

    def capture_obstacle(self) -> str | None:
        """The average over all batches (``momentum=None``) divides by a count that the host reads."""
        reads = self.training and self.buffers and self.momentum is None
        return "reads the number of batches on the host (momentum=None)" if reads else None

    def couples_samples(self, saved: BatchNormSaved) -> bool:
        """Whether the statistics were the batch's."""
        return saved[3]

    def jacobian_t(self, saved: BatchNormSaved) -> Any:
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

    def _track(self, xp: ModuleType, mean: Array, var: Array, correction: float) -> None:
        count = self.buffers["num_batches_tracked"]
        count += 1
        factor = 1 / float(count) if self.momentum is None else self.momentum  # synchronize! (for momentum=None)
        running = self.buffers["running_mean"], self.buffers["running_var"]
        kernels.get(xp).channel_track(mean, var, factor, correction, *running)


def _flat(xp: ModuleType, x: Array) -> Array:
    """Return x (B, C, H, W) as a contiguous (B, C, H * W)."""
    return xp.ascontiguousarray(x).reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _mask(xp: ModuleType, cut: Cut | None) -> tuple[Array | None, tuple[float, float] | None]:
    """Return what kernels take to cut off a gradient."""
    return (None, None) if cut is None else (_flat(xp, cut[0]), cut[1])


class BatchNorm1dSaved(NamedTuple):
    """What the forward of `BatchNorm1d` leaves: that of images of width 1, and the shape of x."""

    image: BatchNormSaved
    shape: tuple[int, ...]


class BatchNorm1d(BatchNorm2d):
    """Normalise the channels of x (B, C) or (B, C, L), as `torch.nn.BatchNorm1d`.

    Options, parameters, buffers and errors are those of `BatchNorm2d`. In evaluation its Jacobian is diagonal; the
    batch's statistics couple the samples.
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the normalised x; `saved` is that of `BatchNorm2d` for images of width 1, and the shape of x.

        Raises
        ------
        ShapeError
            x has another number of axes or channels, or the batch's statistics are asked of one value a channel.
        """
        check_input(x)
        if x.ndim not in (2, 3):
            raise ShapeError("x has the wrong number of axes", expected=f"(B, {self.num_features}[, L])", got=x.shape,
                             remedy="Use BatchNorm2d for images")  # fmt: skip
        y, saved = super().forward(_image(x))
        return y.reshape(x.shape), BatchNorm1dSaved(saved, x.shape)

    def input_grad(self, gy: Array, saved: Any, kept: Sums | None = None) -> Array:
        """Return the input gradient, through the statistics where they are the batch's; add their sums to `kept`."""
        return super().input_grad(self._image_of(gy, saved), saved.image, kept).reshape(saved.shape)

    def weight_grad(self, gy: Array, saved: Any, kept: Sums | None = None) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel, from the sums in `kept` if they are there."""
        return super().weight_grad(self._image_of(gy, saved), saved.image, kept)

    gradients = BatchNorm2d.gradients

    def couples_samples(self, saved: Any) -> bool:
        """Whether the statistics were the batch's."""
        return super().couples_samples(saved.image)

    def jacobian_t(self, saved: Any) -> Any:
        """Return the diagonal of ``weight / sqrt(running_var + eps)``, shared by the batch.

        Raises
        ------
        OptionError
            The statistics were the batch's, so that every output depends on every sample.
        """
        return super().jacobian_t(saved.image)

    def _image_of(self, gy: Array, saved: BatchNorm1dSaved) -> Array:
        x = saved.image[0]
        check_gy(gy, saved.shape, x.dtype, x)
        return _image(gy)


def _image(x: Array) -> Array:
    return x.reshape(*x.shape, *[1] * (4 - x.ndim))
