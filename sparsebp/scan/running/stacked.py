"""Run a scan over one stack of equal dense blocks (recurrent Jacobians): a kernel call a level or chain."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.types import Array
from sparsebp.scan.planning.planned import PlannedScan
from sparsebp.scan.planning.stack_plan import Linear, Matmul, Matvec, Operation, Reduce, StackProgram
from sparsebp.scan.running.arguments import Arguments


class StackBuffers(NamedTuple):
    """Buffers of the stacked run for one shape of call.

    Attributes
    ----------
    operations
        The program's operations with index arrays where the data is.
    stacks
        Products by level, (count, size, size, width) each; width is 1 where the batch shares them.
    """

    operations: list[Operation]
    stacks: list[Array]

    @classmethod
    def make(cls, program: StackProgram, size: int, width: int, xp: ModuleType, dtype: np.dtype) -> StackBuffers:
        """Allocate the stacks and move the index arrays to where `xp` keeps its data."""
        stacks = [xp.empty((count, size, size, width), dtype=dtype) for count in program.stacks]
        return cls([_with_arrays(o, xp) for o in program.operations], stacks)


def _with_arrays(operation: Operation, xp: ModuleType) -> Operation:
    """Replace the index tuples of an operation by int64 arrays of `xp`."""
    fields: list[Any] = [v if isinstance(v, int) else backend.kept(xp, np.asarray(v, np.int64)) for v in operation]
    return type(operation)(*fields)


def run_stacked(plan: PlannedScan, arguments: Arguments, buffers: StackBuffers) -> Array:
    """Run the program on checked arguments; return y, shape (n, size, B)."""
    xp, n, size = arguments.xp, len(plan.patterns), plan.patterns[0].shape[0]
    batch, dtype = arguments.g.shape[1], arguments.g.dtype
    data = arguments.data
    y = xp.empty((n + 1, size, batch), dtype=dtype)
    y[0] = arguments.g
    run = _Run(xp, [data.reshape(n, size, size, data.shape[2]), *buffers.stacks], y, arguments.injections)
    for operation in buffers.operations:
        run(operation)
    return y[1:]


class _Run:
    """State of one run: stacks of matrices, of the vectors that belong to them, and the results so far.

    The vectors (``add``) are the b of the affine maps (A, b); without injections there are none.
    """

    def __init__(self, xp: ModuleType, stacks: list[Array], y: Array, injections: Array | None) -> None:
        self.xp, self.kernels = xp, kernels.get(xp)
        self.stacks, self.y = stacks, y
        self.adds: list[Array | None] = [injections, *[None] * (len(stacks) - 1)]

    def __call__(self, operation: Operation) -> None:
        if isinstance(operation, Matmul):
            self.matmul(operation)
        elif isinstance(operation, Matvec):
            self.matvec(operation)
        elif isinstance(operation, Linear):
            self.linear(operation)
        elif isinstance(operation, Reduce):
            self.reduce(operation)

    def vectors(self, count: int) -> Array:
        """Return a new array of `count` vectors."""
        return self.xp.empty((count, *self.y.shape[1:]), dtype=self.y.dtype)

    def matmul(self, o: Matmul) -> None:
        """Join two affine maps each: ``A = A_right A_left`` and ``b = A_right b_left + b_right``."""
        right, left, out = self.stacks[o.right], self.stacks[o.left], self.stacks[o.out]
        index = self.xp.arange(len(out), dtype=np.int64)
        self.kernels.dense_matmul(right, o.right_index, left, o.left_index, out, index)
        b_right, b_left = self.adds[o.right], self.adds[o.left]
        if b_right is not None and b_left is not None:
            b = self.adds[o.out] = self.vectors(len(out))
            self.kernels.dense_matvec(right, o.right_index, b_left, o.left_index, b_right, o.right_index, b, index)

    def matvec(self, o: Matvec) -> None:
        """Apply the maps of a level."""
        add = self.adds[o.a]
        add_index = None if add is None else o.a_index
        self.kernels.dense_matvec(self.stacks[o.a], o.a_index, self.y, o.x_index, add, add_index, self.y, o.out_index)

    def linear(self, o: Linear) -> None:
        """Apply one map after the other along every chunk."""
        a, add = self.stacks[o.a][o.first : o.last], self.adds[o.a]
        add = None if add is None else add[o.first : o.last]
        x = self.y[o.x_index]  # a copy: the chains write over their own beginnings
        if isinstance(o.out, int):
            self.kernels.dense_chain(a, o.chunk_ptr, x, add, self.y[o.out : o.out + len(a)])
        else:
            out = self.vectors(len(a))
            self.kernels.dense_chain(a, o.chunk_ptr, x, add, out)
            self.y[o.out] = out

    def reduce(self, o: Reduce) -> None:
        """Reduce chunks of the data to one map each."""
        add = self.adds[0]
        vectors = None
        if add is not None:
            add, vectors = add[o.first : o.last], self.vectors(len(self.stacks[1]))
        self.kernels.dense_reduce(self.stacks[0][o.first : o.last], o.chunk_ptr, add, self.stacks[1], vectors)
        self.adds[1] = vectors
