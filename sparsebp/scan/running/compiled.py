"""A scan on the host: every stretch of matrix–vector products in one compiled call.

A step of the linear scan may take a microsecond, and a kernel call from Python some six. So the steps are laid out as a
table once for each shape of call, see `sparsebp.kernels.host.sparse.chain`, and a call fills in where its arrays lie.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core.types import Array
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.planned import PlannedScan
from sparsebp.scan.planning.sizing import SizedRecipe, is_view, shared_spans
from sparsebp.scan.running.arguments import Arguments
from sparsebp.scan.running.multiply import Maps, Multiply
from sparsebp.scan.steps import Span

TOGETHER = 1 << 22
"""Bytes of results up to which they are parts of one allocation. Page by page, fresh memory costs more than a step."""


class Program(NamedTuple):
    """What a scan does for one shape of call. Belongs to a workspace, so that one call at a time writes to it.

    Attributes
    ----------
    table
        (vector steps, fields) int64: a row for each, in the order of execution.
    places
        int64: where arrays lie, in this order: nothing, g, values of the Jacobians, injections, results, intermediate
        products, and the vectors that these add.
    stretches
        Vector steps that follow each other, as (first, last + 1), and the matrix steps before them by their numbers.
    ends
        Rows of the results up to each, (n + 1,).
    slices
        The rows of each.
    most_parts
        Into how many parts a step is split at most.
    added
        Of each intermediate product that a vector step reads: its span, and its place among the added vectors.
    indices
        The index arrays whose addresses the table holds: another thread may make a pattern's `fours` anew.
    """

    table: Array
    places: Array
    stretches: list[tuple[list[int], int, int]]
    ends: Array
    slices: list[slice]
    most_parts: int
    added: list[tuple[Span, int]]
    indices: list[Array]


def make_program(sized: SizedRecipe, patterns: tuple[SparsityPattern, ...], shared: bytes, batch: int,
                 products: dict[Span, Array]) -> Program:  # fmt: skip
    """Lay a recipe out for a batch and a sharing, with the buffers of its intermediate products."""
    chain, n = kernels.on_host().chain, len(patterns)
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
    stretches: list[tuple[list[int], int, int]] = []
    before: list[int] = []
    first = 0
    for number, (step, product) in enumerate(zip(sized.recipe.steps, sized.plans, strict=True)):
        right = sized.patterns[step.right]
        if step.kind == "mm":
            if len(rows) > first:
                stretches.append((before, first, len(rows)))
                before, first = [], len(rows)
            before.append(number)
            if is_view(product):
                data[step.target] = data[step.left if right.kind == "identity" else step.right]
            continue
        names = (data[step.right], vectors[step.left], vectors[step.target], add[step.right])
        matrix, arrays = _of_matrix(chain, right, is_shared[step.right], batch)
        rows.append((*matrix, *names))
        indices += arrays
    stretches.append((before, first, len(rows)))
    ends = np.concatenate(([0], np.cumsum([p.shape[0] for p in patterns])))
    slices = [slice(int(low), int(high)) for low, high in pairwise(ends)]
    table = np.array(rows, np.int64).reshape(len(rows), len(chain.FIELDS))
    addresses = np.array([*places, *[0] * len(joined)], np.int64)
    most_parts = int(table[:, chain.PARTS].max(initial=1))
    added = [(span, add[span]) for span in joined]
    return Program(table, addresses, stretches, ends, slices, most_parts, added, indices)


def _of_matrix(
    chain: Any, pattern: SparsityPattern, shared: bool, batch: int
) -> tuple[tuple[int, ...], tuple[Array, Array]]:
    """Return the columns of a table that a matrix fills, and the arrays whose addresses they hold."""
    (rows, columns), kind, index = pattern.shape, chain.ROWS, pattern.indptr
    if pattern.kind == "identity":
        kind = chain.IDENTITY
    elif batch == 1 and pattern.kind in ("dense", "diagonal"):
        kind = chain.DENSE if pattern.kind == "dense" else chain.DIAGONAL
    elif batch == 1:
        kind, index = chain.FOURS, pattern.fours
    where = index.ctypes.data, pattern.indices.ctypes.data
    parts = chain.parts_of_step(kind, pattern.nnz, rows, batch)
    return (kind, rows, columns, pattern.nnz, *where, not shared and batch > 1, parts), (index, pattern.indices)


def run_program(plan: PlannedScan, arguments: Arguments, program: Program, products: dict[Span, Array]) -> list[Array]:
    """Run every step; return the results, with a batch axis if g was given one."""
    sized, g, n, maps = plan.sized, arguments.g, len(plan.patterns), None
    places, given, run_chain = program.places, arguments.places, kernels.on_host().chain.run_chain
    places[1 : 1 + len(given)] = given
    places[1 + len(given) : 2 + 2 * n] = 0  # no injections
    results = _results(program, arguments)
    for matrix_steps, first, last in program.stretches:
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
    """Allocate the results, and write down where they lie. Small ones are parts of one array of whole cache lines."""
    g, n = arguments.g, len(program.slices)
    total, batch = program.slices[-1].stop, g.shape[1]
    shape = (batch,) if arguments.batched else ()
    where = program.places[2 + 2 * n : 2 + 3 * n]
    if total * batch * g.dtype.itemsize <= TOGETHER:
        chain = kernels.on_host().chain
        whole = np.empty(total * batch + chain.SPARE, g.dtype)
        skipped = chain.lay_out(whole, program.ends, batch, where)
        whole = whole[skipped : skipped + total * batch].reshape(total, *shape)
        return [whole[rows] for rows in program.slices]
    results = [np.empty((rows.stop - rows.start, *shape), g.dtype) for rows in program.slices]
    where[:] = [array.ctypes.data for array in results]
    return results
