"""Every kernel's name, arguments, shapes and dtypes, stated once. `host` and `device` implement the same protocol.

Conventions
-----------
- ``real`` is float32 or float64, the same for all real arguments of a call; ``index`` is int32 or int64.
- Every array is C-contiguous. The caller allocates ``out`` and every array that is said to be written; a kernel
  allocates scratch only. Outputs never alias inputs.
- The batch B is **last** in everything that belongs to a Jacobian, a product or a scan: data ``(nnz, B)``, vectors
  ``(n, B)``. Values shared by the batch have a last axis of length 1: ``(nnz, 1)``; wherever ``B*`` is written the
  length may be 1 or B, and ``out`` has B if any operand has.
- Recurrent layers are time-major as in torch.nn: ``(T, B, ...)``.
- No atomics: the same input gives bitwise the same output on every run and for every number of threads.
- Sizes of zero are legal wherever they make sense (no rows, no nonzeros, no batch).
- A wrong dtype, shape or layout raises (see `sparsebp.backend.check_array`); nothing falls through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sparsebp.core.types import Array, Nonlinearity, SlopeFunction, UpdateRule

UPDATE_OPTIONS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "maximize"),
    "adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "maximize"),
}
"""The columns of an optimizer's options. ``decoupled``: the decay shrinks the parameter (AdamW)."""
UPDATE_BUFFERS: dict[UpdateRule, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
}
"""The buffers of each parameter."""
OPTIONAL_BUFFERS = ("momentum_buffer", "max_exp_avg_sq", "grad_avg")
"""In their place None stands for a parameter without momentum, AMSGrad, or a second moment that is centered."""


