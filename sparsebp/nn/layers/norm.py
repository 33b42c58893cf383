"""Normalisation to mean 0 and variance 1: of every channel over the batch, of every vector of the trailing axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

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
        grads = {"weight": products * scale, "bias": sums}
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


class LayerNorm(Layer):
    """``(x - mean) / sqrt(var + eps) · weight + bias`` over the trailing axes, as `torch.nn.LayerNorm`.

    Parameters
    ----------
    normalized_shape
        Lengths of the trailing axes that are normalised together; an integer stands for one axis.
    eps
        Added to the (biased) variance.
    elementwise_affine
        Whether there is a weight.
    bias
        Whether there is a bias as well; without a weight there is none.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64, of the parameters.

    Raises
    ------
    OptionError
        `normalized_shape` is empty or holds a length below 1, `eps` is negative, or a flag is no truth value.

    Notes
    -----
    Parameters: ``weight`` (ones) and ``bias`` (zeros), of shape `normalized_shape`. Source: Ba et al., "Layer
    Normalization", 2016, Eq. 4.
    """

    replayable = True

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device: Any = None, dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        given = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        shape = tuple(check_integer("a length of normalized_shape", n, 1) for n in given)
        if not shape:
            raise OptionError(
                "Invalid normalized_shape", expected="at least one length, each 1 or more", got=shape,
                remedy="Pass the lengths of the trailing axes",
            )  # fmt: skip
        self.normalized_shape, self.eps = shape, check_number("eps", eps, 0)
        dtype, bias = parameter_dtype(dtype, device), check_flag("bias", bias)
        if check_flag("elementwise_affine", elementwise_affine):
            self.params["weight"] = full(shape, 1, dtype)
            if bias:
                self.params["bias"] = full(shape, 0, dtype)

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is normalised by itself."""
        return len(self.normalized_shape) == 1

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the normalised x; `saved` is it before the affine map, and 1/sqrt(var + eps).

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x does not end in `normalized_shape`, or its dtype is not the weight's.
        """
        xp, weight = self._check(x), self.params.get("weight")
        axes = self._axes()
        centred = x - x.mean(axis=axes, keepdims=True)
        scale = 1 / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + self.eps)
        centred *= scale
        y = centred if weight is None else centred * weight
        return y + self.params["bias"] if "bias" in self.params else y, (centred, scale)

    def input_grad(self, gy: Array, saved: tuple[Array, Array]) -> Array:
        """Return ``(g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps)`` with g = gy · weight."""
        unit, scale = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        axes = self._axes()
        g = gy * self.params["weight"] if "weight" in self.params else gy
        return scale * (g - g.mean(axis=axes, keepdims=True) - unit * (g * unit).mean(axis=axes, keepdims=True))

    def weight_grad(self, gy: Array, saved: tuple[Array, Array]) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}``, summed over all leading axes."""
        unit, _ = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        leading = tuple(range(gy.ndim - len(self.normalized_shape)))
        sums = {"weight": gy * unit, "bias": gy}
        return {name: sums[name].sum(axis=leading) for name in self.params}

    def jacobian_t(self, saved: tuple[Array, Array]) -> Any:
        """Return a dense block for each normalised vector of a sample, per sample; the batch is the first axis."""
        from sparsebp.jacobians import block_jacobian_t

        unit, scale = saved
        if unit.ndim == len(self.normalized_shape):
            raise ShapeError(
                "x has no batch axis", expected="(B, …)", got=unit.shape, remedy="Add an axis in front"
            )  # fmt: skip
        n = math.prod(self.normalized_shape)
        positions = math.prod(unit.shape[1 : unit.ndim - len(self.normalized_shape)])
        unit, scale = unit.reshape(-1, positions, n), scale.reshape(-1, positions, 1, 1)
        eye = backend.namespace(unit).eye(n, dtype=unit.dtype)
        blocks = scale * self._block(unit, eye)
        return block_jacobian_t(blocks * self.params["weight"].reshape(-1) if "weight" in self.params else blocks)

    def lone(self, saved: tuple[Array, Array]) -> bool:
        """Whether x had no axis beside the normalised ones."""
        return saved[0].ndim == len(self.normalized_shape)

    def _block(self, unit: Array, eye: Array) -> Array:
        """Return the blocks but for the scale."""
        return eye - (1 + unit[..., :, None] * unit[..., None, :]) / eye.shape[0]

    def _check(self, x: Array) -> ModuleType:
        """Return the namespace of x; raise if it does not fit."""
        check_input(x)
        leading = x.ndim - len(self.normalized_shape)
        if leading < 0:
            raise ShapeError(
                "x has too few axes", expected=f"(…, {', '.join(map(str, self.normalized_shape))})", got=x.shape,
                remedy="Pass an array that ends in normalized_shape",
            )  # fmt: skip
        weight = self.params.get("weight")
        shape = (*(None for _ in range(leading)), *self.normalized_shape)
        return check_input(x, dtype=None if weight is None else weight.dtype, shape=shape, like=weight)

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.normalized_shape), 0))
