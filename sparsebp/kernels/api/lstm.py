"""The LSTM over all steps, forward and backward, and its materialised Jacobians.

The cell is that of torch.nn (Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Gers et al., "Learning to
forget", 2000). Its state is the pair (h, c), in this order wherever both stand side by side: a transposed Jacobian has
2H rows and columns, of which the two blocks from h are dense and the two from c diagonal.
"""

from __future__ import annotations

from sparsebp.backend import check_array, given, namespace
from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import Family
from sparsebp.kernels.api.recurrent import (
    Sizes,
    arrays_of,
    check_chunks,
    check_incoming,
    check_input,
    check_maps,
    check_outgoing,
    check_sequence,
)
from sparsebp.kernels.operands import WeightSums


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
