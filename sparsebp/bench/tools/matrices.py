"""The sparse products that are measured: what a scan over a convolutional network meets, and random matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from sparsebp.patterns import SparsityPattern

Targets = Mapping[str, float]
"""How many times faster than a side two threads of ours are to be, by the side's name."""


@dataclass(frozen=True)
class Pair:
    """Two sparse matrices that a scan would multiply, as SciPy CSR arrays of float32.

    Attributes
    ----------
    name
        How tables call the product.
    a, b
        The operands.
    targets
        For values shared by the batch.
    batch_targets
        For values of each sample; None: not measured.
    plan_targets
        For planning and one run together; None: not measured.
    """

    name: str
    a: Any
    b: Any
    targets: Targets
    batch_targets: Targets | None = None
    plan_targets: Targets | None = None


def pairs(quick: bool) -> Iterator[Pair]:
    """Yield the products; `quick` makes them small."""
    side, channels = (8, 4) if quick else (32, 64)
    first = convolution_t(3, channels, side)
    yield Pair("conv · ReLU", first, _diagonal(first.shape[1]), {"scipy": 25, "mkl_numeric": 6}, {})
    yield Pair("conv · max-pool", first, max_pool_t(channels, side), {"scipy": 9, "mkl_numeric": 3}, {})

    # rows of the first block (convolution and pooling) of a network with channels last, and its second convolution
    block = _pooled(convolution_t(3, channels, side, layout="hwc"), max_pool_t(channels, side, layout="hwc"))
    rows = slice(len(block.indptr) // 2, len(block.indptr) // 2 + 512)
    second = convolution_t(channels, channels, side // 2, layout="hwc", seed=5)
    yield Pair("dense conv · dense conv, hwc", block[rows], second, {"scipy": 25, "mkl_numeric": 6})

    sizes, keep = ((2, 4, 8), 0.5) if quick else ((64, 128, 256), 0.03)
    block = _pooled(convolution_t(*sizes[:2], side // 2, keep=keep, seed=3), max_pool_t(sizes[1], side // 2))
    second = convolution_t(*sizes[1:], side // 4, keep=keep, seed=4)
    yield Pair(
        "pruned conv · pruned conv", block, second, {"scipy": 16, "mkl_numeric": 2.2},
        batch_targets={"scipy": 25, "mkl_numeric": 6}, plan_targets={"scipy": 1},
    )  # fmt: skip

    for n in (50, 60) if quick else (5000, 10_000):
        density = 0.2 if quick else 0.005
        a, b = (_random(n, density, seed) for seed in (1, 2))
        yield Pair(f"random, n = {n}, {density:.1%}", a, b, {"scipy": 15, "mkl_numeric": 2.5})


def convolution_t(
    channels_in: int,
    channels_out: int,
    side: int,
    *,
    keep: float = 1.0,
    layout: Literal["chw", "hwc"] = "chw",
    seed: int = 0,
) -> Any:
    """Return the transposed Jacobian of a 3×3 convolution with padding 1 on side × side images, as a CSR array.

    `keep` is the share of weights that pruning left; pruned weights are no entries.
    """
    from sparsebp.jacobians import conv_jacobian_t

    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((channels_out, channels_in, 3, 3)).astype(np.float32)
    weight[rng.random(weight.shape) >= keep] = 0
    matrix = conv_jacobian_t(weight, (side, side), padding=1, layout=layout).to_scipy(copy=True)
    matrix.eliminate_zeros()
    return matrix


def max_pool_t(channels: int, side: int, *, layout: Literal["chw", "hwc"] = "chw", seed: int = 0) -> Any:
    """Return the transposed Jacobian of a 2×2 max-pooling: one entry an input pixel, zeros stored."""
    from sparsebp.patterns import pool_pattern

    pattern = pool_pattern(channels, (side, side), 2, layout=layout).pattern
    return _on(pattern, (np.random.default_rng(seed).random(pattern.nnz) < 0.25).astype(np.float32))


def _pooled(convolution: Any, pool: Any) -> Any:
    """Return a matrix with random values on the pattern of the two's product."""
    from sparsebp.patterns import SparsityPattern
    from sparsebp.products import plan_product

    pattern = plan_product(SparsityPattern.from_scipy(convolution), SparsityPattern.from_scipy(pool)).pattern
    return _on(pattern, np.random.default_rng(9).standard_normal(pattern.nnz, dtype=np.float32))


def _diagonal(n: int) -> Any:
    from sparsebp.patterns import pointwise_pattern

    return _on(pointwise_pattern(n), np.ones(n, np.float32))


def _on(pattern: SparsityPattern, data: np.ndarray) -> Any:
    from sparsebp.jacobians import TransposedJacobian

    return TransposedJacobian(pattern, data).to_scipy()


def _random(n: int, density: float, seed: int) -> Any:
    """Return an n × n matrix with the same number of entries in every row."""
    import scipy.sparse as sp

    rng = np.random.default_rng(seed)
    row = round(n * density)
    indices = np.concatenate([np.sort(rng.choice(n, row, replace=False)) for _ in range(n)]).astype(np.int32)
    data = rng.standard_normal(n * row, dtype=np.float32)
    return sp.csr_array((data, indices, np.arange(n + 1, dtype=np.int32) * row), shape=(n, n))
