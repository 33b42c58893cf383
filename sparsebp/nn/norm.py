"""Normalisation: by batch, group, layer and mean square; with a following ReLU in one pass."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs, host_pool
from sparsebp.core.check import Array, check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.layer import Fixed, Layer, check_gy, check_input
from sparsebp.nn.parameters import full, parameter_dtype

BatchNormSaved = tuple[Array, Array, Array, bool]
NormSaved = tuple[Array, Array, Array]
Sums = list[tuple[Array, Array, Any]]
"""Σ gy and Σ gy (x - mean) of every channel, and an event of the stream that computed them; none yet, or one."""
Cut = tuple[Array, tuple[float, float]]
"""The output of a clamping layer behind, and the values between which its slope is 1."""


class BatchNorm(Layer):
    """The base of `BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d`: normalise the channels of x (B, C, …).

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
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    bias
        Whether there is a bias in addition to the weight.

    Notes
    -----
    Parameters: ``weight``, ``bias`` (C,). Buffers: ``running_mean``, ``running_var`` (C,), ``num_batches_tracked`` ().
    The Jacobian is diagonal in evaluation; the batch's statistics couple the samples.
    Source: Ioffe & Szegedy, "Batch Normalization", 2015, Algorithms 1 and 2.
    """

    replayable = True
    optional = "weight", "bias"
    finite_buffers = frozenset(("running_mean", "running_var"))
    affine, track_running_stats = Fixed(), Fixed()

    dims: ClassVar[int]
    """Number of axes after the channels."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, device: Any = None, dtype: Any = np.float32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_features, self.eps = check_integer("num_features", num_features, 1), check_number("eps", eps, 0)
        if self.eps == 0:
            raise OptionError("eps is zero", expected="a positive number", got=eps)
        self.momentum = None if momentum is None else check_number("momentum", momentum, 0, 1)
        shape, dtype, bias = (self.num_features,), parameter_dtype(dtype, device), check_flag("bias", bias)
        self.affine = check_flag("affine", affine)
        self.track_running_stats = check_flag("track_running_stats", track_running_stats)
        if affine:
            self.params["weight"] = full(shape, 1, dtype)
            if bias:
                self.params["bias"] = full(shape, 0, dtype)
        if track_running_stats:
            self.buffers = {
                "running_mean": full(shape, 0, dtype), "running_var": full(shape, 1, dtype),
                "num_batches_tracked": np.zeros((), np.int64),
            }  # fmt: skip

    def forward(self, x: Array) -> tuple[Array, BatchNormSaved]:
        """Return the normalised x; `saved` is x, the mean, 1/sqrt(var + eps), and whether x gave them.

        Raises
        ------
        ShapeError
            Statistics are asked of one value a channel.
        """
        return self.forward_between(x, None)

    def forward_between(self, x: Array, limits: tuple[float, float] | None) -> tuple[Array, BatchNormSaved]:
        """Return the normalised x between `limits`, in the same pass over memory, and the saved value of `forward`."""
        xp, own = self._check(x), self.training or not self.buffers
        k, y = kernels.get(xp).unchecked, host_pool.empty(xp, x.shape, x.dtype)
        weight, bias = self.params.get("weight"), self.params.get("bias")
        if own and x.size > 0:
            rows, out = self._rows(xp, x, own), self._rows(xp, y, own)
            samples, channels, positions = rows.shape
            count = samples * positions
            if self.training and count < 2:
                raise ShapeError("The batch has too few values for its statistics",
                                 expected="2 or more a channel", got=x.shape,
                                 remedy="Pass a larger batch (fit(..., drop_last=True) leaves out a smaller last one),"
                                 " or call eval()")  # fmt: skip
            mean, var, scale = (xp.empty(channels, x.dtype) for _ in range(3))
            affine = self._tiled(xp, weight, channels), self._tiled(xp, bias, channels)
            k.channel_normalise(rows, *affine, self.eps, mean, var, scale, out, limits)
            if self.training and self.buffers:
                self._track(xp, mean, var, count / (count - 1))
            return y, (x, mean, scale, own)
        if own:  # as in PyTorch: an empty batch is counted, and has no statistics
            own, mean, var = False, xp.zeros(self.num_features, x.dtype), xp.ones(self.num_features, x.dtype)
            self._count()
        else:
            mean, var = self.buffers["running_mean"].copy(), self.buffers["running_var"]  # a later forward changes them
        scale, factor = xp.empty_like(mean), xp.empty_like(mean)
        k.channel_factors(var, self.eps, weight, scale, factor)
        k.channel_scale(self._rows(xp, x, own), mean, factor, bias, self._rows(xp, y, own), limits)
        return y, (x, mean, scale, own)

    def gradients(self, gy: Array, saved: BatchNormSaved) -> Gradients:
        """Return the gradients; the sums that both need are taken by the one that comes first."""
        return self.gradients_between(gy, saved, None)

    def gradients_between(self, gy: Array, saved: BatchNormSaved, cut: Cut | None) -> Gradients:
        """Return the gradients for `gy` at the output of a layer behind that cuts off: `cut` is its output, and where.

        The statistics were x's. Results equal those of `gradients` for that layer's input gradient, which is not
        written to memory. On a host, W gives the input gradient in the same pass, for I.
        """
        kept: Sums = []
        shared = (gy, saved, kept) if cut is None else (gy, saved, kept, cut)
        early: list[Array] = []  # the input gradient, if it has been computed

        def input() -> Array:
            return early.pop() if early else self.input_grad(*shared)

        def weights() -> dict[str, Array]:
            if saved[3] and not kept and type(gy) is np.ndarray:  # one pass over memory gives both
                early.append(self.input_grad(*shared))
            return self.weight_grad(*shared)

        return Gradients(self, gy, saved, input, weights)

    def input_grad(
        self, gy: Array, saved: BatchNormSaved, kept: Sums | None = None, cut: Cut | None = None
    ) -> Array:  # fmt: skip
        """Return the input gradient, through the statistics where they are x's.

        The sums that this takes come from `kept` if they are there, and are added to it if not.
        """
        x, mean, scale, own = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        gx, k = host_pool.empty(xp, x.shape, x.dtype), kernels.get(xp).unchecked
        rows, out, weight = self._rows(xp, gy, own), self._rows(xp, gx, own), self.params.get("weight")
        if own:
            known = bool(kept)
            sums, products = self._sums(xp, mean, kept)
            arrays = rows, self._rows(xp, x, own), mean, scale, self._tiled(xp, weight, len(mean)), sums, products, out
            k.channel_back(*arrays, known, *self._mask(xp, cut))
            if kept is not None and not known:
                kept.append((sums, products, graphs.record(xp)))
            return gx
        k.channel_scale(rows, None, self._factor(scale), None, out)
        return gx

    def weight_grad(
        self, gy: Array, saved: BatchNormSaved, kept: Sums | None = None, cut: Cut | None = None
    ) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel.

        The sums come from `kept` if they are there, and are added to it if not.
        """
        x, mean, scale, own = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        if not self.params:
            return {}
        known = bool(kept)
        sums, products = self._sums(xp, mean, kept)
        if not known:
            rows = self._rows(xp, gy, own), self._rows(xp, x, own)
            kernels.get(xp).unchecked.channel_products(*rows, mean, sums, products, *self._mask(xp, cut))
            if kept is not None:
                kept.append((sums, products, graphs.record(xp)))
        bias = sums if kept is None else sums.copy()  # I may still read them when a caller has written to the gradients
        grads = {"weight": products * scale, "bias": bias}
        return {name: self._of_channels(grads[name]) for name in self.params}

    def _sums(self, xp: ModuleType, mean: Array, kept: Sums | None) -> tuple[Array, Array]:
        """Return the sums that are kept, or room for them."""
        if not kept:
            return xp.empty_like(mean), xp.empty_like(mean)
        sums, products, mark = kept[0]
        graphs.wait(xp, mark)
        return sums, products

    def capture_obstacle(self) -> str | None:
        """The average over all batches (``momentum=None``) divides by a count that the host reads."""
        reads = self.training and self.buffers and self.momentum is None
        return "reads the number of batches on the host (momentum=None)" if reads else None

    def couples_samples(self, saved: BatchNormSaved) -> bool:
        """Whether the statistics were the batch's."""
        return saved[3]

    def may_couple_samples(self) -> bool:
        """Whether the statistics are the batch's: while training, and where none are kept."""
        return self.training or not self.buffers

    def jacobian_t(self, saved: BatchNormSaved) -> Any:
        """Return the diagonal of ``weight / sqrt(running_var + eps)``, shared by the batch.

        Raises
        ------
        OptionError
            The statistics were the batch's, so that every output depends on every sample.
        """
        x, _, scale, own = saved
        if own:
            raise OptionError(
                "Batch statistics couple the samples, so there is no Jacobian per sample",
                expected="a forward with running statistics", got="a forward that normalised by the batch",
                remedy="Call eval() before the forward (with track_running_stats=True), or use input_grad"
            )  # fmt: skip
        return self._diagonal(x, scale)

    def _diagonal(self, x: Array, scale: Array) -> Any:
        """Return the Jacobian of a forward with running statistics."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import pointwise_pattern

        values = backend.namespace(x).repeat(self._factor(scale), self._row_shape(x, False)[2])
        return TransposedJacobian(pointwise_pattern(len(values)), values)

    def _factor(self, scale: Array) -> Array:
        """Return the factor of the forward."""
        return scale * self.params["weight"] if self.params else scale

    def _check(self, x: Array) -> ModuleType:
        """Check x and return its namespace."""
        return self._check_shape(x, (None, self.num_features, *(None,) * self.dims))

    def _check_shape(self, x: Array, shape: tuple[int | None, ...]) -> ModuleType:
        like = self.params.get("weight", self.buffers.get("running_mean"))
        return check_input(x, dtype=None if like is None else like.dtype, shape=shape, like=like)

    # How the kernels see x: as rows (samples, channels, positions) whose channels each have their statistics.

    def _row_shape(self, x: Array, own: bool) -> tuple[int, int, int]:
        return x.shape[0], x.shape[1], math.prod(x.shape[2:])

    def _rows(self, xp: ModuleType, x: Array, own: bool) -> Array:
        return xp.ascontiguousarray(x).reshape(self._row_shape(x, own))

    def _tiled(self, xp: ModuleType, param: Array | None, channels: int) -> Array | None:
        """Return a parameter with one element for each of the rows' channels."""
        return param

    def _of_channels(self, sums: Array) -> Array:
        """Return the sums of a parameter's elements from those of the rows' channels."""
        return sums

    def _mask(self, xp: ModuleType, cut: Cut | None) -> tuple[Array | None, tuple[float, float] | None]:
        """Return the kernels' arguments for a clamped output."""
        return (None, None) if cut is None else (self._rows(xp, cut[0], True), cut[1])

    def _count(self) -> None:
        """Count a batch."""
        if self.training and self.buffers:
            self.buffers["num_batches_tracked"] += 1

    def _track(self, xp: ModuleType, mean: Array, var: Array, correction: float) -> None:
        self._count()
        count = self.buffers["num_batches_tracked"]
        factor = 1 / float(count) if self.momentum is None else self.momentum  # synchronize! (for momentum=None)
        running = self.buffers["running_mean"], self.buffers["running_var"]
        kernels.get(xp).channel_track(mean, var, factor, correction, *running)


