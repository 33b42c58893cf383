"""Launchers of the gated recurrent unit (``cuda/gru.cu``, ``cuda/gru_scan.cu``, ``cuda/scan.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import real_define, thread_block
from sparsebp.kernels.device.recurrent import RecurrentLauncher, sizes_of


class GruKernels(RecurrentLauncher):
    """Device side of the GRU part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def gru_forward(self, gx: Array, w_hh: Array, b_hn: Array, h0: Array, h: Array, gates: Array) -> None:
        """GRU (BPPSA Eq. 10) with every gate kept; a block a sample."""
        steps, batch, hidden = h.shape
        form = self._unit_form(h, 1, 3)
        weights = self.xp.ascontiguousarray(w_hh.T) if form.streamed else w_hh
        args = (gx, weights, b_hn, h0, h, gates, np.int64(steps), np.int32(batch), np.int32(hidden))
        self._launch("gru.cu", "gru_forward", form.defines, batch, (form.threads,), args, form.shared)

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
        """Sequential back-propagation; a block a sample."""
        self._gru_chunks(h, h0, gates, w_hh, gy, grad_h_n, ga, gh0, (0, 1, 1))

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
        """The same by reduce-then-scan over the factored Jacobians (BPPSA Eq. 11); as `rnn_scan_backward`."""

        def run_chunks(carry: Array | None, carry_out: Array, span: tuple[int, int, int]) -> None:
            self._gru_chunks(h, h0, gates, w_hh, gy, carry, ga, carry_out, span)

        saved, form = (h, h0, gates), self._unit_form(h, 3, 1)
        self._scan_backward("gru", real_define(h), saved, w_hh, gy, grad_h_n, ga, gh0, chunks, run_chunks, form)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """Materialise the scan's elements (BPPSA Eq. 11), (T, H, H, B)."""
        steps, batch, hidden = h.shape
        args = (h, h0, gates, w_hh, out, np.int32(batch), np.int32(hidden))
        defines = real_define(h) | {"HIDDEN": 1}
        grid = steps * hidden if batch else 0
        self._launch("gru.cu", "gru_jacobians", defines, grid, thread_block(batch), args)

    def _gru_chunks(
        self,
        h: Array,
        h0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        carry: Array | None,
        ga: Array,
        carry_out: Array,
        span: tuple[int, int, int],
    ) -> None:
        """Back-propagate through the chunks of `span` = (first, end, of how many); see ``gru_backward`` in gru.cu."""
        first, end, chunks = span
        form = self._unit_form(h, 3, 1)
        args = (h, h0, gates, w_hh, gy, carry, ga, carry_out, *sizes_of(h, first, chunks))
        grid = (end - first) * h.shape[1]
        self._launch("gru.cu", "gru_backward", form.defines, grid, (form.threads,), args, form.shared)
