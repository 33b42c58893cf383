"""Workloads: sparse matrices and products, staged networks, training loops, recurrent classifiers; peers in torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from benchmarks.harness import import_torch
from sparsebp import models, nn, optim
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import MissingDependencyError, OptionError
from sparsebp.data import Dataset, ImageDataset, epoch_order, load_digits, load_mnist_images
from sparsebp.jacobians import TransposedJacobian, conv_jacobian_t
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.patterns import SparsityPattern, pointwise_pattern, pool_pattern
from sparsebp.products import plan_product

# Sparse matrices as meshes give them: finite differences, finite elements, and the operators of multigrid on them.


def poisson(*shape: int) -> Any:
    """Return the Laplacian on a grid with Dirichlet boundaries, 5 points in two dimensions and 7 in three, as CSR."""
    import scipy.sparse as sp

    matrix: Any = sp.csr_array((1, 1), dtype=np.float32)
    for n in shape:
        line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n), dtype=np.float32)
        matrix = sp.kron(matrix, sp.eye_array(n)) + sp.kron(sp.eye_array(matrix.shape[0]), line)
    return sorted_csr(matrix)


def prolongation(matrix: Any) -> Any:
    """Return the prolongation of smoothed aggregation for a matrix with a positive diagonal, as CSR.

    Constants on aggregates, smoothed by one Jacobi step with weight 2/3 (P. Vaněk, J. Mandel and M. Brezina, "Algebraic
    multigrid by smoothed aggregation", Computing 56, 1996); pyamg's with no strength threshold has the same entries.
    """
    import scipy.sparse as sp

    aggregate = _aggregates(matrix)
    n = len(aggregate)
    tentative = sp.csr_array((np.ones(n, np.float32), aggregate, np.arange(n + 1)), shape=(n, aggregate.max() + 1))
    smoothing = sp.diags_array(np.float32(2 / 3) / matrix.diagonal()) @ matrix
    return sorted_csr(tentative - smoothing @ tentative)


def _aggregates(matrix: Any) -> np.ndarray:
    """Return the aggregate of every unknown: one that has no neighbour in an aggregate founds one with all of them."""
    pointers, columns = matrix.indptr.tolist(), matrix.indices.tolist()
    neighbours = [columns[begin:end] for begin, end in pairwise(pointers)]
    founded, count = [-1] * len(neighbours), 0
    for row, near in enumerate(neighbours):
        if all(founded[other] < 0 for other in near):
            for other in (row, *near):
                founded[other] = count
            count += 1
    joined = [own if own >= 0 else next(founded[other] for other in near if founded[other] >= 0)
              for own, near in zip(founded, neighbours, strict=True)]  # fmt: skip
    return np.array(joined)


def finite_elements(vertices: int, unknowns: int = 1, seed: int = 0) -> Any:
    """Return a matrix with the pattern of linear (P1) finite elements on a Delaunay mesh of random points, as CSR.

    Each entry is a dense block of `unknowns` (displacements in elasticity, say) squared.
    Values are random.
    """
    import scipy.sparse as sp
    from scipy.spatial import Delaunay

    rng = np.random.default_rng(seed)
    corners = Delaunay(rng.random((vertices, 2))).simplices
    rows, columns = np.repeat(corners, 3, axis=1).ravel(), np.tile(corners, 3).ravel()
    near = sp.csr_array((np.ones(len(rows), np.float32), (rows, columns)), shape=(vertices, vertices))
    matrix = sorted_csr(sp.kron(near, np.ones((unknowns, unknowns), np.float32)))
    matrix.data[:] = rng.standard_normal(matrix.nnz, dtype=np.float32)
    return matrix


def sorted_csr(matrix: Any) -> Any:
    """Return a matrix as a CSR array of float32 with 4-byte indices in order, without duplicates."""
    import scipy.sparse as sp

    matrix = sp.csr_array(matrix)
    matrix.sum_duplicates()
    parts = (matrix.data.astype(np.float32), matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32))
    return sp.csr_array(parts, shape=matrix.shape)


# Sparse matrices without a geometry: graphs whose degrees follow a power law, and random ones.

QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Where an edge falls, of four quadrants of the adjacency matrix, and again in each of them (Graph500)."""


def rmat(scale: int, edges_a_vertex: int = 16, seed: int = 0) -> Any:
    """Return the adjacency matrix of an R-MAT graph with 2**scale vertices, duplicate edges merged, as CSR.

    D. Chakrabarti, Y. Zhan and C. Faloutsos, "R-MAT: a recursive model for graph mining", SDM 2004, with the
    parameters of the Graph500 benchmark; its shuffle of the vertices is left out.
    """
    import scipy.sparse as sp

    rng = np.random.default_rng(seed)
    count = edges_a_vertex << scale
    rows, columns = np.zeros((2, count), np.int64)
    for _ in range(scale):
        quadrant = np.searchsorted(np.cumsum(QUADRANTS)[:3], rng.random(count), side="right")
        rows, columns = 2 * rows + quadrant // 2, 2 * columns + quadrant % 2
    n = 1 << scale
    return sorted_csr(sp.coo_array((np.ones(count, np.float32), (rows, columns)), shape=(n, n)))


def random_rows(rows: int, columns: int, entries: int, seed: int = 0) -> Any:
    """Return a matrix with the same number of `entries` in every row, anywhere, as CSR."""
    import scipy.sparse as sp

    rng = np.random.default_rng(seed)
    indices = np.sort(rng.integers(0, columns, (rows, entries), np.int32))
    while len(again := np.flatnonzero((np.diff(indices) == 0).any(axis=1))):  # rows that drew a column twice
        indices[again] = np.sort(rng.integers(0, columns, (len(again), entries), np.int32))
    data = rng.standard_normal(rows * entries, dtype=np.float32)
    parts = (data, indices.ravel(), np.arange(rows + 1, dtype=np.int32) * entries)
    return sp.csr_array(parts, shape=(rows, columns))


# Networks that several benchmarks train.


def mlp(width: int, depth: int, outputs: int | None = None) -> nn.Sequential:
    """Return `depth` fully connected layers with ReLU between them; the last one has `outputs` units, if given."""
    rng = np.random.default_rng(0)
    layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width, rng=rng), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, outputs or width, rng=rng))


