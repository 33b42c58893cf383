"""Running a planned scan on values: product by product, as compiled chains, or as stacks of dense blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs
from sparsebp.core.check import Array, check_integer, check_sequence
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.pattern import values_on
from sparsebp.products import ProductPlan
from sparsebp.scan.algorithms import (
    AbstractStep,
    Linear,
    Matmul,
    Matvec,
    Operation,
    Reduce,
    ScanStep,
    Span,
    StackProgram,
    critical_path,
)
from sparsebp.scan.cost import Chain, SizedRecipe, assign_slots, is_view, shared_spans
from sparsebp.scan.report import Operator, describe, plot
from sparsebp.scan.rules import Candidate, Decision, refusal


class ScanPlan:
    """A planned scan over a chain of transposed Jacobians. Made by `plan_scan`; call it with values.

    The buffers for intermediate products are kept after a call and used again by the next one with the same batch,
    dtype, device and sharing. The result vectors are new at every call; on the host small ones (4 MiB in total) are
    parts of one allocation, so copy one to release the others. Calls from several threads are safe: a second call that
    runs at the same time gets its own buffers.

    Attributes
    ----------
    patterns : tuple of SparsityPattern
        One per Jacobian, in the order of back-propagation: J_1 belongs to the last operator.
    algorithm : str
        The algorithm that runs; ``"auto"`` is resolved.
    up_levels, chunks : int or None
        Its parameter: levels of the up-sweep (hybrid), number of chunks (chunked), else None.
    levels : dict of str to int
        Number of levels by phase, as BPPSA Algorithm 1 counts them.
    flops : int
        For the whole batch, without injections.
    injection_flops : int
        FLOPs that injections at every step would add.
    memory : int
        Bytes that a call needs in addition to its arguments: intermediate products, results, index arrays of the plan.
    batch, dtype
        The sizes for which FLOPs, bytes and memory are stated. A call may have another batch and dtype.
    reason : str
        The rule by which this algorithm runs.
    compared : dict of str to float
        Parallel time, in FLOPs of one worker, of the algorithms that the rule compared; empty if there was one.
    """

    def __init__(self, decision: Decision, chain: Chain, memory_limit: int | None) -> None:
        self.sized, self.reason, self.compared = decision.sized, decision.reason, dict(decision.compared)
        self.chain, self.patterns, self.memory_limit = chain, chain.patterns, memory_limit
        recipe = self.sized.recipe
        self.algorithm, self.up_levels, self.levels = recipe.algorithm, recipe.up_levels, dict(recipe.levels)
        self.chunks = None if recipe.cuts is None else len(recipe.cuts) - 1
        self.batch, self.dtype = chain.batch, chain.dtype
        self.flops, self.memory = self.sized.flops, self.sized.memory
        self.workspaces: list[Any] = []  # buffers that calls leave for later ones

    def __getstate__(self) -> dict[str, Any]:
        """Leave the workspaces out of copies and pickles: they know by address where this plan's arrays lie."""
        return self.__dict__ | {"workspaces": []}

    @property
    def elements(self) -> tuple[Span, ...]:
        """The elements of the scan: the Jacobians, or the pieces into which they are folded."""
        ends = self.chain.ends if {"fold", "unfold"} & set(self.levels) else range(1, len(self.patterns) + 1)
        return tuple(Span(first + 1, end + 1) for first, end in zip((0, *ends), ends, strict=False))

    @cached_property
    def steps(self) -> tuple[ScanStep, ...]:
        """Every product, in the order of execution."""
        steps, counts = self.sized.recipe.steps, self.sized.counts
        path = set(critical_path(steps, [count.flops for count in counts]))
        return tuple(
            ScanStep(*step, count.flops, count.dense_flops, count.bytes, number in path)
            for number, (step, count) in enumerate(zip(steps, counts, strict=True))
        )

    @cached_property
    def critical_path(self) -> tuple[ScanStep, ...]:
        """The dependent steps with the most FLOPs in total."""
        return tuple(step for step in self.steps if step.critical)

    @property
    def injection_flops(self) -> int:
        """Operations that injections at every step add: a matrix–vector product to each product of matrices."""
        total = 0
        for step in self.sized.recipe.steps:
            right = self.sized.patterns[step.right]
            total += right.shape[0]
            if step.kind == "mm" and right.kind != "identity":
                total += 2 * right.nnz
        return total * self.batch

    @cached_property
    def lengths(self) -> np.ndarray:
        """Lengths of the first axis of a call's arguments: g, values and injections of all Jacobians, int64."""
        vectors = [p.shape[0] for p in self.patterns]
        return np.array([self.patterns[0].shape[1], *(p.nnz for p in self.patterns), *vectors], np.int64)

    @cached_property
    def axes(self) -> np.ndarray:
        """Least number of axes of the same arguments with a batch, int64. Values may be shared."""
        n = len(self.patterns)
        return np.array([2, *[1] * n, *[2] * n], np.int64)

    @cached_property
    def compiles(self) -> bool:
        """Whether the host runs chains of matrix–vector products in one call: not from 2**31 entries on."""
        return all(p.indices.dtype == np.int32 for p in self.sized.patterns.values())

    @property
    def stackable(self) -> bool:
        """Whether data may be one stacked array that runs on the dense kernels, a level per call."""
        return self.sized.stack is not None

    @cached_property
    def block(self) -> SparsityPattern | None:
        """The pattern that all Jacobians have, if it is square, so that data may be one stacked array; else None."""
        first = self.patterns[0]
        same = first.shape[0] == first.shape[1] and len({*map(id, self.patterns)}) == 1
        return first if same else None

    def describe(self, max_rows: int = 40) -> str:
        """Return a text: the choice and its reason, totals, and a table of the steps (the first `max_rows`).

        Raises
        ------
        OptionError
            `max_rows` is not an integer, or negative.
        """
        return describe(self, check_integer("max_rows", max_rows, 0))

    def plot(
        self,
        ax: Any = None,
        *,
        kind: Literal["tree", "flops"] = "tree",
        operators: Sequence[Operator] = (),
        measured: Sequence[float] | None = None,
    ) -> Any:
        """Draw the scan on a matplotlib Axes and return the Axes.

        Parameters
        ----------
        ax
            Axes to draw on; None draws on a new figure.
        kind
            ``"tree"``: the array and its levels, as in BPPSA Fig. 3. ``"flops"``: the FLOPs of every step over its
            dense complexity, as in BPPSA Fig. 10.
        operators
            For ``"flops"``: operators of plain back-propagation to show as well, each (name, FLOPs) or (name, FLOPs,
            dense FLOPs), or with `measured` (name, seconds[, dense FLOPs]).
        measured
            For ``"flops"``: seconds of every step, as `profile` returns them, drawn in place of the FLOPs.

        Raises
        ------
        OptionError
            `kind` is unknown, or an argument belongs to the other kind.
        ShapeError
            `measured` has another length than `steps`.
        MissingDependencyError
            matplotlib is not installed.
        """
        return plot(self, ax, kind, operators, measured)

    def profile(
        self, g: Array, data: Sequence[Array], injections: Sequence[Array | None] | None = None, *, repeats: int = 5
    ) -> list[float]:
        """Measure every step alone.

        Parameters
        ----------
        g, data, injections
            As in a call, with one array per Jacobian.
        repeats
            Runs after a first one that does not count; each step's shortest time is returned.

        Returns
        -------
        list of float
            Seconds of each of `steps`, on a GPU with a synchronisation after each.

        Raises
        ------
        OptionError
            `repeats` is less than 1.
        ShapeError, DTypeError, LayoutError, DeviceError, MemoryLimitError
            As in a call; ShapeError also if `data` is one stacked array, whose levels run in one kernel call each.
        """
        repeats = check_integer("repeats", repeats, 1)
        arguments = check_arguments(self, g, data, injections)
        if arguments.stacked:
            raise ShapeError(
                "Stacked data has no steps: its levels run in one kernel call each",
                expected="a list with one array per Jacobian",
                got=f"an array of shape {arguments.data.shape}",
                remedy="Pass list(data)",
            )
        stamps: list[float] = []

        def stamp() -> None:
            backend.synchronize(arguments.xp)  # synchronize!
            stamps.append(time.perf_counter())

        least = [float("inf")] * len(self.steps)
        with workspace_of(self, arguments) as workspace:
            for run in range(repeats + 1):
                stamps.clear()
                stamp()
                run_steps(self, arguments, workspace, stamp)
                if run:  # the first one compiles and warms up
                    least = [min(pair) for pair in zip(least, map(float.__sub__, stamps[1:], stamps), strict=True)]
        return least

    def __repr__(self) -> str:
        return f"ScanPlan({len(self.patterns)} Jacobians, {self.algorithm}, {self.flops} FLOP, {self.memory} bytes)"

    def __call__(
        self, g: Array, data: Sequence[Array] | Array, injections: Sequence[Array | None] | Array | None = None
    ) -> list[Array] | Array:
        """Run the scan: ``y[i] = J_i @ y[i-1] (+ injections[i])`` with ``y[-1] = g``.

        Parameters
        ----------
        g
            (n_out, B), or (n_out,) without a batch, where n_out is the number of columns of J_0.
        data
            One array per Jacobian, ``(nnz,)`` where the batch shares it or ``(nnz, B)``. If all patterns are the same
            square one, also one stacked array ``(n, nnz, B)``, or ``(n, nnz)`` shared.
        injections
            None, or one entry per Jacobian: None or an array of the shape of y[i], e.g. the gradient that arrives from
            a loss at that step. With stacked data also one stacked array.

        Returns
        -------
        list of arrays, or one array
            y[i] of shape (rows of J_i, B); without a batch (rows of J_i,). With stacked data one array (n, rows, B).

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            An argument does not fit the plan or another argument.
        MemoryLimitError
            With the batch of this call the plan exceeds its ``memory_limit``; raised before anything is allocated.
        """
        arguments = check_arguments(self, g, data, injections)
        with workspace_of(self, arguments) as workspace:
            if workspace.stack is not None:
                y: Any = run_stacked(self, arguments, workspace.stack)
            elif arguments.xp is np and self.compiles:
                if workspace.program is None:
                    batch = arguments.g.shape[1]
                    workspace.program = make_program(
                        self.sized, self.patterns, arguments.shared, batch, workspace.products
                    )
                y = run_program(self, arguments, workspace.program, workspace.products)
            else:
                y = [v if arguments.batched else v.reshape(-1) for v in run_steps(self, arguments, workspace)]
        if workspace.stack is not None:
            return y if arguments.batched else y.reshape(y.shape[:2])
        return arguments.xp.stack(y) if arguments.stacked else y


