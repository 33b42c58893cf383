"""RNNCell, GRUCell and LSTMCell: one step, with torch.nn's arguments, parameters and errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebp.core.errors import OptionError
from sparsebp.torch.checks import autocasts, cast_input, check_dense, check_tensors, without_autocast
from sparsebp.torch.gradients import recurrent


class RNNCell(torch.nn.RNNCell):
    """`torch.nn.RNNCell`, run by this library's kernels."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state (B, hidden_size) for the input (B, input_size) and the state; without B for one."""
        if self.nonlinearity not in ("tanh", "relu"):
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return _step(self, f"rnn_{self.nonlinearity}", input, (hx,))[0]


class GRUCell(torch.nn.GRUCell):
    """`torch.nn.GRUCell`, run by this library's kernels."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state (B, hidden_size) for the input (B, input_size) and the state; without B for one."""
        return _step(self, "gru", input, (hx,))[0]


class LSTMCell(torch.nn.LSTMCell):
    """`torch.nn.LSTMCell`, run by this library's kernels."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the next state, a pair of (B, hidden_size), for the input (B, input_size) and the state."""
        if hx is not None and not (isinstance(hx, (tuple, list)) and len(hx) == 2):
            raise OptionError("hx is not the state of st.LSTMCell", expected="a pair (h, c)", got=type(hx).__name__,
                              remedy="Pass what the cell returns, or None for zeros")  # fmt: skip
        h, c = _step(self, "lstm", input, (None, None) if hx is None else hx)
        return h, c


def _step(
    cell: torch.nn.RNNCell | torch.nn.GRUCell | torch.nn.LSTMCell, kind: str, x: Tensor, state: Any
) -> tuple[Tensor, ...]:
    """Return the next state."""
    name = cell._get_name()
    check_dense(name, "input", x)
    for part in state:
        if part is not None:
            check_dense(name, "hx", part)
    if x.dim() not in (1, 2):
        raise ValueError(f"{name}: Expected input to be 1D or 2D, got {x.dim()}D instead")
    for number, part in enumerate(state):
        if part is not None and part.dim() not in (1, 2):
            what = "hidden" if len(state) == 1 else f"hx[{number}]"
            raise ValueError(f"{name}: Expected {what} to be 1D or 2D, got {part.dim()}D instead")
    batched = x.dim() == 2
    x = cast_input(name, x if batched else x.unsqueeze(0), cell.weight_ih)
    if x.shape[1] != cell.input_size:
        raise RuntimeError(f"input has inconsistent input_size: got {x.shape[1]} expected {cell.input_size}")
    starts = []
    for number, part in enumerate(state):
        if part is None:
            start = x.new_zeros(x.shape[0], cell.hidden_size)
        else:
            start = part if batched else part.unsqueeze(0)
            _check_state(number, start, x, cell.hidden_size)
            if autocasts(x):
                start = start.to(x.dtype)
        starts.append(start)
    weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    named = dict(zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), weights, strict=True))
    check_tensors(name, {"input": x, **dict(zip(("hx", "cx"), starts, strict=False)), **named})
    with without_autocast(x):
        _, *last = recurrent(kind, False, None, x, starts[0], starts[1] if len(starts) == 2 else None, *weights)
    return tuple(part if batched else part.squeeze(0) for part in last[: len(starts)])


def _check_state(number: int, start: Tensor, x: Tensor, hidden: int) -> None:
    if start.dim() != 2 or x.shape[0] != start.shape[0]:
        raise RuntimeError(
            f"Input batch size {x.shape[0]} doesn't match hidden{number} batch size {start.shape[0]}"
        )  # fmt: skip
    if start.shape[1] != hidden:
        raise RuntimeError(f"hidden{number} has inconsistent hidden_size: got {start.shape[1]}, expected {hidden}")