class BatchNorm1d(BatchNorm):
    """Normalise the channels of x (B, C) or (B, C, L), as `torch.nn.BatchNorm1d`; see `BatchNorm`."""

    dims = 1

    def _check(self, x: Array) -> ModuleType:
        check_input(x)
        if x.ndim not in (2, 3):
            raise ShapeError("x has the wrong number of axes", expected=f"(B, {self.num_features}[, L])", got=x.shape,
                             remedy="Use BatchNorm2d for images")  # fmt: skip
        return self._check_shape(x, (None, self.num_features, *(None,) * (x.ndim - 2)))


class BatchNorm2d(BatchNorm):
    """Normalise the channels of x (B, C, H, W), as `torch.nn.BatchNorm2d`; see `BatchNorm`."""

    dims = 2


class BatchNorm3d(BatchNorm):
    """Normalise the channels of x (B, C, D, H, W), as `torch.nn.BatchNorm3d`; see `BatchNorm`."""

    dims = 3


class InstanceNorm(BatchNorm):
    """The base of `InstanceNorm1d/2d/3d`: normalise each channel of each sample of x (B, C, …) or (C, …).

    Parameters
    ----------
    num_features, eps, device, dtype, bias
        As for `BatchNorm`.
    momentum
        Weight of the new batch in the running statistics; with None they do not change.
    affine
        Whether there are a weight and a bias.
    track_running_stats
        Whether running statistics, means over the samples, are kept and used in evaluation.

    Notes
    -----
    Parameters and buffers as for `BatchNorm`; ``num_batches_tracked`` stays 0, as in PyTorch. The Jacobian has a dense
    block for each channel; it is diagonal with running statistics.
    Source: Ulyanov et al., "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016, Eq. 3.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = False,
        track_running_stats: bool = False, device: Any = None, dtype: Any = np.float32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)

    @property
    def sample_axes(self) -> int:  # type: ignore[override]
        """The channels and the axes after them."""
        return self.dims + 1

    def unbatched(self, saved: BatchNormSaved) -> bool:
        """Whether x was an unbatched sample."""
        return saved[0].ndim == self.sample_axes

    def couples_samples(self, saved: BatchNormSaved) -> bool:
        """Each sample is normalised by itself."""
        return False

    def may_couple_samples(self) -> bool:
        """As `couples_samples`."""
        return False

    def jacobian_t(self, saved: BatchNormSaved) -> Any:
        """Return a dense block for each channel, per sample; with running statistics the diagonal, shared."""
        x, mean, scale, own = saved
        if not own:
            return self._diagonal(x, scale)
        from sparsebp.jacobians import block_jacobian_t

        xp, n = backend.namespace(x), self._row_shape(x, own)[2]
        unit = (self._rows(xp, x, own)[0] - mean[:, None]) * scale[:, None]
        factor = scale * self._tiled(xp, self.params["weight"], len(scale)) if self.params else scale
        blocks = factor[:, None, None] * (xp.eye(n, dtype=x.dtype) - (1 + unit[:, :, None] * unit[:, None]) / n)
        return block_jacobian_t(blocks.reshape(-1, self.num_features, n, n))

    def _check(self, x: Array) -> ModuleType:
        backend.namespace(x=x)
        batch = () if x.ndim == self.sample_axes else (None,)
        xp = self._check_shape(x, (*batch, self.num_features, *(None,) * self.dims))
        if (self.training or not self.buffers) and self._row_shape(x, False)[2] == 1:
            raise ShapeError("A channel of one element has no statistics", expected="2 or more elements a channel",
                             got=x.shape)  # fmt: skip
        return xp

    def _row_shape(self, x: Array, own: bool) -> tuple[int, int, int]:
        samples, positions = math.prod(x.shape[: -self.dims - 1]), math.prod(x.shape[-self.dims :])
        return (1, samples * self.num_features, positions) if own else (samples, self.num_features, positions)

    def _tiled(self, xp: ModuleType, param: Array | None, channels: int) -> Array | None:
        return None if param is None else xp.tile(param, channels // self.num_features)

    def _of_channels(self, sums: Array) -> Array:
        return sums.reshape(-1, self.num_features).sum(axis=0)

    def _count(self) -> None:
        """PyTorch does not count them."""

    def _track(self, xp: ModuleType, mean: Array, var: Array, correction: float) -> None:
        if self.momentum is not None:
            means = (self._of_channels(array) / (len(array) / self.num_features) for array in (mean, var))
            running = self.buffers["running_mean"], self.buffers["running_var"]
            kernels.get(xp).channel_track(*means, self.momentum, correction, *running)


class InstanceNorm1d(InstanceNorm):
    """Normalise each channel of each sample of x (B, C, L) or (C, L), as `torch.nn.InstanceNorm1d`.

    See `InstanceNorm`.
    """

    dims = 1


class InstanceNorm2d(InstanceNorm):
    """Normalise each channel of each sample of x (B, C, H, W) or (C, H, W), as `torch.nn.InstanceNorm2d`.

    See `InstanceNorm`.
    """

    dims = 2


class InstanceNorm3d(InstanceNorm):
    """Normalise each channel of each sample of x (B, C, D, H, W) or (C, D, H, W), as `torch.nn.InstanceNorm3d`.

    See `InstanceNorm`.
    """

    dims = 3


_BATCH_NORMS: tuple[type, ...] = BatchNorm1d, BatchNorm2d, BatchNorm3d


# Normalisation of each sample by itself: of groups of channels, or of the trailing axes.


class SampleNorm(Layer):
    """Base of `GroupNorm`, `LayerNorm` and `RMSNorm`: ``(x - mean) / sqrt(var + eps)`` over some axes, and a scale."""

    replayable = True
    optional = "weight", "bias"
    eps: Any
    centres = True  # else the mean is not subtracted, and the mean square takes the place of the variance

    def _make_affine(self, shape: tuple[int, ...], bias: bool, dtype: Any) -> None:
        self.params["weight"] = full(shape, 1, dtype)
        if bias:
            self.params["bias"] = full(shape, 0, dtype)

    # The kernels see x as rows (R, C, N), each of which is normalised, with a weight for each of the C.

    @abc.abstractmethod
    def _row_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (R, C, N) for x of `shape`."""

    def _eps(self, dtype: np.dtype) -> Any:
        return self.eps

    def _normalise(self, xp: ModuleType, x: Array) -> tuple[Array, NormSaved]:
        """Return the normalised x, and x, means and ``1 / sqrt(var + eps)``."""
        x = xp.ascontiguousarray(x)
        rows, y = self._row_shape(x.shape), host_pool.empty(xp, x.shape, x.dtype)
        mean, scale = xp.empty(rows[0], x.dtype), xp.empty(rows[0], x.dtype)
        affine = self._flat("weight"), self._flat("bias")
        kernels.get(xp).unchecked.row_normalise(
            x.reshape(rows), *affine, self._eps(x.dtype), self.centres, mean, scale, y.reshape(rows)
        )
        return y, (x, mean, scale)

    def input_grad(self, gy: Array, saved: NormSaved) -> Array:
        """Return ``(g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps)`` with g = gy · weight."""
        x, mean, scale = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        rows, gx = self._row_shape(x.shape), host_pool.empty(xp, x.shape, x.dtype)
        arrays = xp.ascontiguousarray(gy).reshape(rows), x.reshape(rows), self._flat("weight")
        kernels.get(xp).unchecked.row_back(*arrays, self.centres, mean, scale, gx.reshape(rows))
        return gx

    def weight_grad(self, gy: Array, saved: NormSaved) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}``, summed over everything that shares them."""
        x, mean, scale = saved
        xp = check_gy(gy, x.shape, x.dtype, x)
        if not self.params:
            return {}
        rows, shape = self._row_shape(x.shape), self.params["weight"].shape
        grads = {"bias": xp.empty(shape, x.dtype), "weight": xp.empty(shape, x.dtype)}
        arrays = xp.ascontiguousarray(gy).reshape(rows), x.reshape(rows), mean, scale
        kernels.get(xp).unchecked.row_products(*arrays, *(grad.reshape(-1) for grad in grads.values()))
        return {name: grads[name] for name in self.params}

    def _flat(self, name: str) -> Array | None:
        param = self.params.get(name)
        return None if param is None else param.reshape(-1)

    def _unit(self, saved: NormSaved) -> tuple[Array, Array]:
        """Return the normalised rows (R, C N), and their scale (R, 1)."""
        x, mean, scale = saved
        return (x.reshape(len(mean), -1) - mean[:, None]) * scale[:, None], scale[:, None]

    def _blocks(self, unit: Array, scale: Array) -> Array:
        """Return the transposed Jacobian of each normalised vector, on the last two axes."""
        n, squares = unit.shape[-1], unit[..., :, None] * unit[..., None, :]
        eye = backend.namespace(unit).eye(n, dtype=unit.dtype)
        return scale * (eye - (1 + squares if self.centres else squares) / n)


class GroupNorm(SampleNorm):
    """Normalise groups of channels of x (B, C, …), each sample by itself, as `torch.nn.GroupNorm`.

    Parameters
    ----------
    num_groups
        Into how many groups the channels are split.
    num_channels
        C, a multiple of `num_groups`.
    eps
        Added to the (biased) variance.
    affine
        Whether every channel has a weight.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    bias
        Whether there is a bias in addition to the weight.

    Notes
    -----
    Parameters: ``weight`` (ones) and ``bias`` (zeros), (C,). Source: Wu & He, "Group Normalization", 2018, Eq. 1 and 7.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: Any = np.float32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_groups = check_integer("num_groups", num_groups, 1)
        self.num_channels = check_integer("num_channels", num_channels, 1)
        if num_channels % num_groups:
            raise OptionError("The groups do not divide the channels", expected=f"a multiple of {num_groups} channels",
                              got=num_channels)  # fmt: skip
        self.eps, dtype, bias = check_number("eps", eps, 0), parameter_dtype(dtype, device), check_flag("bias", bias)
        if check_flag("affine", affine):
            self._make_affine((self.num_channels,), bias, dtype)

    def forward(self, x: Array) -> tuple[Array, NormSaved]:
        """Return the normalised x; `saved` is x, and the mean and 1/sqrt(var + eps) of every group."""
        weight = self.params.get("weight")
        xp = check_input(x, dtype=None if weight is None else weight.dtype, like=weight)
        if x.ndim < 2 or x.shape[1] != self.num_channels or 0 in x.shape[2:]:
            raise ShapeError("x has the wrong shape", expected=f"(B, {self.num_channels}, …), none of them empty",
                             got=x.shape, remedy="Pass channels behind the batch")  # fmt: skip
        return self._normalise(xp, x)

    def _row_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        return shape[0] * self.num_groups, self.num_channels // self.num_groups, math.prod(shape[2:])

    def jacobian_t(self, saved: NormSaved) -> Any:
        """Return a dense block for each group of a sample, per sample."""
        from sparsebp.jacobians import block_jacobian_t

        unit, scale = self._unit(saved)
        n = unit.shape[1]
        blocks = self._blocks(unit, scale[:, :, None]).reshape(-1, self.num_groups, n, n)
        if self.params:
            each = n * self.num_groups // self.num_channels
            weight = backend.namespace(unit).repeat(self.params["weight"], each)
            blocks = blocks * weight.reshape(self.num_groups, 1, n)
        return block_jacobian_t(blocks)


