"""Every kernel's name, arguments, shapes, dtypes and checks, stated once; host or device do the work.

Conventions
-----------
- ``real`` is float32 or float64, the same for all real arguments of a call; ``index`` is int32 or int64.
- Every array is C-contiguous. The caller allocates ``out`` and every array that is said to be written; a kernel
  allocates scratch only. Outputs never alias inputs.
- The batch B is **last** in everything that belongs to a Jacobian, a product or a scan: data ``(nnz, B)``, vectors
  ``(n, B)``. Values shared by the batch have a last axis of length 1: ``(nnz, 1)``; wherever ``B*`` is written the
  length may be 1 or B, and ``out`` has B if any operand has.
- Recurrent layers are time-major as in torch.nn: ``(T, B, ...)``.
- A kernel writes its results and returns nothing. A method that returns something asks about sizes: it runs nothing.
- No atomics: the same input gives bitwise the same output on every run and for every number of threads.
- Sizes of zero are legal wherever they make sense (no rows, no nonzeros, no batch).
- A wrong dtype, shape or layout raises (see `sparsebp.core.backend.check_array`); nothing falls through.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebp.core import backend
from sparsebp.core.backend import FLOAT_DTYPES, check_array, given, namespace
from sparsebp.core.check import SLOPES, Array, Nonlinearity, SlopeFunction, UpdateRule
from sparsebp.core.errors import DTypeError, LayoutError, OptionError, ShapeError
from sparsebp.kernels.operands import (
    INT32,
    INT64,
    UINT16,
    Blocks,
    Columns,
    Family,
    Pairs,
    Places,
    Rows,
    RowShapes,
    Runs,
    Terms,
    WeightSums,
    batch_of,
    batched,
    exact,
    index_dtype,
    position_dtype,
    rank,
    real_dtype,
    rows_of,
    word_dtype,
    written,
)

_WINNERS = ("uint8", "int32")


# Stacks of small dense blocks: materialised recurrent Jacobians.


class DenseKernels(Family):
    """Levels of products, chains and reductions of small dense blocks."""

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """A level of dense products: ``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` per sample, for all s.

        a (Sa, m, k, B*); b (Sb, k, n, B*); out (So, m, n, B*) real; the indices (S,) int64; `out` is a different array
        from `a` and `b`; entries of `out` that are not named keep their values.
        """
        dtype = real_dtype("a", a)
        (n_a, m, k, _), (n_b, _, n, _) = rank("a", a, 4), rank("b", b, 4)
        n_out, (steps,) = rank("out", out, 4)[0], rank("a_index", a_index, 1)
        batch = batch_of(a=a, b=b)
        batched("a", a, dtype, (n_a, m, k), batch)
        batched("b", b, dtype, (n_b, k, n), batch)
        written("out", out, dtype, (n_out, m, n, batch))
        for name, array in (("a_index", a_index), ("b_index", b_index), ("out_index", out_index)):
            exact(name, array, INT64, (steps,))
        self._run.dense_matmul(a, a_index, b, b_index, out, out_index)

    def dense_matvec(
        self,
        a: Array,
        a_index: Array,
        x: Array,
        x_index: Array,
        add: Array | None,
        add_index: Array | None,
        out: Array,
        out_index: Array,
    ) -> None:
        """A level of dense matrix-vector products.

        For all s: ``out[out_index[s]] = a[a_index[s]] @ x[x_index[s]] + add[add_index[s]]``.

        a (Sa, m, k, B*); x (Sx, k, B); add (Sd, m, B) with add_index (S,), or both None; out (So, m, B), which may be
        the same array as `x` or `add` as long as no entry that is written is also read in this call.
        """
        dtype = real_dtype("a", a)
        n_a, m, k, _ = rank("a", a, 4)
        n_x, _, batch = rank("x", x, 3)
        n_out, (steps,) = rank("out", out, 3)[0], rank("a_index", a_index, 1)
        batched("a", a, dtype, (n_a, m, k), batch)
        exact("x", x, dtype, (n_x, k, batch))
        written("out", out, dtype, (n_out, m, batch))
        for name, array in (("a_index", a_index), ("x_index", x_index), ("out_index", out_index)):
            exact(name, array, INT64, (steps,))
        _together("add", add, "add_index", add_index)
        if add is not None and add_index is not None:
            exact("add", add, dtype, (rank("add", add, 3)[0], m, batch))
            exact("add_index", add_index, INT64, (steps,))
        self._run.dense_matvec(a, a_index, x, x_index, add, add_index, out, out_index)

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Independent chains of matrix-vector products, one per chunk.

        For chunk c: ``v = x[c]``; for s from ``chunk_ptr[c]`` to ``chunk_ptr[c + 1] - 1``: ``v = a[s] @ v + add[s]``;
        ``out[s] = v``.

        a (S, n, n, B*); chunk_ptr (C + 1,) int64 from 0 to S; x (C, n, B); add (S, n, B) or None; out (S, n, B).
        """
        dtype = real_dtype("a", a)
        steps, n, _, _ = rank("a", a, 4)
        chunks, batch = rows_of("chunk_ptr", chunk_ptr), rank("x", x, 3)[2]
        batched("a", a, dtype, (steps, n, n), batch)
        exact("chunk_ptr", chunk_ptr, INT64, (chunks + 1,))
        exact("x", x, dtype, (chunks, n, batch))
        if add is not None:
            exact("add", add, dtype, (steps, n, batch))
        written("out", out, dtype, (steps, n, batch))
        self._run.dense_chain(a, chunk_ptr, x, add, out)

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce each chunk of affine maps to one: ``P = a[last] @ … @ a[first]`` and the matching vector.

        Starting from P = I, v = 0; for s in the chunk: ``P = a[s] @ P``; ``v = a[s] @ v + add[s]``.

        a (S, n, n, B*); chunk_ptr (C + 1,) int64; add (S, n, B) or None; out_matrix (C, n, n, B*);
        out_vector (C, n, B), None exactly when `add` is None.
        """
        dtype = real_dtype("a", a)
        steps, n, _, own = rank("a", a, 4)
        chunks = rows_of("chunk_ptr", chunk_ptr)
        exact("a", a, dtype, (steps, n, n, own))
        exact("chunk_ptr", chunk_ptr, INT64, (chunks + 1,))
        written("out_matrix", out_matrix, dtype, (chunks, n, n, own))
        _together("add", add, "out_vector", out_vector)
        if add is not None and out_vector is not None:
            batch = rank("add", add, 3)[2]
            batched("a", a, dtype, (steps, n, n), batch)
            exact("add", add, dtype, (steps, n, batch))
            written("out_vector", out_vector, dtype, (chunks, n, batch))
        self._run.dense_reduce(a, chunk_ptr, add, out_matrix, out_vector)


def _together(name: str, array: Array | None, other_name: str, other: Array | None) -> None:
    if (array is None) != (other is None):
        missing = name if array is None else other_name
        raise ShapeError(
            f"{missing} is missing",
            expected=f"{name} and {other_name} together, or neither",
            got=f"{missing}=None",
            remedy=f"Pass {missing} as well",
        )


NONLINEARITIES = ("tanh", "relu")
HELD_INPUTS = (1, 4, 8)
"""Input sizes of kernels that hold the input's weights, or the sums of their gradients; a smaller input leaves room."""

MOST_INPUTS = HELD_INPUTS[-1]
"""Largest input size that a device's forward kernel projects itself."""

SUMS_AT_MOST = 4
"""Memory that sums of weight gradients may take over that of the gradients at the gates, which they replace."""

Sizes = tuple[int, int, int]
"""``(T, B, H)``: steps, samples, hidden size."""


def room_for(features: int) -> int:
    """Return the smallest of `HELD_INPUTS` that has room for so many features; 0 where none has."""
    return min((inputs for inputs in HELD_INPUTS if inputs >= features), default=0)


def room_for_sums(registers: int, gates: int, hidden: int, features: int, itemsize: int) -> int:
    """Return for how many inputs a backward that sums weight gradients as it goes is made; 0 where it is none.

    A thread holds its rows of the weights and of their sums in registers, so many of which are free. In float64 the
    values that are loaded ahead take what there would be.
    """
    if registers == 0 or itemsize != 4:
        return 0
    room = room_for(features)
    return room if gates * (2 * hidden + room) <= registers else 0


class RecurrentKernels(Family):
    """Kernels over all steps of a recurrent layer.

    In all: w_hh (H, H) or (3H, H) as torch.nn lays it out (gates r, z, n), h0 (B, H); gy (T, B, H) or None is the
    gradient that arrives at every step's output, grad_h_n (B, H) or None the one that arrives at the last state. A
    batch of zero is legal; a sequence of zero steps and a hidden size of zero are not.

    Forward takes the projected input, or the input x (T, B, I) with its weights: w_ih (H, I) or (3H, I), where I on a
    device is at most `MOST_INPUTS`, b_ih and b_hh (H,) or (3H,), each of which may be None.
    """

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """Return up to which input size forward had better be given x and w_ih; 0 where a product is faster."""
        return int(self._run.projected_inputs(gates, hidden, itemsize))

    def sums_inside(self, gates: int, columns: int, sizes: Sizes, features: int, itemsize: int, chunks: int) -> bool:
        """Whether backward sums the weight gradients as it goes where it is given `WeightSums`, and had better be.

        ga has `columns` of the hidden size, of which the weights feed `gates`. Every chunk leaves its sums: where they
        would take much more memory than ga, products are better.
        """
        steps, batch, hidden = sizes
        room, samples = self._run.sums_for(gates, hidden, features, itemsize)
        most = SUMS_AT_MOST * steps * columns * min(samples, batch)
        return room > 0 and chunks * (gates * (hidden + room) + columns) <= most

    def rnn_forward(
        self,
        x: Array,
        w_hh: Array,
        h0: Array,
        nonlinearity: Nonlinearity,
        h: Array,
        w_ih: Array | None = None,
        b_ih: Array | None = None,
        b_hh: Array | None = None,
    ) -> None:
        """``h[t] = f(x[t] + w_hh @ h[t-1])``, f = tanh or relu (BPPSA Eq. 9).

        x (T, B, H): input projection with both biases; h (T, B, H), written. With w_ih, x is the input, and
        ``w_ih @ x[t] + b_ih + b_hh`` takes the projection's place.
        """
        namespace(x=x, w_hh=w_hh, h0=h0, h=h)
        _check_nonlinearity(nonlinearity)
        _, batch, hidden = check_sequence("h", h)
        check_array("h", h, written=True)
        check_input(x, h, hidden, w_ih, b_ih, b_hh, self._run.MOST_INPUTS)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
        self._run.rnn_forward(x, w_hh, h0, nonlinearity, h, w_ih, b_ih, b_hh)

    def rnn_backward(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        nonlinearity: Nonlinearity,
        gz: Array | None,
        gh0: Array,
        chunks: int = 1,
        sums: WeightSums | None = None,
    ) -> None:
        """Back-propagation. gz (T, B, H), written: gradient at the pre-activations; gh0 (B, H), written.

        With `sums` the weight gradients are written as well, and gz may be None. Where `room_for_sums` finds room they
        are summed as the recursion goes, in a fixed order, and no gz is stored for them; elsewhere by products.

        ``g[t] = gy[t] + w_hhᵀ @ gz[t+1]`` (``+ grad_h_n`` at the last t); ``gz[t] = g[t] * f'(t)``;
        ``gh0 = w_hhᵀ @ gz[0]``. f' is ``1 - h²`` (tanh) or ``h > 0`` (relu; 1 at a NaN).

        One chunk is the recursion, 2·T·B·H² FLOP. More of them, ``1 <= chunks <= T``, are reduce-then-scan, which
        stores no Jacobian: 2·(H + 1)·T·B·H²·(C - 2)/C FLOP more, for the affine maps of all chunks but the first and
        the last in time, which need none; it pays where far more than H workers are idle. Scratch: H·H + H values a
        map and sample.
        """
        namespace(h=h, w_hh=w_hh, gh0=gh0, **given(gz=gz, gy=gy, grad_h_n=grad_h_n), **arrays_of(sums))
        _check_nonlinearity(nonlinearity)
        steps, batch, hidden = check_sequence("h", h)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_incoming(h, gy, grad_h_n=grad_h_n)
        check_outgoing("gz", gz, h, 1, 1, sums)
        check_array("gh0", gh0, dtype=h.dtype, shape=(batch, hidden), written=True)
        check_chunks(chunks, steps)
        self._run.rnn_backward(h, w_hh, gy, grad_h_n, nonlinearity, gz, gh0, chunks, sums)

    def rnn_maps(self, h: Array, w_hh: Array, gy: Array | None, nonlinearity: Nonlinearity, maps: Array) -> None:
        """Reduce chunks of steps to affine maps: the first part of reduce-then-scan, by itself.

        maps (C, B, H + 1, H), written; chunk c has the steps ``c·T//C … (c + 1)·T//C - 1``. A gradient g, a row, that
        comes to the state behind a chunk goes to the state before it as ``g @ maps[c, b, :H] + maps[c, b, H]``.

        2·(H + 1)·T·B·H² FLOP.
        """
        namespace(h=h, w_hh=w_hh, maps=maps, **given(gy=gy))
        _check_nonlinearity(nonlinearity)
        hidden = check_sequence("h", h)[2]
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_maps(h, gy, maps)
        self._run.rnn_maps(h, w_hh, gy, nonlinearity, maps)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """Materialise the scan's elements: out (T, H, H, B), ``out[t, i, j, b] = w_hh[j, i] * f'(h[t, b, j])``,
        the transposed Jacobian of h[t] with respect to h[t-1] (rows: input, columns: output)."""
        namespace(h=h, w_hh=w_hh, out=out)
        _check_nonlinearity(nonlinearity)
        steps, batch, hidden = check_sequence("h", h)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_array("out", out, dtype=h.dtype, shape=(steps, hidden, hidden, batch), written=True)
        self._run.rnn_jacobians(h, w_hh, nonlinearity, out)

    def gru_forward(
        self,
        x: Array,
        w_hh: Array,
        b_hn: Array,
        h0: Array,
        h: Array,
        gates: Array,
        w_ih: Array | None = None,
        b_ih: Array | None = None,
        b_hh: Array | None = None,
    ) -> None:
        """GRU (BPPSA Eq. 10) with every gate kept for the backward.

        x (T, B, 3H), gates in the order r, z, n: ``W_i x + b_i``, plus ``b_h`` for r and z only; b_hn (H,).
        ``M = W_hn h + b_hn``; ``n = tanh(x_n + r * M)``; ``h' = (1 - z) * n + z * h``.
        h (T, B, H), written; gates (T, B, 4H), written, in the order r, z, n, M. With w_ih, x is the input, and its
        projection is made here; of b_hh the parts of r and z are used.
        """
        namespace(x=x, w_hh=w_hh, b_hn=b_hn, h0=h0, h=h, gates=gates)
        steps, batch, hidden = check_sequence("h", h)
        check_array("h", h, written=True)
        check_input(x, h, 3 * hidden, w_ih, b_ih, b_hh, self._run.MOST_INPUTS)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(3 * hidden, hidden))
        check_array("b_hn", b_hn, dtype=h.dtype, shape=(hidden,))
        check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
        check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden), written=True)
        self._run.gru_forward(x, w_hh, b_hn, h0, h, gates, w_ih, b_ih, b_hh)

    def gru_backward(
        self,
        h: Array,
        h0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        ga: Array | None,
        gh0: Array,
        chunks: int = 1,
        sums: WeightSums | None = None,
    ) -> None:
        """Back-propagation through a GRU, by the recursion or by chunks, as `rnn_backward`; factored Jacobians, Eq. 11.

        ga (T, B, 4H), written: gradients at the pre-activations N, R, Z and at M, in the order **n, r, z, m**. So
        ``ga[..., H:]`` is what multiplies h (order r, z, n as in w_hh) and ``ga[..., :3H]`` what multiplies x
        (order n, r, z). gh0 (B, H), written. `sums` as in `rnn_backward`.

        6·T·B·H² FLOP, and with C chunks (2·(H + 1)·H² + 6·H²)·T·B·(C - 2)/C more.
        """
        optional = given(ga=ga, gy=gy, grad_h_n=grad_h_n)
        namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, gh0=gh0, **optional, **arrays_of(sums))
        steps, batch, hidden = _check_gru_saved(h, h0, gates, w_hh)
        check_incoming(h, gy, grad_h_n=grad_h_n)
        check_outgoing("ga", ga, h, 3, 4, sums)
        check_array("gh0", gh0, dtype=h.dtype, shape=(batch, hidden), written=True)
        check_chunks(chunks, steps)
        self._run.gru_backward(h, h0, gates, w_hh, gy, grad_h_n, ga, gh0, chunks, sums)

    def gru_maps(self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of a GRU's steps to affine maps, as `rnn_maps`. 2·(H + 4)·T·B·H² FLOP."""
        namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, maps=maps, **given(gy=gy))
        _check_gru_saved(h, h0, gates, w_hh)
        check_maps(h, gy, maps)
        self._run.gru_maps(h, h0, gates, w_hh, gy, maps)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """Materialise the scan's elements (BPPSA Eq. 11).

        out (T, H, H, B), rows: input h[t-1], columns: output h[t].
        """
        namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, out=out)
        steps, batch, hidden = _check_gru_saved(h, h0, gates, w_hh)
        check_array("out", out, dtype=h.dtype, shape=(steps, hidden, hidden, batch), written=True)
        self._run.gru_jacobians(h, h0, gates, w_hh, out)


def check_input(
    x: Array, h: Array, rows: int, w_ih: Array | None, b_ih: Array | None, b_hh: Array | None, most: int
) -> None:
    """Check the projected input (T, B, rows), or the input, of at most so many features, with what projects it."""
    if w_ih is None:
        if b_ih is not None or b_hh is not None:
            raise OptionError(
                "A bias of the input was given without its weights",
                expected="w_ih with b_ih and b_hh",
                got="w_ih=None",
                remedy="Pass w_ih, or leave the biases out: the projected input has them",
            )
        check_array("x", x, dtype=h.dtype, shape=(*h.shape[:2], rows))
        return
    biases = given(b_ih=b_ih, b_hh=b_hh)
    namespace(h=h, w_ih=w_ih, **biases)
    check_array("w_ih", w_ih, dtype=h.dtype, shape=(rows, None))
    features = w_ih.shape[1]
    if not 1 <= features <= most:
        raise ShapeError(
            "The input size is not one that forward projects",
            expected=f"w_ih of shape ({rows}, 1 to {most})",
            got=w_ih.shape,
            remedy="Pass the projection in place of x: x @ w_ih.T with its bias, and no w_ih",
        )
    check_array("x", x, dtype=h.dtype, shape=(*h.shape[:2], features))
    for name, bias in biases.items():
        check_array(name, bias, dtype=h.dtype, shape=(rows,))


def _check_gru_saved(h: Array, h0: Array, gates: Array, w_hh: Array) -> Sizes:
    steps, batch, hidden = check_sequence("h", h)
    check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
    check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden))
    check_array("w_hh", w_hh, dtype=h.dtype, shape=(3 * hidden, hidden))
    return steps, batch, hidden


def check_incoming(h: Array, gy: Array | None, **last: Array | None) -> None:
    """Check the gradients that may come in: at every step's output, and at the last states; None stands for zero."""
    if gy is not None:
        check_array("gy", gy, dtype=h.dtype, shape=h.shape)
    for name, array in given(**last).items():
        check_array(name, array, dtype=h.dtype, shape=h.shape[1:])


def check_maps(h: Array, gy: Array | None, maps: Array, states: int = 1) -> None:
    """Check what reductions of chunks take and write; a cell's state is so many arrays of H."""
    steps, batch, hidden = h.shape
    check_incoming(h, gy)
    check_array("maps", maps, dtype=h.dtype, shape=(None, batch, states * hidden + 1, states * hidden), written=True)
    check_chunks(len(maps), steps)


def arrays_of(sums: WeightSums | None) -> dict[str, Array]:
    """Return the arrays of `sums` that are there, by name."""
    return {} if sums is None else given(**sums._asdict())


def check_outgoing(name: str, ga: Array | None, h: Array, gates: int, columns: int, sums: WeightSums | None) -> None:
    """Check what a backward leaves: ga (T, B, columns·H), which may be missing where there are sums, and those.

    The weights have gates·H rows.
    """
    steps, batch, hidden = h.shape
    if ga is not None:
        check_array(name, ga, dtype=h.dtype, shape=(steps, batch, columns * hidden), written=True)
    elif sums is None:
        raise OptionError(
            f"{name} is missing", expected="an array to write to, or sums", got="None and None",
            remedy=f"Pass {name}, or the WeightSums in whose place it may be left out",
        )  # fmt: skip
    if sums is None:
        return
    rows = gates * hidden
    check_array("weight_ih", sums.weight_ih, dtype=h.dtype, shape=(rows, None), written=True)
    check_array("weight_hh", sums.weight_hh, dtype=h.dtype, shape=(rows, hidden), written=True)
    check_array("x", sums.x, dtype=h.dtype, shape=(steps, batch, sums.weight_ih.shape[1]))
    check_array("before", sums.before, dtype=h.dtype, shape=h.shape)
    for bias, array in given(bias_ih=sums.bias_ih, bias_hh=sums.bias_hh).items():
        check_array(bias, array, dtype=h.dtype, shape=(rows,), written=True)


def check_sequence(name: str, array: Array) -> Sizes:
    """Check the array that gives a call its sizes: (T, B, H), float, contiguous, T >= 1, H >= 1."""
    if array.dtype not in FLOAT_DTYPES:
        raise DTypeError(
            f"{name} has the wrong dtype",
            expected="float32 or float64",
            got=array.dtype,
            remedy=f"Convert it with {name}.astype('float32'); nothing is converted silently",
        )
    check_array(name, array, shape=(None, None, None))
    steps, batch, hidden = array.shape
    if steps < 1:
        raise ShapeError(
            f"{name} holds no time steps, and empty sequences are not allowed",
            expected="(T, B, H) with T >= 1",
            got=array.shape,
            remedy="Leave empty sequences out before calling",
        )
    if hidden < 1:
        raise ShapeError(
            f"{name} has a hidden size of zero",
            expected="(T, B, H) with H >= 1",
            got=array.shape,
            remedy="Use a hidden size of at least 1",
        )
    return steps, batch, hidden


def _check_nonlinearity(nonlinearity: str) -> None:
    if nonlinearity not in NONLINEARITIES:
        raise OptionError(
            "Unknown nonlinearity",
            expected=" or ".join(repr(name) for name in NONLINEARITIES),
            got=repr(nonlinearity),
            remedy="Pass one of the two",
        )


def check_chunks(chunks: int, steps: int) -> None:
    """Check the number of chunks of a sequence."""
    if not 1 <= chunks <= steps:
        raise OptionError(
            "The number of chunks does not fit the number of steps",
            expected=f"1 <= chunks <= T = {steps}",
            got=chunks,
            remedy="Pass fewer chunks; chunks=1 is the sequential recursion",
        )


# The LSTM over all steps, forward and backward, and its materialised Jacobians.
#
# The cell is that of torch.nn (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers et al., "Learning to
# forget", 2000). Its state is the pair (h, c), in this order wherever both stand side by side: a transposed Jacobian
# has 2H rows and columns, of which the two blocks from h are dense and the two from c diagonal.


class LstmKernels(Family):
    """Kernels over all steps of an LSTM; w_hh (4H, H) as torch.nn lays it out, gates i, f, g, o.

    Layouts as in `RecurrentKernels`, and c0 (B, H) beside h0. grad_h_n and grad_c_n (B, H) are the gradients that
    arrive at the last state; gy (T, B, H) arrives at every h. Each may be None, which stands for zero.
    """

    def lstm_forward(
        self,
        x: Array,
        w_hh: Array,
        h0: Array,
        c0: Array,
        h: Array,
        c: Array,
        gates: Array,
        w_ih: Array | None = None,
        b_ih: Array | None = None,
        b_hh: Array | None = None,
    ) -> None:
        """``c' = f * c + i * g`` and ``h' = o * tanh(c')``, with every gate kept for the backward.

        x (T, B, 4H): input projection with both biases; with w_ih, x is the input, and
        ``w_ih @ x[t] + b_ih + b_hh`` takes the projection's place. h and c (T, B, H), written; gates (T, B, 4H),
        written: i, f, g, o, of which g went through tanh and the others through the sigmoid. 8·T·B·H² FLOP.
        """
        namespace(x=x, w_hh=w_hh, h0=h0, c0=c0, h=h, c=c, gates=gates)
        steps, batch, hidden = check_sequence("h", h)
        check_array("h", h, written=True)
        check_array("c", c, dtype=h.dtype, shape=h.shape, written=True)
        check_input(x, h, 4 * hidden, w_ih, b_ih, b_hh, self._run.MOST_INPUTS)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(4 * hidden, hidden))
        for name, array in (("h0", h0), ("c0", c0)):
            check_array(name, array, dtype=h.dtype, shape=(batch, hidden))
        check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden), written=True)
        self._run.lstm_forward(x, w_hh, h0, c0, h, c, gates, w_ih, b_ih, b_hh)

    def lstm_backward(
        self,
        c: Array,
        c0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        grad_c_n: Array | None,
        ga: Array | None,
        gh0: Array,
        gc0: Array,
        chunks: int = 1,
        sums: WeightSums | None = None,
    ) -> None:
        """Back-propagation through an LSTM, by the recursion or by chunks, as `RecurrentKernels.rnn_backward`.

        ga (T, B, 4H), written: gradients at the pre-activations, in torch's order i, f, g, o; it multiplies h and x
        alike. gh0 and gc0 (B, H), written. `sums` as in `rnn_backward`; with them ga may be None.

        8·T·B·H² FLOP, and with C chunks (4·(2H + 1)·H² + 6·H²)·T·B·(C - 2)/C more: a row of a chunk's map takes two
        products of H × H a step, and not the four of a dense Jacobian. Scratch: 2H·(2H + 1) values a map and sample.
        """
        optional = given(ga=ga, gy=gy, grad_h_n=grad_h_n, grad_c_n=grad_c_n)
        namespace(c=c, c0=c0, gates=gates, w_hh=w_hh, gh0=gh0, gc0=gc0, **optional, **arrays_of(sums))
        steps, batch, hidden = _check_saved(c, c0, gates, w_hh)
        check_incoming(c, gy, grad_h_n=grad_h_n, grad_c_n=grad_c_n)
        check_outgoing("ga", ga, c, 4, 4, sums)
        for name, array in (("gh0", gh0), ("gc0", gc0)):
            check_array(name, array, dtype=c.dtype, shape=(batch, hidden), written=True)
        check_chunks(chunks, steps)
        self._run.lstm_backward(c, c0, gates, w_hh, gy, grad_h_n, grad_c_n, ga, gh0, gc0, chunks, sums)

    def lstm_maps(self, c: Array, c0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of an LSTM's steps to affine maps of (h, c), as `RecurrentKernels.rnn_maps` those of h.

        maps (C, B, 2H + 1, 2H), written. (4·(2H + 1) + 6)·T·B·H² FLOP.
        """
        namespace(c=c, c0=c0, gates=gates, w_hh=w_hh, maps=maps, **given(gy=gy))
        _check_saved(c, c0, gates, w_hh)
        check_maps(c, gy, maps, states=2)
        self._run.lstm_maps(c, c0, gates, w_hh, gy, maps)

    def lstm_jacobians(self, c: Array, c0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """Materialise the scan's elements: the transposed Jacobian of (h, c)[t] with respect to (h, c)[t-1].

        out (T, 2H·(H + 1), B), written: for every step the values on `sparsebp.patterns.lstm_pattern`, row by row. A
        row of h[t-1] has 2H of them, those of h[t] before those of c[t]; a row of c[t-1] has two.
        """
        namespace(c=c, c0=c0, gates=gates, w_hh=w_hh, out=out)
        steps, batch, hidden = _check_saved(c, c0, gates, w_hh)
        check_array("out", out, dtype=c.dtype, shape=(steps, 2 * hidden * (hidden + 1), batch), written=True)
        self._run.lstm_jacobians(c, c0, gates, w_hh, out)


def _check_saved(c: Array, c0: Array, gates: Array, w_hh: Array) -> Sizes:
    steps, batch, hidden = check_sequence("c", c)
    check_array("c0", c0, dtype=c.dtype, shape=(batch, hidden))
    check_array("gates", gates, dtype=c.dtype, shape=(steps, batch, 4 * hidden))
    check_array("w_hh", w_hh, dtype=c.dtype, shape=(4 * hidden, hidden))
    return steps, batch, hidden


# Optimizers' updates and the clipping of gradients: sequences of arrays, in one pass over memory.

FLOAT64 = np.dtype(np.float64)

UPDATE_OPTIONS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "nadam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize", "momentum_decay"),
    "radam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "adamax": ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "maximize"),
    "adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize"),
}
"""The columns of an optimizer's options. ``decoupled``: the decay shrinks the parameter (AdamW)."""
UPDATE_BUFFERS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
}
"""The buffers of each parameter."""
OPTIONAL_BUFFERS = ("momentum_buffer", "max_exp_avg_sq", "grad_avg")
"""In their place None stands for a parameter without momentum, AMSGrad, or a second moment that is centered."""


class OptimizerKernels(Family):
    """Kernels on sequences of arrays, all of one real dtype and of any shapes: one pass over memory for all of them.

    A number's result does not depend on what else is in the call. Implementations are told how to `check` all arrays,
    too: they call it before they touch any that do not look right at once.
    """

    def optimizer_update(
        self,
        rule: UpdateRule,
        params: Sequence[Array],
        grads: Sequence[Array],
        buffers: Sequence[Sequence[Array | None]],
        options: Array,
        steps: Array,
    ) -> None:
        """The update of torch.optim's optimizer of that name, in place on params and buffers.

        grads: one like each parameter. buffers: one sequence for each name in ``UPDATE_BUFFERS[rule]``, with an array
        like each parameter (None: see ``OPTIONAL_BUFFERS``). options
        (n, len(UPDATE_OPTIONS[rule])) float64: a row for each parameter, flags as 0 or 1. steps (n,) int64: the number
        of this update of each parameter, from 1. Both on the host; or on the device, read when the kernel runs.

        No array may be there twice. What depends on the step alone (bias corrections) is worked out in float64.
        """
        check_update_options(rule, len(params), buffers, options, steps)

        def check() -> None:
            check_update(rule, params, grads, buffers, options, steps)

        self._run.optimizer_update(rule, params, grads, buffers, options, steps, check)

    def scale_arrays(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """Multiply all arrays by one number, in place.

        factor: a number, or an array () of float64 beside the arrays, which is read when the kernel runs.
        """
        if hasattr(factor, "shape") and not isinstance(factor, np.generic):
            exact("factor", factor, FLOAT64, ())
        self._run.scale_arrays(arrays, factor, lambda: _check_written(arrays))

    def clamp_arrays(self, arrays: Sequence[Array], limit: float) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays NaN."""
        self._run.clamp_arrays(arrays, limit, lambda: _check_written(arrays))

    def square_sums(self, arrays: Sequence[Array], out: Array) -> None:
        """Sum of the squares of each array, accumulated in float64, in an order that depends on its size alone.

        out (n,) float64, written; it belongs to the namespace of the arrays.
        """
        written("out", out, FLOAT64, (len(arrays),))
        self._run.square_sums(arrays, out, lambda: _check_arrays(arrays))


def check_update(
    rule: UpdateRule,
    params: Sequence[Array],
    grads: Sequence[Array],
    buffers: Sequence[Sequence[Array | None]],
    options: Array,
    steps: Array,
) -> None:
    """Check the arguments of `optimizer_update`."""
    check_update_options(rule, len(params), buffers, options, steps)
    named = {f"{name}[{i}]": a for name, of in (("params", params), ("grads", grads)) for i, a in enumerate(of)}
    kept = zip(UPDATE_BUFFERS[rule], buffers, strict=True)
    _check_together(named | {f"{name}[{i}]": a for name, of in kept for i, a in enumerate(of) if a is not None})
    _check_length("grads", grads, len(params))
    for name, arrays in zip(UPDATE_BUFFERS[rule], buffers, strict=True):
        _check_length(name, arrays, len(params))
    _check_arrays(params, "params")
    for i, param in enumerate(params):
        backend.check_array(f"params[{i}]", param, written=True)
        _like(f"grads[{i}]", grads[i], param)
        for name, arrays in zip(UPDATE_BUFFERS[rule], buffers, strict=True):
            if arrays[i] is not None or name not in OPTIONAL_BUFFERS:
                _like(f"{name}[{i}]", arrays[i], param)
                backend.check_array(f"{name}[{i}]", arrays[i], written=True)


def check_update_options(
    rule: UpdateRule, count: int, buffers: Sequence[Sequence[Array | None]], options: Array, steps: Array
) -> None:
    """Check what of the arguments of `optimizer_update` is quickly looked at.

    Raises
    ------
    OptionError
        The rule is unknown.
    ShapeError
        The rule has another number of buffers.
    """
    if rule not in UPDATE_OPTIONS:
        raise OptionError(
            "Unknown update rule", expected=" or ".join(UPDATE_OPTIONS), got=rule, remedy="Pass one of them"
        )
    _check_length(f"The buffers of {rule}", buffers, len(UPDATE_BUFFERS[rule]))
    exact("options", options, FLOAT64, (count, len(UPDATE_OPTIONS[rule])))
    exact("steps", steps, INT64, (count,))


def _check_written(arrays: Sequence[Array]) -> None:
    """Check what `_check_arrays` does, and that all may be written."""
    _check_arrays(arrays)
    for i, array in enumerate(arrays):
        backend.check_array(f"arrays[{i}]", array, written=True)


def _check_arrays(arrays: Sequence[Array], name: str = "arrays") -> None:
    """Check that all are C-contiguous arrays of one real dtype and one namespace."""
    _check_together({f"{name}[{i}]": array for i, array in enumerate(arrays)})
    for i, array in enumerate(arrays):
        if i == 0:
            real_dtype(f"{name}[0]", array)
        exact(f"{name}[{i}]", array, arrays[0].dtype, array.shape)


def _check_together(arrays: dict[str, Array]) -> None:
    """Check that all are arrays of one namespace: each by itself first, since a NumPy scalar is on the host anyhow."""
    for name, array in arrays.items():
        _check_is_array(name, array)
    backend.namespace(**arrays)


def _like(name: str, array: Array, param: Array) -> None:
    _check_is_array(name, array)
    exact(name, array, param.dtype, param.shape)


def _check_is_array(name: str, array: Array) -> None:
    backend.namespace(**{name: array})
    if isinstance(array, np.generic):  # without memory of its own that a kernel could read
        raise LayoutError(f"{name} is not an array", expected="an array", got=type(array).__name__,
                          remedy="Pass an array; numpy.asarray(...) makes one of a scalar")  # fmt: skip


def _check_length(name: str, items: Sequence[object], count: int) -> None:
    if len(items) != count:
        raise ShapeError(f"{name} has the wrong length", expected=count, got=len(items), remedy="Pass one for each")


# What goes element by element, or channel by channel: batch normalisation, cutting off, the loss.


class PointwiseKernels(Family):
    """Kernels on channels, arrays (B, C, n) with numbers (C,); on arrays cut off at two values; and the loss."""

    def channel_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, mean: Array, var: Array, scale: Array,
        out: Array, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Normalise every channel by its mean and variance (divided by the number) over batch and positions.

        ``scale = 1 / sqrt(var + eps)`` and ``out = (x - mean) * scale * weight + bias``, without what is None. With
        `limits` (low, high), `out` is what `clamp` makes of that.

        x, out (B, C, n); weight, bias (C,); mean, var, scale (C,), written.
        """
        channels = {**given(weight=weight, bias=bias), "mean": mean, "var": var, "scale": scale}
        _check_channels(arrays={"x": x, "out": out}, channels=channels, out=("mean", "var", "scale", "out"))
        _check_limits(limits)
        self._run.channel_normalise(x, weight, bias, eps, mean, var, scale, out, limits)

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """``out = (x - mean) * factor + offset``, with the numbers of the channel.

        x, out (B, C, n); mean, factor, offset (C,).
        """
        channels = {"mean": mean, "factor": factor, "offset": offset}
        _check_channels(arrays={"x": x, "out": out}, channels=channels)
        self._run.channel_scale(x, mean, factor, offset, out)

    def channel_products(
        self, gy: Array, x: Array, mean: Array, sums: Array, products: Array, y: Array | None = None,
        limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """``sums = Σ gy`` and ``products = Σ gy * (x - mean)`` of every channel, over batch and positions.

        With `y` and `limits` (low, high), gy is what `clamp_grad` makes of it.

        gy, x, y (B, C, n); mean (C,); sums, products (C,), written.
        """
        channels = {"mean": mean, "sums": sums, "products": products}
        _check_channels(arrays={"gy": gy, "x": x, **given(y=y)}, channels=channels, out=("sums", "products"))
        _check_limits(limits, y)
        self._run.channel_products(gy, x, mean, sums, products, y, limits)

    def channel_back(
        self, gy: Array, x: Array, mean: Array, scale: Array, weight: Array | None, sums: Array, products: Array,
        out: Array, known: bool = False, y: Array | None = None, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """The transpose of `channel_normalise` at x, for its mean and scale, and the sums of `channel_products`.

        ``out = (gy - sums / N - (x - mean) * products * scale**2 / N) * scale * weight``, N elements a channel. With
        `y` and `limits` (low, high), gy is what `clamp_grad` makes of it.

        gy, x, y, out (B, C, n); mean, scale, weight (C,); sums, products (C,), written, or read if they are `known`.
        """
        channels = {"mean": mean, "scale": scale, **given(weight=weight), "sums": sums, "products": products}
        arrays, out_names = {"gy": gy, "x": x, **given(y=y), "out": out}, ("sums", "products", "out")
        _check_channels(arrays=arrays, channels=channels, out=out_names)
        _check_limits(limits, y)
        self._run.channel_back(gy, x, mean, scale, weight, sums, products, out, known, y, limits)

    def channel_track(
        self, mean: Array, var: Array, momentum: float, correction: float, running_mean: Array, running_var: Array
    ) -> None:
        """Move running statistics by `momentum` towards ``mean`` and ``var * correction``, in place. All (C,)."""
        _check_numbers({"mean": mean, "var": var}, {"running_mean": running_mean, "running_var": running_var})
        self._run.channel_track(mean, var, momentum, correction, running_mean, running_var)

    def channel_factors(self, var: Array, eps: float, weight: Array | None, scale: Array, factor: Array) -> None:
        """``scale = 1 / sqrt(var + eps)`` and ``factor = scale * weight``, `scale` without a weight. All (C,)."""
        _check_numbers({"var": var, **given(weight=weight)}, {"scale": scale, "factor": factor})
        self._run.channel_factors(var, eps, weight, scale, factor)

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """``out = min(max(x, low), high)``; a NaN stays a NaN. x, out (n,); low < high, which may be infinite."""
        _check_clamp(x, low, high, out)
        self._run.clamp(x, low, high, out)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """``out = gy where low < y <= high or y is NaN, else 0``: `high` is the last y of slope 1. gy, y, out (n,)."""
        _check_clamp(gy, low, high, out, y=y)
        self._run.clamp_grad(gy, y, low, high, out)

    def gelu(self, x: Array, approximate: bool, out: Array) -> None:
        """``out = x Φ(x)``; if `approximate`, with ``(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`` for Φ. x, out (n,)."""
        _check_elements(out, x=x)
        self._run.gelu(x, approximate, out)

    def gelu_grad(self, gy: Array, x: Array, approximate: bool, out: Array) -> None:
        """``out = gy (Φ(x) + x Φ'(x))``, Φ as in `gelu`. gy, x, out (n,)."""
        _check_elements(out, gy=gy, x=x)
        self._run.gelu_grad(gy, x, approximate, out)

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Per-row softmax cross-entropy and its gradient in one pass.

        logits (N, C); target (N,) int64 in [0, C); losses (N,), written; grad (N, C), written: softmax - one-hot.
        A row that is not finite gives a loss that is not finite.
        """
        dtype = real_dtype("logits", logits)
        n, classes = rank("logits", logits, 2)
        exact("logits", logits, dtype, (n, classes))
        exact("target", target, INT64, (n,))
        written("losses", losses, dtype, (n,))
        written("grad", grad, dtype, (n, classes))
        self._run.softmax_cross_entropy(logits, target, losses, grad)


def _check_channels(*, arrays: dict[str, Array], channels: dict[str, Array], out: tuple[str, ...] = ("out",)) -> None:
    """Check arrays (B, C, n), all of one shape, and arrays (C,), by name; the first of `arrays` tells the dtype.

    Those named by `out` are written.
    """
    (first, array), *_ = arrays.items()
    dtype, shape = real_dtype(first, array), rank(first, array, 3)
    for name, other in arrays.items():
        (written if name in out else exact)(name, other, dtype, shape)
    for name, other in channels.items():
        (written if name in out else exact)(name, other, dtype, (shape[1],))


def _check_numbers(read: dict[str, Array], written_to: dict[str, Array]) -> None:
    """Check arrays (C,), by name; the first one tells the dtype and C."""
    (first, array), *_ = read.items()
    dtype, shape = real_dtype(first, array), rank(first, array, 1)
    for name, other in read.items():
        exact(name, other, dtype, shape)
    for name, other in written_to.items():
        written(name, other, dtype, shape)


def _check_clamp(x: Array, low: float, high: float, out: Array, **others: Array) -> None:
    """Check the arguments of `clamp` and, with `others` of the same length, of `clamp_grad`."""
    _check_elements(out, **{"gy" if others else "x": x}, **others)
    _check_order(low, high)


def _check_limits(limits: tuple[float, float] | None, *y: Array | None) -> None:
    """Check the limits of kernels that clamp as well; a mask `y` goes with limits, and with none of them is None."""
    if any((array is None) != (limits is None) for array in y):
        raise OptionError(
            "What is between the limits is not said", expected="both y and limits, or neither",
            got="limits alone" if limits is not None else "y alone", remedy="Pass the other one as well",
        )  # fmt: skip
    if limits is not None:
        _check_order(*limits)


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise OptionError(
            "The limits are in the wrong order", expected="low < high", got=f"low={low}, high={high}",
            remedy="Swap them",
        )  # fmt: skip


def _check_elements(out: Array, **read: Array) -> None:
    """Check arrays (n,) that are read, by name, and one that is written; the first one tells the dtype and n."""
    (first, array), *_ = read.items()
    dtype, shape = real_dtype(first, array), rank(first, array, 1)
    for name, other in read.items():
        exact(name, other, dtype, shape)
    written("out", out, dtype, shape)


# C = A @ B of sparse matrices on a kept structure: the numeric phase, a kernel a strategy.


class ProductKernels(Family):
    """Products of two sparse matrices; what they read of the structures is stated in `sparsebp.kernels.operands`.

    In all: a_data (nnz_a, B*); b_data (nnz_b, B*); out (nnz_c, B*), overwritten.
    """

    def spgemm_positions(self, rows: Rows, places: Places, a_data: Array, b_data: Array, out: Array) -> None:
        """Gustavson's algorithm with every product's place kept: no search, and one order of sums."""
        _check_rows(rows, a_data, b_data, out)
        exact("product_ptr", places.product_ptr, INT64, (rows_of("a_indptr", rows.a_indptr) + 1,))
        _check_positions("positions", places.positions, rank("positions", places.positions, 1))
        _check_cuts("row_cuts", places.row_cuts)
        self._run.spgemm_positions(rows, places, a_data, b_data, out)

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """Every entry of C is summed from the list of its products, in one order."""
        words, order, starts, lengths, tiles, shift, tile_cuts = pairs
        (nnz_a, _), (nnz_b, _), (nnz_c, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2), rank("out", out, 2)
        dtype, batch = real_dtype("a_data", a_data), batch_of(a_data=a_data, b_data=b_data)
        batched("a_data", a_data, dtype, (nnz_a,), batch)
        batched("b_data", b_data, dtype, (nnz_b,), batch)
        exact("words", words, word_dtype("words", words), rank("words", words, 1))
        for name, array in (("order", order), ("starts", starts), ("lengths", lengths)):
            exact(name, array, UINT16, (nnz_c,))
        exact("tiles", tiles, INT64, (rank("tiles", tiles, 2)[0], 11))
        if not 0 <= shift <= 32:
            raise ShapeError(
                "The entry of B begins outside of a word",
                expected="a shift from 0 to 32",
                got=str(shift),
                remedy="Pass the number of bits that an entry of A has",
            )
        _check_cuts("tile_cuts", tile_cuts)
        written("out", out, dtype, (nnz_c, batch))
        self._run.spgemm_pairs(pairs, a_data, b_data, out)

    def spgemm_select_rows(self, rows: Rows, a_data: Array, b_data: Array, out: Array) -> None:
        """No row of A has more than one entry: rows of B, picked and scaled.

        For the entry k of row r of A, row r of `out` is ``a_data[k] *`` row ``a_indices[k]`` of B.
        """
        _check_rows(rows, a_data, b_data, out)
        self._run.spgemm_select_rows(rows, a_data, b_data, out)

    def spgemm_select_columns(self, terms: Terms, a_data: Array, b_data: Array, out: Array) -> None:
        """No row of B has more than one entry, so that an entry of A makes one product at most.

        ``a_data[a_index[p]] * b_data[b_index[p]]`` is added to ``out[c_indptr[r] + positions[p]]``, in the order of p.
        """
        product_ptr, a_index, b_index, c_indptr, positions, row_cuts = terms
        kind, dtype = index_dtype("product_ptr", product_ptr), real_dtype("a_data", a_data)
        m, (products,) = rows_of("product_ptr", product_ptr), rank("b_index", b_index, 1)
        (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
        batch = batch_of(a_data=a_data, b_data=b_data)
        exact("product_ptr", product_ptr, kind, (m + 1,))
        if a_index is None:
            nnz_a = products
        else:
            exact("a_index", a_index, kind, (products,))
        batched("a_data", a_data, dtype, (nnz_a,), batch)
        exact("b_index", b_index, kind, (products,))
        batched("b_data", b_data, dtype, (nnz_b,), batch)
        exact("c_indptr", c_indptr, kind, (m + 1,))
        _check_positions("positions", positions, (products,))
        _check_cuts("row_cuts", row_cuts)
        written("out", out, dtype, (rank("out", out, 2)[0], batch))
        self._run.spgemm_select_columns(terms, a_data, b_data, out)

    def spgemm_runs(self, rows: Rows, runs: Runs, a_data: Array, b_data: Array, out: Array) -> None:
        """Rows of B are added run by run: one place stands for a run, and a group's rows meet in registers."""
        kind = _check_rows(rows, a_data, b_data, out)
        exact("b_shape", runs.b_shape, kind, (rows_of("b_indptr", rows.b_indptr),))
        exact("run_ptr", runs.run_ptr, kind, (rows_of("run_ptr", runs.run_ptr) + 1,))
        exact("run_lengths", runs.run_lengths, kind, rank("run_lengths", runs.run_lengths, 1))
        exact("start_ptr", runs.start_ptr, INT64, (rows_of("a_indptr", rows.a_indptr) + 1,))
        _check_positions("starts", runs.starts, rank("starts", runs.starts, 1))
        _check_cuts("row_cuts", runs.row_cuts)
        self._run.spgemm_runs(rows, runs, a_data, b_data, out)

    def spgemm_blocks(self, rows: Rows, blocks: Blocks, a_data: Array, b_data: Array, out: Array) -> None:
        """Gustavson's algorithm on dense blocks: one place stands for a product of two blocks."""
        _check_rows(rows, a_data, b_data, out)
        count, size = rows_of("a_indptr", rows.a_indptr), (blocks.m, blocks.k, blocks.n)
        if min(size) < 1 or count % blocks.m:
            raise ShapeError(
                "The sizes of the blocks do not fit", expected=f"m, k, n >= 1, m a divisor of {count} rows",
                got=str(size), remedy="Pass the sizes that the patterns consist of",
            )  # fmt: skip
        exact("product_ptr", blocks.product_ptr, INT64, (count // blocks.m + 1,))
        _check_positions("positions", blocks.positions, rank("positions", blocks.positions, 1))
        _check_cuts("row_cuts", blocks.row_cuts)
        self._run.spgemm_blocks(rows, blocks, a_data, b_data, out)

    def spgemm_accumulate(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """Nothing is kept per product: a dense row of sums, from which the entries of C are read.

        Scratch: n sums (times a vector, if there is a batch) for every part or block that runs.
        """
        _check_columns(rows, columns, a_data, b_data, out)
        self._run.spgemm_accumulate(rows, columns, a_data, b_data, out)

    def spgemm_filled(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """A, B and C are nearly full: the same through dense matrices, where that is the quicker.

        Values that are not finite meet entries alone, never what is not there. Scratch: the three matrices.
        """
        _check_columns(rows, columns, a_data, b_data, out)
        self._run.spgemm_filled(rows, columns, a_data, b_data, out)


def _check_columns(rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
    """Check what products without an index have."""
    kind = _check_rows(rows, a_data, b_data, out)
    exact("b_indices", columns.b_indices, kind, (len(b_data),))
    exact("c_indices", columns.c_indices, kind, (len(out),))
    if columns.n < 0:
        raise ShapeError(
            "The number of columns is negative",
            expected="columns >= 0",
            got=str(columns.n),
            remedy="Pass the number of columns of B",
        )
    _check_cuts("row_cuts", columns.row_cuts)


def _check_rows(rows: Rows, a_data: Array, b_data: Array, out: Array) -> object:
    """Check what all products by rows have; return the index type."""
    a_indptr, a_indices, b_indptr, c_indptr = rows
    kind, dtype = index_dtype("a_indptr", a_indptr), real_dtype("a_data", a_data)
    m, k = rows_of("a_indptr", a_indptr), rows_of("b_indptr", b_indptr)
    (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
    batch = batch_of(a_data=a_data, b_data=b_data)
    exact("a_indptr", a_indptr, kind, (m + 1,))
    exact("a_indices", a_indices, kind, (nnz_a,))
    batched("a_data", a_data, dtype, (nnz_a,), batch)
    exact("b_indptr", b_indptr, kind, (k + 1,))
    batched("b_data", b_data, dtype, (nnz_b,), batch)
    exact("c_indptr", c_indptr, kind, (m + 1,))
    written("out", out, dtype, (rank("out", out, 2)[0], batch))
    return kind


def _check_positions(name: str, positions: Array, shape: tuple[int, ...]) -> None:
    exact(name, positions, position_dtype(name, positions), shape)


def _check_cuts(name: str, cuts: Array) -> None:
    exact(name, cuts, INT64, (rows_of(name, cuts) + 1,))


# CSR: a sparse matrix times vectors and diagonals, gathers, and the values of transposed Jacobians.


class SparseKernels(Family):
    """Kernels on the values of one sparse matrix, and those that make values of transposed Jacobians, batch last."""

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV: ``out[i, b] = add[i, b] + sum_k data[k, b] * x[indices[k], b]`` over the entries k of row i.

        With shared values this is SpMM of one CSR matrix with a dense one.

        indptr (n_rows + 1,) index; indices (nnz,) index; data (nnz, B*) real; x (n_cols, B) real; out (n_rows, B) real;
        add (n_rows, B) real or None.
        """
        kind, dtype = index_dtype("indptr", indptr), real_dtype("data", data)
        n_rows, (nnz,) = rows_of("indptr", indptr), rank("indices", indices, 1)
        n_cols, batch = rank("x", x, 2)
        exact("indptr", indptr, kind, (n_rows + 1,))
        exact("indices", indices, kind, (nnz,))
        batched("data", data, dtype, (nnz,), batch)
        exact("x", x, dtype, (n_cols, batch))
        written("out", out, dtype, (n_rows, batch))
        if add is not None:
            exact("add", add, dtype, (n_rows, batch))
        self._run.csr_matvec(indptr, indices, data, x, out, add)

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR on the same pattern: ``out[k] = scale[row(k)] * data[k]``.

        indptr (n_rows + 1,) index; data (nnz, B*); scale (n_rows, B*); out (nnz, B*).
        """
        kind, dtype = index_dtype("indptr", indptr), real_dtype("data", data)
        n_rows, nnz = rows_of("indptr", indptr), rank("data", data, 2)[0]
        rank("scale", scale, 2)
        batch = batch_of(data=data, scale=scale)
        exact("indptr", indptr, kind, (n_rows + 1,))
        batched("data", data, dtype, (nnz,), batch)
        batched("scale", scale, dtype, (n_rows,), batch)
        written("out", out, dtype, (nnz, batch))
        self._run.scale_rows(indptr, data, scale, out)

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal on the same pattern: ``out[k] = data[k] * scale[indices[k]]``.

        indices (nnz,) index; data (nnz, B*); scale (n_cols, B*); out (nnz, B*).
        """
        kind, dtype = index_dtype("indices", indices), real_dtype("data", data)
        (nnz,), n_cols = rank("indices", indices, 1), rank("scale", scale, 2)[0]
        rank("data", data, 2)
        batch = batch_of(data=data, scale=scale)
        exact("indices", indices, kind, (nnz,))
        batched("data", data, dtype, (nnz,), batch)
        batched("scale", scale, dtype, (n_cols,), batch)
        written("out", out, dtype, (nnz, batch))
        self._run.scale_columns(indices, data, scale, out)

    def scale_runs(self, indices: Array, shapes: RowShapes, data: Array, scale: Array, out: Array) -> None:
        """As `scale_columns`, with what is known of A's rows besides; no column is read where values have no batch.

        indices, data, scale, out as there; `shapes` describes the same pattern.
        """
        kind, dtype = index_dtype("indices", indices), real_dtype("data", data)
        (nnz,), n_cols = rank("indices", indices, 1), rank("scale", scale, 2)[0]
        rank("data", data, 2)
        batch, m = batch_of(data=data, scale=scale), rows_of("indptr", shapes.indptr)
        exact("indices", indices, kind, (nnz,))
        exact("indptr", shapes.indptr, kind, (m + 1,))
        exact("shape", shapes.shape, INT32, (m,))
        exact("first", shapes.first, kind, (m,))
        exact("run_ptr", shapes.run_ptr, INT64, (rows_of("run_ptr", shapes.run_ptr) + 1,))
        exact("whole", shapes.whole, INT64, (rows_of("run_ptr", shapes.run_ptr),))
        exact("run_columns", shapes.run_columns, INT32, rank("run_columns", shapes.run_columns, 1))
        exact("run_ends", shapes.run_ends, INT32, rank("run_columns", shapes.run_columns, 1))
        batched("data", data, dtype, (nnz,), batch)
        batched("scale", scale, dtype, (n_cols,), batch)
        written("out", out, dtype, (nnz, batch))
        self._run.scale_runs(indices, shapes, data, scale, out)

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``. data (n, B); index (m,) index, all in range; out (m, B)."""
        dtype, kind = real_dtype("data", data), index_dtype("index", index)
        (n, batch), (m,) = rank("data", data, 2), rank("index", index, 1)
        exact("data", data, dtype, (n, batch))
        exact("index", index, kind, (m,))
        written("out", out, dtype, (m, batch))
        self._run.gather(data, index, out)

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """A product with exactly one term per output entry: ``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``.

        a_data (nnz_a, B*); b_data (nnz_b, B*); a_index, b_index (nnz_c,) index; out (nnz_c, B*).
        """
        dtype, kind = real_dtype("a_data", a_data), index_dtype("a_index", a_index)
        (nnz_a, _), (nnz_b, _) = rank("a_data", a_data, 2), rank("b_data", b_data, 2)
        (nnz_c,) = rank("a_index", a_index, 1)
        batch = batch_of(a_data=a_data, b_data=b_data)
        batched("a_data", a_data, dtype, (nnz_a,), batch)
        batched("b_data", b_data, dtype, (nnz_b,), batch)
        exact("a_index", a_index, kind, (nnz_c,))
        exact("b_index", b_index, kind, (nnz_c,))
        written("out", out, dtype, (nnz_c, batch))
        self._run.gather_multiply(a_data, a_index, b_data, b_index, out)

    def pointwise_slopes(self, kept: Array, function: SlopeFunction, out: Array) -> None:
        """The diagonal of a pointwise operator: ``out[i, b] = slope(kept[b, i])``.

        `function` "given": the slope is what was kept; "relu", "tanh", "sigmoid": it is f' as told from y.

        kept (B, n); out (n, B).
        """
        dtype, (batch, size) = real_dtype("kept", kept), rank("kept", kept, 2)
        if function not in SLOPES:
            raise OptionError(
                "Unknown function",
                expected=" or ".join(map(repr, SLOPES)),
                got=repr(function),
                remedy="Pass one of these",
            )
        exact("kept", kept, dtype, (batch, size))
        written("out", out, dtype, (size, batch))
        self._run.pointwise_slopes(kept, function, out)

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """Max pooling: one where a window takes its maximum, else zero.

        Entries come in lines of ``windows * taps``: `windows` windows beside each other from ``window[l]`` on, of each
        `taps` places beside each other from ``offset[l]`` on. ``out[(l, w, t), b]`` is 1 if
        ``winner[b, window[l] + w] == offset[l] + t``.

        winner (B, n_out) uint8 or int32; window (lines,) index; offset (lines,) int32; out (lines * windows * taps, B).
        """
        namespace(winner=winner)
        if winner.dtype not in _WINNERS:
            raise DTypeError(
                "winner has the wrong dtype", expected="uint8 or int32", got=winner.dtype,
                remedy="Convert it with winner.astype(...); nothing is converted silently",
            )  # fmt: skip
        kind, (batch, columns), (lines,) = (
            index_dtype("window", window),
            rank("winner", winner, 2),
            rank("window", window, 1),
        )
        if windows < 1 or taps < 1:
            raise OptionError(
                "A line holds at least one window and one tap", expected="windows >= 1 and taps >= 1",
                got=f"windows={windows}, taps={taps}", remedy="Pass 1 and 1 for entries without structure",
            )  # fmt: skip
        exact("winner", winner, winner.dtype, (batch, columns))
        exact("window", window, kind, (lines,))
        exact("offset", offset, "int32", (lines,))
        written("out", out, real_dtype("out", out), (lines * windows * taps, batch))
        self._run.max_pool_values(winner, window, offset, windows, taps, out)


# Convolutions and max pooling.


class WindowKernels(Family):
    """Kernels over sliding windows.

    Window o begins at input ``o * stride - before``; its tap t lies ``t * dilation`` further. What lies outside the
    input is zero for a convolution and never a maximum. The options are one integer an axis.
    """

    def convolve(
        self,
        weight: Array,
        x: Array,
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        out: Array,
    ) -> None:
        """``out[b, o, w] = Σ weight[o, c, t] · x[b, c, w * stride + t * dilation - before]``, c of the group of o.

        weight (O, C / groups, taps on three axes); x (B, C, D, H, W); out (B, O, windows on three axes), overwritten.
        """
        _check_convolution(weight, x, out, stride, before, dilation, groups, "y")
        self._run.convolve(weight, x, stride, before, dilation, groups, out)

    def convolve_t(
        self,
        weight: Array,
        y: Array,
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        out: Array,
    ) -> None:
        """The transpose of `convolve`: from the gradient at its output to that at its input.

        weight (O, C / groups, taps on three axes); y (B, O, windows on three axes); out (B, C, D, H, W), overwritten.
        """
        _check_convolution(weight, out, y, stride, before, dilation, groups, "x")
        self._run.convolve_t(weight, y, stride, before, dilation, groups, out)

    def correlate(
        self,
        y: Array,
        x: Array,
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        out: Array,
    ) -> None:
        """The gradient at the weights of `convolve`, for y the gradient at its output.

        y (B, O, windows on three axes); x (B, C, D, H, W); out (O, C / groups, taps on three axes), overwritten.
        """
        _check_convolution(out, x, y, stride, before, dilation, groups, "weight")
        self._run.correlate(y, x, stride, before, dilation, groups, out)

    def max_pool(
        self,
        x: Array,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        y: Array,
        winner: Array,
    ) -> None:
        """The maximum of every window, and its place counted in C order over the kernel.

        The first maximum wins; NaN wins over all, of several the last. Every window must meet the input.

        x (N, H, W); y (N, windows on two axes), written; winner as y, uint8 (kernels of up to 256 taps) or int32,
        written; the options are two integers each.
        """
        dtype, (planes, _, _), (_, *outputs) = real_dtype("x", x), rank("x", x, 3), rank("y", y, 3)
        _pool(kernel, stride, before, dilation, winner)
        exact("x", x, dtype, x.shape)
        written("y", y, dtype, (planes, *outputs))
        written("winner", winner, winner.dtype, (planes, *outputs))
        self._run.max_pool(x, kernel, stride, before, dilation, y, winner)

    def max_pool_grad(
        self,
        gy: Array,
        winner: Array,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        before: tuple[int, ...],
        dilation: tuple[int, ...],
        out: Array,
    ) -> None:
        """Every window's gradient goes to its maximum; where windows overlap they are added in their order.

        gy, winner (N, windows on two axes); out (N, H, W), overwritten.
        """
        dtype, (planes, _, _), (_, *inputs) = real_dtype("gy", gy), rank("gy", gy, 3), rank("out", out, 3)
        _pool(kernel, stride, before, dilation, winner)
        exact("gy", gy, dtype, gy.shape)
        exact("winner", winner, winner.dtype, gy.shape)
        written("out", out, dtype, (planes, *inputs))
        self._run.max_pool_grad(gy, winner, kernel, stride, before, dilation, out)


def _check_convolution(
    weight: Array, x: Array, y: Array, stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...],
    groups: int, out: str,
) -> None:  # fmt: skip
    """Check the arguments of a convolution with output y; `out` says which of x, weight and y is written."""
    names = {role: "out" if role == out else role for role in ("x", "weight", "y")}
    dtype, (batch, channels, *_) = real_dtype(names["x"], x), rank(names["x"], x, 5)
    rows, _, *kernel = rank(names["weight"], weight, 5)
    outputs = rank(names["y"], y, 5)[2:]
    if groups < 1 or channels % groups or rows % groups:
        raise OptionError(
            "groups does not fit the channels", expected=f"a divisor of {channels} and of {rows}", got=groups,
            remedy="Pass 1 for a convolution over all channels",
        )  # fmt: skip
    _sizes(3, stride=stride, before=before, dilation=dilation)
    shapes = {"x": x.shape, "weight": (rows, channels // groups, *kernel), "y": (batch, rows, *outputs)}
    for name, array in (("x", x), ("weight", weight), ("y", y)):
        check = written if name == out else exact
        check(names[name], array, dtype, shapes[name])


def _pool(
    kernel: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...], dilation: tuple[int, ...], winner: Array
) -> None:
    namespace(winner=winner)
    if winner.dtype not in _WINNERS:
        raise DTypeError(
            "winner has the wrong dtype", expected="uint8 or int32", got=winner.dtype,
            remedy="Allocate it with one of the two",
        )  # fmt: skip
    if winner.dtype == "uint8" and kernel[0] * kernel[1] > 256:
        raise DTypeError(
            "winner cannot hold the places of the kernel", expected="int32", got="uint8", remedy="Allocate int32"
        )
    _sizes(2, kernel=kernel, stride=stride, before=before, dilation=dilation)


def _sizes(axes: int, **values: tuple[int, ...]) -> None:
    for name, value in values.items():
        if len(value) != axes or min(value) < (0 if name == "before" else 1):
            raise OptionError(
                f"{name} does not fit the windows", expected=f"{axes} integers, at least {int(name != 'before')}",
                got=repr(value), remedy="Pass one for every axis",
            )  # fmt: skip


class Kernels(
    SparseKernels,
    ProductKernels,
    DenseKernels,
    RecurrentKernels,
    LstmKernels,
    WindowKernels,
    PointwiseKernels,
    OptimizerKernels,
):
    """All kernels, over an implementation. `sparsebp.kernels.get` makes one for an array namespace."""
