"""Linear: y = x Wᵀ + b; weights that can be pruned."""

from __future__ import annotations

from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core import masks as masking
from sparsebp.core.check import Array, ProductFactors, Seed, check_flag, check_generator, check_integer
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.parameters import fan_in_bound, parameter_dtype, uniform
from sparsebp.nn.work import Work

MASK = "weight_mask"
"""Name of the pruning mask's buffer, as in torch.nn.utils.prune."""


class Prunable(Layer):
    """Base of `Linear` and all convolutions: a parameter ``weight`` that can be pruned by a mask."""

    # The mask is the bool buffer `weight_mask`, of the weight's shape, present once something has been pruned. The
    # layer computes with 0 for pruned weights, whatever the array holds; their gradients are 0, and the transposed
    # Jacobian has no entries for them. This holds in every layer that shares the array; several masks are combined by
    # "and".

    optional = ("bias",)

    def keep_weights(self, mask: Array) -> None:
        """Keep the weights where `mask` is true, and set the others to 0, in place."""
        # mask: Bool, of the weight's shape, NumPy or CuPy; it is copied to the weight's device.
        weight = self.params["weight"]
        if mask is None or (backend.namespace(mask) and mask.dtype != bool):
            raise DTypeError("The mask has the wrong dtype", expected="bool", got=getattr(mask, "dtype", None),
                             remedy="Pass mask != 0")  # fmt: skip
        if mask.shape != weight.shape:
            raise ShapeError("The mask does not fit the weight", expected=weight.shape, got=mask.shape)
        self.buffers[MASK] = backend.as_namespace(mask, backend.namespace(weight)).copy()
        self._arrays_replaced()
        masking.clear(weight)

    def mask_for(self, array: Array) -> Array | None:
        """Return the mask if `array` is the weight, None for another one."""
        return self.buffers.get(MASK) if self.params.get("weight") is array else None

    def _arrays_replaced(self) -> None:
        if MASK in self.buffers:
            masking.attach(self, self.params["weight"])

    def _draw(
        self, shape: tuple[int, ...], outputs: int, bias: bool, dtype: Any, rng: Seed, device: Any = None
    ) -> None:
        """Draw a weight of `shape` and, if asked for, a bias from U(±1/√fan_in), as torch.nn."""
        rng, dtype = check_generator("rng", rng), parameter_dtype(dtype, device)
        bound = fan_in_bound(prod(shape[1:]))
        self.params["weight"] = uniform(rng, shape, bound, dtype)
        if check_flag("bias", bias):
            self.params["bias"] = uniform(rng, (outputs,), bound, dtype)

    def buffer_for(self, name: str) -> Array | None:
        """Return room for the mask that a state brings to a layer that has none yet."""
        weight = self.params["weight"]
        return backend.namespace(weight).ones(weight.shape, dtype=bool) if name == MASK else None

    def _mask(self) -> Array | None:
        """Return which weights are kept, None: all are."""
        if MASK in self.buffers:
            self._arrays_replaced()  # the buffer was set directly, without `keep_weights`
        elif not masking.owners:
            return None
        return masking.mask_of(self.params["weight"])

    def _kept(self, array: Array) -> Array:
        """Return the weight or its gradient, with 0 for what is pruned; read-only."""
        if not masking.owners and MASK not in self.buffers:
            return array
        mask = self._mask()
        return array if mask is None else masking.kept(array, mask)

    def _host_mask(self) -> np.ndarray | None:
        """Return which weights are kept, on the host; None: all are."""
        mask = self._mask()
        return None if mask is None else backend.to_host(mask)  # synchronize!


