"""An LSTM whose state is projected (``proj_size``), in terms of one whose state is not.

The state h = W_hr·m, of m = o·tanh(c), enters the gates as W_hh·h = (W_hh·W_hr)·m, so m is the state of an LSTM with
that product as its weights. A first state h0 is no projection of any m: it enters as features of each sample's first
input, with W_hh as their weights, and m starts from zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebp.torch.gradients import recurrent


def run_projected(
    reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y (N, P), h_n (B, P) and c_n (B, H) for x (N, I), h0 (B, P), c0 (B, H), w_hh (4H, P) and w_hr (P, H)."""
    first = _first_rows(reverse, batch_sizes, x, h0.shape[0])
    starts = x.new_zeros(x.shape[0], h0.shape[1]).index_copy(0, first, h0)
    m, m_n, c_n = recurrent(
        "lstm", reverse, batch_sizes, torch.cat([x, starts], 1), torch.zeros_like(c0), c0, torch.cat([w_ih, w_hh], 1),
        w_hh @ w_hr, b_ih, b_hh,
    )  # fmt: skip
    return m @ w_hr.T, m_n @ w_hr.T, c_n


def _first_rows(reverse: bool, batch_sizes: Tensor | None, x: Tensor, batch: int) -> Tensor:
    """Return the row of each sample that its run comes to first (B,)."""
    samples = torch.arange(batch, device=x.device)
    if not reverse:
        return samples
    if batch_sizes is None:
        return samples + (x.shape[0] - batch)
    sizes = batch_sizes.to(x.device)
    lengths = (sizes[:, None] > samples).sum(0)
    return (sizes.cumsum(0) - sizes)[lengths - 1] + samples