class Kernels(Protocol):
    """The protocol of the kernels. Implementations: `sparsebp.kernels.host`, `sparsebp.kernels.device`."""

    # ---- CSR and fixed-pattern products --------------------------------------------------------------------------

    def csr_matvec(
        self, indptr: Array, indices: Array, data: Array, x: Array, out: Array, add: Array | None = None
    ) -> None:
        """Batched SpMV: ``out[i, b] = add[i, b] + sum_k data[k, b] * x[indices[k], b]`` over the entries k of row i.

        With shared values this is SpMM of one CSR matrix with a dense one.

        indptr (n_rows + 1,) index; indices (nnz,) index; data (nnz, B*) real; x (n_cols, B) real; out (n_rows, B) real;
        add (n_rows, B) real or None.
        """

    def scale_rows(self, indptr: Array, data: Array, scale: Array, out: Array) -> None:
        """Diagonal times CSR on the same pattern: ``out[k] = scale[row(k)] * data[k]``.

        indptr (n_rows + 1,) index; data (nnz, B*); scale (n_rows, B*); out (nnz, B*).
        """

    def scale_columns(self, indices: Array, data: Array, scale: Array, out: Array) -> None:
        """CSR times diagonal on the same pattern: ``out[k] = data[k] * scale[indices[k]]``.

        indices (nnz,) index; data (nnz, B*); scale (n_cols, B*); out (nnz, B*).
        """

    def gather(self, data: Array, index: Array, out: Array) -> None:
        """``out[k] = data[index[k]]``. data (n, B); index (m,) index, all in range; out (m, B)."""

    def gather_multiply(self, a_data: Array, a_index: Array, b_data: Array, b_index: Array, out: Array) -> None:
        """A product with exactly one term per output entry: ``out[k] = a_data[a_index[k]] * b_data[b_index[k]]``.

        a_data (nnz_a, B*); b_data (nnz_b, B*); a_index, b_index (nnz_c,) index; out (nnz_c, B*).
        """

    def spgemm_numeric(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        c_indptr: Array,
        product_ptr: Array,
        positions: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """Numeric phase of C = A @ B on a kept structure.

        For row r, products are numbered in the order of Gustavson's algorithm (entries k of row r of A, for each the
        entries q of row ``a_indices[k]`` of B), starting at ``product_ptr[r]``; product p is added to
        ``out[c_indptr[r] + positions[p]]``.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), c_indptr (m + 1,) index; a_data (nnz_a, B*);
        b_data (nnz_b, B*); product_ptr (m + 1,) int64; positions (n_products,) uint16 or uint32;
        row_cuts (n_parts + 1,) int64: rows split into parts of about equal work, fixed by the plan;
        out (nnz_c, B*), overwritten.
        """

    def spgemm_select_rows(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        c_indptr: Array,
        out: Array,
    ) -> None:
        """C = A @ B where no row of A has more than one entry: rows of B, picked and scaled.

        For the entry k of row r of A, row r of `out` is ``a_data[k] *`` row ``a_indices[k]`` of B.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), c_indptr (m + 1,) index; a_data (nnz_a, B*);
        b_data (nnz_b, B*); out (nnz_c, B*), overwritten.
        """

    def spgemm_select_columns(
        self,
        product_ptr: Array,
        a_index: Array | None,
        a_data: Array,
        b_index: Array,
        b_data: Array,
        c_indptr: Array,
        positions: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """C = A @ B where no row of B has more than one entry, so that an entry of A makes one product at most.

        Row r has the products p from ``product_ptr[r]`` to ``product_ptr[r + 1] - 1``;
        ``a_data[a_index[p]] * b_data[b_index[p]]`` is added to ``out[c_indptr[r] + positions[p]]``, in this order.
        Without `a_index` product p belongs to entry p of A.

        product_ptr (m + 1,), a_index (n_products,) or None, b_index (n_products,), c_indptr (m + 1,) index;
        a_data (nnz_a, B*); b_data (nnz_b, B*); positions (n_products,) uint16 or uint32; row_cuts (n_parts + 1,) int64;
        out (nnz_c, B*), overwritten.
        """

    def spgemm_runs(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_data: Array,
        b_shape: Array,
        run_ptr: Array,
        run_lengths: Array,
        c_indptr: Array,
        start_ptr: Array,
        starts: Array,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """C = A @ B where the rows of B are runs of neighbouring columns, each of which is a run of C as well.

        Rows of B with the same `b_shape` have the same columns. Shape s has the runs u from ``run_ptr[s]`` to
        ``run_ptr[s + 1] - 1``, which cut a row of B into pieces of ``run_lengths[u]`` entries. Entries of a row of A
        that follow one another and name rows of one shape form a group; `starts` holds, for every group of row r and
        every run of its shape, from ``start_ptr[r]`` on, where in the row of C the run begins.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), b_shape (k,), run_ptr (n_shapes + 1,),
        run_lengths (n_runs,), c_indptr (m + 1,) index; a_data (nnz_a, B*); b_data (nnz_b, B*); start_ptr (m + 1,)
        int64; starts (n_starts,) uint16 or uint32; row_cuts (n_parts + 1,) int64; out (nnz_c, B*), overwritten.
        """

    def spgemm_accumulate(
        self,
        a_indptr: Array,
        a_indices: Array,
        a_data: Array,
        b_indptr: Array,
        b_indices: Array,
        b_data: Array,
        c_indptr: Array,
        c_indices: Array,
        columns: int,
        row_cuts: Array,
        out: Array,
    ) -> None:
        """C = A @ B with nothing kept per product: a dense row of sums, from which the entries of C are read.

        Scratch: `columns` sums (times a vector, if there is a batch) for every part or block that runs.

        a_indptr (m + 1,), a_indices (nnz_a,), b_indptr (k + 1,), b_indices (nnz_b,), c_indptr (m + 1,),
        c_indices (nnz_c,) index; a_data (nnz_a, B*); b_data (nnz_b, B*); columns: of B; row_cuts (n_parts + 1,) int64;
        out (nnz_c, B*), overwritten.
        """

    # ---- values of transposed Jacobians: batch first in, batch last out --------------------------------------------

    def pointwise_slopes(self, kept: Array, function: SlopeFunction, out: Array) -> None:
        """The diagonal of a pointwise operator: ``out[i, b] = slope(kept[b, i])``.

        `function` "given": the slope is what was kept; "relu", "tanh", "sigmoid": it is f' as told from y.

        kept (B, n); out (n, B).
        """

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """Max pooling: one where a window takes its maximum, else zero.

        Entries come in lines of ``windows * taps``: `windows` windows beside each other from ``window[l]`` on, of each
        `taps` places beside each other from ``offset[l]`` on. ``out[(l, w, t), b]`` is 1 if
        ``winner[b, window[l] + w] == offset[l] + t``.

        winner (B, n_out) uint8 or int32; window (lines,) index; offset (lines,) int32; out (lines * windows * taps, B).
        """

    # ---- convolutions and max pooling -----------------------------------------------------------------------------
    # Window o begins at input ``o * stride - before``; its tap t lies ``t * dilation`` further. What lies outside the
    # input is zero for a convolution and never a maximum. The options are one integer an axis.

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

    # ---- channels: arrays (B, C, n) and (C,) --------------------------------------------------------------------

    def channel_moments(self, x: Array, mean: Array, var: Array) -> None:
        """The mean of every channel of x over batch and positions, and the variance (divided by their number).

        x (B, C, n); mean, var (C,), written.
        """

    def channel_scale(self, x: Array, mean: Array, factor: Array, offset: Array, out: Array) -> None:
        """``out = (x - mean) * factor + offset``, with the numbers of the channel.

        x, out (B, C, n); mean, factor, offset (C,).
        """

    def channel_products(self, gy: Array, x: Array, mean: Array, sums: Array, products: Array) -> None:
        """``sums = Σ gy`` and ``products = Σ gy * (x - mean)`` of every channel, over batch and positions.

        gy, x (B, C, n); mean (C,); sums, products (C,), written.
        """

    def channel_centre(
        self, gy: Array, x: Array, mean: Array, offset: Array, slope: Array, factor: Array, out: Array
    ) -> None:
        """``out = (gy - offset - (x - mean) * slope) * factor``, with the numbers of the channel.

        gy, x, out (B, C, n); mean, offset, slope, factor (C,).
        """

    # ---- cutting off ---------------------------------------------------------------------------------------------

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """``out = min(max(x, low), high)``; a NaN stays a NaN. x, out (n,); low < high, which may be infinite."""

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """``out = gy where low < y <= high, else 0``: with `high` the last y of slope 1. gy, y, out (n,)."""

    # ---- stacks of small dense blocks (materialised recurrent Jacobians) ------------------------------------------

    def dense_matmul(self, a: Array, a_index: Array, b: Array, b_index: Array, out: Array, out_index: Array) -> None:
        """A level of dense products: ``out[out_index[s]] = a[a_index[s]] @ b[b_index[s]]`` per sample, for all s.

        a (Sa, m, k, B*); b (Sb, k, n, B*); out (So, m, n, B*) real; the indices (S,) int64; `out` is a different array
        from `a` and `b`; entries of `out` that are not named keep their values.
        """

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

    def dense_chain(self, a: Array, chunk_ptr: Array, x: Array, add: Array | None, out: Array) -> None:
        """Independent chains of matrix-vector products, one per chunk.

        For chunk c: ``v = x[c]``; for s from ``chunk_ptr[c]`` to ``chunk_ptr[c + 1] - 1``: ``v = a[s] @ v + add[s]``;
        ``out[s] = v``.

        a (S, n, n, B*); chunk_ptr (C + 1,) int64 from 0 to S; x (C, n, B); add (S, n, B) or None; out (S, n, B).
        """

    def dense_reduce(
        self, a: Array, chunk_ptr: Array, add: Array | None, out_matrix: Array, out_vector: Array | None
    ) -> None:
        """Reduce each chunk of affine maps to one: ``P = a[last] @ … @ a[first]`` and the matching vector.

        Starting from P = I, v = 0; for s in the chunk: ``P = a[s] @ P``; ``v = a[s] @ v + add[s]``.

        a (S, n, n, B*); chunk_ptr (C + 1,) int64; add (S, n, B) or None; out_matrix (C, n, n, B*);
        out_vector (C, n, B), None exactly when `add` is None.
        """

    # ---- recurrent -----------------------------------------------------------------------------------------------
    # In all: w_hh (H, H) or (3H, H) as torch.nn lays it out (gates r, z, n), h0 (B, H); gy (T, B, H) or None is the
    # gradient that arrives at every step's output, grad_h_n (B, H) or None the one that arrives at the last state.

    def rnn_forward(self, gx: Array, w_hh: Array, h0: Array, nonlinearity: Nonlinearity, h: Array) -> None:
        """``h[t] = f(gx[t] + w_hh @ h[t-1])``, f = tanh or relu (BPPSA Eq. 9).

        gx (T, B, H): input projection with both biases; h (T, B, H), written.
        """

    def rnn_backward(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        nonlinearity: Nonlinearity,
        gz: Array,
        gh0: Array,
    ) -> None:
        """Sequential back-propagation. gz (T, B, H), written: gradient at the pre-activations; gh0 (B, H), written.

        ``g[t] = gy[t] + w_hhᵀ @ gz[t+1]`` (``+ grad_h_n`` at the last t); ``gz[t] = g[t] * f'(t)``;
        ``gh0 = w_hhᵀ @ gz[0]``. f' is ``1 - h²`` (tanh) or ``h > 0`` (relu).
        """

    def rnn_scan_backward(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        nonlinearity: Nonlinearity,
        chunks: int,
        gz: Array,
        gh0: Array,
    ) -> None:
        """The same result as `rnn_backward` by reduce-then-scan over `chunks` chunks of time; stores no Jacobian.

        Scratch: one affine map (H·H + H values) per chunk and sample. ``1 <= chunks <= T``.
        """

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """Materialise the scan's elements: out (T, H, H, B), ``out[t, i, j, b] = w_hh[j, i] * f'(h[t, b, j])``,
        the transposed Jacobian of h[t] with respect to h[t-1] (rows: input, columns: output)."""

    def gru_forward(self, gx: Array, w_hh: Array, b_hn: Array, h0: Array, h: Array, gates: Array) -> None:
        """GRU (BPPSA Eq. 10) with every gate kept for the backward.

        gx (T, B, 3H), gates in the order r, z, n: ``W_i x + b_i``, plus ``b_h`` for r and z only; b_hn (H,).
        ``M = W_hn h + b_hn``; ``n = tanh(gx_n + r * M)``; ``h' = (1 - z) * n + z * h``.
        h (T, B, H), written; gates (T, B, 4H), written, in the order r, z, n, M.
        """

    def gru_backward(
        self,
        h: Array,
        h0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        ga: Array,
        gh0: Array,
    ) -> None:
        """Sequential back-propagation through a GRU.

        ga (T, B, 4H), written: gradients at the pre-activations N, R, Z and at M, in the order **n, r, z, m**. So
        ``ga[..., H:]`` is what multiplies h (order r, z, n as in w_hh) and ``ga[..., :3H]`` what multiplies x
        (order n, r, z). gh0 (B, H), written.
        """

    def gru_scan_backward(
        self,
        h: Array,
        h0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        chunks: int,
        ga: Array,
        gh0: Array,
    ) -> None:
        """The same result as `gru_backward` by reduce-then-scan over the factored Jacobians (BPPSA Eq. 11)."""

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """Materialise the scan's elements (BPPSA Eq. 11).

        out (T, H, H, B), rows: input h[t-1], columns: output h[t].
        """

    # ---- training ------------------------------------------------------------------------------------------------

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Per-row softmax cross-entropy and its gradient in one pass.

        logits (N, C); target (N,) int64 in [0, C); losses (N,), written; grad (N, C), written: softmax - one-hot.
        A row that is not finite gives a loss that is not finite.
        """

    # ---- optimizers ----------------------------------------------------------------------------------------------
    # Sequences of arrays, all of one real dtype and of any shapes; one call is one pass over memory for all of them.
    # A number's result does not depend on what else is in the call.

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

    def scale_arrays(self, arrays: Sequence[Array], factor: float) -> None:
        """Multiply all arrays by one number, in place."""

    def clamp_arrays(self, arrays: Sequence[Array], limit: float) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays NaN."""

    def square_sums(self, arrays: Sequence[Array], out: Array) -> None:
        """Sum of the squares of each array, accumulated in float64, in an order that depends on its size alone.

        out (n,) float64, written; it belongs to the namespace of the arrays.
        """
