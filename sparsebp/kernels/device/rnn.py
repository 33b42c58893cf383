"""Launchers of the Elman recurrence (``cuda/rnn.cu``, ``cuda/rnn_scan.cu``, ``cuda/scan.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array, Nonlinearity
from sparsebp.kernels.device.base import Defines, real_define, thread_block
from sparsebp.kernels.device.recurrent import RecurrentLauncher, sizes_of


class RnnKernels(RecurrentLauncher):
    """Device side of the RNN part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def rnn_forward(self, gx: Array, w_hh: Array, h0: Array, nonlinearity: Nonlinearity, h: Array) -> None:
        """``h[t] = f(gx[t] + w_hh @ h[t-1])``; a block a sample."""
        steps, batch, hidden = h.shape
        form = self._unit_form(h, 1, 1)
        weights = self.xp.ascontiguousarray(w_hh.T) if form.streamed else w_hh
        args = (gx, weights, h0, h, np.int64(steps), np.int32(batch), np.int32(hidden))
        defines = form.defines | _relu(nonlinearity)
        self._launch("rnn.cu", "rnn_forward", defines, batch, (form.threads,), args, form.shared)

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
        """Sequential back-propagation; a block a sample."""
        self._rnn_chunks(h, w_hh, gy, grad_h_n, nonlinearity, gz, gh0, (0, 1, 1))

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
        """The same by reduce-then-scan; see `RecurrentLauncher._scan_backward`."""

        def run_chunks(carry: Array | None, carry_out: Array, span: tuple[int, int, int]) -> None:
            self._rnn_chunks(h, w_hh, gy, carry, nonlinearity, gz, carry_out, span)

        defines, form = real_define(h) | _relu(nonlinearity), self._unit_form(h, 1, 1)
        self._scan_backward("rnn", defines, (h,), w_hh, gy, grad_h_n, gz, gh0, chunks, run_chunks, form)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """Materialise the scan's elements, (T, H, H, B)."""
        steps, batch, hidden = h.shape
        args = (h, w_hh, out, np.int32(batch), np.int32(hidden))
        defines = real_define(h) | {"HIDDEN": 1} | _relu(nonlinearity)
        grid = steps * hidden if batch else 0
        self._launch("rnn.cu", "rnn_jacobians", defines, grid, thread_block(batch), args)

    def _rnn_chunks(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        carry: Array | None,
        nonlinearity: Nonlinearity,
        gz: Array,
        carry_out: Array,
        span: tuple[int, int, int],
    ) -> None:
        """Back-propagate through the chunks of `span` = (first, end, of how many); see ``rnn_backward`` in rnn.cu."""
        first, end, chunks = span
        form = self._unit_form(h, 1, 1)
        defines = form.defines | _relu(nonlinearity)
        args = (h, w_hh, gy, carry, gz, carry_out, *sizes_of(h, first, chunks))
        grid = (end - first) * h.shape[1]
        self._launch("rnn.cu", "rnn_backward", defines, grid, (form.threads,), args, form.shared)


def _relu(nonlinearity: Nonlinearity) -> Defines:
    return {"RELU": int(nonlinearity == "relu")}