class Arguments(NamedTuple):
    """Checked arguments of one call."""

    xp: ModuleType  # that all arrays belong to
    g: Array  # (n_out, B)
    data: Any  # a list with (nnz,) or (nnz, B) per Jacobian; stacked, one array (n, nnz, B) or (n, nnz, 1)
    injections: Any  # None, or a list with None or (rows, B) per Jacobian; stacked, None or one array (n, rows, B)
    stacked: bool  # whether data came as one array
    batched: bool  # whether results keep their batch axis
    shared: bytes  # 1 where the batch shares the values of a Jacobian, else 0
    found: Array | None = None  # on the host the addresses of g, data and injections (0 for None), if they are known

    @property
    def arrays(self) -> list[Array]:
        """Values of every Jacobian, (nnz,) or (nnz, B) each."""
        if self.stacked:
            return [d[:, 0] if self.data.shape[2] == 1 else d for d in self.data]
        return list(self.data)

    @property
    def places(self) -> Array:
        """The addresses in `found`, for arrays on the host."""
        if self.found is not None:
            return self.found
        injections = () if self.injections is None else self.injections
        arrays = (self.g, *self.arrays, *injections)
        return np.array([0 if array is None else array.ctypes.data for array in arrays], np.int64)


def check_arguments(
    plan: ScanPlan, g: Array, data: Sequence[Array] | Array, injections: Sequence[Array | None] | Array | None
) -> Arguments:
    """Check the arguments of ``plan(g, data, injections)`` against the plan and against each other.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError
        See the message.
    """
    at_once = _checked_at_once(plan, g, data, injections)
    if at_once is not None:
        return at_once
    patterns = plan.patterns
    stacked = hasattr(data, "ndim")
    parts: list[Any] = [data] if stacked else _listed("data", data, "arrays")
    if len(parts) == len(patterns):
        parts = list(map(values_on, patterns, parts))
    added = {} if injections is None else {"injections": injections}
    if injections is not None and not getattr(injections, "ndim", 0):
        injections = _listed("injections", injections, "arrays or None")
        added = {f"injections[{i}]": v for i, v in enumerate(injections) if v is not None}
    xp = backend.namespace(g=g, **{f"data[{i}]": part for i, part in enumerate(parts)}, **added)
    dtype = backend.float_dtype(g.dtype)
    if g.ndim not in (1, 2):
        raise ShapeError("g has the wrong shape", expected="(n,) or (n, B)", got=g.shape, remedy="Put the batch last")
    batch = g.shape[1:]  # () without one
    backend.check_array("g", g, dtype=dtype, shape=(patterns[0].shape[1], *batch))
    if batch == (0,):
        raise ShapeError("The batch is empty", expected="at least one sample", got=g.shape, remedy="Skip empty batches")
    values: Any = _checked_stack(data, plan, batch, dtype) if stacked else parts
    if not stacked:
        _check_count("data", len(parts), len(patterns))
        for i, (d, p) in enumerate(zip(parts, patterns, strict=True)):
            shape = (p.nnz,) if d.ndim == 1 else (p.nnz, *batch)
            backend.check_array(f"data[{i}]", d, dtype=dtype, shape=shape)
    vectors = None if injections is None else _checked_injections(xp, injections, patterns, batch, dtype, stacked)
    one_for_all: Any = [values.shape[2] == 1] * len(patterns) if stacked else [d.ndim == 1 for d in parts]
    return Arguments(xp, g.reshape(-1, prod(batch)), values, vectors, stacked, bool(batch), bytes(one_for_all))