def unet(in_channels: int = 3, classes: int = 5, widths: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """Return a U-Net, images (B, in_channels, H, W) to logits (B, classes, H, W).

    On each level two 3×3 convolutions with batch normalisation and ReLU, before and after the smaller levels, whose
    output is joined to their input. (Ronneberger et al., 2015; padded, so that sizes stay.)
    """
    rng = np.random.default_rng(0)

    def twice(channels: int, width: int) -> list[nn.Layer]:
        layers: list[nn.Layer] = []
        for given in (channels, width):
            layers += [nn.Conv2d(given, width, 3, padding=1, bias=False, rng=rng), nn.BatchNorm2d(width), nn.ReLU()]
        return layers

    def level(channels: int, width: int, *smaller: int) -> list[nn.Layer]:
        if not smaller:
            return twice(channels, width)
        back = nn.ConvTranspose2d(smaller[0], width, 2, stride=2, rng=rng)
        inner = nn.Sequential(nn.MaxPool2d(2), *level(width, *smaller), back)
        return [*twice(channels, width), nn.Concat(nn.Identity(), inner), *twice(2 * width, width)]

    return nn.Sequential(*level(in_channels, *widths), nn.Conv2d(widths[0], classes, 1, rng=rng))


def depthwise_1d(in_channels: int = 16, classes: int = 10, width: int = 64, blocks: int = 4) -> nn.Sequential:
    """Return a network of depthwise separable convolutions over time, series (B, in_channels, L) to logits."""
    rng = np.random.default_rng(0)
    layers: list[nn.Layer] = [nn.Conv1d(in_channels, width, 1, bias=False, rng=rng), nn.BatchNorm1d(width), nn.ReLU()]
    for _ in range(blocks):
        layers += [
            nn.Conv1d(width, width, 7, padding=3, groups=width, bias=False, rng=rng), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 1, bias=False, rng=rng), nn.BatchNorm1d(width), nn.ReLU(),
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, classes, rng=rng))


