"""Linear: y = x Wᵀ + b."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, ProductFactors, Seed, check_integer
from sparsebp.core.errors import ShapeError
from sparsebp.kernels.dense import matmul
from sparsebp.nn.layer import Work, check_gy, check_input
from sparsebp.nn.pruning import Prunable


class Linear(Prunable):
    """An affine map of the last axis, as `torch.nn.Linear`.

    Parameters
    ----------
    in_features, out_features
        Lengths of the last axis before and after.
    bias
        Whether to add a bias.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, U(±1/√in_features).

    Raises
    ------
    OptionError
        A length is negative or no integer, or `bias` is no truth value.

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
        """Return y (..., out_features) for x (..., in_features); `saved` is x.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has no axes or another number of features, or its dtype is not the weights'.
        """
        y = self._product(x)
        if "bias" in self.params:
            y += self.params["bias"]
        return y, x

    def forward_between(self, x: Array, limits: tuple[float, float]) -> tuple[Array, Array] | None:
        """Return the output between `limits`, and what `forward` saves; on the host. None without a bias to add.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            As `forward`.
        """
        if "bias" not in self.params or self.out_features == 0:
            return None
        y = self._product(x)
        kernels.on_host().add_between(y.reshape(-1, self.out_features), self.params["bias"], *limits)
        return y, x

    def _product(self, x: Array) -> Array:
        """Return x Wᵀ, a new array, after checking x."""
        weight = self._weight()
        xp = check_input(x, dtype=weight.dtype, like=weight)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError("x has the wrong shape", expected=f"(…, {self.in_features})", got=x.shape)
        return matmul(xp, x, weight.T)

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy W, of the shape of x."""
        xp = self._check(gy, saved)
        return matmul(xp, gy, self._weight())

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": gyᵀ x, "bias": Σ gy}``, summed over all leading axes."""
        xp = self._check(gy, saved)
        gy, x = self._flat(gy, saved)
        return {"weight": self._masked(matmul(xp, gy.T, x)), **self._bias_grad(xp, gy)}

    def weight_grad_factors(self, gy: Array, saved: Array) -> tuple[dict[str, ProductFactors], dict[str, Array]] | None:
        """Return ``{"weight": (gyᵀ, x)}, {"bias": Σ gy}``; None if a part of the weight is pruned."""
        if self._mask() is not None:
            return None
        xp = self._check(gy, saved)
        gy, x = self._flat(gy, saved)
        return {"weight": (gy.T, x)}, self._bias_grad(xp, gy)

    def weight_grad_products(self, gy: Array, saved: Array) -> dict[str, ProductFactors] | None:
        """Return two matrices a parameter, whose product has its gradient's numbers; None if a weight is pruned."""
        if self._mask() is not None:
            return None
        xp = self._check(gy, saved)
        gy, x = self._flat(gy, saved)
        return {"weight": (gy.T, x)} | ({"bias": (_row_of_ones(xp, gy), gy)} if "bias" in self.params else {})

    def _flat(self, gy: Array, saved: Array) -> tuple[Array, Array]:
        rows = prod(saved.shape[:-1])
        return gy.reshape(rows, self.out_features), saved.reshape(rows, self.in_features)

    def _bias_grad(self, xp: Any, gy: Array) -> dict[str, Array]:
        return {"bias": column_sums(xp, gy)} if "bias" in self.params else {}

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

    def lone(self, saved: Array) -> bool:
        """Whether x was one vector."""
        return saved.ndim == 1

    def jacobian_t(self, saved: Array) -> Any:
        """Return Wᵀ, shared by the batch; a diagonal block for each position between batch and features."""
        from sparsebp.jacobians import linear_jacobian_t

        return linear_jacobian_t(self._weight(), prod(saved.shape[1:-1]), mask=self._host_mask())

    def _check(self, gy: Array, saved: Array) -> Any:
        weight = self.params["weight"]
        return check_gy(gy, (*saved.shape[:-1], self.out_features), weight.dtype, weight)


def column_sums(xp: ModuleType, rows: Array) -> Array:
    """Return the sums over the first axis of a matrix, a bias's gradient."""
    if not backend.is_host(xp):
        return rows.sum(axis=0)
    # A GEMV: several times faster than a sum.
    return matmul(xp, _row_of_ones(xp, rows), rows)[0]


_KEPT = 1 << 14
"""Numbers of a row of ones that is kept for the next sums."""


def _row_of_ones(xp: ModuleType, rows: Array) -> Array:
    """Return a matrix (1, number of rows) that sums them; nobody writes into it."""
    count = rows.shape[0]
    if not backend.is_host(xp):
        return xp.ones((1, count), rows.dtype)
    return (_ones if count <= _KEPT else _new_ones)(count, rows.dtype)


def _new_ones(count: int, dtype: np.dtype) -> np.ndarray:
    return np.ones((1, count), dtype)


_ones = lru_cache(maxsize=16)(_new_ones)