_PLAIN, _PLAIN_OR_NONE = {np.ndarray}, {np.ndarray, type(None)}


def _checked_at_once(plan: ScanPlan, g: Any, data: Any, injections: Any) -> Arguments | None:
    """Check lists of plain arrays of the host in one compiled call; None where something is, or may be, wrong."""
    if type(g) is not np.ndarray or g.ndim not in (1, 2) or g.dtype not in backend.FLOAT_DTYPES or 0 in g.shape[1:]:
        return None
    n, batched = len(plan.patterns), g.ndim == 2
    for given in (data,) if injections is None else (data, injections):
        if type(given) not in (list, tuple) or len(given) != n:
            return None
    arrays = [g, *data]
    if {*map(type, arrays)} != _PLAIN or not {*map(type, injections or ())} <= _PLAIN_OR_NONE:
        return None
    arrays += injections or ()
    count, batch = len(arrays), g.shape[1] if batched else 1
    found = kernels.on_host().find(arrays, plan.lengths[:count], plan.axes[:count], g.ndim, batch, g.dtype)
    if found is None:
        return None
    places, vectors = found.places, None
    if injections is not None:
        vectors = [None if v is None else v.reshape(-1, batch) for v in injections]
        if all(v is None for v in vectors):
            places, vectors = places[: 1 + n], None
    shared = (~found.wide[1 : 1 + n]).tobytes()
    return Arguments(np, g.reshape(-1, batch), arrays[1 : 1 + n], vectors, False, batched, shared, places)


