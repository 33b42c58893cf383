"""Every kernel's arguments, dtypes, shapes and checks, stated once as a table; host or device do the work.

A row names the arguments in their order, one ``name (shape) dtype`` for each array:

- A capital names a size. The arrays of a call agree about it; `B` is the batch. Small letters are whole-number
  arguments. ``B*`` is 1 (values shared by the batch) or B, and B is then what the operands have.
- ``real`` is float32 or float64, the same for all real arguments of a call; ``number`` may be complex, too. ``index``
  is int32 or int64, ``position`` uint16 or uint32, ``word`` uint32 or uint64, ``winner`` uint8 or int32. Other dtypes
  are NumPy's.
- An array with a question mark may be None. One that is ``written`` must not be read-only.
- Tuples of arrays, ``name: Class``, state the same of their fields in `sparsebp.kernels.operands`.

Conventions
-----------
- Every array that is not ``strided`` is C-contiguous, and all are on the host or on one device. The caller allocates
  what is written; a kernel allocates scratch only. Outputs never alias inputs.
- The batch is **last** in everything that belongs to a Jacobian, a product or a scan; recurrent layers are time-major
  as in torch.nn: ``(T, B, ...)``.
- A kernel writes its results and returns nothing. A method that returns something asks about sizes: it runs nothing.
- No atomics: the same input gives bitwise the same output on every run and for every number of threads.
- Sizes of zero are legal wherever they make sense (no rows, no nonzeros, no batch).
- A wrong dtype, shape or layout raises (see `sparsebp.core.backend.check_array`); nothing falls through.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sparsebp.core import backend
from sparsebp.core.check import Array, UpdateRule
from sparsebp.kernels.checks import (
    FEW_SUMS,
    FLOAT64,
    SUMS_AT_MOST,
    Sizes,
    check_arrays,
    check_near,
    check_update,
    check_update_options,
    check_written,
    written,
)
from sparsebp.kernels.table import kernel


class Kernels:
    """All kernels, over an implementation. `sparsebp.kernels.get` makes one for an array namespace.

    Parameters
    ----------
    run
        `sparsebp.kernels.host.HostKernels` or `sparsebp.kernels.device.DeviceKernels`. Their methods have the names and
        arguments of those here, and check nothing.

    Attributes
    ----------
    xp
        The namespace of the arrays, ``numpy`` or ``cupy``.
    unchecked
        The host's kernels without their checks, for callers that have checked their arrays; on a device, these kernels.
        Every argument has to be given; None stands for a default.
    """

    def __init__(self, run: Any) -> None:
        self._run, self.xp = run, run.xp
        self.unchecked = run if run.unchecked else self

    # A sparse matrix times vectors and diagonals, gathers, and the values of transposed Jacobians.

    csr_matvec = kernel(
        """indptr (Rows + 1) index; indices (Nnz) index; data (Nnz, B*) real; x (Cols, B) real;
        out (Rows, B) real written; add (Rows, B) real? = None""",
        """Batched SpMV: ``out[i, b] = add[i, b] + Σ_k data[k, b] * x[indices[k], b]`` over the entries k of row i.

        With shared values this is SpMM of one CSR matrix with a dense one.""",
    )
    scale_rows = kernel(
        "indptr (Rows + 1) index; data (Nnz, B*) real; scale (Rows, B*) real; out (Nnz, B) real written",
        "Diagonal times CSR on the same pattern: ``out[k] = scale[row(k)] * data[k]``.",
    )
    scale_columns = kernel(
        "indices (Nnz) index; data (Nnz, B*) real; scale (Cols, B*) real; out (Nnz, B) real written",
        "CSR times diagonal on the same pattern: ``out[k] = data[k] * scale[indices[k]]``.",
    )
    scale_runs = kernel(
        """indices (Nnz) index; shapes: RowShapes; data (Nnz, B*) real; scale (Cols, B*) real;
        out (Nnz, B) real written""",
        """As `scale_columns`; `shapes` describes the rows of the same pattern. Without a batch no column is read.""",
    )
    gather = kernel(
        "data (N, B) real; index (M) index; out (M, B) real written",
        "``out[k] = data[index[k]]``; every index is in range.",
    )
    gather_multiply = kernel(
        """a_data (NnzA, B*) real; a_index (NnzC) index; b_data (NnzB, B*) real; b_index (NnzC) index;
        out (NnzC, B) real written""",
        "A product with exactly one term per output entry: ``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``.",
    )
    pointwise_slopes = kernel(
        "kept (B, N) real; function: SlopeFunction; out (N, B) real written",
        """The diagonal of a pointwise operator: ``out[i, b] = slope(kept[b, i])``.

        `function` "given": `kept` is the slope; "relu", "tanh", "sigmoid": `kept` is y = f(x), and the slope f'.""",
        "check_function(function)",
    )
    max_pool_values = kernel(
        """winner (B, Outputs) winner; window (Lines) index; offset (Lines) int32; windows: int; taps: int;
        out (Lines * windows * taps, B) real written""",
        """Max pooling: one where a window takes its maximum, else zero.

        Entries come in lines of ``windows * taps``: `windows` adjacent windows from ``window[l]`` on, and in each
        `taps` adjacent places from ``offset[l]`` on. ``out[(l, w, t), b]`` is 1 if
        ``winner[b, window[l] + w] == offset[l] + t``.""",
        "check_line(windows, taps)",
    )

    # C = A @ B of sparse matrices on a stored structure, one kernel for each strategy. `out` is overwritten.

    spgemm_positions = kernel(
        "rows: Rows; places: Places; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        "Gustavson's algorithm with the place of every product stored: no search, and one order of sums.",
    )
    spgemm_pairs = kernel(
        "pairs: Pairs; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        "Every entry of C is summed from the list of its products, in one order.",
        "check_shift(shift)",
    )
    spgemm_select_rows = kernel(
        "rows: Rows; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        """For A with at most one entry a row: rows of B, picked and scaled.

        For the entry k of row r of A, row r of `out` is ``a_data[k] *`` row ``a_indices[k]`` of B.""",
    )
    spgemm_select_columns = kernel(
        "terms: Terms; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        """For B with at most one entry a row, so each entry of A takes part in at most one product.

        ``a_data[a_index[p]] * b_data[b_index[p]]`` is added to ``out[c_indptr[r] + positions[p]]``, in the order of
        p.""",
        "NnzA = Products if a_index is None else len(a_data)",
    )
    spgemm_runs = kernel(
        "rows: Rows; runs: Runs; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        "Rows of B are added run by run: one place stands for a run, and a group's rows meet in registers.",
    )
    spgemm_blocks = kernel(
        "rows: Rows; blocks: Blocks; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        "Gustavson's algorithm on dense blocks: one place stands for a product of two blocks.",
        "check_blocks(M, m, k, n)",
    )
    spgemm_accumulate = kernel(
        "rows: Rows; columns: Columns; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        """Stores nothing per product: sums are collected in a dense row, from which the entries of C are read.

        Scratch: n sums (times a vector, if there is a batch) for every part or block that runs.""",
        "check_columns(n)",
    )
    spgemm_filled = kernel(
        "rows: Rows; columns: Columns; a_data (NnzA, B*) real; b_data (NnzB, B*) real; out (NnzC, B) real written",
        """For A, B and C that are nearly full: the product of dense matrices.

        Infinity and NaN are multiplied with entries only, never with the zeros between them. Scratch: the three
        matrices.""",
        "check_columns(n)",
    )

    # Linear layers, with torch.nn's weight.

    affine = kernel(
        "x (N, I) real; weight (O, I) real; bias (O) real?; out (N, O) real written", "``out = x @ weightᵀ + bias``."
    )
    affine_grad = kernel(
        "gy (N, O) real; x (N, I) real; weight (O, I) real written; bias (O) real? written",
        "The gradients at weight and bias: ``gyᵀ @ x``, and the sums over the rows of gy.",
    )

    add_bias = kernel("out (N, C) real written; bias (C) real", "Add a bias to every row, in place.")

    # Stacks of small dense blocks: materialised recurrent Jacobians.

    dense_matmul = kernel(
        """a (Sa, M, K, B*) real; a_index (S) int64; b (Sb, K, N, B*) real; b_index (S) int64;
        out (So, M, N, B) real written; out_index (S) int64""",
        """A level of dense products: ``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` per sample, for all s.

        `out` is a different array from `a` and `b`; its entries that are not in `out_index` keep their values.""",
    )
    dense_matvec = kernel(
        """a (Sa, M, K, B*) real; a_index (S) int64; x (Sx, K, B) real; x_index (S) int64; add (Sd, M, B) real?;
        add_index (S) int64?; out (So, M, B) real written; out_index (S) int64""",
        """A level of dense matrix-vector products.

        For all s: ``out[out_index[s]] = a[a_index[s]] @ x[x_index[s]] + add[add_index[s]]``; `add` and `add_index` may
        both be None. `out` may be the same array as `x` or `add` as long as no entry that is written is also read.""",
        "check_together('add', add, 'add_index', add_index)",
    )
    dense_chain = kernel(
        """a (S, N, N, B*) real; chunk_ptr (C + 1) int64; x (C, N, B) real; add (S, N, B) real?;
        out (S, N, B) real written""",
        """Independent chains of matrix-vector products, one per chunk; chunk_ptr goes from 0 to S.

        For chunk c: ``v = x[c]``; for s from ``chunk_ptr[c]`` to ``chunk_ptr[c + 1] - 1``: ``v = a[s] @ v + add[s]``;
        ``out[s] = v``.""",
    )
    dense_reduce = kernel(
        """a (S, N, N, B*) real; chunk_ptr (C + 1) int64; add (S, N, B) real?;
        out_matrix (C, N, N, a.shape[-1]) real written; out_vector (C, N, B) real? written""",
        """Reduce each chunk of affine maps to one: ``P = a[last] @ … @ a[first]`` and the matching vector.

        Starting from P = I, v = 0; for s in the chunk: ``P = a[s] @ P``; ``v = a[s] @ v + add[s]``. `out_vector` is
        None exactly when `add` is.""",
        "check_together('add', add, 'out_vector', out_vector)",
        "B = a.shape[-1] if add is None else add.shape[-1]",
    )

    # All steps of a recurrent layer. Weights are laid out as in torch.nn, a GRU's gates r, z, n, an LSTM's i, f, g, o.
    # gy is the gradient that arrives at every step's output, grad_h_n the one that arrives at the last state; None is
    # zero. A batch of zero is legal; a sequence of zero steps and a hidden size of zero are not.
    #
    # Forward takes the product of the input with its weights, or both of them, where I on a device is at most
    # `MOST_INPUTS`; it adds the biases to either. With `fresh` the state before the first step is zero, and h0 (and c0)
    # are written, not read.

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """Return the largest input size for which forward is faster with x and w_ih than after a product; maybe 0."""
        return int(self._run.projected_inputs(gates, hidden, itemsize))

    @lru_cache(maxsize=256)  # noqa: B019 - asked in every step, of one object
    def sums_inside(self, gates: int, columns: int, sizes: Sizes, features: int, itemsize: int, chunks: int) -> bool:
        """Whether backward should be given `WeightSums`, because it sums the weight gradients as it goes.

        ga has `columns` times the hidden size, of which each weight feeds `gates`. Every chunk leaves its sums: if they
        take much more memory than ga, products are better.
        """
        steps, batch, hidden = sizes
        room, samples = self._run.sums_for(gates, hidden, features, itemsize)
        numbers = chunks * (gates * (hidden + room) + columns)
        most = SUMS_AT_MOST * steps * columns * min(samples, batch)
        few = samples > 1 and -(-batch // samples) * numbers * hidden <= FEW_SUMS  # on a host, whose blocks share sums
        return room > 0 and (numbers <= most or few)

    rnn_forward = kernel(
        """x (T, B, I) real; w_hh (H, H) real; h0 (B, H) real; nonlinearity: Nonlinearity; h (T, B, H) real written;
        w_ih (H, I) real? = None; b_ih (H) real? = None; b_hh (H) real? = None; fresh: bool = False""",
        """``h[t] = f(x[t] + b_ih + b_hh + w_hh @ h[t-1])``, f = tanh or relu (BPPSA Eq. 9).

        x: the input's product, I = H. With w_ih, x is the input, and ``w_ih @ x[t]`` takes its place.""",
        "check_nonlinearity(nonlinearity)",
        "check_steps('h', h)",
        "check_fresh(fresh, h0=h0)",
        "I = input_size(H, w_ih, self._run.MOST_INPUTS)",
    )
    rnn_backward = kernel(
        """h (T, B, H) real; w_hh (H, H) real; gy (T, B, H) real?; grad_h_n (B, H) real?; nonlinearity: Nonlinearity;
        gz (T, B, H) real? written; gh0 (B, H) real written; chunks: int = 1; sums: WeightSums | None = None""",
        """Back-propagation: gz is the gradient at the pre-activations.

        With `sums` the weight gradients are written as well, and gz may be None. If `sums_inside`, they are summed as
        the recursion goes, in a fixed order; otherwise by products.

        ``g[t] = gy[t] + w_hhᵀ @ gz[t+1]`` (``+ grad_h_n`` at the last t); ``gz[t] = g[t] * f'(t)``;
        ``gh0 = w_hhᵀ @ gz[0]``. f' is ``1 - h²`` (tanh) or ``h > 0`` (relu; 1 at a NaN).

        One chunk is the recursion, 2·T·B·H² FLOP. More of them, ``1 <= chunks <= T``, are reduce-then-scan, which
        stores no Jacobian: 2·(H + 1)·T·B·H²·(C - 2)/C FLOP more, for the affine maps of all chunks but the first and
        the last in time, which need none; it pays if far more than H workers are idle. Scratch: H·H + H values a
        map and sample.""",
        "check_nonlinearity(nonlinearity)",
        "check_steps('h', h)",
        "check_chunks(chunks, T)",
        "check_outgoing('gz', gz, sums)",
        "G = 1",
    )
    rnn_maps = kernel(
        """h (T, B, H) real; w_hh (H, H) real; gy (T, B, H) real?; nonlinearity: Nonlinearity;
        maps (C, B, H + 1, H) real written""",
        """Reduce chunks of steps to affine maps: the first phase of reduce-then-scan.

        Chunk c of C has the steps ``c·T//C … (c + 1)·T//C - 1``. A gradient g, a row, that comes to the state behind a
        chunk reaches the state before it as ``g @ maps[c, b, :H] + maps[c, b, H]``. 2·(H + 1)·T·B·H² FLOP.""",
        "check_nonlinearity(nonlinearity)",
        "check_steps('h', h)",
        "check_chunks(C, T)",
    )
    rnn_jacobians = kernel(
        "h (T, B, H) real; w_hh (H, H) real; nonlinearity: Nonlinearity; out (T, H, H, B) real written",
        """Materialise the scan's elements: ``out[t, i, j, b] = w_hh[j, i] * f'(h[t, b, j])``.

        This is the transposed Jacobian of h[t] with respect to h[t-1] (rows: input, columns: output).""",
        "check_nonlinearity(nonlinearity)",
        "check_steps('h', h)",
    )
    gru_forward = kernel(
        """x (T, B, I) real; w_hh (3 * H, H) real; b_hn (H) real; h0 (B, H) real; h (T, B, H) real written;
        gates (T, B, 4 * H) real written; w_ih (3 * H, I) real? = None; b_ih (3 * H) real? = None;
        b_hh (3 * H) real? = None; fresh: bool = False""",
        """GRU (BPPSA Eq. 10) with every gate kept for the backward.

        x, I = 3·H, gates in the order r, z, n: ``W_i x``; added to it are b_ih, and of b_hh the parts for r and z.
        ``M = W_hn h + b_hn``; ``n = tanh(x_n + r * M)``; ``h' = (1 - z) * n + z * h``. Gates are kept in the order
        r, z, n, M. With w_ih, x is the input, and is multiplied here.""",
        "check_steps('h', h)",
        "check_fresh(fresh, h0=h0)",
        "I = input_size(3 * H, w_ih, self._run.MOST_INPUTS)",
    )
    gru_backward = kernel(
        """h (T, B, H) real; h0 (B, H) real; gates (T, B, 4 * H) real; w_hh (3 * H, H) real; gy (T, B, H) real?;
        grad_h_n (B, H) real?; ga (T, B, 4 * H) real? written; gh0 (B, H) real written; chunks: int = 1;
        sums: WeightSums | None = None""",
        """Back-propagation through a GRU, by the recursion or by chunks, as `rnn_backward`; factored Jacobians, Eq. 11.

        ga: gradients at the pre-activations N, R, Z and at M, in the order **n, r, z, m**. So ``ga[..., H:]`` is what
        multiplies h (order r, z, n as in w_hh) and ``ga[..., :3H]`` what multiplies x (order n, r, z). `sums` as in
        `rnn_backward`.

        6·T·B·H² FLOP, and with C chunks (2·(H + 1)·H² + 6·H²)·T·B·(C - 2)/C more.""",
        "check_steps('h', h)",
        "check_chunks(chunks, T)",
        "check_outgoing('ga', ga, sums)",
        "G = 3",
    )
    sum_gates = kernel(
        """ga (N, C) real; first: int; product (C - first, I) real?; w_ih (C - first, I) real? written;
        b_ih (C - first) real? written; b_hh (C - first) real? written""",
        """The biases' gradients: sums of ga over all steps and samples. Its last columns, from `first` on, go to b_hh.

        The others, up to the last `first`, go to b_ih. A GRU's (first = H) are those at n, r, z: they, and the rows of
        `product`, the gradient at the input's weights as it comes from these columns, are brought to the order r, z, n,
        in b_ih and w_ih. The order of the sums is fixed.""",
        "check_together('product', product, 'w_ih', w_ih)",
    )
    gru_maps = kernel(
        """h (T, B, H) real; h0 (B, H) real; gates (T, B, 4 * H) real; w_hh (3 * H, H) real; gy (T, B, H) real?;
        maps (C, B, H + 1, H) real written""",
        "Reduce chunks of a GRU's steps to affine maps, as `rnn_maps`. 2·(H + 4)·T·B·H² FLOP.",
        "check_steps('h', h)",
        "check_chunks(C, T)",
    )
    gru_jacobians = kernel(
        """h (T, B, H) real; h0 (B, H) real; gates (T, B, 4 * H) real; w_hh (3 * H, H) real;
        out (T, H, H, B) real written""",
        "Materialise the scan's elements (BPPSA Eq. 11); rows: input h[t-1], columns: output h[t].",
        "check_steps('h', h)",
    )

    # The LSTM of torch.nn (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers et al., "Learning to
    # forget", 2000). Its state is the pair (h, c), in this order wherever both are adjacent: a transposed Jacobian has
    # 2H rows and columns, of which the two blocks from h are dense and the two from c diagonal.

    lstm_forward = kernel(
        """x (T, B, I) real; w_hh (4 * H, H) real; h0 (B, H) real; c0 (B, H) real; h (T, B, H) real written;
        c (T, B, H) real written; gates (T, B, 4 * H) real written; w_ih (4 * H, I) real? = None;
        b_ih (4 * H) real? = None; b_hh (4 * H) real? = None; fresh: bool = False""",
        """``c' = f * c + i * g`` and ``h' = o * tanh(c')``, with every gate kept for the backward.

        x, I = 4·H: ``W_i x``, to which both biases are added; with w_ih, x is the input, and is multiplied here. Gates
        are kept in the order i, f, g, o, of which g went through tanh and the others through the sigmoid. 8·T·B·H²
        FLOP.""",
        "check_steps('h', h)",
        "check_fresh(fresh, h0=h0, c0=c0)",
        "I = input_size(4 * H, w_ih, self._run.MOST_INPUTS)",
    )
    lstm_backward = kernel(
        """c (T, B, H) real; c0 (B, H) real; gates (T, B, 4 * H) real; w_hh (4 * H, H) real; gy (T, B, H) real?;
        grad_h_n (B, H) real?; grad_c_n (B, H) real?; ga (T, B, 4 * H) real? written; gh0 (B, H) real written;
        gc0 (B, H) real written; chunks: int = 1; sums: WeightSums | None = None""",
        """Back-propagation through an LSTM, by the recursion or by chunks, as `rnn_backward`.

        ga: gradients at the pre-activations, in torch's order i, f, g, o; it multiplies h and x alike. gy arrives at
        every h. `sums` as in `rnn_backward`; with them ga may be None.

        8·T·B·H² FLOP, and with C chunks (4·(2H + 1)·H² + 6·H²)·T·B·(C - 2)/C more: a row of a chunk's map takes two
        products of H × H a step, and not the four of a dense Jacobian. Scratch: 2H·(2H + 1) values a map and
        sample.""",
        "check_steps('c', c)",
        "check_chunks(chunks, T)",
        "check_outgoing('ga', ga, sums)",
        "G = 4",
    )
    lstm_maps = kernel(
        """c (T, B, H) real; c0 (B, H) real; gates (T, B, 4 * H) real; w_hh (4 * H, H) real; gy (T, B, H) real?;
        maps (C, B, 2 * H + 1, 2 * H) real written""",
        """Reduce chunks of an LSTM's steps to affine maps of (h, c), as `rnn_maps`.

        (4·(2H + 1) + 6)·T·B·H² FLOP.""",
        "check_steps('c', c)",
        "check_chunks(C, T)",
    )
    lstm_jacobians = kernel(
        """c (T, B, H) real; c0 (B, H) real; gates (T, B, 4 * H) real; w_hh (4 * H, H) real;
        out (T, 2 * H * (H + 1), B) real written""",
        """Materialise the scan's elements: the transposed Jacobian of (h, c)[t] with respect to (h, c)[t-1].

        For every step the values on `sparsebp.patterns.lstm_pattern`, row by row. A row of h[t-1] has 2H of them, h[t]
        before c[t]; a row of c[t-1] has two.""",
        "check_steps('c', c)",
    )

    # Linear recurrences, element by element (Blelloch, "Prefix sums and their applications", 1990, section 1.4). The
    # factors and resets may be shared by steps, samples and units. Where `reset` is true, the state before a step is
    # zero, whatever it was. Of sample b, steps from ``lengths[b]`` on do not take part: all that is written for them is
    # zero.

    linear_recurrence = kernel(
        """a (Ta, Ba, Ha) number strided; b (T, B, H) number strided; h0 (B, H) number strided; lengths (B) int64?;
        reset (Tr, Br, Hr) bool? strided; reverse: bool; h (T, B, H) number strided written""",
        """``h[t] = a[t] * h[t-1] + b[t]`` with ``h[-1] = h0``; `reverse` goes from a sample's last step to the first.

        An axis of a and of reset has the length of b's, or 1.""",
        "check_shared('a', a, b)",
        "reset is None or check_shared('reset', reset, b)",
    )
    linear_recurrence_grad = kernel(
        """a (Ta, Ba, Ha) number strided; h (T, B, H) number strided; gh (T, B, H) number strided;
        h0 (B, H) number strided; lengths (B) int64?; reset (Tr, Br, Hr) bool? strided; reverse: bool;
        ga (Ta, B, H) number strided written; gb (T, B, H) number strided written; gh0 (B, H) number strided written""",
        """The transpose of `linear_recurrence`, for gh the gradient at h, which arrives at every step.

        ``gb[t] = gh[t] + conj(a[t+1]) * gb[t+1]``, ``ga[t] = gb[t] * conj(h[t-1])`` and ``gh0 = conj(a[0]) * gb[0]``.
        A factor that all steps share gets the sum of its gradients over the steps; sums over samples and units are the
        caller's.""",
        "check_shared('a', a, h)",
        "reset is None or check_shared('reset', reset, h)",
    )

    # The minGRU and, with three parts of x, the minLSTM (Feng et al., "Were RNNs All We Needed?", 2024, sections 3.1
    # and 3.2) as linear recurrences.

    min_gru_forward = kernel(
        """x (T, B, G * H) real; h0 (B, H) real; lengths (B) int64?; nonlinearity: str; reverse: bool;
        h (T, B, H) real written""",
        """``h[t] = (1 - z) * h[t-1] + z * c`` with ``z = σ(u)``, ``c = c(v)`` and ``(u, v) = x[t]``, projected inputs.

        Of a minLSTM ``(p, q, v) = x[t]``, and ``z = σ(p) / (σ(p) + σ(q))``.

        c is the function of `CANDIDATES` that `nonlinearity` names; `lengths` and `reverse` as in
        `linear_recurrence`.""",
        "check_choice('nonlinearity', nonlinearity, CANDIDATES)",
        "G = parts_of(x, h)",
    )
    min_gru_backward = kernel(
        """x (T, B, G * H) real; h (T, B, H) real; gh (T, B, H) real; h0 (B, H) real; lengths (B) int64?;
        nonlinearity: str; reverse: bool; gx (T, B, G * H) real written; gh0 (B, H) real written""",
        """The gradients of `min_gru_forward` at x and h0, for gh the gradient at h; gates are computed again.

        ``g[t] = gh[t] + (1 - z[t+1]) * g[t+1]``; the gradient at u is ``g (c - h[t-1]) z (1 - z)`` and at v
        ``g z c'(v)``, where c' is 1 at the corner of `positive`. Of a minLSTM those at p and q are
        ``g (c - h[t-1]) z (1 - z)`` times 1 - σ(p), and times -(1 - σ(q)).""",
        "check_choice('nonlinearity', nonlinearity, CANDIDATES)",
        "G = parts_of(x, h)",
    )

    # The selective scan (Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section
    # 3): E channels with N states each, whose rates `a` are stored states first.

    selective_scan = kernel(
        """x (T, B, E) real; dt (T, B, E) real; a (N, E) real; b (T, B, N) real; c (T, B, N) real; d (E) real;
        h0 (B, N, E) real; reset (T, B) bool?; y (T, B, E) real written; states (Kept, B, N, E) real written""",
        """``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]``, h[-1] = h0, and ``y[t] = Σ_n c[t, n] h[t, n] + d x[t]``.

        states: h before the steps 0, `CHUNK`, 2 `CHUNK`, …, and after the last step. Where `reset` is true, the state
        before a step, and its factor, are zero, whatever they were.""",
        "check_states(Kept, T)",
    )
    selective_scan_grad = kernel(
        """x (T, B, E) real; dt (T, B, E) real; a (N, E) real; b (T, B, N) real; c (T, B, N) real; d (E) real;
        gy (T, B, E) real; gh (B, N, E) real; states (Kept, B, N, E) real; reset (T, B) bool?;
        gx (T, B, E) real written; gdt (T, B, E) real written; ga (B, N, E) real written; gb (T, B, N) real written;
        gc (T, B, N) real written; gd (B, E) real written; gh0 (B, N, E) real written""",
        """The gradients of `selective_scan`, for gy at y and gh at the last state; of a and d those of each sample.

        Each chunk of steps runs forward again from its state; no other state is stored.""",
        "check_states(Kept, T)",
    )

    # Sliding windows. Window o begins at input ``o * stride - before``; its tap t lies ``t * dilation`` further. Taps
    # outside the input are zero for a convolution and never a maximum. The options are one integer for each axis.

    convolve = kernel(
        """weight (O, C // groups, Kd, Kh, Kw) real; x (B, C, D, H, W) real; stride: tuple[int, ...];
        before: tuple[int, ...]; dilation: tuple[int, ...]; groups: int; out (B, O, Od, Oh, Ow) real written;
        bias (O) real? = None; limits: tuple[float, float] | None = None""",
        """``out[b, o, w] = Σ weight[o, c, t] · x[b, c, w * stride + t * dilation - before] + bias[o]``, c of o's group.

        With `limits` (low, high), the result is clamped.""",
        "check_groups(groups, C, O)",
        "check_windows(3, stride=stride, before=before, dilation=dilation)",
        "check_limits(limits)",
    )
    convolve_t = kernel(
        """weight (O, C // groups, Kd, Kh, Kw) real; y (B, O, Od, Oh, Ow) real; stride: tuple[int, ...];
        before: tuple[int, ...]; dilation: tuple[int, ...]; groups: int; out (B, C, D, H, W) real written;
        bias (C) real? = None; limits: tuple[float, float] | None = None""",
        """The transpose of `convolve`: from the gradient at its output to the gradient at its input.

        `bias` is added and `limits` are kept as there.""",
        "check_groups(groups, C, O)",
        "check_windows(3, stride=stride, before=before, dilation=dilation)",
        "check_limits(limits)",
    )
    correlate = kernel(
        """y (B, O, Od, Oh, Ow) real; x (B, C, D, H, W) real; stride: tuple[int, ...]; before: tuple[int, ...];
        dilation: tuple[int, ...]; groups: int; out (O, C // groups, Kd, Kh, Kw) real written""",
        "The gradient at the weights of `convolve`, for y the gradient at its output.",
        "check_groups(groups, C, O)",
        "check_windows(3, stride=stride, before=before, dilation=dilation)",
    )
    max_pool = kernel(
        """x (N, H, W) real; rows (Oh, 3) int64; columns (Ow, 3) int64; kernel: tuple[int, ...];
        dilation: tuple[int, ...]; y (N, Oh, Ow) real written; winner (N, Oh, Ow) winner written""",
        """The maximum of every window, and its place counted in C order over the kernel: uint8 for up to 256 taps.

        `rows` and `columns` have for every window of an axis ``start, first, end``: the taps t from `first` to
        ``end - 1``, at least one, are ``start + t * dilation`` and lie in the input. Starts ascend.

        The first maximum wins; NaN wins over all numbers, and the last NaN over others.""",
        "check_windows(2, kernel=kernel, dilation=dilation)",
        "check_winner(winner, kernel)",
    )
    max_pool_grad = kernel(
        """gy (N, Oh, Ow) real; winner (N, Oh, Ow) winner; rows (Oh, 3) int64; columns (Ow, 3) int64;
        kernel: tuple[int, ...]; dilation: tuple[int, ...]; out (N, H, W) real written""",
        "Every window's gradient goes to its maximum; where windows overlap they are added in their order.",
        "check_windows(2, kernel=kernel, dilation=dilation)",
        "check_winner(winner, kernel)",
    )
    band_product = kernel(
        """x (N, L, M) real; first (Rows) int64; indptr (Rows + 1) int64; data (Nnz) real;
        out (N, Rows, M) real written""",
        """A banded matrix along an axis: ``out[n, r, m] = Σ_k data[indptr[r] + k] * x[n, first[r] + k, m]``.

        A row's entries lie side by side, from column ``first[r]`` on; the row of none is 0.""",
    )

    # Element by element, or channel by channel. With `limits` (low, high), the result is clamped, and with y, gy first
    # goes through `clamp_grad`.

    channel_normalise = kernel(
        """x (B, C, N) real; weight (C) real?; bias (C) real?; eps: float; mean (C) real written;
        var (C) real written; scale (C) real written; out (B, C, N) real written;
        limits: tuple[float, float] | None = None""",
        """Normalise every channel by its mean and variance (divided by the number) over batch and positions.

        ``scale = 1 / sqrt(var + eps)`` and ``out = (x - mean) * scale * weight + bias``; None drops a term.""",
        "check_limits(limits)",
    )
    channel_scale = kernel(
        """x (B, C, N) real; mean (C) real?; factor (C) real?; offset (C) real?; out (B, C, N) real written;
        limits: tuple[float, float] | None = None""",
        "``out = (x - mean) * factor + offset``, with the numbers of the channel; None drops a term.",
        "check_limits(limits)",
    )
    channel_products = kernel(
        """gy (B, C, N) real; x (B, C, N) real; mean (C) real; sums (C) real written; products (C) real written;
        y (B, C, N) real? = None; limits: tuple[float, float] | None = None""",
        "``sums = Σ gy`` and ``products = Σ gy * (x - mean)`` of every channel, over batch and positions.",
        "check_limits(limits, y)",
    )
    channel_back = kernel(
        """gy (B, C, N) real; x (B, C, N) real; mean (C) real; scale (C) real; weight (C) real?;
        sums (C) real written; products (C) real written; out (B, C, N) real written; known: bool = False;
        y (B, C, N) real? = None; limits: tuple[float, float] | None = None""",
        """The transpose of `channel_normalise` at x, for its mean and scale, and the sums of `channel_products`.

        ``out = (gy - sums / N - (x - mean) * products * scale**2 / N) * scale * weight``, N elements a channel.
        Sums that are `known` are read.""",
        "check_limits(limits, y)",
    )
    channel_track = kernel(
        """mean (C) real; var (C) real; momentum: float; correction: float; running_mean (C) real written;
        running_var (C) real written""",
        "Move running statistics by `momentum` towards ``mean`` and ``var * correction``, in place.",
    )
    channel_factors = kernel(
        "var (C) real; eps: float; weight (C) real?; scale (C) real written; factor (C) real written",
        "``scale = 1 / sqrt(var + eps)`` and ``factor = scale * weight``, `scale` without a weight.",
    )
    row_normalise = kernel(
        """x (R, C, N) real; weight (W) real?; bias (W) real?; eps: float; centre: bool; mean (R) real written;
        scale (R) real written; out (R, C, N) real written""",
        """Normalise every row by its mean and variance, or without `centre` by its mean square; mean is 0 then.

        ``scale = 1 / sqrt(var + eps)`` and ``out = (x - mean) * scale * weight + bias``; None drops a term. The weight
        of ``x[r, c]`` is number ``(r C + c) % W``: W is a multiple of C.""",
        "check_row_weights(C, weight)",
    )
    row_back = kernel(
        """gy (R, C, N) real; x (R, C, N) real; weight (W) real?; centre: bool; mean (R) real; scale (R) real;
        out (R, C, N) real written""",
        "The gradient at x of `row_normalise`, from its mean and scale.",
        "check_row_weights(C, weight)",
    )
    row_products = kernel(
        """gy (R, C, N) real; x (R, C, N) real; mean (R) real; scale (R) real; sums (W) real written;
        products (W) real written""",
        "The gradients of `row_normalise` at bias and weight: sums of gy, and of ``gy * (x - mean) * scale``.",
        "check_row_weights(C, sums)",
    )
    clamp = kernel(
        "x (N) real; low: float; high: float; out (N) real written",
        "``out = min(max(x, low), high)``; a NaN stays a NaN. low < high, which may be infinite.",
        "check_limits((low, high))",
    )
    clamp_grad = kernel(
        "gy (N) real; y (N) real; low: float; high: float; out (N) real written",
        "``out = gy where low < y <= high or y is NaN, else 0``: at `high` the slope is 1.",
        "check_limits((low, high))",
    )
    channel_slope = kernel(
        "values (B, C, N) real; x (B, C, N) real; weight (C) real; out (B, C, N) real written",
        "``out = values`` where x > 0, else ``weight * values``, with the channel's weight.",
    )
    channel_slope_grad = kernel(
        "gy (B, C, N) real; x (B, C, N) real; out (C) real written",
        "The gradient of `channel_slope` at the weight, where its values are x: sums of ``gy * x`` where not x > 0.",
    )
    pointwise = kernel(
        "x (N) real; function: Function; constants: tuple[float, float, float]; out (N) real written",
        """``out = f(x)``, f a function of `FUNCTIONS`, of as many of the constants a, b, c as it has.

        softplus: beta a, threshold b. elu: ``a (exp(x / c) - 1)`` below 0, ``b x`` above. leaky_relu: ``a x`` below 0.
        The others are as in torch.nn.""",
        "check_pointwise(function)",
    )
    pointwise_grad = kernel(
        """gy (N) real; kept (N) real; function: Function; constants: tuple[float, float, float];
        out (N) real written""",
        "``out = gy f'(x)``; `kept` is x, of a tanh and a sigmoid y.",
        "check_pointwise(function)",
    )
    softmax = kernel(
        "x (O, N, I) real; log: bool; out (O, N, I) real written",
        """``exp(x) / Σ exp(x)`` along the second axis, or its logarithm; N of 1 or more. Infinities may give NaN.""",
        "check_axis(N)",
    )
    softmax_grad = kernel(
        "gy (O, N, I) real; y (O, N, I) real; log: bool; out (O, N, I) real written",
        "The gradient at x, from what `softmax` wrote: ``y (gy - Σ gy y)``, of the logarithm ``gy - exp(y) Σ gy``.",
        "check_axis(N)",
    )
    element_loss = kernel(
        """prediction (N) real; target (N) real; weight (N) real?; counts (N) real?; function: LossFunction;
        constant: float; divisor: float; losses (N) real? written; slopes (N) real written;
        value () float64? written""",
        """``losses = weight f(prediction, target)``, ``value = Σ losses / divisor``, and its slopes at the prediction.

        f is a function of `LOSS_FUNCTIONS`: smooth_l1 with the constant beta, huber with delta; in bce_with_logits
        `counts` multiplies ``-log σ(x)``. `value` is summed in double precision.""",
        "check_loss(function)",
    )
    softmax_cross_entropy = kernel(
        """logits (N, C) real; target (N) int64; losses (N) real written; grad (N, C) real written;
        mean () float64? written = None""",
        """Per-row softmax cross-entropy and its gradient, softmax - one-hot, in one pass; target in [0, C).

        A row that is not finite gives a loss that is not finite. With `mean`, float64 of shape (), the mean of the
        losses is written there, and the gradient is the mean's.""",
        "check_mean(mean, N)",
    )

    # Sequences of arrays, all of one real dtype and of any shapes: one pass over memory for all of them. A number's
    # result does not depend on the other arrays in the call. Implementations are also passed `check`, which checks all
    # arrays: they call it only if a quick look finds something wrong.

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

        grads: one for each parameter. buffers: one sequence for each name in ``UPDATE_BUFFERS[rule]``, with an array
        for each parameter (None: see ``OPTIONAL_BUFFERS``). options (n, len(UPDATE_OPTIONS[rule])) float64: a row for
        each parameter, flags as 0 or 1. steps (n,) int64: the number of this update of each parameter, from 1. Both on
        the host; or on the device, read when the kernel runs.

        No array may occur twice. Bias corrections are computed in float64.
        """
        check_update_options(rule, len(params), buffers, options, steps)

        def check() -> None:
            check_update(rule, params, grads, buffers, options, steps)

        self._run.optimizer_update(rule, params, grads, buffers, options, steps, check)

    def scale_arrays(self, arrays: Sequence[Array], factor: float) -> None:
        """Multiply all arrays by one number, in place."""
        self._run.scale_arrays(arrays, factor, lambda: check_written(arrays))

    def clip_arrays(self, arrays: Sequence[Array], squares: Array, max_norm: float) -> None:
        """Multiply all arrays by ``max_norm / (norm + 1e-6)``, in place, if that is below 1 and the norm is finite.

        squares (n,) float64: what the norm is the root of the sum of, read when the kernel runs.
        """
        check_near("squares", squares, arrays)
        backend.check_array("squares", squares, dtype=FLOAT64, shape=(None,))
        self._run.clip_arrays(arrays, squares, max_norm, lambda: check_written(arrays))

    def clamp_arrays(self, arrays: Sequence[Array], limit: float) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays NaN."""
        self._run.clamp_arrays(arrays, limit, lambda: check_written(arrays))

    def square_sums(self, arrays: Sequence[Array], out: Array) -> None:
        """Sum of the squares of each array, accumulated in float64, in an order that depends only on its size.

        out (n,) float64, written; it belongs to the namespace of the arrays.
        """
        check_near("out", out, arrays)
        written("out", out, FLOAT64, (len(arrays),))
        self._run.square_sums(arrays, out, lambda: check_arrays(arrays))

    def join_arrays(self, arrays: Sequence[Array], out: Array) -> None:
        """Copy the numbers of all arrays to `out` (total size,), of their dtype, one array behind the other."""
        check_arrays(arrays)
        if arrays:
            check_near("out", out, arrays)
            written("out", out, arrays[0].dtype, (sum(array.size for array in arrays),))
        self._run.join_arrays(arrays, out)
