"""Arrays that travel together, through the checks to the kernels of host and device; all are C-contiguous.

`WeightSums` is of a recurrence. The others are index arrays, from a product's plan: of C = A @ B with A (m, k) and
B (k, n). ``index`` is int32 or int64, the same in all tuples of a call; ``position`` is uint16 or uint32. Every one of
them but `Rows` and `RowShapes` ends with what the host shares its work by: `row_cuts` (n_parts + 1,) int64 splits the
rows of C (of `Pairs`, tiles) into parts of about equal work, fixed by the plan.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.backend import FLOAT_DTYPES, INDEX_DTYPES, check_array, namespace
from sparsebp.core.check import Array
from sparsebp.core.errors import DTypeError, ShapeError

# What the checks of arguments share: quick tests that pass in a fraction of a microsecond, the full error behind them.
#
# They look at dtypes, shapes and layout, never at values: that would cost a pass over the data (on a device a
# synchronisation) at every call. What indices hold is checked where a pattern is made.

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
UINT16, UINT32, UINT64 = (np.dtype(kind) for kind in (np.uint16, np.uint32, np.uint64))
POSITION_DTYPES = (UINT16, UINT32)


class Family:
    """Some kernels that belong together: each method checks its arguments, then calls the implementation's.

    Parameters
    ----------
    run
        `sparsebp.kernels.host.HostKernels` or `sparsebp.kernels.device.DeviceKernels`. Their methods have the names and
        arguments of those here, and look at nothing.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def unchecked(self) -> Any:
        """The host's kernels without their checks, for arrays that a caller has looked at; on a device, these.

        Every argument has to be given; None stands for what is the default here.
        """
        return self._run if self._run.unchecked else self


