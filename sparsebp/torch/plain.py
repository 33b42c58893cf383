"""The same runs in PyTorch's own operations, step by step: what second derivatives and forward mode recompute.

PyTorch's cells are differentiable as often as one likes, in either mode and under every transform of `torch.func`;
kernels are not. A first gradient never comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebp.torch.packing import reversed_rows

CELLS: dict[str, Callable[..., Any]] = {
    "rnn_tanh": torch.rnn_tanh_cell,
    "rnn_relu": torch.rnn_relu_cell,
    "gru": torch.gru_cell,
    "lstm": torch.lstm_cell,
}


def run(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Return y (N, H), h_n (B, H) and, of an LSTM, c_n (B, H)."""
    cell, rows, batch = CELLS[kind], x.shape[0], h0.shape[0]
    sizes = [batch] * (rows // batch if rows else 0) if batch_sizes is None else batch_sizes.tolist()
    order = None
    if reverse:
        host = None if batch_sizes is None else np.array(sizes)
        order = torch.from_numpy(reversed_rows(host, rows, batch).copy()).to(x.device)
        x = x[order]
    with torch.autocast(x.device.type, enabled=False):
        y, last = _steps(cell, x, sizes, (h0,) if c0 is None else (h0, c0), weights)
    return (y if order is None else y[order], *last)


def _steps(
    cell: Callable[..., Any], x: Tensor, sizes: list[int], state: tuple[Tensor, ...], weights: tuple[Tensor, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Run over the rows, dropping samples where they end; return all states and each sample's last ones."""
    outputs: list[Tensor] = [x.new_empty(0, state[0].shape[1])]
    ended: list[list[Tensor]] = [[] for _ in state]
    for x_t in x.split(sizes):
        for part, gone in zip(state, ended, strict=True):
            if len(x_t) < len(part):
                gone.append(part[len(x_t) :])
        state = tuple(part[: len(x_t)] for part in state)
        new = cell(x_t, state if len(state) > 1 else state[0], *weights)
        state = new if isinstance(new, tuple) else (new,)
        outputs.append(state[0])
    return torch.cat(outputs), [torch.cat([part, *gone[::-1]]) for part, gone in zip(state, ended, strict=True)]


def gradients(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], arriving: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients at `inputs` of outputs at which `arriving` arrives; None stands for zero."""
    outputs, back = torch.func.vjp(function, *inputs)[:2]
    return back(tuple(_or_zeros(g, y) for g, y in zip(arriving, outputs, strict=True)))


def tangents(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], along: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Return the derivatives of the outputs along `along`; None stands for zero.

    The way back is linear in what arrives: the way back through *it* is the way forward. So forward mode needs reverse
    mode alone, which nests wherever this is called.
    """
    outputs, back = torch.func.vjp(function, *inputs)[:2]
    forward = torch.func.vjp(back, tuple(torch.zeros_like(y) for y in outputs))[1]
    (found,) = forward(tuple(_or_zeros(v, x) for v, x in zip(along, inputs, strict=True)))
    return found


def _or_zeros(given: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if given is None else given
