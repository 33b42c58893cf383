"""The sparse products that are measured: what a scan over a convolutional network meets, multigrid, meshes, graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.tools.graphs import random_rows, rmat
from benchmarks.tools.meshes import finite_elements, poisson, prolongation, sorted_csr

if TYPE_CHECKING:
    from sparsebp.patterns import SparsityPattern

Targets = Mapping[str, float]
"""How many times faster than a side we are to be, by the side's name."""
ONE_THREAD: Targets = {"scipy": 3, "mkl_numeric": 1.5}
TWO_THREADS: Targets = {"scipy": 6, "mkl_numeric": 1.5}
"""Of any product, whatever its structure."""
SMALL_BLOCKS: Targets = {"scipy": 10, "mkl_numeric": 1.5}
"""Of one whose patterns consist of small dense blocks, with two threads."""


@dataclass(frozen=True)
class Pair:
    """Two sparse matrices to be multiplied, as SciPy CSR arrays of float32.

    Attributes
    ----------
    name
        How tables call the product.
    a, b
        The operands.
    targets
        Of two threads, for values shared by the batch.
    batch_targets
        Of two threads, for values of each sample; None: not measured.
    plan_targets
        Of two threads, for planning and one run together; None: not measured.
    alone_targets
        Of one thread, for values shared by the batch.
    """

    name: str
    a: Any
    b: Any
    targets: Targets
    batch_targets: Targets | None = None
    plan_targets: Targets | None = None
    alone_targets: Targets = field(default_factory=dict)


def pairs(quick: bool) -> Iterator[Pair]:
    """Yield the products; `quick` makes them small."""
    yield from of_networks(quick)
    yield from of_others(quick)


def of_networks(quick: bool) -> Iterator[Pair]:
    """Yield products that a scan over a convolutional network meets, and of random matrices with wide rows."""
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
        a, b = (random_rows(n, n, round(n * density), seed) for seed in (1, 2))
        yield Pair(f"random, n = {n}, {density:.1%}", a, b, {"scipy": 15, "mkl_numeric": 2.5})


def of_others(quick: bool) -> Iterator[Pair]:
    """Yield products of matrices that come from elsewhere: all are to reach the same."""

    def pair(name: str, a: Any, b: Any, targets: Targets = TWO_THREADS) -> Pair:
        return Pair(name, a, b, targets, plan_targets={"scipy": 1}, alone_targets=ONE_THREAD)

    for shape in ((8, 9), (4, 4, 3)) if quick else ((300, 300), (40, 40, 40)):
        fine = poisson(*shape)
        coarse = prolongation(fine)
        name = f"Poisson {' × '.join(map(str, shape))}"
        yield pair(f"{name}, A·P", fine, coarse)
        yield pair(f"{name}, R·(AP)", sorted_csr(coarse.T), sorted_csr(fine @ coarse))

    mesh = finite_elements(30 if quick else 30_000)
    yield pair("P1 finite elements, squared", mesh, mesh)
    elasticity = finite_elements(10 if quick else 3000, unknowns=3)
    yield pair("3 × 3 blocks, squared", elasticity, elasticity, SMALL_BLOCKS)
    graph = rmat(5 if quick else 14)
    yield pair("R-MAT graph, squared", graph, graph)
    tall = random_rows(*((100, 20, 3) if quick else (100_000, 1000, 6)), seed=3)
    yield pair("tall random, AᵀA", sorted_csr(tall.T), tall)
    for n, entries in ((40, 5), (60, 3)) if quick else ((1000, 50), (3000, 12), (10_000, 8), (30_000, 3), (30_000, 20)):
        a, b = (random_rows(n, n, entries, seed) for seed in (1, 2))
        yield pair(f"random, n = {n}, {entries} a row", a, b)


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