class LayerNorm(SampleNorm):
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
        Whether there is a bias as well; never without a weight.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.

    Notes
    -----
    Parameters: ``weight`` (ones) and ``bias`` (zeros), of shape `normalized_shape`. Source: Ba et al., "Layer
    Normalization", 2016, Eq. 4.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device: Any = None, dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        given = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        shape = tuple(check_integer("a length of normalized_shape", n, 1) for n in given)
        if not shape:
            raise OptionError("Invalid normalized_shape", expected="at least one length, each 1 or more", got=shape)
        self.normalized_shape, self.eps = shape, check_number("eps", eps, 0)
        dtype, bias = parameter_dtype(dtype, device), check_flag("bias", bias)
        if check_flag("elementwise_affine", elementwise_affine):
            self._make_affine(shape, bias, dtype)

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is normalised by itself."""
        return len(self.normalized_shape) == 1

    def forward(self, x: Array) -> tuple[Array, NormSaved]:
        """Return the normalised x; `saved` is x, and every vector's mean (0 for `RMSNorm`) and 1/sqrt(var + eps)."""
        return self._normalise(self._check(x), x)

    def _row_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        leading = len(shape) - len(self.normalized_shape)
        return math.prod(shape[:leading]), math.prod(self.normalized_shape), 1

    def jacobian_t(self, saved: NormSaved) -> Any:
        """Return a dense block for each normalised vector of a sample, per sample; the batch is the first axis."""
        from sparsebp.jacobians import block_jacobian_t

        x = saved[0]
        if x.ndim == len(self.normalized_shape):
            raise ShapeError("x has no batch axis", expected="(B, …)", got=x.shape)
        unit, scale = self._unit(saved)
        n = unit.shape[1]
        positions = math.prod(x.shape[1 : x.ndim - len(self.normalized_shape)])
        blocks = self._blocks(unit.reshape(-1, positions, n), scale.reshape(-1, positions, 1, 1))
        return block_jacobian_t(blocks * self.params["weight"].reshape(-1) if self.params else blocks)

    @property
    def sample_axes(self) -> int:  # type: ignore[override]
        """The normalised ones."""
        return len(self.normalized_shape)

    def unbatched(self, saved: NormSaved) -> bool:
        """Whether x had the normalised axes only."""
        return saved[0].ndim == len(self.normalized_shape)

    def _check(self, x: Array) -> ModuleType:
        """Return the namespace of x; raise if it does not fit."""
        check_input(x)
        leading = x.ndim - len(self.normalized_shape)
        if leading < 0:
            raise ShapeError("x has too few axes", expected=f"(…, {', '.join(map(str, self.normalized_shape))})",
                             got=x.shape)  # fmt: skip
        weight = self.params.get("weight")
        shape = (*(None for _ in range(leading)), *self.normalized_shape)
        return check_input(x, dtype=None if weight is None else weight.dtype, shape=shape, like=weight)


class RMSNorm(LayerNorm):
    """``x / sqrt(mean(x²) + eps) · weight`` over the trailing axes, as `torch.nn.RMSNorm`.

    Parameters
    ----------
    normalized_shape
        Lengths of the trailing axes that are normalised together; an integer stands for one axis.
    eps
        Added to the mean square; None: the spacing of x's dtype at 1.
    elementwise_affine
        Whether there is a weight.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.

    Notes
    -----
    Parameter: ``weight`` (ones), of shape `normalized_shape`. Source: Zhang & Sennrich, "Root Mean Square Layer
    Normalization", 2019, Eq. 4.
    """

    centres = False

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device: Any = None, dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, 0.0 if eps is None else eps, elementwise_affine, False, device, dtype)
        self.eps = eps

    def _eps(self, dtype: np.dtype) -> Any:
        return dtype.type(np.finfo(dtype).eps if self.eps is None else self.eps)