def exact(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Check dtype, shape and C-contiguity of one array that is read.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        From `sparsebp.core.backend.check_array`, which words the error.
    """
    if getattr(array, "shape", None) == shape and array.dtype == dtype and array.flags.c_contiguous:
        return
    check_array(name, array, dtype=dtype, shape=shape)


def written(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Check one array as `exact` does, and that it may be written."""
    exact(name, array, dtype, shape)
    if not getattr(array.flags, "writeable", True):
        check_array(name, array, written=True)


def rank(name: str, array: Array, ndim: int) -> tuple[int, ...]:
    """Return the shape of `array`, after checking that it has `ndim` axes."""
    if getattr(array, "ndim", None) != ndim:
        check_array(name, array, shape=(None,) * ndim, contiguous=False)
    return array.shape


def real_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of `array`, after checking that it is one that kernels take.

    Raises
    ------
    DTypeError
        It is neither float32 nor float64.
    """
    if getattr(array, "dtype", bool) not in FLOAT_DTYPES:
        _wrong_dtype(name, array, "float32 or float64")
    return array.dtype


def index_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of an index array, after checking that it is int32 or int64."""
    if getattr(array, "dtype", bool) not in INDEX_DTYPES:
        _wrong_dtype(name, array, "int32 or int64")
    return array.dtype


def position_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of an array of output positions, after checking that it is uint16 or uint32."""
    if getattr(array, "dtype", bool) not in POSITION_DTYPES:
        _wrong_dtype(name, array, "uint16 or uint32")
    return array.dtype


def word_dtype(name: str, array: Array) -> np.dtype:
    """Return the dtype of an array of words that name two entries, after checking that it is uint32 or uint64."""
    if getattr(array, "dtype", bool) not in (UINT32, UINT64):
        _wrong_dtype(name, array, "uint32 or uint64")
    return array.dtype


def rows_of(name: str, indptr: Array) -> int:
    """Return the number of rows that `indptr` describes.

    Raises
    ------
    ShapeError
        It is not one-dimensional, or empty (even without rows it holds one zero).
    """
    (length,) = rank(name, indptr, 1)
    if length == 0:
        raise ShapeError(
            f"{name} is empty", expected="n_rows + 1 entries", got="0", remedy="Start it with a zero, also for no rows"
        )
    return length - 1


def batch_of(**arrays: Array) -> int:
    """Return the batch size of operands whose last axis is 1 (shared) or B (per sample).

    Raises
    ------
    ShapeError
        Two operands have different batch sizes, neither of them 1.
    """
    batch = 1
    for array in arrays.values():
        length = array.shape[-1]
        if length in (1, batch):
            continue
        if batch != 1:
            raise ShapeError(
                "Operands have different batch sizes",
                expected="a last axis of 1 or of one batch size B in all",
                got=", ".join(f"{name} {value.shape}" for name, value in arrays.items()),
                remedy="Pass values for the same samples, or shared values with a last axis of 1",
            )
        batch = length
    return batch


def batched(name: str, array: Array, dtype: Any, lead: tuple[int, ...], batch: int) -> None:
    """Check an array of shape ``(*lead, B*)``: values per sample, or shared by the batch."""
    shared = array.ndim == len(lead) + 1 and array.shape[-1] == 1
    exact(name, array, dtype, (*lead, 1 if shared else batch))


def _wrong_dtype(name: str, array: Array, expected: str) -> None:
    namespace(**{name: array})
    raise DTypeError(
        f"{name} has the wrong dtype",
        expected=expected,
        got=array.dtype,
        remedy=f"Convert it with {name}.astype(...); nothing is converted silently",
    )


# NAdam's momenta: plain numbers, for whoever works them out on the host.

_TERMS = 52
"""Of a series whose k-th term is below 2⁻ᵏ."""


def momenta(beta1: float, momentum_decay: float, step: float) -> tuple[float, float, float]:
    """Return NAdam's momentum of a step, of the next one, and the product of all up to this one.

    Step i has the momentum β₁ (1 − q^i / 2) with q = 0.96^momentum_decay, so the product needs the sum of
    log(1 − q^i / 2), which is −Σₖ 2⁻ᵏ/k Σᵢ q^(ki), and the inner sum is geometric. So nothing has to be kept from step
    to step. Numerators and denominators of the inner sums, 1 − q^(kn) and 1 − q^k, grow from term to term without
    cancellation.
    """
    slope = momentum_decay * math.log(0.96)
    q, last = math.exp(slope), math.exp(slope * step)
    first_gap, all_gaps = -math.expm1(slope), -math.expm1(slope * step)
    total, power, gap, gaps = 0.0, 1.0, 0.0, 0.0
    for k in range(1, _TERMS + 1):
        power *= 0.5 * q
        gap, gaps = first_gap + q * gap, all_gaps + last * gaps
        total -= power / k * (gaps / gap if first_gap > 0.0 else step)
    product = beta1**step * math.exp(total)
    return beta1 * (1.0 - 0.5 * last), beta1 * (1.0 - 0.5 * last * q), product


class Rows(NamedTuple):
    """Gustavson's algorithm: entries of A name rows of B, whose sum is a row of C.

    Attributes
    ----------
    a_indptr, a_indices, b_indptr, c_indptr
        Of the patterns: (m + 1,), (nnz_a,), (k + 1,), (m + 1,) index.
    """

    a_indptr: Array
    a_indices: Array
    b_indptr: Array
    c_indptr: Array


PAGE = 1024
"""Columns behind which `RowShapes` may leave a gap."""


class RowShapes(NamedTuple):
    """Rows of A that share few shapes, each of which is runs of neighbouring columns, counted from the row's first.

    Attributes
    ----------
    indptr
        (m + 1,) index: A's.
    shape, first
        (m,) int32, (m,) index: number of every row's shape, and its first column (0 where it has no entries).
    run_ptr, whole
        (n_shapes + 1,), (n_shapes,) int64: shape s has the runs u from ``run_ptr[s]`` to ``run_ptr[s + 1] - 1``. Those
        before ``whole[s]`` can be gone through four entries at a time: what is beyond the run's end is of the same row
        of A, and there are as many columns up to the row's last one.
    run_columns, run_ends
        (n_runs,) int32: the column where the run begins, and how many entries the row has up to the run's end.
    gap
        Where it is not 0, `first` and `run_columns` are of columns that are numbered with so many left out behind every
        `PAGE`: the values of B are copied to such places first. Channels of as many bytes as a page of memory, or
        several, would all compete for the same few places of the innermost cache.
    """

    indptr: Array
    shape: Array
    first: Array
    run_ptr: Array
    whole: Array
    run_columns: Array
    run_ends: Array
    gap: int


class Places(NamedTuple):
    """Where every product lands.

    Products of row r are numbered in the order of Gustavson's algorithm (entries k of row r of A, for each the
    entries q of row ``a_indices[k]`` of B), from ``product_ptr[r]`` on.

    Attributes
    ----------
    product_ptr
        (m + 1,) int64.
    positions
        (n_products,) position: product p of row r is added to entry ``c_indptr[r] + positions[p]`` of C.
    """

    product_ptr: Array
    positions: Array
    row_cuts: Array


class Terms(NamedTuple):
    """Products of single entries, those of row r of C from ``product_ptr[r]`` to ``product_ptr[r + 1] - 1``.

    Attributes
    ----------
    product_ptr, c_indptr
        (m + 1,) index.
    a_index, b_index
        (n_products,) index: which entries of A and B are multiplied. Where `a_index` is None, product p belongs to
        entry p of A.
    positions
        (n_products,) position, as in `Places`.
    """

    product_ptr: Array
    a_index: Array | None
    b_index: Array
    c_indptr: Array
    positions: Array
    row_cuts: Array


class Runs(NamedTuple):
    """Rows of B as runs of neighbouring columns, each of which is a run of C as well.

    Rows of B with the same shape have the same columns. Entries of a row of A that follow one another and name rows of
    one shape form a group.

    Attributes
    ----------
    b_shape
        (k,) index: number of every row's shape.
    run_ptr, run_lengths
        (n_shapes + 1,), (n_runs,) index: shape s has the runs u from ``run_ptr[s]`` to ``run_ptr[s + 1] - 1``, which
        cut a row of B into pieces of ``run_lengths[u]`` entries.
    start_ptr, starts
        (m + 1,) int64, (n_starts,) position: for every group of row r and every run of its shape, from
        ``start_ptr[r]`` on, where in the row of C the run begins.
    """

    b_shape: Array
    run_ptr: Array
    run_lengths: Array
    start_ptr: Array
    starts: Array
    row_cuts: Array


class Blocks(NamedTuple):
    """A consists of dense blocks (m, k), B of blocks (k, n), and so C of blocks (m, n), in grids.

    Attributes
    ----------
    product_ptr
        (rows of C / m + 1,) int64: products of blocks before each m rows of C.
    positions
        (n_block_products,) position: product p of a group of rows, in the order of Gustavson's algorithm, is added to
        the block with that number of the group's blocks of C.
    m, k, n
        Sizes of the blocks, Python ints.
    row_cuts
        Groups of m rows of C in parts of about equal work.
    """

    product_ptr: Array
    positions: Array
    m: int
    k: int
    n: int
    row_cuts: Array


class Pairs(NamedTuple):
    """For every entry of C the pairs of entries of A and B whose products it is the sum of, in Gustavson's order.

    Entries of C are cut into tiles of neighbours, whose entries of A lie near each other. Within a tile, the lists
    stand in the order of their lengths, the shortest first.

    Attributes
    ----------
    words
        (n_products,) uint32 or uint64: the low `shift` bits are an entry of A, counted from the tile's first one, the
        others an entry of B.
    order
        (nnz_c,) uint16: whose list comes next, counted from the tile's first entry of C.
    starts, lengths
        (nnz_c,) uint16: where in the words of its tile the list of each entry of C begins, and how many words it has.
    tiles
        (n_tiles + 1, 11) int64, for every tile, and behind the last: its first entry of C, its first entry of A, its
        first word, and how many of its lists have 1, 2, … 8 words.
    shift
        A Python int.
    tile_cuts
        (n_parts + 1,) int64: tiles in parts of about equal work.
    """

    words: Array
    order: Array
    starts: Array
    lengths: Array
    tiles: Array
    shift: int
    tile_cuts: Array


class Columns(NamedTuple):
    """The columns of B and C, where no place is kept.

    Attributes
    ----------
    b_indices, c_indices
        Of the patterns: (nnz_b,), (nnz_c,) index.
    n
        Number of columns, a Python int.
    """

    b_indices: Array
    c_indices: Array
    n: int
    row_cuts: Array


class WeightSums(NamedTuple):
    """The weight gradients of a recurrence, for its backward to sum as it goes: what weights multiply, and the outputs.

    Attributes
    ----------
    x
        (T, B, I): the input.
    before
        (T, B, H): the state before each step, h0 and then all of h but the last.
    weight_ih, weight_hh
        (gH, I) and (gH, H), written; gates as in torch.nn.
    bias_ih, bias_hh
        (gH,) each, written, or None.
    """

    x: Array
    before: Array
    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None
    bias_hh: Array | None


# The weight gradients of a recurrence as products over all steps: for sizes that no kernel sums as it goes.


def multiply_sums(ga: Array, sums: WeightSums) -> None:
    """Write `sums` from ga (T, B, columns·H), the gradient at everything that a weight feeds."""
    xp = backend.namespace(ga)
    rows, hidden = sums.weight_hh.shape
    flat = ga.reshape(-1, ga.shape[-1])
    of_input, of_state = flat[:, :rows].T, flat[:, flat.shape[1] - rows :].T

    def in_torch_order(gates: Array) -> Array:  # a GRU's input part is n, r, z
        return gates if rows == flat.shape[1] else xp.roll(gates, -hidden, axis=0)

    sums.weight_ih[...] = in_torch_order(backend.matmul(of_input, sums.x.reshape(len(flat), sums.x.shape[2])))
    sums.weight_hh[...] = backend.matmul(of_state, sums.before.reshape(len(flat), hidden))
    if sums.bias_ih is not None:
        sums.bias_ih[...] = in_torch_order(of_input.sum(axis=1))
    if sums.bias_hh is not None:
        sums.bias_hh[...] = of_state.sum(axis=1)