def _listed(name: str, value: Any, of: str) -> list[Any]:
    try:
        return check_sequence(name, value, of)
    except OptionError as error:
        raise ShapeError(error.problem, expected=error.expected, got=error.got, remedy=error.remedy) from error


def _checked_stack(data: Array, plan: ScanPlan, batch: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return one stacked array of data as (n, nnz, B), or (n, nnz, 1) where the batch shares it."""
    n, block = len(plan.patterns), plan.block
    if block is None:
        raise ShapeError(
            "One stacked data array needs Jacobians that all have the same square pattern",
            expected="a list with one array per Jacobian",
            got=f"an array of shape {data.shape}",
        )
    shape = (n, block.nnz) if data.ndim == 2 else (n, block.nnz, *batch)
    backend.check_array("data", data, dtype=dtype, shape=shape)
    return data.reshape(n, block.nnz, 1 if data.ndim == 2 else prod(batch))


def _checked_injections(
    xp: ModuleType, injections: Any, patterns: Sequence[SparsityPattern], batch: tuple[int, ...], dtype: np.dtype,
    stacked: bool,
) -> Any:  # fmt: skip
    """Return the injections with a batch axis: a list, or stacked one array; None if nothing is injected."""
    n, width = len(patterns), prod(batch)
    if stacked and hasattr(injections, "ndim"):
        size = patterns[0].shape[0]
        backend.check_array("injections", injections, dtype=dtype, shape=(n, size, *batch))
        return injections.reshape(n, size, width)
    _check_count("injections", len(injections), n)
    for i, (v, p) in enumerate(zip(injections, patterns, strict=True)):
        if v is not None:
            backend.check_array(f"injections[{i}]", v, dtype=dtype, shape=(p.shape[0], *batch))
    vectors = [None if v is None else v.reshape(-1, width) for v in injections]
    if all(v is None for v in vectors):
        return None
    if not stacked:
        return vectors
    whole = xp.zeros((n, patterns[0].shape[0], width), dtype=dtype)
    for at, v in zip(whole, vectors, strict=True):
        if v is not None:
            at[...] = v
    return whole


def _check_count(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ShapeError(
            f"{name} has the wrong length",
            expected=f"{expected} entries, one per Jacobian of the plan",
            got=got,
            remedy="Pass None for a step without injection" if name == "injections" else None,
        )


# The products of a scan one by one: a matrix with a vector, and two affine maps joined.


class Multiply:
    """``A @ x + add`` into a new array; the identity is not multiplied with."""

    def __init__(self, like: Array) -> None:
        self.xp = backend.namespace(like)
        self.kernels, self.batch, self.dtype = kernels.get(self.xp), like.shape[1], like.dtype

    def __call__(self, pattern: SparsityPattern, data: Array, x: Array, add: Array | None) -> Array:
        """Return the product with x (columns, B), of data (nnz,) or (nnz, B)."""
        if pattern.kind == "identity":
            return x.copy() if add is None else x + add
        out = self.xp.empty((pattern.shape[0], self.batch), dtype=self.dtype)
        indptr, indices = pattern.device_arrays(self.xp)
        values = data.reshape(-1, 1) if data.ndim == 1 else data
        self.kernels.csr_matvec(indptr, indices, values, x, out, add)
        return out


class Maps:
    """The affine maps of a call by their spans: values of matrices, and the vectors that they add.

    `products` are the buffers of intermediate products.
    """

    def __init__(
        self, data: list[Array], injections: list[Array | None] | None, products: Mapping[Span, Array],
        multiply: Multiply,
    ) -> None:  # fmt: skip
        self.matrices = {Span(i + 1, i + 2): d for i, d in enumerate(data)}
        self.offsets: dict[Span, Array | None] = {}
        if injections is not None:
            self.offsets = {Span(i + 1, i + 2): v for i, v in enumerate(injections)}
        self.products, self.multiply = products, multiply

    def join(self, step: AbstractStep, product: ProductPlan, pattern: SparsityPattern) -> None:
        """Join two maps to ``A_right A_left`` and ``A_right b_left + b_right``; `pattern` belongs to A_right."""
        left, right = self.matrices[step.left], self.matrices[step.right]
        if is_view(product):
            self.matrices[step.target] = left if pattern.kind == "identity" else right
        else:
            out = self.matrices[step.target] = self.products[step.target]
            if out.size:
                operands, k = product.operands(self.multiply.xp), self.multiply.kernels
                product.how.run(k, operands, *(a.reshape(len(a), -1) for a in (right, left, out)))
        b_left, b_right = self.offsets.get(step.left), self.offsets.get(step.right)
        added = b_right if b_left is None else self.multiply(pattern, right, b_left, b_right)
        self.offsets[step.target] = added


# A scan on the host: every chain of matrix–vector products in one compiled call.
#
# A step of the linear scan may take a microsecond, and a kernel call from Python about six. So the steps are written
# to a table once for each shape of call (`sparsebp.kernels.host.sparse.csr`), and a call fills in addresses.


TOGETHER = 1 << 22
"""Bytes of results up to which they are parts of one allocation: fresh pages of memory cost more than a step."""


class Program(NamedTuple):
    """The table of a scan for one shape of call. It belongs to a workspace, so only one call writes to it at a time.

    `places` are int64 addresses of arrays, in this order: nothing, g, values of the Jacobians, injections, results,
    intermediate products, and the vectors that these add.
    """

    table: Array  # (vector steps, fields) int64: a row for each, in the order of execution
    places: Array
    segments: list[tuple[list[int], int, int]]  # matrix steps, and the range of the vector steps that follow them
    ends: Array  # first rows of the results in one array, (n + 1,)
    slices: list[slice]  # the rows of each result
    most_parts: int  # the largest number of parts into which a step is split
    added: list[tuple[Span, int]]  # span of each intermediate product, and the position in `places` of what it adds
    indices: list[Array]  # named by the table, kept alive: another thread may make a pattern's `fours` anew


def make_program(sized: SizedRecipe, patterns: tuple[SparsityPattern, ...], shared: bytes, batch: int,
                 products: dict[Span, Array]) -> Program:  # fmt: skip
    """Lay a recipe out for a batch and a sharing, with the buffers of its intermediate products."""
    chain, n = kernels.on_host().csr, len(patterns)
    is_shared = shared_spans(sized.recipe.steps, patterns, [flag == 1 for flag in shared])
    data = {Span(i + 1, i + 2): 2 + i for i in range(n)}
    add = {Span(i + 1, i + 2): 2 + n + i for i in range(n)}
    vectors = {Span(0, i + 2): 2 + 2 * n + i for i in range(n)} | {Span(0, 1): 1}
    places, known = [0] * (2 + 3 * n), len(products)
    for number, (span, array) in enumerate(products.items()):
        data[span] = 2 + 3 * n + number
        places.append(array.ctypes.data)
    joined = [step.target for step in sized.recipe.steps if step.kind == "mm"]
    add |= {span: 2 + 3 * n + known + number for number, span in enumerate(joined)}
    rows: list[tuple[int, ...]] = []
    indices: list[Array] = []
    segments: list[tuple[list[int], int, int]] = []
    before: list[int] = []
    first = 0
    for number, (step, product) in enumerate(zip(sized.recipe.steps, sized.plans, strict=True)):
        right = sized.patterns[step.right]
        if step.kind == "mm":
            if len(rows) > first:
                segments.append((before, first, len(rows)))
                before, first = [], len(rows)
            before.append(number)
            if is_view(product):
                data[step.target] = data[step.left if right.kind == "identity" else step.right]
            continue
        names = (data[step.right], vectors[step.left], vectors[step.target], add[step.right])
        matrix, arrays = _of_matrix(chain, right, is_shared[step.right], batch)
        rows.append((*matrix, *names))
        indices += arrays
    segments.append((before, first, len(rows)))
    ends = np.concatenate(([0], np.cumsum([p.shape[0] for p in patterns])))
    slices = [slice(int(low), int(high)) for low, high in pairwise(ends)]
    table = np.array(rows, np.int64).reshape(len(rows), len(chain.FIELDS))
    table[:, chain.PARTS] = chain.parts_of_steps(table, batch)
    addresses = np.array([*places, *[0] * len(joined)], np.int64)
    most_parts = int(table[:, chain.PARTS].max(initial=1))
    added = [(span, add[span]) for span in joined]
    return Program(table, addresses, segments, ends, slices, most_parts, added, indices)


def _of_matrix(
    chain: Any, pattern: SparsityPattern, shared: bool, batch: int
) -> tuple[tuple[int, ...], tuple[Array, Array]]:
    """Return the columns of a table for a matrix, and the index arrays whose addresses they hold."""
    (rows, columns), kind, index = pattern.shape, chain.ROWS, pattern.indptr
    if pattern.kind == "identity":
        kind = chain.IDENTITY
    elif batch == 1 and pattern.kind in ("dense", "diagonal"):
        kind = chain.DENSE if pattern.kind == "dense" else chain.DIAGONAL
    elif batch == 1:
        kind, index = chain.FOURS, pattern.fours
    where = index.ctypes.data, pattern.indices.ctypes.data
    return (kind, rows, columns, pattern.nnz, *where, not shared and batch > 1, 1), (index, pattern.indices)


def run_program(plan: ScanPlan, arguments: Arguments, program: Program, products: dict[Span, Array]) -> list[Array]:
    """Run every step; return the results, with a batch axis if g was given one."""
    sized, g, n, maps = plan.sized, arguments.g, len(plan.patterns), None
    places, given, run_chain = program.places, arguments.places, kernels.on_host().csr.run_chain
    places[1 : 1 + len(given)] = given
    places[1 + len(given) : 2 + 2 * n] = 0  # no injections
    results = _results(program, arguments)
    for matrix_steps, first, last in program.segments:
        if matrix_steps:
            maps = maps or Maps(arguments.arrays, arguments.injections, products, Multiply(g))
            for number in matrix_steps:
                step = sized.recipe.steps[number]
                maps.join(step, sized.plans[number], sized.patterns[step.right])
            for span, place in program.added:
                vector = maps.offsets.get(span)
                places[place] = 0 if vector is None else vector.ctypes.data
        run_chain(program.table[first:last], program.most_parts, places, g.shape[1], g.dtype)
    return results


def _results(program: Program, arguments: Arguments) -> list[Array]:
    """Allocate the results and store their addresses. Small ones are parts of one array of whole cache lines."""
    g, n = arguments.g, len(program.slices)
    total, batch = program.slices[-1].stop, g.shape[1]
    shape = (batch,) if arguments.batched else ()
    where = program.places[2 + 2 * n : 2 + 3 * n]
    if total * batch * g.dtype.itemsize <= TOGETHER:
        chain = kernels.on_host().csr
        whole = np.empty(total * batch + chain.SPARE, g.dtype)
        skipped = chain.lay_out(whole, program.ends, batch, where)
        whole = whole[skipped : skipped + total * batch].reshape(total, *shape)
        return [whole[rows] for rows in program.slices]
    results = [np.empty((rows.stop - rows.start, *shape), g.dtype) for rows in program.slices]
    where[:] = [array.ctypes.data for array in results]
    return results


# A scan over one stack of equal dense blocks (recurrent Jacobians): a kernel call per level or chain.


class StackBuffers(NamedTuple):
    """Buffers of the stacked run for one shape of call."""

    operations: list[Operation]  # of the program, with index arrays on the device of the data
    stacks: list[Array]  # products by level, (count, size, size, width); width is 1 where the batch shares them

    @classmethod
    def make(cls, program: StackProgram, size: int, width: int, xp: ModuleType, dtype: np.dtype) -> StackBuffers:
        """Allocate the stacks and move the index arrays to the current device of `xp`."""
        stacks = [xp.empty((count, size, size, width), dtype=dtype) for count in program.stacks]
        return cls([_with_arrays(o, xp) for o in program.operations], stacks)


def _with_arrays(operation: Operation, xp: ModuleType) -> Operation:
    """Replace the index tuples of an operation by int64 arrays of `xp`."""
    fields: list[Any] = [v if isinstance(v, int) else graphs.kept(xp, np.asarray(v, np.int64)) for v in operation]
    return type(operation)(*fields)


def run_stacked(plan: ScanPlan, arguments: Arguments, buffers: StackBuffers) -> Array:
    """Run the program on checked arguments; return y, shape (n, size, B)."""
    xp, n, size, data = arguments.xp, len(plan.patterns), plan.patterns[0].shape[0], arguments.data
    k, batch, dtype = kernels.get(xp).unchecked, arguments.g.shape[1], arguments.g.dtype  # the arguments are checked
    y = xp.empty((n + 1, size, batch), dtype=dtype)
    y[0] = arguments.g
    stacks = [data.reshape(n, size, size, data.shape[2]), *buffers.stacks]
    adds: list[Array | None] = [arguments.injections, *[None] * len(buffers.stacks)]  # the b of affine maps (A, b)
    for o in buffers.operations:
        if type(o) is Matvec:
            add = adds[o.a]
            k.dense_matvec(
                stacks[o.a], o.a_index, y, o.x_index, add, None if add is None else o.a_index, y, o.out_index
            )
        elif type(o) is Matmul:  # A = A_right A_left, b = A_right b_left + b_right
            right, left, out = stacks[o.right], stacks[o.left], stacks[o.out]
            index = xp.arange(len(out), dtype=np.int64)
            k.dense_matmul(right, o.right_index, left, o.left_index, out, index)
            b_right, b_left = adds[o.right], adds[o.left]
            if b_right is not None and b_left is not None:
                b = adds[o.out] = xp.empty((len(out), size, batch), dtype=dtype)
                k.dense_matvec(right, o.right_index, b_left, o.left_index, b_right, o.right_index, b, index)
        elif type(o) is Linear:
            a, add = stacks[o.a][o.first : o.last], adds[o.a]
            add = None if add is None else add[o.first : o.last]
            x = y[o.x_index]  # a copy: the chains write over their own beginnings
            whole = isinstance(o.out, int)
            out = y[o.out : o.out + len(a)] if whole else xp.empty((len(a), size, batch), dtype=dtype)  # type: ignore[operator]
            k.dense_chain(a, o.chunk_ptr, x, add, out)
            if not whole:
                y[o.out] = out
        elif type(o) is Reduce:
            a, add, vectors = stacks[0][o.first : o.last], adds[0], None
            if add is not None:
                add, vectors = add[o.first : o.last], xp.empty((len(stacks[1]), size, batch), dtype=dtype)
            k.dense_reduce(a, o.chunk_ptr, add, stacks[1], vectors)
            adds[1] = vectors
    return y[1:]


_HOST = "numpy", "cpu", None
KEPT_WORKSPACES = 2
"""Workspaces that a plan keeps: for a batch size, and for a last, smaller batch."""


@dataclass
class Workspace:
    """Buffers of one call's shape, kept by the plan between calls."""

    key: tuple[Any, ...]  # array module, device, dtype, batch, sharing, stacked or not
    products: dict[Span, Array]  # intermediate products; those that do not live at the same time share memory
    stack: StackBuffers | None = None  # of the stacked run
    program: Program | None = None  # the table that the host runs, made by its first call


@contextmanager
def workspace_of(plan: ScanPlan, arguments: Arguments) -> Iterator[Workspace]:
    """Lend a workspace that fits the call, and keep it for the next one; after an error it is dropped.

    A captured call has its own, in the memory of the graph.
    """
    workspace = _take_workspace(plan, arguments)
    yield workspace
    if graphs.is_recorded():
        return
    plan.workspaces.append(workspace)
    del plan.workspaces[:-KEPT_WORKSPACES]


def _take_workspace(plan: ScanPlan, arguments: Arguments) -> Workspace:
    """Take a fitting workspace out of the plan, or make one; while it is out, no other call can write to it."""
    xp, g = arguments.xp, arguments.g
    sized, batch, shared = plan.sized, g.shape[1], arguments.shared
    stack = sized.stack if arguments.stacked else None
    device = _HOST if xp is np else (xp.__name__, str(g.device), graphs.order_of(xp))
    key = (*device, g.dtype, batch, shared, stack is not None)
    for kept in () if graphs.is_recorded() else list(plan.workspaces):
        if kept.key == key:
            try:
                plan.workspaces.remove(kept)
            except ValueError:  # another thread took it first
                continue
            return kept
    if stack is not None:
        size, width = plan.patterns[0].shape[0], 1 if shared[0] else batch
        _check_limit(plan, g, stack.values(size, width, batch) * g.dtype.itemsize)
        return Workspace(key, {}, StackBuffers.make(stack, size, width, xp, g.dtype))
    is_shared = shared_spans(sized.recipe.steps, plan.patterns, [flag == 1 for flag in shared])
    slots, capacities = assign_slots(sized.recipe.steps, sized.plans, sized.patterns, is_shared, batch)
    _check_limit(plan, g, sum(capacities) * g.dtype.itemsize)
    memory = [xp.empty(c, dtype=g.dtype) for c in capacities]
    products = {}
    for span, slot in slots.items():
        nnz = sized.patterns[span].nnz
        shape = (nnz,) if is_shared[span] else (nnz, batch)
        products[span] = memory[slot][: prod(shape)].reshape(shape)
    return Workspace(key, products)


def _check_limit(plan: ScanPlan, g: Array, workspace: int) -> None:
    """Refuse a call whose batch takes the plan beyond its limit, before buffers are allocated."""
    if plan.memory_limit is None:
        return
    results = sum(p.shape[0] for p in plan.patterns) * g.shape[1] * g.dtype.itemsize
    need = workspace + results + plan.sized.index
    if need > plan.memory_limit:
        recipe = plan.sized.recipe
        candidate = Candidate(recipe.algorithm, recipe.up_levels, plan.chunks)
        chain = replace(plan.chain, batch=g.shape[1], dtype=g.dtype)
        problem = MemoryLimitError(
            f"The {recipe.algorithm} scan needs more memory than memory_limit for a batch of {g.shape[1]}",
            got=f"{need} bytes",
        )
        raise refusal(candidate, chain, plan.memory_limit, problem)


def run_steps(
    plan: ScanPlan, arguments: Arguments, workspace: Workspace, done: Callable[[], None] | None = None
) -> list[Array]:
    """Run every step by its own kernel call, and call `done` after each."""
    sized, g = plan.sized, arguments.g
    maps = Maps(arguments.arrays, arguments.injections, workspace.products, Multiply(g))
    vectors = {Span(0, 1): g}
    for step, product in zip(sized.recipe.steps, sized.plans, strict=True):
        pattern = sized.patterns[step.right]
        if product is None:
            values, add = maps.matrices[step.right], maps.offsets.get(step.right)
            vectors[step.target] = maps.multiply(pattern, values, vectors[step.left], add)
        else:
            maps.join(step, product, pattern)
        if done is not None:
            done()
    return [vectors[Span(0, i + 2)] for i in range(len(plan.patterns))]
