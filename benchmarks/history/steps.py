"""Training steps, products and scans of fixed sizes. Every setup runs what is timed once, which compiles it."""

from __future__ import annotations

import numpy as np

from benchmarks import scan, spgemm, training, workloads
from sparsebp.core.threads import set_threads
from sparsebp.patterns import SparsityPattern
from sparsebp.scan import plan_scan


class RecurrentStep:
    """A classifier on 1000 time steps, batch 16: forward, and forward, cross-entropy, backward and Adam."""

    params = tuple(workloads.SIZES)
    param_names = ("cell",)

    def setup(self, cell: str) -> None:
        set_threads(1)
        self.workload = workloads.SequenceWorkload(cell, 1000, 16)
        self.workload.step()

    def time_forward(self, cell: str) -> None:
        self.workload.forward()

    def time_step(self, cell: str) -> None:
        self.workload.step()


class ConvolutionalStep:
    """A network on a batch of 8 images: forward, cross-entropy, backward and SGD with momentum."""

    params = ("LeNet-5", "VGG-11")
    param_names = ("network",)

    def setup(self, network: str) -> None:
        set_threads(1)
        make, shape = workloads.IMAGES[network]
        model = make()
        self.batch = training.batch_of(model, shape, 8)
        self.executor = training.ours(model, training.OPTIMIZER)[0]["none"]
        self.time_step(network)

    def time_step(self, network: str) -> None:
        self.executor.step([self.batch])


class SparseProduct:
    """Products of sparse matrices: the symbolic phase, and the values on the planned pattern."""

    params = ("finite elements, squared", "random, 12 entries a row")
    param_names = ("matrices",)

    def setup(self, matrices: str) -> None:
        set_threads(1)
        if matrices.startswith("random"):
            a, b = (workloads.random_rows(3000, 3000, 12, seed) for seed in (1, 2))
        else:
            a = b = workloads.finite_elements(3000)
        self.pair = workloads.Pair(matrices, a, b, {})
        self.plan, _ = spgemm.plan_pair(self.pair)
        self.out = self.plan(a.data, b.data)

    def time_plan(self, matrices: str) -> None:
        spgemm.plan_pair(self.pair)

    def time_values(self, matrices: str) -> None:
        self.plan(self.pair.a.data, self.pair.b.data, out=self.out)


class Chain:
    """A linear scan over fifty sparse matrices of 200 rows, 5 % of them filled, and one vector."""

    def setup(self) -> None:
        set_threads(1)
        matrices = scan.random_matrices(50, 200, 0.05)
        self.values = [matrix.data for matrix in matrices]
        self.plan = plan_scan([SparsityPattern.from_scipy(matrix) for matrix in matrices], "linear")
        self.g = np.ones(200, np.float32)
        self.time_scan()

    def time_scan(self) -> None:
        self.plan(self.g, self.values)