class Linear(Prunable):
    """An affine map of the last axis, as `torch.nn.Linear`.

    Parameters
    ----------
    in_features, out_features
        Lengths of the last axis before and after.
    bias
        Whether to add a bias.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values, U(±1/√in_features).

    Notes
    -----
    Parameters: ``weight`` (out_features, in_features), ``bias`` (out_features,). Pruning (`sparsebp.prune`) adds
    the buffer ``weight_mask``.
    """

    replayable = True
    stepwise = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = np.float32, *,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features = in_features = check_integer("in_features", in_features, 0)
        self.out_features = out_features = check_integer("out_features", out_features, 0)
        self._draw((out_features, in_features), out_features, bias, dtype, rng, device)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return y (..., out_features) for x (..., in_features); `saved` is x."""
        xp, weight = self._checked(x)
        rows = _rows(xp, x, self.in_features)
        y = host_pool.empty(xp, (len(rows), self.out_features), weight.dtype)
        kernels.get(xp).unchecked.affine(rows, weight, self.params.get("bias"), y)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features), x

    def forward_between(self, x: Array, limits: tuple[float, float]) -> tuple[Array, Array] | None:
        """Return the output clamped to `limits`, and the saved x; on the host. None without a bias to add."""
        if "bias" not in self.params or self.out_features == 0:
            return None
        xp, weight = self._checked(x)
        y = kernels.dense(xp).matmul(x, weight.T)
        kernels.on_host().add_between(y.reshape(-1, self.out_features), self.params["bias"], *limits)
        return y, x

    def _checked(self, x: Array) -> tuple[ModuleType, Array]:
        """Return the namespace of x, which is checked, and the weight."""
        weight = self._kept(self.params["weight"])
        xp = check_input(x, dtype=weight.dtype, like=weight)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError("x has the wrong shape", expected=f"(…, {self.in_features})", got=x.shape)
        return xp, weight

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy W, of the shape of x."""
        weight = self.params["weight"]
        xp = check_gy(gy, (*saved.shape[:-1], self.out_features), weight.dtype, weight)
        return kernels.dense(xp).matmul(gy, self._kept(weight))

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": gyᵀ x, "bias": Σ gy}``, summed over all leading axes."""
        xp, gy, x = self._matrices(gy, saved)
        grads = {"weight": host_pool.empty(xp, self.params["weight"].shape, gy.dtype)}
        if "bias" in self.params:
            grads["bias"] = xp.empty(self.out_features, gy.dtype)
        kernels.get(xp).unchecked.affine_grad(gy, x, grads["weight"], grads.get("bias"))
        return grads | {"weight": self._kept(grads["weight"])}

    def weight_grad_factors(self, gy: Array, saved: Array) -> tuple[dict[str, ProductFactors], dict[str, Array]] | None:
        """Return ``{"weight": (gyᵀ, x)}, {"bias": Σ gy}``; None if a part of the weight is pruned."""
        if self._mask() is not None:
            return None
        xp, gy, x = self._matrices(gy, saved)
        return {"weight": (gy.T, x)}, {"bias": kernels.dense(xp).column_sums(gy)} if "bias" in self.params else {}

    def weight_grad_products(self, gy: Array, saved: Array) -> dict[str, ProductFactors] | None:
        """Return two matrices per parameter whose product holds its gradient; None if a weight is pruned."""
        if self._mask() is not None:
            return None
        xp, gy, x = self._matrices(gy, saved)
        ones = {"bias": (kernels.dense(xp).row_of_ones(gy), gy)} if "bias" in self.params else {}
        return {"weight": (gy.T, x)} | ones

    def _matrices(self, gy: Array, saved: Array) -> tuple[ModuleType, Array, Array]:
        """Check gy; return its namespace, and gy and x as matrices."""
        weight = self.params["weight"]
        xp = check_gy(gy, (*saved.shape[:-1], self.out_features), weight.dtype, weight)
        return xp, _rows(xp, gy, self.out_features), _rows(xp, saved, self.in_features)

    def input_grad_work(self, shape: tuple[int, ...], saved: Array) -> Work:
        """Return the cost of one matrix product."""
        weight, rows = self.params["weight"], prod(shape[:-1])
        mask = self._host_mask()
        return Work(
            flops=2 * rows * weight.size,
            values=weight.size + rows * (self.in_features + self.out_features),
            calls=1,
            entries=prod(shape[1:-1]) * (weight.size if mask is None else int(np.count_nonzero(mask))),
        )

    def unbatched(self, saved: Array) -> bool:
        """Whether x was one vector."""
        return saved.ndim == 1

    def jacobian_t(self, saved: Array) -> Any:
        """Return Wᵀ, shared by the batch; a diagonal block for each position between batch and features."""
        from sparsebp.jacobians import linear_jacobian_t

        return linear_jacobian_t(self._kept(self.params["weight"]), prod(saved.shape[1:-1]), mask=self._host_mask())


def _rows(xp: ModuleType, array: Array, width: int) -> Array:
    """Return an array (…, width) as a matrix, C-contiguous for a device's kernels: a host's read it as it lies."""
    rows, k = array if array.ndim == 2 else array.reshape(prod(array.shape[:-1]), width), kernels.get(xp)
    return rows if k.unchecked is not k else xp.ascontiguousarray(rows)