IMAGES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "LeNet-5": (partial(models.lenet5, rng=0), (1, 28, 28)), "VGG-11": (partial(models.vgg11, rng=0), (3, 32, 32)),
    "MobileNetV2-style": (partial(models.mobilenetv2, rng=0), (3, 32, 32)),
    "ResNet-8": (partial(models.resnet, depth=8, rng=0), (3, 32, 32)), "U-Net": (unet, (3, 32, 32)),
    "depthwise 1-D": (depthwise_1d, (16, 128)),
}  # fmt: skip
"""Convolutional networks: how they are made, and the shape of a sample."""


# Shared by the benchmarks of convolutional networks: twins in PyTorch, the order of batches, and training.


def torch_twin(model: nn.Sequential) -> Any:
    """Return the same chain in torch.nn, with the same weights."""
    torch = import_torch()
    twin = _torch_module(torch.nn, model).to(torch.float64 if model.dtype == np.float64 else torch.float32)
    state = model.state_dict()
    twin.load_state_dict({name: torch.as_tensor(state[name]) for name in twin.state_dict()})  # pruning masks stay here
    return twin


def _torch_module(theirs: Any, layer: nn.Layer) -> Any:
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)):
        w = layer.windows
        padding = tuple(before for before, _ in w.padding)
        return getattr(theirs, type(layer).__name__)(
            layer.in_channels, layer.out_channels, w.kernel, w.stride, padding, groups=layer.groups,
            bias="bias" in layer.params,
        )  # fmt: skip
    if isinstance(layer, nn.Sequential):
        return theirs.Sequential(*(_torch_module(theirs, child) for child in layer.children.values()))
    if isinstance(layer, (nn.Residual, nn.Concat)):
        children = {name: _torch_module(theirs, child) for name, child in layer.children.items()}
        return _branches(theirs, children, isinstance(layer, nn.Concat))
    if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
        return getattr(theirs, type(layer).__name__)(layer.num_features)
    if isinstance(layer, nn.Hardtanh):
        return theirs.Hardtanh(layer.min_val, layer.max_val)
    if isinstance(layer, (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)):
        return getattr(theirs, type(layer).__name__)(layer.output_size)
    if isinstance(layer, nn.Linear):
        return theirs.Linear(layer.in_features, layer.out_features)
    if isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d)):
        return getattr(theirs, type(layer).__name__)(layer.window.kernel, layer.window.stride)
    return getattr(theirs, type(layer).__name__)()


