"""Linear: y = x Wᵀ + b."""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.nn import init, memory
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.prunable import Prunable
from sparsebp.nn.work import Work
from sparsebp.threads import SHORT_ALONE, short_products
from sparsebp.types import Array, Seed


class Linear(Prunable):
    """An affine map of the last axis, as `torch.nn.Linear`.

    Parameters
    ----------
    in_features, out_features
        Lengths of the last axis before and after.
    bias
        Whether to add a bias.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, U(±1/√in_features).

    Notes
    -----
    Parameters: ``weight`` (out_features, in_features), ``bias`` (out_features,). Pruning (`sparsebp.prune`) adds
    the buffer ``weight_mask``.
    """

    replayable = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dtype: Any = np.float32, rng: Seed = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        rng, dtype, bound = init.generator(rng), backend.float_dtype(dtype), init.fan_in_bound(in_features)
        self.params["weight"] = init.uniform(rng, (out_features, in_features), bound, dtype)
        if bias:
            self.params["bias"] = init.uniform(rng, (out_features,), bound, dtype)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return y (..., out_features) for x (..., in_features); `saved` is x."""
        weight = self._weight()
        shape = (*(None for _ in x.shape[:-1]), self.in_features)
        check_input(x, dtype=weight.dtype, shape=shape, like=weight)
        with self._threads(x):
            y = backend.matmul(x, weight.T)
        if "bias" in self.params:
            y += self.params["bias"]
        return y, x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy W, of the shape of x."""
        self._check(gy, saved)
        with self._threads(saved):
            return backend.matmul(gy, self.params["weight"])

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": gyᵀ x, "bias": Σ gy}``, summed over all leading axes."""
        xp = self._check(gy, saved)
        flat = gy.reshape(-1, self.out_features)
        with self._threads(saved):
            grads = {"weight": self._masked(memory.matmul(xp, flat.T, saved.reshape(-1, self.in_features)))}
            if "bias" in self.params:
                # A GEMV: several times faster than a sum.
                grads["bias"] = backend.matmul(xp.ones(flat.shape[0], dtype=flat.dtype), flat)
        return grads

    def input_grad_work(self, shape: tuple[int, ...], saved: Array) -> Work:
        """Return the cost of one matrix product."""
        weight, rows = self.params["weight"], prod(shape[:-1])
        kept = self._kept()
        return Work(
            flops=2 * rows * weight.size,
            values=weight.size + rows * (self.in_features + self.out_features),
            calls=1,
            entries=prod(shape[1:-1]) * (weight.size if kept is None else int(np.count_nonzero(kept))),
        )

    def jacobian_t(self, saved: Array) -> Any:
        """Return Wᵀ, shared by the batch; a diagonal block for each position between batch and features."""
        from sparsebp.jacobians import linear_jacobian_t

        return linear_jacobian_t(self.params["weight"], positions=int(np.prod(saved.shape[1:-1])), kept=self._kept())

    def _check(self, gy: Array, saved: Array) -> Any:
        weight = self.params["weight"]
        return check_gy(gy, (*saved.shape[:-1], self.out_features), weight.dtype, weight)

    def _threads(self, x: Array) -> AbstractContextManager[None]:
        """Run a product of x and the weights on one BLAS thread if it is short: layers around it are kernels."""
        return short_products(2.0 * prod(x.shape[:-1]) * self.params["weight"].size, SHORT_ALONE)
