"""Launchers of the recurrences (``cuda/rnn*.cu``, ``cuda/gru*.cu``, ``cuda/lstm*.cu``, ``cuda/scan.cu``)."""

from __future__ import annotations

from sparsebp.core.types import Array, Nonlinearity
from sparsebp.kernels.api.recurrent import MOST_INPUTS, room_for_sums
from sparsebp.kernels.device.recurrent_launches import SUM_REGISTERS, Cell, RecurrentLauncher, Saved
from sparsebp.kernels.operands import WeightSums

_RNN: dict[Nonlinearity, Cell] = {
    "tanh": Cell("rnn", 1, 1, states=1, factors=2, defines={"RELU": 0}),
    "relu": Cell("rnn", 1, 1, states=1, factors=2, defines={"RELU": 1}),
}
_GRU = Cell("gru", 3, 4, states=1, factors=5, defines={})
_LSTM = Cell("lstm", 4, 4, states=2, factors=7, defines={})


class RecurrentKernels(RecurrentLauncher):
    """Device side of `sparsebp.kernels.api.RecurrentKernels` and `LstmKernels`; shapes and dtypes are stated there.

    Forward runs a block a sample, backward one a sample and chunk, Jacobians one a step and unit.

    Raises
    ------
    OptionError
        The hidden size exceeds the 1024 threads of a block, in a forward or a backward.
    """

    MOST_INPUTS = MOST_INPUTS

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """All that the kernels can."""
        return MOST_INPUTS

    def sums_for(self, gates: int, hidden: int, features: int, itemsize: int) -> tuple[int, int]:
        """Sums are a sample's, in registers."""
        return room_for_sums(SUM_REGISTERS, gates, hidden, features, itemsize), 1

    def rnn_forward(
        self,
        x: Array,
        w_hh: Array,
        h0: Array,
        nonlinearity: Nonlinearity,
        h: Array,
        w_ih: Array | None,
        b_ih: Array | None,
        b_hh: Array | None,
    ) -> None:
        """See ``rnn_forward.cu``."""
        self._forward(_RNN[nonlinearity], (x, w_ih, b_ih, b_hh), w_hh, (h0,), h)

    def rnn_backward(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        nonlinearity: Nonlinearity,
        gz: Array | None,
        gh0: Array,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """See ``rnn.cu``."""
        self._back_propagate(_RNN[nonlinearity], Saved((h,), w_hh, gy), (grad_h_n,), gz, (gh0,), chunks, sums)

    def rnn_maps(self, h: Array, w_hh: Array, gy: Array | None, nonlinearity: Nonlinearity, maps: Array) -> None:
        """The first phase of reduce-then-scan, of all chunks."""
        self._reduce_all(_RNN[nonlinearity], Saved((h,), w_hh, gy), maps)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """See ``rnn.cu``."""
        self._jacobians(_RNN[nonlinearity], (h,), w_hh, out)

    def gru_forward(
        self,
        x: Array,
        w_hh: Array,
        b_hn: Array,
        h0: Array,
        h: Array,
        gates: Array,
        w_ih: Array | None,
        b_ih: Array | None,
        b_hh: Array | None,
    ) -> None:
        """See ``gru_forward.cu``."""
        self._forward(_GRU, (x, w_ih, b_ih, b_hh), w_hh, (b_hn, h0), h, gates)

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
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """See ``gru.cu``."""
        self._back_propagate(_GRU, Saved((h, h0, gates), w_hh, gy), (grad_h_n,), ga, (gh0,), chunks, sums)

    def gru_maps(self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """The first phase of reduce-then-scan, of all chunks."""
        self._reduce_all(_GRU, Saved((h, h0, gates), w_hh, gy), maps)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """See ``gru.cu``."""
        self._jacobians(_GRU, (h, h0, gates), w_hh, out)

    def lstm_forward(
        self,
        x: Array,
        w_hh: Array,
        h0: Array,
        c0: Array,
        h: Array,
        c: Array,
        gates: Array,
        w_ih: Array | None,
        b_ih: Array | None,
        b_hh: Array | None,
    ) -> None:
        """See ``lstm_forward.cu``."""
        self._forward(_LSTM, (x, w_ih, b_ih, b_hh), w_hh, (h0, c0), h, c, gates)

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
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """See ``lstm.cu``."""
        last, initial = (grad_h_n, grad_c_n), (gh0, gc0)
        self._back_propagate(_LSTM, Saved((c, c0, gates), w_hh, gy), last, ga, initial, chunks, sums)

    def lstm_maps(self, c: Array, c0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """The first phase of reduce-then-scan, of all chunks."""
        self._reduce_all(_LSTM, Saved((c, c0, gates), w_hh, gy), maps)

    def lstm_jacobians(self, c: Array, c0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """See ``lstm.cu``."""
        self._jacobians(_LSTM, (c, c0, gates), w_hh, out)