def _branches(theirs: Any, children: Mapping[str, Any], joined: bool) -> Any:
    """Return a module that joins or adds the outputs of others."""

    class Branches(theirs.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, child in children.items():
                self.add_module(name, child)

        def forward(self, x: Any) -> Any:
            outputs = [child(x) for child in self.children()]
            return import_torch().cat(outputs, 1) if joined else sum(outputs[1:], outputs[0])

    return Branches()


def batches(samples: int, size: int, seed: int, steps: int) -> Iterator[np.ndarray]:
    """Yield the samples of each of `steps` batches: epochs in random order, incomplete batches left out."""
    an_epoch = samples // size
    for step in range(steps):
        epoch, number = divmod(step, an_epoch)
        yield epoch_order(samples, seed=seed, epoch=epoch)[number * size : (number + 1) * size]


def step(model: nn.Sequential, optimizer: optim.Optimizer, x: Any, target: Any) -> float:
    """Run forward, cross-entropy, backward and update, layer by layer; return the loss."""
    loss = nn.CrossEntropyLoss()
    logits, saved = model.forward(x)
    value, kept = loss.forward(logits, target)
    optimizer.step(model.weight_grad(loss.input_grad(kept), saved))
    return float(value)


def train(
    model: nn.Sequential, optimizer: optim.Optimizer, data: ImageDataset, size: int, seed: int, steps: int
) -> Iterator[tuple[float, float]]:
    """Train on `batches`, a step each time: yields the loss, and the seconds that the step took without its batch."""
    for chosen in batches(len(data), size, seed, steps):
        x, target = data.batch(chosen)
        start = time.perf_counter()
        value = step(model, optimizer, x, target)
        yield value, time.perf_counter() - start


Targets = Mapping[str, float]
"""Times faster than each side."""
ONE_THREAD: Targets = {"scipy": 3, "mkl_numeric": 1.5}
TWO_THREADS: Targets = {"scipy": 6, "mkl_numeric": 1.5}
"""Of any product, whatever its structure."""
SMALL_BLOCKS: Targets = {"scipy": 10, "mkl_numeric": 1.5}
"""Of one whose patterns consist of small dense blocks, with two threads."""


@dataclass(frozen=True)
class Pair:
    """Two sparse matrices to be multiplied, as SciPy CSR arrays of float32."""

    name: str  # how tables call the product
    a: Any  # the operands
    b: Any
    targets: Targets  # of two threads, for values shared by the batch
    batch_targets: Targets | None = None  # of two threads, for values of each sample; None: not measured
    plan_targets: Targets | None = None  # of two threads, for planning and one run together; None: not measured
    alone_targets: Targets = field(default_factory=dict)  # of one thread, for values shared by the batch
    mask: Any = None  # the entries that are computed, all if None


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

    block, second = pruned_convolutions(*((2, 8, 0.5) if quick else (64, 32, 0.03)))
    yield Pair(
        "pruned conv · pruned conv", block, second, {"scipy": 16, "mkl_numeric": 2.2},
        batch_targets={"scipy": 25, "mkl_numeric": 6}, plan_targets={"scipy": 1},
    )  # fmt: skip

    for n in (50, 60) if quick else (5000, 10_000):
        density = 0.2 if quick else 0.005
        a, b = (random_rows(n, n, round(n * density), seed) for seed in (1, 2))
        yield Pair(f"random, n = {n}, {density:.1%}", a, b, {"scipy": 15, "mkl_numeric": 2.5})


def pruned_convolutions(channels: int, side: int, keep: float) -> tuple[Any, Any]:
    """Return the transposed Jacobians of a pruned convolution with its pooling, and of the next convolution.

    The first leads from `channels` to twice as many, on images of ``side / 2``; the second doubles them again.
    """
    between = 2 * channels
    first = convolution_t(channels, between, side // 2, keep=keep, seed=3)
    second = convolution_t(between, 2 * between, side // 4, keep=keep, seed=4)
    return _pooled(first, max_pool_t(between, side // 2)), second


def of_others(quick: bool) -> Iterator[Pair]:
    """Yield products of matrices that come from elsewhere: all are to reach the same."""
    import scipy.sparse as sp

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
    below = sorted_csr(sp.tril(graph + graph.T, -1))
    yield Pair("R-MAT graph, L·L ∘ L", below, below, {"scipy": 6, "graphblas": 1}, plan_targets={"graphblas": 1},
               alone_targets={"graphblas": 1}, mask=below)  # fmt: skip
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
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((channels_out, channels_in, 3, 3)).astype(np.float32)
    weight[rng.random(weight.shape) >= keep] = 0
    matrix = conv_jacobian_t(weight, (side, side), padding=1, layout=layout).to_scipy(copy=True)
    matrix.eliminate_zeros()
    return matrix


def max_pool_t(channels: int, side: int, *, layout: Literal["chw", "hwc"] = "chw", seed: int = 0) -> Any:
    """Return the transposed Jacobian of a 2×2 max-pooling: one entry an input pixel, zeros stored."""
    pattern = pool_pattern(channels, (side, side), 2, layout=layout).pattern
    return _on(pattern, (np.random.default_rng(seed).random(pattern.nnz) < 0.25).astype(np.float32))


def _pooled(convolution: Any, pool: Any) -> Any:
    """Return a matrix with random values on the pattern of the two's product."""
    pattern = plan_product(SparsityPattern.from_scipy(convolution), SparsityPattern.from_scipy(pool)).pattern
    return _on(pattern, np.random.default_rng(9).standard_normal(pattern.nnz, dtype=np.float32))


def _diagonal(n: int) -> Any:
    return _on(pointwise_pattern(n), np.ones(n, np.float32))


def _on(pattern: SparsityPattern, data: np.ndarray) -> Any:
    return TransposedJacobian(pattern, data).to_scipy()


# The networks of the benchmark in four stages, with real digits for each: SNN, VGG-11, GRU, Transformer.

STAGES = 4


@dataclass(frozen=True)
class Network:
    """A network with its data."""

    # Returns the chain of four stages, from the sizes and a generator of their initial values.
    build: Callable[..., nn.Sequential]
    # Returns the training and the test set, from the number of test samples.
    data: Callable[[int], tuple[Dataset, Dataset]]
    # Learning rates: a moderate one, and one near the highest by which synchronous training still learns.
    rates: tuple[float, float]
    sizes: Mapping[str, Any]  # arguments of `build`
    quick: Mapping[str, Any]


class Part(nn.Layer):
    """Layers one after the other as one stage: a `Sequential` would be as many stages as it has layers."""

    def __init__(self, *layers: nn.Layer) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.children = {"body": self.body}

    def forward(self, x: Array) -> tuple[Array, Any]:
        return self.body.forward(x)

    def gradients(self, gy: Array, saved: Any) -> nn.Gradients:
        """Return the layers' gradients."""
        inner = self.body.gradients(gy, saved)
        return nn.Gradients(self, gy, saved, inner.input_grad, lambda: {"body": inner})


class LastStep(nn.Layer):
    """``(T, B, n) -> (B, n)``: the last step of a sequence."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the last step of x."""
        check_input(x)
        return x[-1].copy(), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy at the last step, and zeros before it."""
        xp = check_gy(gy, saved.shape[1:], saved.dtype, saved)
        gx = xp.zeros_like(saved)
        gx[-1] = gy
        return gx


def stacked(cell: str, layers: int, hidden: int, classes: int) -> nn.Sequential:
    """Return recurrent layers one above the other, and a linear layer on the last step."""
    head = nn.Linear(hidden, classes, rng=np.random.default_rng(0))
    chain = (getattr(nn, cell)(hidden, hidden, rng=number) for number in range(layers))
    return nn.Sequential(*chain, LastStep(), head)


class BatchFirst(nn.Layer):
    """``(T, B, n) -> (B, T, n)``."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x with the batch first."""
        xp = check_input(x)
        return xp.ascontiguousarray(x.transpose(1, 0, 2)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy with the time first."""
        xp = check_gy(gy, (saved.shape[1], saved.shape[0], saved.shape[2]), saved.dtype, saved)
        return xp.ascontiguousarray(gy.transpose(1, 0, 2))


def cut(layers: Sequence[nn.Layer], begins: Sequence[int]) -> nn.Sequential:
    """Return the chain of the layers in stages that begin at these."""
    ends = [*begins[1:], len(layers)]
    return nn.Sequential(*(Part(*layers[begin:end]) for begin, end in zip(begins, ends, strict=True)))


def snn(rng: np.random.Generator, *, layers: int, width: int) -> nn.Sequential:
    """A self-normalizing network (Klambauer et al., 2017): linear layers with SELU, LeCun's initial values."""
    chain: list[nn.Layer] = [nn.Flatten()]
    for number in range(layers):
        chain += [nn.Linear(784 if number == 0 else width, width, rng=rng), nn.SELU()]
    chain.append(nn.Linear(width, 10, rng=rng))
    model = cut(chain, [0, *(1 + 2 * (layers * k // STAGES) for k in range(1, STAGES))])
    nn.init.lecun_linear(model, rng)
    return model


def vgg11(rng: np.random.Generator, *, width: float) -> nn.Sequential:
    """VGG-11 with fewer channels; two convolutions a stage."""
    layers = list(models.vgg11(1, width=width, rng=rng).children.values())
    convolutions = [number for number, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    return cut(layers, [0, *convolutions[2::2]])


def gru(rng: np.random.Generator, *, hidden: int) -> nn.Sequential:
    """Two GRU layers between a projection of the 28 rows, the steps, and a linear head."""
    seeds = map(int, rng.integers(2**31, size=2))  # a generator each: the layers are on several ranks
    layers = [nn.Linear(28, hidden, rng=rng), *(nn.GRU(hidden, hidden, rng=seed) for seed in seeds)]
    return cut([*layers, LastStep(), nn.Linear(hidden, 10, rng=rng)], [0, 1, 2, 3])


def transformer(rng: np.random.Generator, *, width: int) -> nn.Sequential:
    """Four encoder layers, one a stage, on steps of two rows; the first has the embedding with it."""
    layers = list(models.transformer_classifier(56, steps=14, width=width, rng=rng).children.values())
    return cut([BatchFirst(), *layers], [0, 4, 5, 6])


NETWORKS = {
    "SNN": Network(
        snn, lambda test: load_mnist_images(test=test), (5e-4, 1.5e-3),
        {"layers": 32, "width": 256}, {"layers": 4, "width": 16},
    ),
    "VGG-11": Network(
        vgg11, lambda test: load_mnist_images(size=32, test=test), (2e-3, 5e-3), {"width": 0.125}, {"width": 0.02},
    ),
    "GRU": Network(
        gru, lambda test: load_digits(test=test, pixels_per_step=28), (2e-2, 5e-2), {"hidden": 32}, {"hidden": 5},
    ),
    "Transformer": Network(
        transformer, lambda test: load_digits(test=test, pixels_per_step=56), (3e-3, 1e-2),
        {"width": 32}, {"width": 4},
    ),
}  # fmt: skip


# The recurrent benchmarks' workload, twice: sparsebp's classifier and its twin in PyTorch, with the same weights.
#
# A recurrent layer reads a sequence, a linear layer reads its last hidden state, softmax cross-entropy, Adam (BPPSA
# §4.1, §4.2). Both sides start from the same parameters and see the same batch, and their gradients are compared before
# anything is timed.

CELLS: dict[str, tuple[int, int]] = {"RNN": (1, 20), "GRU": (38, 20)}
"""Input and hidden size of the paper's two models (BPPSA §4.1, §4.2 with its S features)."""

SIZES = CELLS | {"LSTM": (38, 20)}
"""The same of all cells: an LSTM is as large as the GRU."""

CLASSES = 10
LEARNING_RATE = 1e-3


class SequenceWorkload:
    """One training step of a sequence classifier, ours and PyTorch's."""

    def __init__(
        self, cell: str, length: int, batch: int, *, dtype: Any = np.float32, device: str = "cpu",
        backward: str = "auto", input_size: int | None = None, hidden: int | None = None, classes: int = CLASSES,
    ) -> None:  # fmt: skip
        if cell not in SIZES:
            raise OptionError(
                "Unknown cell", expected=" or ".join(map(repr, SIZES)), got=repr(cell), remedy="Choose one"
            )
        paper_input, paper_hidden = SIZES[cell]
        input_size = input_size or paper_input
        self.cell, self.length, self.batch, self.device = cell, length, batch, device
        self.classes = classes
        self.dtype, self.input_size, self.hidden = backend.float_dtype(dtype), input_size, hidden or paper_hidden
        rng = np.random.default_rng(0)
        layer: Any = getattr(nn, cell)
        self.model: Any = nn.SequenceClassifier(
            layer(input_size, self.hidden, backward=backward, dtype=dtype, rng=rng),
            nn.Linear(self.hidden, classes, dtype=dtype, rng=rng),
        )
        self.state = {name: backend.to_host(array).copy() for name, array in self.model.state_dict().items()}
        x = rng.standard_normal((length, batch, input_size)).astype(self.dtype)
        target = rng.integers(0, classes, batch)
        self.host_batch = (x, target)
        self.model.to(device)
        self.x, self.target = backend.to_device(x, device), backend.to_device(target, device)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    # ---- ours --------------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[Any, Any]:
        """Run our forward pass and loss; return the saved values."""
        logits, saved = self.model.forward(self.x)
        _, loss_saved = self.loss.forward(logits, self.target)
        return saved, loss_saved

    def backward(self, kept: tuple[Any, Any]) -> dict[str, Any]:
        """Run our backward pass: the gradients of all parameters."""
        saved, loss_saved = kept
        return self.model.weight_grad(self.loss.input_grad(loss_saved), saved)

    def step(self) -> None:
        """Run one whole training step of ours."""
        self.optimizer.step(self.backward(self.forward()))

    @property
    def flops(self) -> int:
        """Operations of the step's matrix products, except those of the classes: forward, and back to all weights."""
        rows = {"RNN": 1, "GRU": 3, "LSTM": 4}[self.cell] * self.hidden
        return 2 * self.length * self.batch * rows * (2 * self.input_size + 3 * self.hidden)

    def choice(self) -> Any:
        """Return the choice of the recurrent layer's ``auto``, with its reason."""
        saved, _ = self.forward()
        return saved.rnn.backward_choice

    # ---- and others --------------------------------------------------------------------------------------------------

    def agreement(self, twin: TorchTwin) -> float:
        """Return `difference` from PyTorch's gradients, from the same weights."""
        return self.difference(twin.gradients(self.state))

    def difference(self, theirs: dict[str, np.ndarray]) -> float:
        """Return the largest ``‖ours − theirs‖ / ‖theirs‖`` over all parameters' gradients, at the first weights."""
        self.model.load_state_dict(self.state)
        ours = {name: backend.to_host(grad) for name, grad in self.backward(self.forward()).items()}
        return max(
            float(np.linalg.norm(ours[name] - grad) / max(np.linalg.norm(grad), np.finfo(self.dtype).tiny))
            for name, grad in theirs.items()
        )


class TorchClassifier:
    """A `torch.nn.ModuleDict` of ``rnn``, ``head``, perhaps ``embedding``; fused Adam, PyTorch's fastest."""

    def __init__(self, model: Any) -> None:
        torch = import_torch()
        self.model, self.loss = model, torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    def loss_of(self, x: Any, target: Any, lengths: Any = None) -> Any:
        """Run the forward pass and the loss, with the gradients of the last step dropped; `lengths` packs x."""
        self.optimizer.zero_grad(set_to_none=True)
        if "embedding" in self.model:
            x = self.model["embedding"](x)
        if lengths is not None:
            x = import_torch().nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        _, last = self.model["rnn"](x)
        h_n = last[0] if isinstance(last, tuple) else last  # an LSTM's (h_n, c_n)
        return self.loss(self.model["head"](h_n[-1]), target)


class TorchTwin(TorchClassifier):
    """The workload in PyTorch: ``torch.nn`` (cuDNN on a GPU)."""

    def __init__(self, workload: SequenceWorkload) -> None:
        torch = self._torch = import_torch()
        device = torch.device(workload.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise MissingDependencyError(
                "This PyTorch was built without CUDA, and the GPU benchmark compares with it",
                remedy="Install a CUDA build of PyTorch",
            )
        options = {"device": device, "dtype": torch.float32 if workload.dtype == np.float32 else torch.float64}
        rnn = getattr(torch.nn, workload.cell)(workload.input_size, workload.hidden, **options)
        head = torch.nn.Linear(workload.hidden, workload.classes, **options)
        super().__init__(torch.nn.ModuleDict({"rnn": rnn, "head": head}))
        self._load(workload.state)
        self.x, self.target = (torch.from_numpy(array).to(device) for array in workload.host_batch)

    def _load(self, state: dict[str, np.ndarray]) -> None:
        self.model.load_state_dict({name: self._torch.from_numpy(array.copy()) for name, array in state.items()})

    def forward(self) -> Any:
        """Run the forward pass and the loss, with the gradients of the last step dropped."""
        return self.loss_of(self.x, self.target)

    def step(self) -> None:
        """Run one whole training step."""
        self.backward(self.forward())
        self.optimizer.step()

    def backward(self, loss: Any) -> None:
        """Run the backward pass."""
        loss.backward()

    def gradients(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return all gradients at the parameters `state`."""
        self._load(state)
        self.backward(self.forward())
        return {name: parameter.grad.cpu().numpy() for name, parameter in self.model.named_parameters()}


def chunk_count(length: int) -> int:
    """Return the chunks that a recurrent layer takes when ``backward="chunked"`` is asked for: ``⌊√T⌋``."""
    return max(1, math.isqrt(length))
